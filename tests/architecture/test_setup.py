"""Set-up behind the make commands: what is pinned, when it is done again, what of the caller stays outside."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from unittest import mock

import pytest


def _module(repository):
    spec = importlib.util.spec_from_file_location("make_venv", repository / "tools" / "make_venv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_venv(repository, tmp_path, monkeypatch):
    """tools/make_venv.py over a copy of its inputs; creating and installing are only recorded."""
    module = _module(repository)
    for name in module.INPUTS:
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((repository / name).read_bytes())
    done = []

    def create(venv, python):
        done.append("create")
        os.makedirs(os.path.dirname(python))
        open(python, "w").close()

    monkeypatch.setattr(module, "ROOT", str(tmp_path))
    monkeypatch.setattr(module, "create", create)
    monkeypatch.setattr(module, "usable", os.path.exists)
    monkeypatch.setattr(module, "install", lambda venv, python, extras, build: done.append(",".join(extras)))

    def call(*arguments):
        done.clear()
        monkeypatch.setattr("sys.argv", ["make_venv.py", *arguments])
        module.main()
        return list(done)

    module.call = call
    return module


def test_a_second_call_does_nothing(make_venv):
    assert make_venv.call("--extras", "torch,dev") == ["create", "dev,torch"]
    assert make_venv.call("--extras", "torch,dev") == []
    assert make_venv.call("--extras", "torch") == []


@pytest.mark.parametrize(("has_pip", "venvs"), [(True, ["--without-pip"]), (False, ["--without-pip", "--clear"])])
def test_pip_comes_from_the_interpreters_own_or_from_ensurepip(repository, monkeypatch, has_pip, venvs):
    module, asked = _module(repository), []

    def run(command, variables=(), quiet=False):
        asked.append(command)
        return int(command[1:3] == ["-m", "pip"] and not has_pip)

    monkeypatch.setattr(module, "run", run)
    module.create("environment", "python")
    assert [command[-2] for command in asked if command[2] == "venv"] == venvs
    assert [command[-1] for command in asked if command[2] == "pip"] == ["pip"]


def test_missing_extras_are_added_and_remembered(make_venv):
    assert make_venv.call("--extras", "torch") == ["create", "torch"]
    assert make_venv.call("--extras", "dev") == ["dev"]
    assert make_venv.call("--extras", "dev,torch") == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_input_installs_again(make_venv, tmp_path, name):
    make_venv.call("--extras", "torch,dev")
    path = tmp_path / name
    path.write_text(path.read_text() + "\n")
    assert make_venv.call("--extras", "dev") == ["dev"]
    assert make_venv.call("--extras", "torch") == ["torch"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"digest": 1}'])
def test_a_broken_stamp_is_no_stamp(make_venv, tmp_path, content):
    make_venv.call("--extras", "torch")
    (tmp_path / ".venv" / "microfloat-setup.json").write_text(content)
    assert make_venv.call("--extras", "torch") == ["torch"]


def test_a_failed_installation_leaves_no_stamp(make_venv, monkeypatch):
    def fail(*arguments):
        raise make_venv.SetupError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(make_venv, "install", fail)
        with pytest.raises(make_venv.SetupError, match="no network"):
            make_venv.call("--extras", "torch")
    assert make_venv.call("--extras", "torch") == ["torch"]


def test_an_old_interpreter_is_refused(make_venv, monkeypatch):
    monkeypatch.setattr(make_venv, "MINIMUM", (99, 0))
    with pytest.raises(make_venv.SetupError, match="PYTHON="):
        make_venv.call("--extras", "torch")


def test_settings_of_the_caller_stay_outside(make_venv, monkeypatch):
    for name in make_venv.FOREIGN:
        monkeypatch.setenv(name, "elsewhere")
    assert "elsewhere" not in make_venv.clean_environment().values()


@pytest.fixture
def commands(repository, tmp_path, monkeypatch):
    """``commands(extras, build, fails=word, settings=lines)``: the installer and the arguments of what an installation
    runs, where pip is configured with these lines; commands with that word fail."""
    module = _module(repository)
    monkeypatch.setattr(module, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(module.sys, "platform", "linux")

    def call(extras, build, fails=None, settings=""):
        seen = []

        def run(command, variables=()):
            seen.append((os.path.basename(command[0]), command[1:], dict(variables)))
            return int(fails in command)

        listed = subprocess.CompletedProcess([], 0, stdout=settings.encode())
        monkeypatch.setattr(module, "run", run)
        monkeypatch.setattr(module, "begin", lambda command: [run(command), mock.Mock()][1])
        monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: listed)
        (tmp_path / "venv").mkdir(exist_ok=True)
        try:
            module.install(str(tmp_path / "venv"), "bin/python", extras, build)
        finally:
            call.seen = seen
        return seen

    call.error = module.SetupError
    return call


def _editable(seen):
    return next((by, arguments) for by, arguments, _ in seen if "-e" in arguments)


def test_uv_installs_what_is_pinned_and_torch_first(commands):
    seen = commands(["cli", "torch"], "auto")
    by = [installer for installer, _, _ in seen]
    assert by == ["python", "uv", "uv", "python", "uv", "python"]  # pip brings it, and Python compiles, torch meanwhile
    (_, bring, _), (_, build, _), (_, torch, _), _, (_, rest, _), _ = seen
    assert bring[-1] == "uv"
    assert build[-2:] == ["hatchling", "editables"]
    assert re.fullmatch(r"torch==[\d.]+\+cpu", torch[-1])
    assert rest[-1].endswith("[cli,torch]")
    for arguments in (bring, build, rest):
        assert arguments[arguments.index("-c") + 1].endswith("constraints.txt")


def test_uv_is_told_how_pip_is_configured(commands):
    """An environment variable of pip's stands above its files, as pip has it."""
    lines = """:env:.find-links='/wheels'
:env:.disable-pip-version-check='1'
global.find-links='/others'
global.extra-index-url='\\nfile:///a\\nfile:///b'
install.no-index='true'
global.cert='/ca.pem'
"""
    seen = commands(["torch"], "auto", settings=lines)
    ours = [(arguments, variables) for by, arguments, variables in seen if by == "uv"]
    assert len(ours) == 3
    for arguments, variables in ours:
        told = arguments[arguments.index("unsafe-best-match") + 1 :][:7]
        assert told == [
            "--find-links", "/wheels", "--extra-index-url", "file:///a", "--extra-index-url", "file:///b", "--no-index"
        ]  # fmt: skip
        assert variables == {"SSL_CERT_FILE": "/ca.pem"}


