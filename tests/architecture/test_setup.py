"""Set-up behind the make commands: what is pinned, when it is done again, what of the caller stays outside."""

import importlib.util
import json
import os
import re
import subprocess
import tomllib

import pytest


@pytest.fixture
def make_venv(repository, tmp_path, monkeypatch):
    """tools/make_venv.py over a copy of its inputs; creating and installing are only recorded."""
    spec = importlib.util.spec_from_file_location("make_venv", repository / "tools" / "make_venv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
    folders = {name: ["src"] for name in set(extras) - {"dev"}}
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
    assert len(used) == 3
    assert ["integrations" in words for words in used] == [False, False, True]  # `make test` does not pay for them
    assert {name for words in used for name in words.split(",")} <= set(extras)


def test_ci_runs_the_command_that_everybody_runs(repository):
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-1] == "exec make test"
    assert sum("make" in line for line in commands) == 1


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
