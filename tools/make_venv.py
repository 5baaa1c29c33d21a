"""Make or refresh the virtual environment that `make` works in; standard library only.

    python3 tools/make_venv.py --venv .venv --extras torch,examples

What is installed is pinned by constraints.txt. A stamp inside the environment holds a digest of pyproject.toml,
constraints.txt, this file and the interpreter, so a second call returns at once and a change reinstalls.

torch comes in builds of very different size. `--torch-build auto` asks for the CPU build first on Linux without an
NVIDIA GPU; if pip is configured with no source of it, the default build is installed and that is said. `cpu` refuses
instead, `default` takes whatever pip finds. The CPU build is unpacked beside everything that does not need torch: it is
half of the bytes, and pip works on one core.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading

MINIMUM = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INPUTS = ("pyproject.toml", "constraints.txt", os.path.join("tools", "make_venv.py"))
BACKEND = ("hatchling", "editables")
# Extras whose packages ask for torch themselves: they wait until it is there.
NEED_TORCH = ("torch", "integrations")
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


def run(command):
    """Run with visible output; the exit status."""
    return subprocess.call(command, cwd=ROOT, env=clean_environment())


def require(command, remedy):
    if run(command) != 0:
        raise SetupError("this command failed: {}\n{}".format(" ".join(command), remedy))


def create(venv, python):
    """A fresh environment with pip, also where the interpreter came without ensurepip (some Linux distributions)."""
    say(f"creating {os.path.relpath(venv, ROOT)} with Python {platform.python_version()}")
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        require([sys.executable, "-m", "venv", "--clear", "--without-pip", venv], "Install Python's venv module.")
        remedy = "Install Python's ensurepip (python3-venv on Debian and Ubuntu), or pip 22.3 or newer."
        require([sys.executable, "-m", "pip", "--python", python, "install", "pip"], remedy)
        return
    require([sys.executable, "-m", "venv", "--clear", venv], "Install Python's venv module.")


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


def install_cpu_torch(pip, version, venv):
    """True if pip found and unpacked the CPU build, alone: what torch needs comes with everything else."""
    say(f"installing the CPU build of torch {version}, beside the rest")
    if run([*pip, "install", "--quiet", "--no-compile", "--no-deps", f"torch=={version}+cpu"]) != 0:
        return False
    compile_packages(
        pip[0], os.path.join(venv, "lib", "python{}.{}".format(*sys.version_info[:2]), "site-packages", "torch")
    )
    return True


def without_cpu_torch(version, *, insist):
    """Raise, or say what happens instead, where pip has not found the CPU build."""
    remedy = "Name a source of torch's CPU wheels in pip's configuration (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL)."
    if insist:
        raise SetupError(f"pip could not install the CPU build of torch {version}. {remedy}")
    say(f"pip could not install the CPU build of torch {version}; going on with the default build, which may carry")
    say("several gigabytes of CUDA. To avoid that, interrupt. " + remedy)


def compile_packages(python, folder):
    """Byte code of what has none there; what some Python cannot read stays as it is, as it does with pip.

    pip compiles on one core, this on all. The packages' own tests are left to whoever imports them.
    """
    left = rf"^{re.escape(folder)}.*[\\/]tests?[\\/]"
    run([python, "-W", "ignore", "-m", "compileall", "-qq", "-j", "0", "-x", left, folder])


def without_triton(constraints, venv):
    """A copy of the constraints for CUDA builds of torch: they name the triton they need, which may be another one."""
    path = os.path.join(venv, "constraints-cuda.txt")
    with open(path, "w") as file:
        file.write(re.sub(r"^triton==.*\n", "", constraints, flags=re.MULTILINE))
    return path


def requirements(extras):
    """The packages of the library and of these extras, as pyproject.toml names them."""
    import tomllib  # of Python 3.11, which is checked first

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    listed = [project["optional-dependencies"].get(extra, []) for extra in extras]
    return [*project["dependencies"], *(requirement for extra in listed for requirement in extra)]


def install_beside_torch(pip, constraints_path, packages, version, venv):
    """True if the CPU build of torch could be installed, while pip installed these packages in another process."""
    found = []
    torch = threading.Thread(target=lambda: found.append(install_cpu_torch(pip, version, venv)))
    torch.start()
    try:
        # What torch needs comes later: pip would call that a conflict.
        require([*pip, "install", "--no-compile", "--no-warn-conflicts", "-c", constraints_path, *packages], NO_INDEX)
    finally:
        torch.join()
    return found == [True]


def install(venv, python, extras, torch_build):
    """Install the library in editable form with its extras, everything pinned; torch's build is chosen first."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    constraints_path = os.path.join(ROOT, "constraints.txt")
    with open(constraints_path) as file:
        constraints = file.read()
    on_linux = "torch" in extras and sys.platform == "linux"
    if on_linux and (torch_build == "cpu" or (torch_build == "auto" and not has_nvidia_gpu())):
        version = pinned(constraints, "torch")
        packages = [*BACKEND, *requirements(extra for extra in extras if extra not in NEED_TORCH)]
        if not install_beside_torch(pip, constraints_path, packages, version, venv):
            without_cpu_torch(version, insist=torch_build == "cpu")
            constraints_path = without_triton(constraints, venv)
    else:
        if on_linux:
            constraints_path = without_triton(constraints, venv)
        require([*pip, "install", "--no-compile", "-c", constraints_path, *BACKEND], NO_INDEX)
    say("installing microfloat[{}] in editable form".format(",".join(extras)))
    target = "{}[{}]".format(ROOT, ",".join(extras))
    require([*pip, "install", "--no-compile", "-c", constraints_path, "--no-build-isolation", "-e", target], NO_INDEX)
    compile_packages(python, os.path.join(venv, "lib"))


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
