# The commands of this repository; `make` alone lists them. PYTHON= names the interpreter, if none is found.
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint bench clean
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST = $(BIN)/python -m pytest
PIP = $(BIN)/python -m pip install -q --disable-pip-version-check
PACKAGES = -c constraints.txt -e '.[aot,plot,test]'

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## render a launch and run the rendered command on this machine's CPU
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: $(STAMP) ## every test but the slow ones
	$(TEST) -m "not slow"

test-slow: $(STAMP) ## real TPU-topology compiles and long fuzzing
	$(TEST) -m slow

lint: $(STAMP) ## ruff, as in CI
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(STAMP) ## every performance ratio, as a table
	$(BIN)/python benchmarks/run_all.py

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# MaxText needs Python 3.12. Candidates are run, not believed: a python3.12 on the PATH can be a shim that
# only prints an error.
$(STAMP): pyproject.toml constraints.txt
	@for python in $(or $(PYTHON),python3.12 python3.13 python3 "$$HOME"/.pyenv/versions/3.1[2-9]*/bin/python); do \
	  "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && break; \
	  python=; \
	done; \
	if [ -z "$$python" ]; then echo "make: no Python >= 3.12 found; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
	echo "setting up $(VENV) with $$("$$python" --version)"; \
	[ -x $(BIN)/python ] || "$$python" -m venv $(VENV); \
	if $(PIP) -c constraints.txt uv && $(BIN)/uv pip install -q --python $(BIN)/python $(PACKAGES); then exit 0; fi; \
	echo "no uv here, or none that reaches the registry as pip is set up to: pip takes its place" >&2; \
	$(PIP) $(PACKAGES)
	@touch $@
