# Each command does all of its own set-up: it needs python3 (3.11 or newer) and pip, nothing else.
#
#   make demo       train a small transformer in bf16 and under three recipes: two minutes on two free cores, after set-up
#   make test       what CI runs: the test suite without the tests marked slow
#   make test-all   everything: machine code for every chip, every kernel interpreted, every benchmark command and example,
#                   the training packages around (Accelerate, Lightning, PEFT, the newest and the oldest transformers)
#   make test-oldest   the oldest NumPy, ml_dtypes, matplotlib, safetensors, typer, rich and transformers that are allowed
#   make test-torchtitan   the converter in the real torchtitan, in an environment of its own
#   make test-vllm  the quantization method in the real layers of vLLM, without its kernels, in another environment
#   make lint       ruff and pyright
#   make tables     regenerate every generated table of README.md and docs/
#   make docs       the site of docs/ with the API reference, into site/; a dead link or name is an error
#   make corpus     the text of the pretraining study, docs/evidence.md, from fifteen packages of Debian into .data/corpus
#   make fuzz       damaged checkpoints against their reader, for SECONDS=600; inputs that fail are kept
#
# Settings: PYTHON=python3.12 (what to build the environment with), JOBS=8 (test processes), TESTS="tests/torch -k linear",
# TORCH_BUILD=auto|cpu|default (which torch wheel), DEMO="--preset tiny --recipe nvfp4".

PYTHON ?= python3
JOBS ?= 2
TESTS ?=
DEMO ?= --preset tiny
TORCH_BUILD ?= auto
SECONDS ?= 600
VENV := .venv
DOCS_VENV ?= .venv-docs
TITAN_VENV ?= .venv-torchtitan
VLLM_VENV ?= .venv-vllm
SITE ?= site

# A virtual environment or a module path of the caller must not leak into ours. Byte code is written: the tests start
# dozens of processes that import the library.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

# Plugins of installed packages are not looked for: each process would rewrite and import what no test uses.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1

# JOBS=0 runs in one process and does without pytest-xdist, which tries a test that took its process down once more.
PYTEST_ARGS := -p no:benchmark $(if $(filter 0,$(JOBS)),,-p xdist.plugin -n $(JOBS) --dist loadgroup --no-loadscope-reorder --max-worker-restart 1)
SETUP = $(PYTHON) tools/make_venv.py --venv $(VENV) --torch-build $(TORCH_BUILD) --extras

.PHONY: help demo docs corpus fuzz test test-all test-oldest test-torchtitan test-vllm test-installed lint format api tables setup-demo setup-docs setup-test setup-test-all setup-lint clean

help:
	@sed -n 's/^#   //p' Makefile

setup-demo:
	@$(SETUP) torch,examples

setup-test:
	@$(SETUP) torch,triton,jax,cli,plot,examples,dev

# pyright comes with all of Node.js, which no test needs.
setup-lint:
	@$(SETUP) torch,triton,jax,cli,plot,examples,dev,lint

# The packages of tests/integrations, which skip in `make test` where they are not installed.
setup-test-all:
	@$(SETUP) torch,triton,jax,cli,plot,examples,dev,integrations

# In one process: its order of documents is that of their digests, so that more would change nothing but the time.
corpus: setup-test-all
	RAYON_NUM_THREADS=1 $(VENV)/bin/python tools/corpus.py --out .data/corpus

# Without constraints.txt, since torchtitan asks for older datasets than TRL. torchtitan imports Triton, which comes with
# the wheels of torch for CUDA and not with those for a CPU.
test-torchtitan:
	$(PYTHON) -m venv $(TITAN_VENV)
	$(TITAN_VENV)/bin/python -m pip install --quiet --editable ".[torch,triton,cli,dev,torchtitan]"
	OMP_NUM_THREADS=1 $(TITAN_VENV)/bin/python -m pytest -p no:benchmark tests/integrations/test_torchtitan.py

# vLLM alone, and what its layers import: an engine, with its kernels and CUDA, is not needed.
test-vllm:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable ".[torch,cli,dev]" -r tests/integrations/vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps vllm==0.33.0
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -p no:benchmark tests/integrations/test_vllm.py

# In an environment of its own, which holds neither torch nor jax: the sources are read, not imported.
setup-docs:
	@$(SETUP) docs

docs: VENV := $(DOCS_VENV)
docs: setup-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet --site-dir $(abspath $(SITE))

demo: setup-demo
	$(VENV)/bin/python examples/train_gpt.py $(DEMO)

# One thread per process: two processes of one thread each are faster on two cores than two of two.
# What is marked slow, and why, is said at the end of the run; `-m` in TESTS takes the place of this one.
test: setup-test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "not slow" $(TESTS)

test-all: setup-test-all
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS) $(TESTS)
	OMP_NUM_THREADS=1 $(VENV)/bin/python tools/check_oldest.py

# The second half of `make test-all` by itself.
test-oldest: setup-test-all
	OMP_NUM_THREADS=1 $(VENV)/bin/python tools/check_oldest.py

# All of it in an environment that is already there, for instance on a GPU machine: no set-up, no network.
test-installed:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(PYTEST_ARGS) $(TESTS)

fuzz: setup-test
	$(VENV)/bin/python tools/fuzz_checkpoints.py --seconds $(SECONDS)

lint: setup-lint
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m pyright --pythonpath $(VENV)/bin/python

format: setup-test
	$(VENV)/bin/python -m ruff check --fix .
	$(VENV)/bin/python -m ruff format .

# Regenerate the public-API snapshot after a change that is meant; the diff belongs into the same commit.
api: setup-test
	$(VENV)/bin/python -m tests.architecture.public_api --write

# Nothing is measured: the figures come from benchmarks/results, the rest from the library itself.
tables: setup-test
	$(VENV)/bin/python tools/tables.py --write

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(TITAN_VENV) $(VLLM_VENV) $(SITE) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
