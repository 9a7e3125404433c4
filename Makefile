# make demo    a tiny real checkpoint is converted there and back, and a running engine takes new weights;
#              needs Python 3.11+ and nothing else
# make test    the test suite, as CI runs it
# make test-engines  real vLLM and SGLang, each in an environment of its own (3.4 and 2.8 GB)
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

.PHONY: demo test test-engines check bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.core
	@$(MAKE) --no-print-directory $(VENV)/.engine || echo "torch and transformers could not be installed" >&2
	$(BIN)/python examples/roundtrip.py

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not vllm and not sglang" $(PYTEST_ARGS)

# An engine that cannot be installed is skipped by its tests, one by one, with the reason; see the summary.
test-engines: $(VENV)/.dev
	@for engine in vllm sglang; do PYTHON=$(PYTHON) sh engines/$$engine/install.sh .venv-$$engine || \
	  { rm -rf .venv-$$engine; echo "WARNING: NO $$engine HERE, NOTHING IS PUSHED INTO IT IN THIS RUN" >&2; }; done
	$(BIN)/python -m pytest -m "vllm or sglang" $(PYTEST_ARGS) tests/engines

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
	$(BIN)/python bench/refit.py

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# mypy and import-linter read folders, not package-dir: show them cli/ where it is installed.
TREE := $(VENV)/tree
define link-tree
@rm -rf $(TREE) && mkdir -p $(TREE)/convtools
@ln -s "$(CURDIR)"/convtools/* "$(CURDIR)"/cli $(TREE)/convtools/
endef

# A stamp each: converting needs no torch, the engine of the demo does. All are made anew when a version
# or a range changes, or the kernel.
$(VENV)/.core: pyproject.toml constraints.txt convtools/equality/fingerprint_kernel.c
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
