# The two commands are `make lab` and `make test`; `make` alone lists the rest. Each installs what it needs into .venv
# first, which takes minutes once and a moment from then on. Options: PYTHON=/path/to/python3.12, LAB_ARGS, TEST_ARGS.

LAB_ARGS ?=
TEST_ARGS ?=

# The first Python 3.11 to 3.14 on the PATH, or the one that PYTHON names.
CANDIDATES = $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11 python)
FITS = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
FOUND := $(shell for p in $(CANDIDATES); do "$$p" -c '$(FITS)' </dev/null >/dev/null 2>&1 && echo "$$p" && break; done)
NEEDED = This course needs Python 3.11 to 3.14
MISSING = $(if $(PYTHON),$(NEEDED) and PYTHON=$(PYTHON) is not one that runs here,$(NEEDED) and there is none on the \
PATH: install one from https://www.python.org/downloads/ or name yours as in: make lab PYTHON=/path/to/python3.12)
INSTALL = "$(or $(FOUND),$(error $(MISSING)))" -I course_utils/_bootstrap.py

PYTEST = .venv/bin/python -m pytest
ROOT_ALLOWED = $(if $(filter 0,$(shell id -u)),--allow-root)

# Somebody else's packages (a cluster's modules set these) must not get before the course's own.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help lab test test-all bench exercises lint clean FORCE

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

lab: ## open the course in JupyterLab
	$(INSTALL)
	.venv/bin/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks $(ROOT_ALLOWED) $(LAB_ARGS)

test: ## run the tests: units, doctests, every notebook, faults
	$(INSTALL) test
	$(PYTEST) --nbval -m "not slow" $(TEST_ARGS)

test-all: ## the same, with the tests that take long
	$(INSTALL) test
	$(PYTEST) --nbval $(TEST_ARGS)

bench: ## time how fast ranks start and answer, beside the other ways of starting them
	$(INSTALL) bench
	.venv/bin/python tests/bench/launch.py

ASSIGNMENTS = $(notdir $(patsubst %/,%,$(wildcard solutions/*/)))

exercises: $(ASSIGNMENTS:%=exercises/%) ## generate exercises/ from solutions/ with nbgrader

exercises/%: FORCE
	@test -n "$(OVERWRITE)" || test -z "$$(git status --porcelain -- exercises/$* 2>/dev/null)" || { echo "exercises/$* \
	has work in it that is not committed, and generating it anew deletes that: move it away, or make exercises OVERWRITE=1"; \
	exit 1; }
	$(INSTALL) test
	.venv/bin/nbgrader generate_assignment $* --force --no-db

lint: ## look for mistakes with ruff
	$(INSTALL) test
	.venv/bin/ruff check .

clean: ## delete what was installed and what tools left behind
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name .ipynb_checkpoints -prune -exec rm -rf {} +

FORCE:
