# Every target does its own set-up: a virtual environment in .venv, installed once and reused.
# PYTHON=python3.12 chooses the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-all faults check docs bench reproduce release gpu-slot gpu-check null-gpu clean
.DELETE_ON_ERROR:

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## libraries and commands, into .venv
	@echo "installed; in this folder: source $(BIN)/activate, then: dist-transformer --help"

demo: $(STAMP)  ## the whole way on a synthetic corpus, in minutes
	$(BIN)/python -m dist_transformer demo

test: $(STAMP)  ## what a change needs
	@echo "the tests take 10 to 25 minutes on two idle cores, by their speed"
	$(BIN)/python -m pytest -m "not slice" -n auto --maxprocesses 4 --no-loadscope-reorder

# SLICE names some of them, separated by spaces.
test-all: $(STAMP)  ## what a release needs; SLICE="browser worlds" runs some
	$(BIN)/python -m tests.slices $(SLICE)

release: $(STAMP)  ## wheel and source distribution, tested
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	DIST="$(CURDIR)/dist" $(BIN)/python -m pytest tests/compat/test_release.py

faults: $(STAMP)  ## faults in real trainings, for hours; resumes
	FAULTS=results/faults/faults.json $(BIN)/python -m pytest tests/faults -m campaign

check: $(STAMP)  ## style, types, and tests of code and pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_docs.py tests/test_wording.py -m "not slice"

# The variable silences an announcement of the theme, which is no warning about our pages.
docs: $(VENV)/.docs-installed  ## the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "open build/site/index.html, or serve it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

bench: $(STAMP)  ## the benchmarks, for hours; resumes
	$(BIN)/python tools/bench.py

# Trains from scratch, so an earlier training goes away.
reproduce: $(STAMP)  ## train a short recipe, and compare with committed figures
	rm -rf runs/reproduce
	$(BIN)/python tools/reproduce.py --out runs/reproduce

# A PYTHON that is named is used as it is: nothing is installed.
GIVEN := $(filter command environment,$(origin PYTHON))
gpu-slot: $(if $(GIVEN),,$(STAMP))  ## the first ten minutes on a GPU; resumes: PART=1
	PYTHONPATH="$(CURDIR)" $(if $(GIVEN),$(PYTHON),$(BIN)/python) tools/gpu_slot.py $(if $(PART),--part $(PART))

gpu-check: $(if $(GIVEN),,$(STAMP))  ## kernels, steps and decoding on a GPU: PART=tests
	PYTHONPATH="$(CURDIR)" $(if $(GIVEN),$(PYTHON),$(BIN)/python) tools/gpu_check.py $(if $(PART),--part $(PART))

# The host's side of the GPU path on a stub of CUDA; torch's build for CUDA (5 GB) goes to .nullgpu/ once.
null-gpu: $(STAMP)  ## the host's side of the GPU path, without a GPU
	$(BIN)/python -m tests.nullgpu

$(STAMP): pyproject.toml constraints.txt tools/check_machine.sh
	sh tools/check_machine.sh $(PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	options=$$(sh tools/torch_build.sh $(BIN)/python) && \
	$(BIN)/python -m pip install $$options -c constraints.txt -e ".[test]"
	touch $@

$(VENV)/.docs-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

clean:  ## remove environments, caches and builds
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
