# Everything runs inside .venv, which `make venv` builds once and rebuilds when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One torch release for everybody: with the pin beside the package in one command, pip never swaps the build later.
TORCH ?= torch==2.13.0
JOBS ?= 2

.PHONY: venv demo test test-long oracle test-oracle bench-core bench-sim bench-peers lint format clean

venv: $(STAMP)
	@$(BIN)/python -m engine.compiled

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvtwin needs Python 3.11 or later; name one with 'make PYTHON=/path/to/python3.11 venv'." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[engine,dev]'
	touch $(STAMP)

demo: venv
	$(BIN)/kvtwin demo --out results/demo

test: venv
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow and not oracle"

test-long: venv
	$(BIN)/python -m pytest -n $(JOBS) -m "not oracle"

# vLLM's own schedulers, in an environment of their own outside of this folder (see docs/oracle.md).
oracle: venv
	TORCH=$(TORCH) $(BIN)/python tests/oracle/setup_oracle.py

test-oracle: venv
	$(BIN)/python -m pytest -n 0 -m oracle tests/oracle

bench-core: venv
	$(BIN)/python benchmarks/core.py

# Whole simulations: requests per CPU-second, memory, linearity.
bench-sim: venv
	$(BIN)/python benchmarks/sim.py

# The same beside another simulator, in an environment of its own outside of this folder.
bench-peers: venv
	$(BIN)/python benchmarks/peers.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache results/demo
