# Every target sets up what it needs. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := aiorl/constraints.txt
LEARNER := $(VENV)/.learner
TESTS := $(VENV)/.tests
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
# pip would compile 18,000 files with one processor; some of them are examples of errors
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
RESULTS := .pytest_cache/results.xml
# Whole files in each process. Of three on two cores, one usually waits for something, and of five
# with slow tests three.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-docs extras train test test-slow test-all nightly check style types layers prose \
	readability size requirements bench bench-against chaos results examples coverage picture docs docs-serve fuzz lock build release clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "aiorl needs Python 3.11 or newer; set PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) pip==26.3  # Python 3.11's own compares 200,000 files with sets of tags, for a minute

$(LEARNER): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing the packages for training into $(VENV): 1.9 GB, a minute or two the first time"
	@$(PIP) -e '.[learner]'
	@$(COMPILE)
	@touch $@

$(TESTS): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing the packages for most tests into $(VENV): 2 GB, a minute or two the first time"
	@$(PIP) -e '.[learner,test]'
	@$(COMPILE)
	@touch $(LEARNER) $@

$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing the packages for development into $(VENV): 3.6 GB, some minutes the first time"
	@$(PIP) -e '.[dev]'
	@$(COMPILE)
	@touch $(LEARNER) $(TESTS) $@

setup: $(STAMP)  ## make .venv and install everything for development (3.6 GB), pinned

setup-test: $(TESTS)  ## make .venv and install what most tests need (2 GB), pinned

extras: | $(BIN)/python  ## add extras to .venv, which goes on using this clone; make extras E=box2d,video
	@test -n "$(E)" || { echo "name the extras in pyproject.toml that you need: make extras E=box2d,video"; exit 2; }
	@$(PIP) -e '.[$(E)]'

train: $(LEARNER)  ## solve CartPole-v1 with PPO and two workers; installs the packages for training (1.9 GB)
	@$(BIN)/aiorl train --preset ppo-cartpole-quick --stop-return 475

test: $(STAMP)  ## run the tests (without the long learning runs)
	@$(PYTEST) -n 3 -m 'not slow' --junitxml=$(RESULTS)
	@$(BIN)/python tests/support/requirement_table.py --check $(RESULTS)

test-slow: $(STAMP)  ## run the learning and fault runs that CI runs, too
	@$(PYTEST) -n 5 -m 'slow and not nightly'

test-all: $(STAMP)  ## run all tests, including long learning and fault runs
	@$(BIN)/python -m pytest

nightly: $(STAMP)  ## run the tests that CI leaves out: campaigns, notebooks, long learning runs
	@$(BIN)/python -m pytest -m nightly

check: style types layers prose readability size  ## check style, types, import layers, prose and readability; print sizes

style: $(STAMP)  ## ruff: lint and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	@$(BIN)/mypy

layers: $(STAMP)  ## import-linter: imports go in one direction
	@$(BIN)/lint-imports --no-cache

prose: $(STAMP)  ## list words that this project no longer writes, and facts that docstrings of public names lack
	@$(BIN)/python tests/support/prose.py

readability: $(STAMP)  ## how the package reads: density, names, attributes and others, within limits
	@$(BIN)/python tests/support/readability.py --rooms

size:  ## print statements, code lines and files of each room; nothing limits them
	@$(BIN)/python tests/support/size.py

requirements: $(STAMP)  ## run the tests and write docs/requirements.md: requirements and their tests
	-@$(PYTEST) -n 3 -m 'not slow' --ignore=tests/test_requirements.py --junitxml=$(RESULTS)
	@$(BIN)/python tests/support/requirement_table.py $(RESULTS)

bench: $(STAMP)  ## measure every figure against its baseline; make bench NAMES="sampler wire"
	@$(BIN)/python -m benchmarks $(NAMES)

bench-against: $(STAMP)  ## measure this tree and another revision alternately; make bench-against REV=main NAMES="sampler"
	@$(BIN)/python -m benchmarks.against $(if $(ROUNDS),--rounds $(ROUNDS)) $(or $(REV),HEAD) $(NAMES)

chaos: $(STAMP)  ## random faults in whole runs for 20 minutes; make chaos CHAOS="--seed 7"
	@$(BIN)/python -m benchmarks.chaos $(CHAOS)

results: $(STAMP)  ## learning results of presets, seed by seed, into docs/results.md; make results TASKS="ppo-cartpole"
	@$(BIN)/python -m benchmarks.results $(TASKS)

examples: $(STAMP)  ## run every example, a few minutes
	@$(BIN)/python -m pytest tests/examples

coverage: $(STAMP)  ## tests with branch coverage
	@$(PIP) coverage
	@$(BIN)/coverage run -m pytest -m 'not slow' && $(BIN)/coverage combine && $(BIN)/coverage report

fuzz: $(STAMP)  ## fuzz the parsers of untrusted data for 10 minutes; make fuzz SECONDS=60 TARGETS="decode graph"
	@$(PIP) atheris
	@$(BIN)/python tests/fuzz/run.py --seconds $(or $(SECONDS),600) $(if $(TARGETS),--targets $(TARGETS))

picture: $(STAMP)  ## train CartPole-v1 again, and write the pictures of docs/: its curve, and pages by chromium
	@folder=$$(mktemp -d) && trap "rm -rf $$folder" EXIT \
		&& $(BIN)/aiorl train --env CartPole-v1 --algo ppo --num-workers 2 --stop-return 475 --run-dir $$folder/run \
		&& cp $$folder/run/learning_curve.png docs/ \
		&& PYTHONPATH=tests/support $(BIN)/python tests/support/pictures.py $$folder/run

setup-docs: $(STAMP)  ## install what builds the documentation site
	@$(BIN)/mkdocs --version >/dev/null 2>&1 || $(PIP) mkdocs-material 'mkdocstrings[python]'

docs: setup-docs  ## build the documentation site in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html, or run: make docs-serve"

docs-serve: setup-docs  ## serve the site at http://127.0.0.1:8000; rebuild it after each change
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lock: $(STAMP)  ## rewrite aiorl/constraints.txt from the installed packages
	@$(BIN)/python -m pip freeze --exclude-editable | grep -v '^aiorl' > $(CONSTRAINTS)

build: $(STAMP)  ## build the sdist, and the wheel from it
	@$(BIN)/python -m build --outdir dist

release: $(STAMP)  ## make and try what a release has: sdist, wheel, site; make release TAG=v0.2.0 checks the tag, too
	@.ci/release $(TAG)

clean:  ## remove .venv, caches and build products (runs/ is kept)
	rm -rf $(VENV) dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
