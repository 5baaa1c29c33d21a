"""Run the integration tests on the oldest version of transformers that pyproject.toml allows; standard library only.

    python tools/check_oldest.py

constraints.txt pins the newest one, which `make test-all` has tested by then. The oldest is installed beside the
environment that runs this, without what it needs, which is there, and is found first by the tests.
"""

import os
import re
import subprocess
import sys
import tomllib

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE, EXTRA = "transformers", "integrations"
TESTS = (
    "test_checkpoints.py", "test_experts.py", "test_from_pretrained.py", "test_fused_transformers.py",
    "test_generation.py", "test_peft.py", "test_readers.py", "test_training_to_serving.py", "test_transformers.py",
)  # fmt: skip


def oldest():
    """The lowest version of the package that the extra takes."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        needed = tomllib.load(file)["project"]["optional-dependencies"][EXTRA]
    (bound,) = [found[1] for one in needed if (found := re.match(rf"{PACKAGE}>=([\d.]+)", one))]
    return bound + ".0" * (2 - bound.count("."))


def main():
    version = oldest()
    folder = os.path.join(ROOT, "build", f"{PACKAGE}-{version}")
    if not os.path.isdir(folder):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        if subprocess.call([*command, f"{PACKAGE}=={version}"]) != 0:
            sys.exit(f"{PACKAGE} {version} cannot be installed, so it is not tested. Is a package index reachable?")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((folder, os.path.join(ROOT, "src"), ROOT))}
    probe = f"import {PACKAGE}; print({PACKAGE}.__version__)"
    found = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    if found.stdout.strip() != version:
        sys.exit(f"{PACKAGE}: got {found.stdout.strip()}, needed {version} from {folder}. Remove that folder.")
    tests = [os.path.join("tests", "integrations", name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider", *tests]
    sys.exit(subprocess.call(command, cwd=ROOT, env=environment))


if __name__ == "__main__":
    main()
