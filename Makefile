# Every target sets up what it needs by itself: `make test` works in a fresh clone.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
WORKERS ?= 2
SIZE    ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup lint test test-slow mutants train docs wheel bench accept torture clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## create .venv and install into it; done again only when the dependencies change

# The constraints matter: an unpinned torch may be another build, gigabytes larger.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tapeless needs Python 3.11 or newer, $(PYTHON) is %d.%d; try make PYTHON=python3.11" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

lint: $(READY)  ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One thread for each worker: two workers with all cores each would wait for one another.
test: lint  ## lint, then every test but the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m 'not slow'

test-slow: $(READY)  ## the slow tests alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m slow

mutants: $(READY)  ## plant every known bug, one at a time, and see that the levels find it: five minutes
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m mutants

train: $(READY)  ## train the default model on this Python's own sources
	$(BIN)/tapeless train new

wheel: $(READY)  ## build the wheel into dist/, install it elsewhere, and train there
	$(BIN)/python acceptance/wheel.py dist

docs: $(VENV)/.docs  ## build the documentation site into build/site; fails on a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "open build/site/index.html"

$(VENV)/.docs: $(READY)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

bench: $(READY)  ## measure what docs/performance.md says: half an hour on two quiet cores
	$(BIN)/python bench/run.py
	$(BIN)/python acceptance/tables.py

accept: $(READY)  ## measure every claim, print claim, bound, value and verdict
	$(BIN)/python acceptance/run.py
	$(BIN)/python acceptance/tables.py

# Two hours on one core; make torture SIZE=0.01 PARTS=kills takes minutes. Needs Linux and cc.
torture: $(READY)  ## kill, fail, damage and mutate everything that is written or read
	OMP_NUM_THREADS=1 nice $(BIN)/python acceptance/torture.py $(SIZE) $(PARTS)

clean:  ## remove .venv and everything generated
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
