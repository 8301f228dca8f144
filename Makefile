# Two commands need nothing but python3, make and a package registry: `make demo` and `make test`.
PYTHON ?= python3
JAX ?= jax
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help models demo serve-demo dev docs test test-integration test-slow test-gpu test-versions package lint types clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing tca_jax into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . "$(JAX)"
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo "installing tca_jax and its test tools into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]" "$(JAX)"
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing tca_jax, its test tools, Ray and lint tools into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" "$(JAX)"
	@touch $(VENV)/.installed $(VENV)/.installed-test $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

demo: $(VENV)/.installed  ## answer questions about a long document: full attention, predicted worth, a window of its bytes
	$(BIN)/tca-jax demo

serve-demo: $(VENV)/.installed  ## serve the shipped model on a CPU, upload a document, ask three questions at once
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[serve]"
	sh examples/serve_demo.sh $(BIN)/tca-jax $(BIN)/python

models: $(VENV)/.installed  ## fetch SmolLM2-135M and Qwen2.5-Coder-0.5B as GGUF files (590 MB)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[gguf]"
	$(BIN)/python -m tca_jax.lab.models fetch smollm2 qwen-0.5b

dev: $(VENV)/.installed-dev  ## install with the tools of all tests and of lint

test-gpu: $(VENV)/.installed-test  ## the tests that run kernels, on a machine with an NVIDIA GPU
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile \
		tests/pallas_kernels tests/test_functional.py tests/engine

PYTEST := $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-test  ## the tests of functions and kernels
	$(PYTEST) -m "not integration and not slow"

test-integration: $(VENV)/.installed-dev  ## the tests of whole commands, examples, servers, meshes and several features together
	$(PYTEST) -m integration

test-slow: $(VENV)/.installed-dev  ## the tests that take many seconds, before a release; CI does not run them
	$(PYTEST) -m slow

test-versions:  ## all tests, with the oldest JAX on Python 3.11 and with the newest on Python 3.12; both must be there
	$(MAKE) test test-integration test-slow VENV=.venv-oldest PYTHON=python3.11 JAX="jax==0.10.2"
	$(MAKE) test test-integration test-slow VENV=.venv-newest PYTHON=python3.12 JAX="jax>=0.12"

package: $(VENV)/.installed-dev  # the package as it installs, for tools that follow its imports
	rm -rf build && mkdir -p build/package
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/package .
	cd build/package && ../../$(BIN)/python -c "import tca_jax, tca_jax.methods, tca_jax.models"  # read their .pyi files

lint: package  ## ruff, budgets of lines, import contracts
	$(BIN)/python tests/line_budgets.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/package && ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache

types: package  ## mypy on the package as it installs
	cd build/package && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p tca_jax

docs: $(VENV)/.installed-docs package  ## the site of docs/, into build/site
	$(BIN)/mkdocs build --strict

clean:  ## remove the virtual environment and build products
	rm -rf $(VENV) build dist *.egg-info
