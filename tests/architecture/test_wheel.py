"""Smoke test of the built wheel in an environment of its own, with the core dependencies and nothing else."""

import os
import re
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import processes
from tests.docs.code_blocks import code_blocks

pytestmark = pytest.mark.xdist_group("wheel")

QUANTIZE_WITH_NUMPY = """
import sys
import numpy as np
import microfloat
from microfloat import reference

x_MK = np.linspace(-3.0, 3.0, 2 * 64, dtype=np.float32).reshape(2, 64)
quantized = reference.quantize(x_MK, "mxfp8")
assert quantized.codes.shape == (2, 64) and quantized.scale.shape == (2, 2)
assert np.abs(reference.dequantize(quantized) - x_MK).max() < 2.0**-3
assert "site-packages" in microfloat.__file__, microfloat.__file__
assert not {"torch", "jax", "triton"} & set(sys.modules)
print(microfloat.__version__)
"""


def _run(command, folder):
    """Run without the caller's PYTHONPATH and virtual environment, in a folder that is not the source tree."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return processes.run([str(word) for word in command], cwd=folder, env=environment)


def _output(done):
    return f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    """The wheel, built with the installed build backend and no network."""
    pytest.importorskip("build", reason="the package `build` is not installed")
    pytest.importorskip("hatchling", reason="the package `hatchling` is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, repository]
    done = _run(command, folder)
    assert done.returncode == 0, _output(done)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_python(wheel, repository, tmp_path_factory):
    """The interpreter of a fresh environment that holds the wheel and what its metadata asks for."""
    folder = tmp_path_factory.mktemp("environment")
    done = _run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    if done.returncode != 0:
        pytest.skip(f"cannot make a virtual environment here: {done.stderr.strip() or done.stdout.strip()}")
    python = folder / "venv" / "bin" / "python"
    # The pip of the environment that runs the tests, which takes seconds less than to install another.
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input"]
    pip += ["install", "--quiet", "--no-compile"]
    constraints = ["-c", repository / "constraints.txt"]
    # Without the wheel first: what fails here is the network, what fails below is the wheel.
    done = _run([*pip, *constraints, "--retries=1", "--timeout=20", "numpy", "ml_dtypes"], folder)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"pip cannot install the core dependencies, is a package index reachable? {last}")
    done = _run([*pip, *constraints, wheel], folder)
    assert done.returncode == 0, _output(done)
    return python


def test_the_wheel_holds_the_library_and_nothing_else(wheel, repository):
    """Features B1."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    package = [name for name in names if not re.match(r"microfloat-[^/]+\.dist-info/", name)]
    assert "microfloat/py.typed" in package
    assert all(name.startswith("microfloat/") for name in package)
    sources = {path.relative_to(repository / "src").as_posix() for path in (repository / "src").rglob("*.py")}
    assert {name for name in package if name.endswith(".py")} == sources
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow("the sdist, and a wheel from it")
def test_the_sdist_gives_the_same_wheel_and_holds_the_tests(wheel, repository, tmp_path):
    """Features B1."""
    build = [sys.executable, "-m", "build", "--no-isolation"]
    done = _run([*build, "--sdist", "--outdir", tmp_path, repository], tmp_path)
    assert done.returncode == 0, _output(done)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / path.name.removesuffix(".tar.gz")
    for name in ("Makefile", "constraints.txt", "mkdocs.yml", "CITATION.cff", "RELEASING.md", ".ci/run",
                 "tools/make_venv.py", "docs/index.md", "tests/golden/index.json"):  # fmt: skip
        assert (source / name).read_bytes() == (repository / name).read_bytes(), name
    tests = [path.relative_to(repository) for path in (repository / "tests").rglob("test_*.py")]
    assert [str(name) for name in tests if not (source / name).exists()] == []
    assert not list(source.glob("*venv*"))
    done = _run([*build, "--wheel", "--outdir", tmp_path / "again", source], tmp_path)
    assert done.returncode == 0, _output(done)
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(tmp_path / "again" / wheel.name) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())
        assert all(first.read(name) == second.read(name) for name in first.namelist() if name.endswith(".py"))


@pytest.mark.slow("the wheel in an environment of its own, which pip fills")
def test_the_wheel_runs_with_its_core_dependencies_alone(wheel_python, tmp_path):
    list_names = "import importlib.metadata as m; print(*(one.name for one in m.distributions()))"
    listed = _run([wheel_python, "-c", list_names], tmp_path).stdout.lower().replace("-", "_")
    assert set(listed.split()) == {"microfloat", "numpy", "ml_dtypes"}
    done = _run([wheel_python, "-W", "error", "-c", QUANTIZE_WITH_NUMPY], tmp_path)
    assert done.returncode == 0, _output(done)
    command = _run([wheel_python.with_name("microfloat"), "--help"], tmp_path)  # features O10
    assert command.returncode == 2
    assert 'pip install ".[cli]"' in command.stderr
    version = Path(__file__).parents[2].joinpath("src/microfloat/_version.py").read_text()
    assert f'"{done.stdout.strip()}"' in version


@pytest.mark.slow("the wheel in the environment of a reader of the README")
def test_the_wheel_runs_the_first_code_of_the_readme(wheel_python, repository, tmp_path):
    """Features B10."""
    pytest.importorskip("torch", reason="torch is not installed")
    blocks = code_blocks(repository / "README.md", "python") if (repository / "README.md").exists() else []
    if not blocks:
        pytest.skip("README.md has no python block")
    # torch is too large to install again: the running environment's packages come after the wheel's own.
    query = [wheel_python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(_run(query, tmp_path).stdout.strip())
    pth = site / "zz_running_environment.pth"
    pth.write_text(sysconfig.get_path("purelib") + "\n")
    try:
        done = _run([wheel_python, "-c", blocks[0].source], tmp_path)
        where = _run([wheel_python, "-c", "import microfloat; print(microfloat.__file__)"], tmp_path)
    finally:
        pth.unlink()
    assert where.stdout.startswith(str(site)), "the wheel was not what ran"
    assert done.returncode == 0, _output(done)
