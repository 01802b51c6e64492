# Every target that needs it sets up its environment by itself: python3 (3.11 or newer) and make are
# enough. The stamp makes that free until pyproject.toml or the constraints change.

PYTHON ?= python3
DEFAULT_TORCH := 2.13.0
TORCH := $(DEFAULT_TORCH)
VENV := $(if $(filter $(DEFAULT_TORCH),$(TORCH)),.venv,.venv-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := constraints/$(TORCH).txt
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
ARGS ?=
ONLY ?=
# One process for each core, of one thread. In order: one of them runs the tests of real ranks, which
# share what is started for them (tests/support/ranks.py), until another has nothing else left.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Comments that ignore an error of types are for the annotations of one version of torch.
MYPY_FLAGS := $(if $(filter $(DEFAULT_TORCH),$(TORCH)),,--no-warn-unused-ignores)

TORCHES := $(sort $(patsubst constraints/%.txt,%,$(wildcard constraints/[0-9]*.txt)))
ifeq ($(filter $(TORCH),$(TORCHES)),)
$(error TORCH=$(TORCH): there is no $(CONSTRAINTS); expected one of: $(TORCHES))
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-rest test-all lint bench sweep exports compatibility clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  TORCH=version, with any target, chooses the version of torch and its environment:"
	@echo "  $(foreach each,$(TORCHES),$(each) ($(if $(filter $(DEFAULT_TORCH),$(each)),.venv: the default,.venv-$(each))))"

demo: $(STAMP) ## Run the demo (ARGS="--mode fsdp --steps 20" varies it)
	@$(BIN)/shardwise demo $(ARGS)

test: $(STAMP) ## Run the quick tests, of every feature (ARGS="-k name" is passed to pytest; "-n 0" for a debugger)
	$(PYTEST) -m "not slow" $(ARGS)

test-rest: $(STAMP) ## Run the slow tests, which `make test` leaves out
	$(PYTEST) -m slow $(ARGS)

test-all: $(STAMP) ## Run all tests, quick and slow
	$(PYTEST) $(ARGS)

lint: $(STAMP) ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(MYPY_FLAGS)

bench: $(STAMP) ## Run the benchmarks (ONLY="import_time" chooses)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $(ONLY)

sweep: $(STAMP) ## Run the exhaustive tests of tests/sweep (nightly), and write docs/op-coverage.md
	$(PYTEST) tests/sweep $(ARGS)
	@PYTHONPATH=tests $(BIN)/python -m support.op_db --page

exports: $(STAMP) ## Try torch's own transformation of exported programs, and write it into docs/export.md
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m support.export_table --page

compatibility: ## Run everything with each version of torch, and write docs/compatibility.md (ONLY="2.15.0" chooses)
	@$(PYTHON) tests/support/compatibility.py $(ONLY)

clean: ## Remove the environments of all versions of torch, caches and build products
	rm -rf .venv .venv-[0-9]* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools goes first and the package is built with it, without build isolation: so the
# pinned one is used, and no build environment resolves anything (torch!) outside the constraints.
$(STAMP): pyproject.toml constraints/shared.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("shardwise needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "setting up $(VENV) with torch $(TORCH) (a minute or so, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint $(CONSTRAINTS) setuptools
	@$(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[dev]'
	@touch $@
