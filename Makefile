# Every target sets up what it needs: a fresh clone and `make run` or `make test` are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODULES := src/headrace/listeners/http/ui/static/vendor
QUICK := tests/record tests/log tests/wire tests/schemas tests/broker tests/model tests/listeners \
	tests/test_architecture.py tests/test_config.py tests/test_docs.py
KERNELS := $(shell find src -name '*.pyx' -o -name '*.pxd')

.PHONY: run test quick install ui check bench build docs site clean

run: install
	$(BIN)/headrace serve --demo

# The tests start hundreds of programs: each would compile all of Headrace again if Python may not keep what it compiled.
test: export PYTHONDONTWRITEBYTECODE :=
test: install
	$(BIN)/python -m pytest -n auto

# The inner loop: unit tests only, without processes, Spark or a browser.
quick: install
	$(BIN)/python -m pytest -q -n auto -m "not slow and not process" $(QUICK)

install: $(STAMP) ui

$(STAMP): pyproject.toml setup.py constraints.txt $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace: Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'setuptools>=77' wheel Cython
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[keys,spark,dev]'
	@touch $(STAMP)

# The dashboard's two modules come from npm, by name and version, into a folder that git ignores. Without npm
# everything else works, and the dashboard's page says what is missing.
ui: $(MODULES)/preact.js

$(MODULES)/preact.js: ui/package.json
	@if command -v npm >/dev/null; then \
	  (cd ui && npm install --silent --no-audit --no-fund --no-package-lock --ignore-scripts) && mkdir -p $(MODULES) && \
	  cp ui/node_modules/uplot/dist/uPlot.esm.js $(MODULES)/uplot.js && \
	  cp ui/node_modules/uplot/dist/uPlot.min.css $(MODULES)/uplot.css && \
	  cp ui/node_modules/htm/preact/standalone.module.js $(MODULES)/preact.js; \
	else echo "headrace: npm is not installed, so the dashboard will only say so; everything else works"; fi

# Rebuilds the Cython kernels in place, for people who work on them.
build:
	$(BIN)/python setup.py -q build_ext --inplace

check: install
	$(BIN)/ruff check src tests bench tools fuzz setup.py
	$(BIN)/ruff format --check src tests bench tools fuzz setup.py
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_docs.py

# Writes the reference tables of docs/ from the code; a test holds them up to date.
docs: install
	$(BIN)/python tools/reference.py

# The documentation as a site, in build/site.
site: install
	$(BIN)/zensical build --clean --strict

# The log by itself, with the scorecard; ONLY=amqp, kafka, spark, ... is one of the other modules of bench/.
bench: install
	$(BIN)/python -m bench$(if $(ONLY),.$(ONLY)) $(if $(BASE),--base $(BASE))

clean:
	rm -rf build $(VENV)
	find src -name '*.so' -delete
