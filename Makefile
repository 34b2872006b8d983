# Dither: `make run` sets up and trains, `make test` sets up and tests. Both need only Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# On a machine that has local copies of the data sets beside the checkout, use them.
LOCAL_DATA := $(wildcard ../shared/data)
ifndef DITHER_DATA
ifneq ($(LOCAL_DATA),)
export DITHER_DATA := $(abspath $(LOCAL_DATA))
endif
endif

.PHONY: bench bench-quick bench-scale federation-demo install run test test-slow lint types format docs wheel clean help
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(VENV)/.installed  ## Make the environment .venv with Dither in it

run: $(VENV)/.installed  ## Train on Adult over 16 institutions with proven ε = 1
	@$(BIN)/dither run adult

test: $(VENV)/.dev  ## Run linter, type checker and the fast tests
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest

test-slow: $(VENV)/.dev  ## Run the slow tests too (minutes)
	@$(BIN)/python -m pytest -m "slow or not slow"

.PHONY: test-torch
test-torch:  ## Try a PyTorch model in an environment of its own, .venv-torch (torch for CPUs: 190 MB, 750 MB unpacked)
	@test -x .venv-torch/bin/python || $(PYTHON) -m venv .venv-torch
	@.venv-torch/bin/python -m pip install -qq --disable-pip-version-check -e '.[torch]' pytest 'torch==2.13.0+cpu'
	@.venv-torch/bin/python -m pytest -o addopts= -q tests/e2e/test_examples.py -k torch

.PHONY: test-nvflare
test-nvflare:  ## Try NVIDIA FLARE as transport in an environment of its own, .venv-nvflare: a quarter of an hour
	@test -x .venv-nvflare/bin/python || $(PYTHON) -m venv .venv-nvflare
	@.venv-nvflare/bin/python -m pip install -qq --disable-pip-version-check -e '.[nvflare]' pytest
	@.venv-nvflare/bin/python -m pytest -o addopts= -q tests/federation/test_nvflare.py tests/e2e/test_federation_nvflare.py \
	  tests/e2e/test_federation.py tests/e2e/test_federation_faults.py -k "nvflare and ($(or $(K),not storm and not every))"

.PHONY: web
web: $(VENV)/.installed  ## Look at your runs, plans and privacy in a browser
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[web]'
	@mkdir -p runs && $(BIN)/dither web

federation-demo: $(VENV)/.$(or $(TRANSPORT),flower)  ## A server and PARTIES=4 parties as processes here, TRANSPORT=flower or nvflare
	@$(BIN)/dither federation demo --parties $(or $(PARTIES),4) --transport $(or $(TRANSPORT),flower)

bench: $(VENV)/.installed  ## Dither and its peers on the same work: makes their environments, about 30 minutes
	@$(BIN)/python benchmarks/bench.py

bench-quick: $(VENV)/.installed  ## The same for two of the workloads, a few minutes
	@$(BIN)/python benchmarks/bench.py --quick

bench-scale: $(VENV)/.installed  ## Sweeps, cohort, local steps, many clients, start-up
	@$(BIN)/python benchmarks/scale.py

lint: $(VENV)/.dev  ## Check style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev  ## Check types
	@$(BIN)/mypy

format: $(VENV)/.dev  ## Rewrite files in the project's style
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

docs: $(VENV)/.installed  ## Build the documentation into site/, warnings as errors
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.dev  ## Build wheel and source archive into dist/
	@$(BIN)/python -m build

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache

# The environment is made once and again only when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Dither needs Python 3.11 or newer; call make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Dither into $(VENV) (about a minute the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e .
	@touch $@

$(VENV)/.flower: $(VENV)/.installed
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[deploy]'
	@touch $@

$(VENV)/.nvflare: $(VENV)/.installed
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[nvflare]'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev,deploy]'
	@touch $@
