"""Run tests on the oldest versions that pyproject.toml allows; standard library only.

    python tools/check_oldest.py                 # each set below
    python tools/check_oldest.py libraries

constraints.txt pins the newest ones, which `make test-all` has tested by then. The oldest are installed beside the
environment that runs this, without what they need, which is there, and are found first by the tests. torch and jax stay
those of the environment: their oldest ones are those of a GPU machine (`make test-installed`).
"""

import os
import re
import subprocess
import sys
import tomllib
from typing import NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Set(NamedTuple):
    """Packages that are tested together, each as its oldest version, and the tests of what they are needed for."""

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    arguments: tuple[str, ...] = ()


SETS = {
    "libraries": Set(
        ("numpy", "ml_dtypes", "matplotlib", "safetensors", "typer", "rich"),
        ("cli", "checkpoint", "formats", "metrics", "pictures", "recipes", "reference"),
        # matplotlib before 3.10.8 calls pyparsing by names that 3.3 has replaced.
        ("-m", "not slow", "-W", "ignore::pyparsing.warnings.PyparsingDeprecationWarning"),
    ),
    "transformers": Set(
        ("transformers",),
        tuple(
            f"integrations/test_{name}.py"
            for name in (
                "checkpoints", "experts", "from_pretrained", "fused_transformers", "generation", "peft", "readers",
                "training_to_serving", "transformers",
            )
        ),
    ),
}  # fmt: skip


def oldest(package):
    """The lowest version of a package that the library or an extra takes."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    needed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    bounds = {found[1] for one in needed if (found := re.match(rf"{package}>=([\d.]+)", one))}
    if len(bounds) != 1:
        sys.exit(f"{package}: got the bounds {sorted(bounds)} in pyproject.toml, needed one.")
    (bound,) = bounds
    return bound + ".0" * (2 - bound.count("."))


def beside(packages):
    """The folder with the oldest version of each, installed where it is not yet."""
    wanted = {package: oldest(package) for package in packages}
    folder = os.path.join(ROOT, "build", "-".join(f"{package}-{version}" for package, version in wanted.items()))
    if not os.path.isdir(folder):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        versions = [f"{package}=={version}" for package, version in wanted.items()]
        if subprocess.call([*command, *versions]) != 0:
            sys.exit(f"{' '.join(versions)} cannot be installed, so not tested. Is a package index reachable?")
    return folder, wanted


def run(chosen):
    """Run the tests of one set; the exit status."""
    folder, wanted = beside(chosen.packages)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((folder, os.path.join(ROOT, "src"), ROOT))}
    probe = f"import importlib.metadata as m; print(*(m.version(name) for name in {chosen.packages}))"
    found = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    for (package, version), got in zip(wanted.items(), found.stdout.split(), strict=True):
        if got != version:
            sys.exit(f"{package}: got {got}, needed {version} from {folder}. Remove that folder.")
    print("on", ", ".join(f"{package} {version}" for package, version in wanted.items()), flush=True)
    tests = [os.path.join("tests", *name.split("/")) for name in chosen.tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    return subprocess.call([*command, *chosen.arguments, *tests], cwd=ROOT, env=environment)


def main():
    names = sys.argv[1:] or list(SETS)
    if unknown := [name for name in names if name not in SETS]:
        sys.exit(f"set: got {unknown[0]!r}, needed one of {', '.join(SETS)}.")
    sys.exit(max(run(SETS[name]) for name in names))


if __name__ == "__main__":
    main()
