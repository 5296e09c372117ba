# Every target sets up what it needs: a fresh clone and `make run` or `make test` are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(shell find src -name '*.pyx' -o -name '*.pxd')

.PHONY: run test install check bench build docs clean

run: install
	$(BIN)/headrace serve

test: install
	$(BIN)/python -m pytest

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace: Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel Cython
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[keys,spark,dev]'
	@touch $(STAMP)

# Rebuilds the Cython kernels in place, for people who work on them.
build:
	$(BIN)/python setup.py -q build_ext --inplace

check: install
	$(BIN)/ruff check src tests bench tools setup.py
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

# Writes the reference tables of docs/ from the code; a test holds them up to date.
docs: install
	$(BIN)/python tools/reference.py

bench: install
	$(BIN)/python -m bench $(if $(BASE),--base $(BASE))

clean:
	rm -rf build $(VENV)
	find src -name '*.so' -delete
