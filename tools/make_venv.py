"""Make or refresh the virtual environment that `make` works in; standard library only.

    python3 tools/make_venv.py --venv .venv --extras torch,examples

What is installed is pinned by constraints.txt. A stamp inside the environment holds a digest of pyproject.toml,
constraints.txt, this file and the interpreter, so a second call returns at once and a change reinstalls.

uv installs, which takes about half of the time (benchmarks/results/setup.json); pip brings it, and what
pip is configured with is told to it. Where uv is not to be had, fails, or pip has a setting that it does not know, pip
installs.

torch comes in builds of very different size. `--torch-build auto` asks for the CPU build first on Linux without an
NVIDIA GPU; if there is no source of it, the default build is installed and that is said. `cpu` refuses instead,
`default` takes whatever is found.
"""

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys

MINIMUM = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INPUTS = ("pyproject.toml", "constraints.txt", os.path.join("tools", "make_venv.py"))
BACKEND = ("hatchling", "editables")
# A third of all code that is installed: folders by their names, or below others.
RARELY_IMPORTED = (
    "_unicode_data", "_vendor", "distutils", "fontTools", "fsspec/implementations", "google/protobuf",
    "hypothesis/extra", "jax/experimental", "physics", "pip", "pydantic", "pygments", "scipy",
    "setuptools", "sympy/categories", "sympy/codegen", "sympy/parsing", "sympy/plotting", "sympy/stats", "sympy/vector",
    "testing", "torch/sparse", "torchgen",
)  # fmt: skip
# pip's settings: as arguments and as variables of uv; what changes nothing here; all others are left to pip itself.
ARGUMENTS_OF_UV = {
    "index-url": "--index-url", "extra-index-url": "--extra-index-url", "find-links": "--find-links",
    "constraint": "--constraint", "trusted-host": "--allow-insecure-host",
}  # fmt: skip
VARIABLES_OF_UV = {
    "cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT", "proxy": "ALL_PROXY", "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}  # fmt: skip
WITHOUT_EFFECT = {
    "break-system-packages", "cache-dir", "compile", "disable-pip-version-check", "log", "no-cache-dir", "no-color",
    "no-compile", "no-input", "no-python-version-warning", "no-warn-conflicts", "no-warn-script-location", "prefix",
    "progress-bar", "quiet", "require-virtualenv", "retries", "root", "root-user-action", "target", "user", "verbose",
}  # fmt: skip
NO_INDEX = "Is a package index reachable? In an environment that has everything, `make test-installed` needs no set-up."
# Settings of the caller that would send packages elsewhere or import someone else's.
FOREIGN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def say(text):
    print("[setup] " + text, flush=True)


def digest():
    """Of everything that decides what the environment contains."""
    state = hashlib.sha256(platform.python_version().encode())
    for name in INPUTS:
        with open(os.path.join(ROOT, name), "rb") as file:
            state.update(file.read())
    return state.hexdigest()


def clean_environment():
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


def run(command, variables=(), quiet=False):
    """Run with visible output, unless it is one of two ways; the exit status. `variables`: more of the environment."""
    output = subprocess.DEVNULL if quiet else None
    return subprocess.call(
        command, cwd=ROOT, env={**clean_environment(), **dict(variables)}, stdout=output, stderr=output
    )


def begin(command):
    """Run with visible output while this goes on."""
    return subprocess.Popen(command, cwd=ROOT, env=clean_environment())


def require(command, remedy, variables=()):
    if run(command, variables) != 0:
        raise SetupError("this command failed: {}\n{}".format(" ".join(command), remedy))


def create(venv, python):
    """A fresh environment with pip: brought by the pip of the interpreter, in a third of ensurepip's time, or by that.

    Some have the one and not the other: Linux distributions leave out ensurepip, others pip, or it is older than 22.3.
    """
    say(f"creating {os.path.relpath(venv, ROOT)} with Python {platform.python_version()}")
    remedy = "Install Python's venv module."
    require([sys.executable, "-m", "venv", "--clear", "--without-pip", venv], remedy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--python", python]
    if run([*pip, "install", "--quiet", "--no-compile", "pip"], quiet=True) == 0:
        return
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        raise SetupError("Install ensurepip (python3-venv on Debian and Ubuntu), or pip 22.3 or newer.") from None
    require([sys.executable, "-m", "venv", "--clear", venv], remedy)


def usable(python):
    """True if an existing environment answers, has pip, and runs the interpreter that was asked for."""
    if not os.path.exists(python):
        return False
    probe = "import pip, platform; print(platform.python_version())"
    done = subprocess.run(
        [python, "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=clean_environment()
    )
    return done.returncode == 0 and done.stdout.decode().strip() == platform.python_version()


def has_nvidia_gpu():
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None


def pinned(constraints, package):
    found = re.search(rf"^{re.escape(package)}==(\S+)$", constraints, re.MULTILINE)
    if not found:
        raise SetupError(f"constraints.txt does not pin {package}; add a line {package}==VERSION.")
    return found.group(1)


def settings_of(listed):
    """pip's settings by name, from the lines of `pip config list`: those of the environment stand above all others."""
    found = {}
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            name, equals, value = line.partition("=")
            if equals and name.startswith(section):
                found[name[len(section) :].replace("_", "-")] = str(ast.literal_eval(value))
    return found


def told_to_uv(settings):
    """Arguments, variables, and the names of what uv cannot be told."""
    arguments, variables, unknown = ["--index-strategy", "unsafe-best-match"], {}, []  # as pip chooses among indexes
    for name, value in settings.items():
        if name in ARGUMENTS_OF_UV:
            arguments += [word for each in value.split() for word in (ARGUMENTS_OF_UV[name], each)]
        elif name in VARIABLES_OF_UV:
            variables[VARIABLES_OF_UV[name]] = value
        elif name == "no-index" and value.lower() in ("1", "true", "yes", "on"):
            arguments.append("--no-index")
        elif name not in (*WITHOUT_EFFECT, "no-index"):
            unknown.append(name)
    return arguments, variables, unknown


def uv_of(pip, python, constraints_path):
    """The beginning of uv's commands that install, and their variables; None where pip has to."""
    done = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, env=clean_environment())
    arguments, variables, unknown = told_to_uv(settings_of(done.stdout.decode()))
    if done.returncode or unknown:
        say("pip installs, because uv does not know its settings: {}".format(", ".join(unknown) or "unreadable"))
        return None
    if run([*pip, "install", "--quiet", "-c", constraints_path, "uv"]) != 0:
        say("pip installs, because it cannot bring uv")
        return None
    uv = os.path.join(os.path.dirname(python), "uv")
    return [uv, "pip", "install", "--python", python, *arguments], variables


def without_cpu_torch(version, *, insist):
    """Raise, or say what happens instead, where the CPU build has not been found."""
    remedy = "Name a source of torch's CPU wheels in pip's configuration (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL)."
    if insist:
        raise SetupError(f"the CPU build of torch {version} could not be installed. {remedy}")
    say(f"the CPU build of torch {version} could not be installed; going on with the default build, which may carry")
    say("several gigabytes of CUDA. To avoid that, interrupt. " + remedy)


def compile_packages(python, folder):
    """Begin to write byte code of what has none there; what some Python cannot read stays as it is, as with pip.

    pip and uv compile on one core or everything, this on all. The packages' own tests, and what tests of ours hardly
    import, are left to whoever imports them.
    """
    names = "|".join(RARELY_IMPORTED).replace("/", r"[\\/]")
    left = rf"^{re.escape(folder)}.*[\\/](tests?|{names})[\\/]"
    return begin([python, "-W", "ignore", "-m", "compileall", "-qq", "-j", "0", "-x", left, folder])


def without_triton(constraints, venv):
    """A copy of the constraints for CUDA builds of torch: they name the triton they need, which may be another one."""
    path = os.path.join(venv, "constraints-cuda.txt")
    with open(path, "w") as file:
        file.write(re.sub(r"^triton==.*\n", "", constraints, flags=re.MULTILINE))
    return path


def install_by(installer, venv, python, extras, torch_build):
    """Install the library in editable form with its extras, everything pinned; torch's build is chosen first, and
    compiled while the others come."""
    command, variables = installer
    constraints_path = os.path.join(ROOT, "constraints.txt")
    with open(constraints_path) as file:
        constraints = file.read()
    require([*command, "-c", constraints_path, *BACKEND], NO_INDEX, variables)
    if "torch" in extras and sys.platform == "linux":
        version, found = pinned(constraints, "torch"), False
        if torch_build == "cpu" or (torch_build == "auto" and not has_nvidia_gpu()):
            say(f"installing the CPU build of torch {version}")
            found = run([*command, "--no-deps", f"torch=={version}+cpu"], variables) == 0
            if not found:
                without_cpu_torch(version, insist=torch_build == "cpu")
        if not found:
            constraints_path = without_triton(constraints, venv)
    say("installing microfloat[{}] in editable form".format(",".join(extras)))
    target = "{}[{}]".format(ROOT, ",".join(extras))
    packages = os.path.join(venv, "lib")
    compiling = compile_packages(python, packages)
    try:
        require([*command, "-c", constraints_path, "--no-build-isolation", "-e", target], NO_INDEX, variables)
    finally:
        compiling.wait()
    compile_packages(python, packages).wait()


def install(venv, python, extras, torch_build):
    """Install by uv, or else by pip."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    uv = uv_of(pip, python, os.path.join(ROOT, "constraints.txt"))
    by_pip = [*pip, "install", "--no-compile"], {}
    try:
        install_by(uv or by_pip, venv, python, extras, torch_build)
    except SetupError as error:
        if uv is None:
            raise
        say(f"uv could not install everything ({str(error).splitlines()[0]}); once more by pip")
        install_by(by_pip, venv, python, extras, torch_build)


def read_stamp(path):
    try:
        with open(path) as file:
            stamp = json.load(file)
        return stamp["digest"], set(stamp["extras"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, set()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", default=".venv", help="folder of the environment, relative to the repository")
    parser.add_argument("--extras", required=True, help="extras of pyproject.toml, separated by commas")
    parser.add_argument("--torch-build", default="auto", choices=["auto", "cpu", "default"])
    options = parser.parse_args()
    extras = sorted(set(options.extras.split(",")))
    venv = os.path.join(ROOT, options.venv)
    python = os.path.join(venv, "bin", "python")
    stamp_path = os.path.join(venv, "microfloat-setup.json")

    if sys.version_info < MINIMUM:
        got = platform.python_version()
        raise SetupError(f"Python 3.11 or newer is needed, got {got}; name one, e.g. make PYTHON=python3.12.")
    wanted = digest()
    current, present = read_stamp(stamp_path)
    if current == wanted and present.issuperset(extras) and os.path.exists(python):
        return
    if not usable(python):
        create(venv, python)
    if current != wanted:
        present = set()
    install(venv, python, extras, options.torch_build)
    with open(stamp_path, "w") as file:
        json.dump({"digest": wanted, "extras": sorted(present.union(extras))}, file)
    say("ready: " + os.path.relpath(venv, ROOT))


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit("[setup] " + str(error))
