# Every target installs what it needs: in a fresh clone, `make run` or `make test` is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODULES := src/headrace/listeners/http/ui/static/vendor
QUICK := tests/record tests/log tests/wire tests/schemas tests/broker tests/model tests/listeners/kafka \
	tests/test_architecture.py tests/test_config.py tests/test_docs.py
KERNELS := $(shell find src -name '*.pyx' -o -name '*.pxd')

.PHONY: run test quick install ui check bench build docs site clean

run: install
	$(BIN)/headrace serve --demo

# The tests start hundreds of processes: without bytecode files each of them would compile all of Headrace again.
test: export PYTHONDONTWRITEBYTECODE :=
test: install
	$(BIN)/python -m pytest -n auto

# The inner loop: unit tests only, without processes, Spark or a browser.
quick: install
	$(BIN)/python -m pytest -q -n auto -m "not slow and not process and not peer" $(QUICK)

install: $(STAMP) ui

$(STAMP): pyproject.toml setup.py constraints.txt $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace: Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'setuptools>=77' wheel Cython
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[keys,spark,dev]'
	@touch $(STAMP)

# The dashboard's JavaScript modules come from npm, by name and version, into a folder that git ignores. Without npm,
# everything else works, and the dashboard's page names what is missing.
ui: $(MODULES)/preact.js

$(MODULES)/preact.js: ui/package.json
	@if command -v npm >/dev/null; then \
	  (cd ui && npm install --silent --no-audit --no-fund --no-package-lock --ignore-scripts) && mkdir -p $(MODULES) && \
	  cp ui/node_modules/uplot/dist/uPlot.esm.js $(MODULES)/uplot.js && \
	  cp ui/node_modules/uplot/dist/uPlot.min.css $(MODULES)/uplot.css && \
	  cp ui/node_modules/htm/preact/standalone.module.js $(MODULES)/preact.js; \
	else echo "headrace: npm is not installed: the dashboard is not available, everything else works"; fi

# Rebuilds the Cython modules in place.
build:
	$(BIN)/python setup.py -q build_ext --inplace

check: install
	$(BIN)/ruff check src tests bench tools fuzz setup.py
	$(BIN)/ruff format --check src tests bench tools fuzz setup.py
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_docs.py

# Regenerates the reference tables in docs/ from the code; a test checks that they are current.
docs: install
	$(BIN)/python tools/reference.py

# The documentation as a site, in build/site.
site: install
	$(BIN)/zensical build --clean --strict

# Benchmarks the log alone; ONLY=amqp, kafka, spark, ... runs another module of bench/.
bench: install
	$(BIN)/python -m bench$(if $(ONLY),.$(ONLY)) $(if $(BASE),--base $(BASE))

clean:
	rm -rf build $(VENV)
	find src -name '*.so' -delete
