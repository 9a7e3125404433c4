# make demo    a tiny real checkpoint is converted there and back, and a running engine takes new weights;
#              needs Python 3.11+ and nothing else
# make test    the test suite, as CI runs it
# make check   lint, format, types, direction of imports
# make bench   the benchmarks
# make clean   remove what the others made
#
# PYTHON=python3.12 chooses the interpreter, PYTEST_ARGS="-k staging" narrows the tests.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test check bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.core
	@$(MAKE) --no-print-directory $(VENV)/.engine || echo "torch and transformers could not be installed" >&2
	$(BIN)/python examples/roundtrip.py

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(link-tree)
	MYPYPATH=$(TREE) $(BIN)/mypy -p convtools
	cd $(TREE) && "$(abspath $(BIN))"/lint-imports --no-cache "$(CURDIR)/pyproject.toml"

bench: $(VENV)/.dev
	$(BIN)/python bench/bench.py
	$(BIN)/python bench/slice.py
	$(BIN)/python bench/compare.py
	$(BIN)/python bench/fingerprint.py

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# mypy and import-linter read folders, not package-dir: show them cli/ where it is installed.
TREE := $(VENV)/tree
define link-tree
@rm -rf $(TREE) && mkdir -p $(TREE)/convtools
@ln -s "$(CURDIR)"/convtools/* "$(CURDIR)"/cli $(TREE)/convtools/
endef

# A stamp each: converting needs no torch, the engine of the demo does. All are made anew when a version
# or a range changes.
$(VENV)/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("needs Python 3.11+, this is %d.%d" % v[:2])'
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.engine: $(VENV)/.core
	$(PIP) -e '.[engine]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) -e '.[dev,megatron]'
	@touch $@
