# make demo: the whole pipeline on the embedded model. make test: every test. Both set themselves up.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
TP ?= 1
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
PROCESSES ?= 2
DEMO_ARGS ?=
LOAD_REQUESTS ?= 2000
LOAD_ARGS ?=
FUZZ_EXAMPLES ?= 300
GPU_REPORT ?= gpu-report.json
MEGATRON_WHEELS ?= $(HOME)/.cache/headrank/megatron-wheels
ifneq ($(words $(VENV)),1)
$(error VENV='$(VENV)': make cannot work with spaces in it; give a path without)
endif
BIN := $(abspath $(VENV))/bin
# A stamp holds a checksum of what was asked for, so that a second run installs nothing and needs no network.
WANTED := $(shell cat setup.py constraints.txt | cksum | cut -d' ' -f1)
RUN_STAMP := $(VENV)/.headrank-run-$(WANTED)
DEV_STAMP := $(VENV)/.headrank-dev-$(WANTED)
PIP := '$(BIN)/python' -m pip --disable-pip-version-check --no-input

# File by file, so that what a file sets up once is set up once; in order, so that the long files of tests/distributed
# begin first.
PYTEST_PARALLEL := $(if $(filter-out 1,$(PROCESSES)),-n $(PROCESSES) --dist loadfile --no-loadscope-reorder)

# Waiting threads that spin make every process on a small machine several times slower.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0
export TOKENIZERS_PARALLELISM ?= false
export PATH := $(BIN):$(PATH)

.PHONY: help setup setup-dev demo test test-unit test-distributed test-integrations test-gpu test-megatron-versions
.PHONY: bench results-page load-test fuzz lint format system clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' \
		| while IFS='|' read -r name text; do printf '  make %-23s %s\n' "$$name" "$$text"; done
	@echo '  VENV=path moves the environment (.venv), PYTHON=path picks the interpreter (3.10-3.12),'
	@echo '  TORCH=... another torch, TP=3 the tensor-parallel size of the demo'

setup: $(RUN_STAMP) ## install headrank with training into VENV

setup-dev: $(DEV_STAMP) ## the same and the tools for tests and lint

demo: $(RUN_STAMP) ## the main job on the embedded model: pairs, heads, training, export, reranking, report
	'$(BIN)/headrank' experiment run configs/demo.yaml --set training.tensor_parallel=$(TP) $(DEMO_ARGS)

test: $(DEV_STAMP) ## all tests: unit, distributed, end to end; two files at a time (PROCESSES=1 for one)
	'$(BIN)/python' -m pytest $(PYTEST_PARALLEL) $(PYTEST_ARGS)

test-unit: $(DEV_STAMP) ## the fast loop
	'$(BIN)/python' -m pytest tests/unit $(PYTEST_PARALLEL) $(PYTEST_ARGS)

test-distributed: $(DEV_STAMP) ## real gloo processes, tiny models
	'$(BIN)/python' -m pytest tests/distributed $(PYTEST_ARGS)

# rank-llm asks for vLLM and never needs it for its requests: it comes without what it asks for.
test-integrations: $(DEV_STAMP) ## Ray, MTEB, BEIR, PyTerrier, ranx, rank_llm with the real packages, which it installs
	$(PIP) install --no-compile -c constraints.txt -e '.[integrations-heavy]' dacite
	$(PIP) install --no-compile -c constraints.txt --no-deps rank-llm
	HEADRANK_TEST_INTEGRATIONS=1 '$(BIN)/python' -m pytest tests/integrations $(PYTEST_ARGS)

test-gpu: $(DEV_STAMP) ## on a GPU node: the acceptance list, and one report file to send back (GPU_REPORT=...)
	HEADRANK_TEST_GPU=1 HEADRANK_GPU_REPORT='$(GPU_REPORT)' '$(BIN)/python' -m pytest tests/gpu $(PYTEST_ARGS)

test-megatron-versions: $(DEV_STAMP) ## every supported release of Megatron-Core, into MEGATRON_WHEELS
	HEADRANK_MEGATRON_WHEELS='$(MEGATRON_WHEELS)' '$(BIN)/python' -m pytest tests/megatron_versions $(PYTEST_ARGS)

bench: $(RUN_STAMP) ## contenders interleaved, ratios
	'$(BIN)/python' -m benchmarks

load-test: $(DEV_STAMP) ## 'headrank serve' under load, every answer checked; LOAD_REQUESTS=200 for a short one
	'$(BIN)/python' -m benchmarks.serving_load --requests $(LOAD_REQUESTS) $(LOAD_ARGS)

fuzz: $(DEV_STAMP) ## requests made from the OpenAPI description of 'headrank serve'; FUZZ_EXAMPLES=1000 for more
	HEADRANK_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) \
		'$(BIN)/python' -m pytest tests/end_to_end/test_serving_fuzz.py $(PYTEST_ARGS)

results-page: $(RUN_STAMP) ## write the tables of README.md and docs/results.md from results/
	'$(BIN)/python' -m docs.results_tables

lint: $(DEV_STAMP) ## ruff, mypy, shellcheck
	'$(BIN)/ruff' check .
	'$(BIN)/ruff' format --check .
	'$(BIN)/mypy'
	@if command -v shellcheck >/dev/null; then \
		{ git ls-files '*.sh' '*.sbatch'; echo .ci/run; } | sort -u | xargs shellcheck -x; \
	else echo 'shellcheck is not installed: shell scripts were not checked (make system installs it)'; fi

format: $(DEV_STAMP) ## let ruff rewrite the code
	'$(BIN)/ruff' check --fix .
	'$(BIN)/ruff' format .

system: ## optional system packages, as root: chromium (viewer tests), shellcheck (lint)
	apt-get update -qq && apt-get install -y --no-install-recommends chromium shellcheck

clean: ## remove the environment and everything made by runs; the model cache stays
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The interpreter: PYTHON if given, else the first of these that starts and is 3.10-3.12.
define make_environment
	supported='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'; chosen=; \
	for python in $(or $(PYTHON),python3.11 python3.12 python3.10 python3); do \
		if "$$python" -c "$$supported" 2>/dev/null; then chosen="$$python"; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
		printf '%s' 'headrank needs Python 3.10, 3.11 or 3.12; $(or $(PYTHON),python3 on PATH) is ' >&2; \
		echo '$(shell $(or $(PYTHON),python3) --version 2>&1 | head -1): install one or give PYTHON=/path/to/python' >&2; \
		exit 2; \
	fi; \
	"$$chosen" -m venv '$(VENV)'
endef

$(RUN_STAMP): setup.py constraints.txt
	@if [ ! -x '$(BIN)/pip' ]; then echo '[setup] virtual environment in $(VENV)'; $(make_environment); fi
	@echo '[setup] torch, first and alone'
	$(PIP) install --no-compile '$(TORCH)'
	@echo '[setup] headrank and its dependencies, at the versions of constraints.txt'
	$(PIP) install --no-compile -c constraints.txt -e '.[train]'
	@rm -f $(VENV)/.headrank-run-* && touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo '[setup] tools for tests and lint'
	$(PIP) install --no-compile -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.headrank-dev-* && touch $@
