# make demo   set everything up and generate text with the model that ships
# make test   set everything up and pass the tests
# make check  lint, format and types        make docs   the documents' examples
# make bench  the quick form of every benchmark that needs no accelerator

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export JAX_PLATFORMS ?= cpu

.PHONY: demo test check docs bench

demo: $(VENV)/.demo
	@$(BIN)/jaxkv generate "Once upon a time" --echo --max-new-tokens 300 --stats

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -n auto --dist loadfile

check: $(VENV)/.dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python -m mypy

docs: $(VENV)/.dev
	@$(BIN)/python -m pytest tests/test_docs_formulas.py tests/test_docs_prefix_reuse.py tests/test_docs_mesh.py tests/test_examples.py

bench: $(VENV)/.dev
	@for name in state_ops in_place capacity cpu_decode; do $(BIN)/python benchmarks/$$name.py --quick; done

$(BIN)/python:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing jaxkv and its packages into $(VENV) (about a minute)"
	@$(PIP) install -qq --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing jaxkv, its packages and the compilers for the tests into $(VENV) (a few minutes)"
	@$(PIP) install -qq --editable '.[dev]'
	@touch $@ $(VENV)/.demo