@pytest.mark.parametrize(
    ("fails", "settings", "said"),
    [
        ("uv", "", "cannot bring uv"),
        (None, "global.only-binary=':all:'\n", "only-binary"),
        ("unsafe-best-match", "", "once more by pip"),
    ],
)
def test_pip_installs_where_uv_cannot(commands, capfd, fails, settings, said):
    by, arguments = _editable([each for each in commands(["torch"], "auto", fails, settings) if each[0] == "python"])
    assert (by, arguments[-1][-7:]) == ("python", "[torch]")
    assert said in capfd.readouterr().out


def test_what_no_installer_can_do_is_raised(commands):
    with pytest.raises(commands.error, match="make test-installed"):
        commands(["torch"], "auto", fails="-e")


def test_without_torchs_cpu_build_the_default_one_is_installed_or_refused(commands):
    with pytest.raises(commands.error, match="CPU build of torch"):
        commands(["torch"], "cpu", fails="--no-deps")
    _, editable = _editable(commands(["torch"], "auto", fails="--no-deps"))
    assert editable[editable.index("-c") + 1].endswith("constraints-cuda.txt")
    assert not any("--no-deps" in arguments for _, arguments, _ in commands(["torch"], "default"))


def test_tests_of_packages_get_no_byte_code(repository, tmp_path, monkeypatch):
    module = _module(repository)
    for name in ("a", "a/tests", "a/contest"):
        folder = tmp_path / "tests" / "lib" / name  # above the folder the word means nothing
        folder.mkdir(parents=True)
        (folder / "code.py").write_text("")
    assert module.compile_packages(sys.executable, str(tmp_path / "tests" / "lib")).wait() == 0
    compiled = {path.parents[1].name for path in tmp_path.rglob("*.pyc")}
    assert compiled == {"a", "contest"}


