# `make demo` and `make test` need Python 3.10-3.14 with headers and venv, a C++ compiler and make, and nothing
# else: they make .venv, install torch and the rest there, build the extension and run. `make help` lists the verbs.

PYTHON ?= python3
# The torch that .venv gets; any release from 2.8 on: make test TORCH=torch==2.8.0
TORCH ?= torch==2.11.0
# How many processes run the tests, each a file at a time. More than cores: compilers and limits of time let some wait.
TEST_JOBS ?= 4
# Passed on to the program that the verb runs: make demo ARGS="--plot plot.png", make test ARGS="-k grouped -x",
# make benchmark ARGS="layers --isa avx2"
ARGS ?=

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
PIP := $(VENV_PYTHON) -m pip --disable-pip-version-check
EXTENSION := build/.extension

SOURCES := $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.* conv2d_ext/include/*/*.*)
BUILD_FILES := setup.py $(wildcard build_backend/*.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pips at once would spoil .venv.
.NOTPARALLEL:
.PHONY: help demo test test-models fuzz benchmark figures docs build format lint clean distclean FORCE

help:  ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(EXTENSION)  ## run the library's main job: the workload, checked and timed on this machine
	$(VENV_PYTHON) -m conv2d_ext $(ARGS)

# The processes share the cores, so their threads must not wait by spinning.
test: $(EXTENSION)  ## run the tests
	OMP_WAIT_POLICY=passive $(VENV_PYTHON) -m pytest --numprocesses=$(TEST_JOBS) --dist=loadfile \
	  --no-loadscope-reorder $(ARGS)

test-models: $(EXTENSION) $(VENV)/.models  ## run the tests of whole models, some thirty of torchvision and timm
	CONV2D_EXT_TEST_MODELS=all OMP_WAIT_POLICY=passive $(VENV_PYTHON) -m pytest --numprocesses=$(TEST_JOBS) \
	  tests/test_invariant_models.py $(ARGS)

fuzz: | $(VENV)/.created  ## draw random problems for the CPU engine: make fuzz ARGS="--seconds 600 --sanitizer thread"
	$(VENV_PYTHON) tests/fuzz $(ARGS)

benchmark: $(EXTENSION)  ## time layers of real networks beside F.conv2d; figures in build/benchmarks
	$(VENV_PYTHON) -m benchmarks $(or $(ARGS),layers --quick)

figures: $(EXTENSION)  ## measure anew what README.md and docs/results.md show, on a quiet machine, in half an hour (with AMX 50 minutes)
	$(VENV_PYTHON) -m benchmarks.figures $(ARGS)

docs: $(EXTENSION) $(VENV)/.docs  ## build the documentation site, build/docs/html; ARGS="--builder linkcheck" follows links
	$(VENV_PYTHON) tools/build_docs.py $(ARGS)

build: $(EXTENSION)  ## compile what has changed, and make the package importable in .venv

format: $(VENV)/.lint  ## format every Python and C++ file
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" tools/format.sh

lint: $(VENV)/.lint  ## check formatting and rules; changes nothing
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" tools/format.sh --check

clean:  ## remove what building wrote
	rm -rf build dist *.egg-info conv2d_ext/*.so conv2d_ext/_build_info.py

distclean: clean  ## remove .venv too
	rm -rf $(VENV)

# Compiles and links what has changed; ninja decides.
$(EXTENSION): $(VENV)/.installed $(SOURCES) $(BUILD_FILES)
	$(VENV_PYTHON) setup.py --quiet build_ext --inplace
	@touch $@

# Two steps: the editable install builds against the torch that the first one brings. Naming torch again keeps pip
# from moving it while it looks for the torchvision that fits.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install "$(TORCH)" ninja "setuptools>=77,<82"
	$(PIP) install --no-build-isolation --editable ".[test]" "$(TORCH)"
	@touch $@

# Changes when TORCH does, so that another torch is installed and built against.
$(VENV)/.torch: FORCE | $(VENV)/.created
	@echo "$(TORCH)" | cmp -s - $@ || echo "$(TORCH)" > $@

$(VENV)/.models: pyproject.toml | $(VENV)/.installed
	$(PIP) install --no-build-isolation --editable ".[models]" "$(TORCH)"
	@touch $@

$(VENV)/.lint: requirements-lint.txt | $(VENV)/.created
	$(PIP) install --requirement requirements-lint.txt
	@touch $@

$(VENV)/.docs: requirements-docs.txt | $(VENV)/.created
	$(PIP) install --requirement requirements-docs.txt
	@touch $@

$(VENV)/.created:
	@command -v "$(PYTHON)" > /dev/null || { echo "conv2d_ext: $(PYTHON) was not found: install Python 3.10 to 3.14," \
	  "or name one, for example make PYTHON=python3.12." >&2; exit 1; }
	@"$(PYTHON)" build_backend/conv2d_ext_toolchain.py
	"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@
