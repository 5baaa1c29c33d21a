"""Import direction, import weight and environment reads of the library."""

import ast
import json

import pytest

from tests.architecture.imports import LAYERS, circle_of, file_graph, imported_modules, modules_under, violations


def test_every_module_imports_only_layers_below_it(repository):
    modules = list(modules_under(repository / "src"))
    assert modules
    rows = [row for path, name, package in modules for row in violations(path.read_text(), name, is_package=package)]
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("microfloat.formats", "from microfloat.recipes import Recipe"),
        ("microfloat.formats", "import torch"),
        ("microfloat.formats", "def f():\n    import jax.numpy as jnp"),
        ("microfloat.formats", "from microfloat import recipes"),
        ("microfloat.formats", "from . import recipes"),
        ("microfloat.formats", "import importlib\nimportlib.import_module('torch')"),
        ("microfloat.recipes.nvfp4", "from ..reference import quantize"),
        ("microfloat.metrics", "from microfloat import reference"),
        ("microfloat.reference", "import safetensors"),
        ("microfloat.kernels.cast", "import torch"),
        ("microfloat.kernels.cast", "from microfloat.torch import ops"),
        ("microfloat.torch.linear.function", "import jax"),
        ("microfloat.torch.linear.function", "from microfloat.jax import ops"),
        ("microfloat.torch.linear.function", "from microfloat.cli import main"),
        ("microfloat.torch.linear.function", "from microfloat import Recipe"),
        ("microfloat.jax.ops", "from torch import nn"),
        ("microfloat.jax.ops", "from microfloat import torch"),
        ("microfloat.unplaced", "import math"),
        ("microfloat", "from microfloat import torch"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert len(violations(source, module, is_package=module == "microfloat")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("microfloat.recipes.nvfp4", "import math\nimport numpy as np\nfrom microfloat.formats import NVFP4"),
        ("microfloat.recipes.nvfp4", "from .base import Recipe\nfrom ..errors import invalid_value"),
        ("microfloat.checkpoint.nvfp4", "import safetensors\nfrom microfloat import reference"),
        ("microfloat.kernels.cast", "import triton\nimport triton.language as tl"),
        ("microfloat.torch.linear.function", "import torch\nfrom microfloat.kernels import cast\nfrom . import ops"),
        ("microfloat.jax.ops", "import jax\nfrom flax import linen"),
        ("microfloat.cli.doctor", "import typer\nimport microfloat.torch\nimport microfloat.jax"),
        ("microfloat", "from microfloat import reference\nfrom microfloat.formats import E4M3"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert violations(source, module, is_package=module == "microfloat") == []


# Folders whose files may still import each other in a circle, through imports in functions or for type checkers.
CIRCLES = {"torch"}


def test_no_files_import_each_other_in_a_circle(repository):
    rooms = {name for row in LAYERS for name in row} - CIRCLES
    graph = file_graph(repository / "src", lambda name: name == "microfloat" or name.split(".")[1] in rooms)
    assert len(graph) > 100
    assert circle_of(graph) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from microfloat.b import f", "import microfloat.a"),
        ("def g():\n    from . import b", "from microfloat import a"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from microfloat.b import f", "from .a import g"),
    ],
)
def test_a_circle_is_found(tmp_path, first, second):
    package = tmp_path / "microfloat"
    package.mkdir()
    (package / "a.py").write_text(first)
    (package / "b.py").write_text(second)
    assert set(circle_of(file_graph(tmp_path, lambda name: True))) == {"microfloat.a", "microfloat.b"}
    (package / "b.py").write_text("import math")
    assert circle_of(file_graph(tmp_path, lambda name: True)) == []


def test_relative_imports_are_resolved():
    assert list(imported_modules("from . import a", "microfloat.torch", is_package=True)) == [(1, "microfloat.torch")]
    assert list(imported_modules("from .x import a", "microfloat.torch.y")) == [(1, "microfloat.torch.x")]
    assert list(imported_modules("from ..x import a", "microfloat.torch.y")) == [(1, "microfloat.x")]
    assert list(imported_modules("from .. import x", "microfloat.torch.y")) == [(1, "microfloat.x")]


LOADED_BY_IMPORT = """
import json, sys
before = set(sys.modules)
import microfloat
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(loaded - set(sys.stdlib_module_names))))
"""


def test_import_microfloat_loads_numpy_and_ml_dtypes_alone(fresh_python):
    """Features B2."""
    done = fresh_python(LOADED_BY_IMPORT)
    assert done.returncode == 0, done.stderr
    loaded = {name for name in json.loads(done.stdout) if not name.startswith("_")}
    assert "microfloat" in loaded
    assert loaded <= {"microfloat", "numpy", "ml_dtypes"}


LOADED_WHEN_USED = """
import sys, microfloat
print("microfloat.reference" in sys.modules, "microfloat.metrics" in sys.modules, "metrics" in dir(microfloat))
print(float(microfloat.reference.quantize([448.0], microfloat.FP8_TENSOR).scale), microfloat.metrics.__name__)
"""


def test_the_oracle_is_loaded_when_it_is_used(fresh_python):
    done = fresh_python(LOADED_WHEN_USED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "True", "1.0", "microfloat.metrics"]


@pytest.mark.slow_cases("tests/jax/test_imports.py has a process without torch", all_but=("torch-jax",))
@pytest.mark.parametrize(("front_end", "other"), [("torch", "jax"), ("jax", "torch")])
def test_a_front_end_does_not_load_the_other_framework(fresh_python, repository, front_end, other):
    if not (repository / "src" / "microfloat" / front_end).is_dir():
        pytest.skip(f"microfloat.{front_end} is not in the source tree")
    pytest.importorskip(front_end, reason=f"{front_end} is not installed")
    # torch's compiler and what shards tensors are loaded when they are used.
    unused = [other, "torch._dynamo", "microfloat.torch.distributed"]
    code = f"import sys, microfloat.{front_end}; print(*(name in sys.modules for name in {unused!r}))"
    if front_end == "torch":
        code += "; print(microfloat.torch.distributed.ColwiseParallel.__name__, hasattr(microfloat.torch, 'nothing'))"
    done = fresh_python(code)
    assert done.returncode == 0, done.stderr
    reached = ["ColwiseParallel", "False"] if front_end == "torch" else []
    assert done.stdout.split() == ["False", "False", "False", *reached]


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
import microfloat
for write in ("import microfloat.{}", "from microfloat import {}", "microfloat.{}"):
    try:
        exec(write.format(sys.argv[2]))
    except Exception as error:
        print(type(error).__name__, isinstance(error, ImportError), error)
"""


def test_the_torch_front_end_without_torch_names_the_extra(fresh_python):
    doors = """
for name in ("transformers", "torchtitan", "vllm"):
    try:
        __import__("microfloat.integrations." + name)
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = fresh_python(WITHOUT + doors, "torch", "torch")
    assert done.returncode == 0, done.stderr
    imported, from_root, attribute, *others = done.stdout.splitlines()
    missing = "MissingPackageError microfloat.integrations needs the package torch, which is not installed"
    assert len(others) == 3
    assert all(line.startswith(missing) and 'pip install ".[torch]"' in line for line in others)
    assert imported == from_root
    assert imported.startswith(
        "MissingPackageError True microfloat.torch needs the package torch, which is not installed"
    )
    assert 'pip install ".[torch]"' in imported
    assert attribute == (
        "AttributeError False module 'microfloat' has no attribute 'torch'; "
        "it is imported on its own: import microfloat.torch"
    )


@pytest.mark.slow("a process of JAX more")
def test_the_jax_front_ends_without_their_package_name_the_extra(fresh_python):
    pytest.importorskip("jax", reason="jax is not installed")
    code = """
import sys
for part, package in (("jax", "jax"), ("jax.linen", "flax"), ("jax.nnx", "flax"), ("jax.fp8_ops", "flax")):
    sys.modules[package] = None
    try:
        __import__(f"microfloat.{part}")
    except ImportError as error:
        print(type(error).__name__, error)
    del sys.modules[package]
"""
    done = fresh_python(code)
    assert done.returncode == 0, done.stderr
    needed = [("jax", "jax"), ("jax.linen", "flax"), ("jax.nnx", "flax"), ("jax.fp8_ops", "flax")]
    for line, (part, package) in zip(done.stdout.splitlines(), needed, strict=True):
        expected = f"MissingPackageError microfloat.{part} needs the package {package}, which is not installed"
        assert line.startswith(expected)
        assert 'pip install ".[jax]"' in line


def test_a_front_end_that_was_not_imported_is_no_attribute():
    import microfloat

    assert "it is imported on its own: import microfloat.jax" in str(_error(lambda: microfloat.__getattr__("jax")))
    assert str(_error(lambda: microfloat.tensorflow)) == "module 'microfloat' has no attribute 'tensorflow'"


def _error(call):
    with pytest.raises(AttributeError) as caught:
        call()
    return caught.value


ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def _environment_reads(source):
    named = any(name in source for name in ENVIRONMENT_NAMES)  # most files need not be parsed
    for node in ast.walk(ast.parse(source)) if named else ():
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        imported = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
        if name in ENVIRONMENT_NAMES or imported & ENVIRONMENT_NAMES:
            yield node.lineno


def test_the_environment_is_read_in_one_file_only(repository):
    rows = [
        f"{name}:{line}"
        for path, name, _ in modules_under(repository / "src")
        if name != "microfloat._environment"
        for line in _environment_reads(path.read_text())
    ]
    assert not rows, "environment reads outside src/microfloat/_environment.py: " + ", ".join(rows)


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['X']", "import os\nos.getenv('X')", "from os import environ", "from os import getenv as g"],
)
def test_an_environment_read_is_found(source):
    assert list(_environment_reads(source))