def test_a_cuda_build_of_torch_chooses_its_own_triton(make_venv, tmp_path):
    path = make_venv.without_triton("torch==2.0\ntriton==3.6.0\nnumpy==2.0\n", str(tmp_path))
    with open(path) as file:
        assert file.read() == "torch==2.0\nnumpy==2.0\n"


def _canonical(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_every_direct_dependency_is_pinned_exactly(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    wanted = list(project["project"]["dependencies"]) + list(project["build-system"]["requires"])
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
    assert {_canonical(requirement) for requirement in wanted} <= {_canonical(line) for line in pins}
    assert len({_canonical(line) for line in pins}) == len(pins)


def test_the_core_needs_two_packages(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert {_canonical(requirement) for requirement in project["dependencies"]} == {"numpy", "ml-dtypes"}


def test_extras_serve_something(repository):
    """Every package of an extra is imported by the library, or by the folder that the extra is for."""
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    folders = {name: ["src"] for name in set(extras) - {"dev", "docs", "lint"}}
    folders |= {"examples": ["examples", "docs"], "integrations": ["tests/integrations"]}
    for extra, names in folders.items():
        text = "\n".join(path.read_text() for name in names for path in (repository / name).rglob("*.py"))
        for requirement in extras[extra]:
            package = _canonical(requirement).replace("-", "[-_]")
            pattern = rf"^\s*(import|from) {package}\b" + (rf'|"{package}"' if extra == "integrations" else "")
            assert re.search(pattern, text, re.M), f"{extra}: nothing imports {package}"


def test_the_extras_that_make_installs_exist(repository):
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    used = re.findall(r"\$\(SETUP\) ([\w,]+)", (repository / "Makefile").read_text())
    assert len(used) == 5
    # `make test`, the second of them, does not pay for these.
    assert ["lint" in words for words in used] == [False, False, True, False, False]
    assert ["integrations" in words for words in used] == [False, False, False, True, False]
    assert used[-1] == "docs"  # in an environment of its own
    assert {name for words in used for name in words.split(",")} <= set(extras)


def test_ci_runs_the_command_that_everybody_runs(repository):
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-1] == "exec make test"
    assert sum("make" in line for line in commands) == 1


def test_workflows_run_commands_of_make_alone(repository):
    text = (repository / ".github" / "workflows" / "ci.yml").read_text()
    commands = re.findall(r"^\s*(?:- )?run: *(.*)$", text, re.MULTILINE)
    assert commands == ["make test", "make lint", "make docs"]
    targets = set(re.findall(r"^([a-z][\w-]*):", (repository / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in commands} <= targets


def test_the_versions_of_a_release_agree(repository):
    """Of the library and of its citation; the classifiers name the versions of Python that the workflow runs."""
    version = re.search(r'^__version__ = "(.+)"$', (repository / "src/microfloat/_version.py").read_text(), re.M)[1]
    assert f"\nversion: {version}\n" in (repository / "CITATION.cff").read_text()
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    classified = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)]
    matrix = re.search(r"python: \[(.+)\]", (repository / ".github/workflows/ci.yml").read_text())[1]
    assert re.findall(r"3\.\d+", matrix) == classified


def test_a_foreign_environment_does_not_reach_the_commands(repository, tmp_path):
    """A recipe line sees neither VIRTUAL_ENV nor PYTHONPATH of the caller."""
    probe = tmp_path / "probe.mk"
    names = ["VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"]
    show = "; ".join(f'echo "{name}=$${name}"' for name in names)
    probe.write_text(f"include {repository / 'Makefile'}\nprobe:\n\t@{show}\n")
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    environment = {**inherited, **dict.fromkeys(names, "elsewhere")}
    done = subprocess.run(
        ["make", "-f", str(probe), "probe"], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [f"{name}=" for name in names]


def test_the_stamp_is_json_that_names_the_extras(make_venv, tmp_path):
    make_venv.call("--extras", "torch,dev")
    stamp = json.loads((tmp_path / ".venv" / "microfloat-setup.json").read_text())
    assert stamp["extras"] == ["dev", "torch"]
