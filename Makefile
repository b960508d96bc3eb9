# Every target does its own set-up: a virtual environment in .venv, installed once and reused.
# PYTHON=python3.12 chooses the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all faults check docs bench reproduce release gpu-check null-gpu clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python -m dist_transformer demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slice" -n auto --maxprocesses 4 --no-loadscope-reorder

# SLICE names some of them, separated by spaces.
test-all: $(STAMP)
	$(BIN)/python -m tests.slices $(SLICE)

release: $(STAMP)
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	DIST=$(CURDIR)/dist $(BIN)/python -m pytest tests/compat/test_release.py

faults: $(STAMP)
	$(BIN)/python -m tests.faults --json results/faults.json

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_docs.py tests/test_wording.py -m "not slice"

# The variable silences an announcement of the theme, which is no warning about our pages.
docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "open build/site/index.html, or serve it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

bench: $(STAMP)
	$(BIN)/python tools/bench.py

# Trains from scratch, so an earlier training goes away.
reproduce: $(STAMP)
	rm -rf runs/reproduce
	$(BIN)/python tools/reproduce.py --out runs/reproduce

# A PYTHON that is named is used as it is: nothing is installed.
GIVEN := $(filter command environment,$(origin PYTHON))
gpu-check: $(if $(GIVEN),,$(STAMP))
	PYTHONPATH=$(CURDIR) $(if $(GIVEN),$(PYTHON),$(BIN)/python) tools/gpu_check.py --part $(PART)

# The host's side of the GPU path on a stub of CUDA; torch's build for CUDA (5 GB) goes to .nullgpu/ once.
null-gpu: $(STAMP)
	$(BIN)/python -m tests.nullgpu

$(STAMP): pyproject.toml constraints.txt tools/check_machine.sh
	sh tools/check_machine.sh $(PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	touch $@

$(VENV)/.docs-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
