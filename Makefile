# Every target that needs it sets up .venv by itself: python3 (3.11 or newer) and make are enough.
# The stamp makes that free until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
ARGS ?=
ONLY ?=
# One process for each core, of one thread. In order: one of them runs the tests of real ranks, which
# share what is started for them, until another has nothing else left.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench sweep exports clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## Run the demo (ARGS="--mode fsdp --steps 20" varies it)
	@$(BIN)/shardwise demo $(ARGS)

test: $(STAMP) ## Run the tests (ARGS="-k name" is passed to pytest; "-n 0" for a debugger)
	$(PYTEST) $(ARGS)

lint: $(STAMP) ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP) ## Run the benchmarks (ONLY="import_time" chooses)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $(ONLY)

sweep: $(STAMP) ## Run the long tests of tests/sweep, and write docs/op-coverage.md
	$(PYTEST) tests/sweep $(ARGS)
	@PYTHONPATH=tests $(BIN)/python -m op_db --page

exports: $(STAMP) ## Try torch's own transformation of exported programs, and write it into docs/export.md
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m export_table --page

clean: ## Remove .venv, caches and build products
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools goes first and the package is built with it, without build isolation: so the
# pinned one is used, and no build environment resolves anything (torch!) outside the constraints.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("shardwise needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "setting up $(VENV) (a minute or so, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint constraints.txt setuptools
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@
