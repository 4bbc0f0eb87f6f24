# `make demo` trains a small model with pooled attention; `make test` checks everything. Both set up .venv first, from
# requirements.txt, with a Python >= 3.12 that is found or fetched (tools/setup.sh); a second run starts at once.
# PYTHON=... names the Python to use. ARGS=... is handed on to pytest, or to `libra train` by `make demo`.

BIN = .venv/bin
WORKERS = 2
ARGS =

.PHONY: help setup demo test lint unit long old-triton parity qwen3-0.6b format bench report requirements wheel clean distclean
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "%-14s%s\n", $$1, $$2 }' Makefile

setup: ## make .venv, or do nothing where it is complete
	@sh tools/setup.sh

demo: setup ## train a small Qwen3 model on eight virtual CPU devices; again: go on where it stopped
	$(BIN)/libra train demo $(ARGS)

test: lint unit ## everything that continuous integration checks

lint: setup ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

unit: setup ## the tests alone; ARGS="tests/test_x.py -k name" picks some
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

long: setup ## further variants of the tests, most of them compiled for GPUs: some minutes more
	$(BIN)/python -m pytest -n $(WORKERS) -m long $(ARGS)

old-triton: setup ## the tests of the GPU kernels with Triton 3.6, which GPU images carry; ARGS="-k name" picks some
	sh tools/old_triton.sh $(ARGS)

parity: setup ## compare logits and gradients with Hugging Face transformers; ARGS=--record keeps the numbers for tests
	PARITY_PYTHON='$(PARITY_PYTHON)' sh tools/parity.sh $(ARGS)

qwen3-0.6b: setup ## import, train, export a model of that shape, compare with transformers: long, 17 GB of memory
	PARITY_PYTHON='$(PARITY_PYTHON)' sh tools/qwen3_0_6b.sh --json benchmarks/reports/qwen3_0_6b.json \
	    --report benchmarks/reports/qwen3_0_6b.md $(ARGS)

format: setup ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## run the benchmarks: tables here, JSON and reports in benchmarks/reports
	mkdir -p benchmarks/reports
	$(BIN)/python -m benchmarks.planner --json benchmarks/reports/planner.json --report benchmarks/reports/planner.md \
	    --plot benchmarks/reports/planner_frontier.png
	$(BIN)/python -m benchmarks.planner_others --json benchmarks/reports/planner_others.json \
	    --report benchmarks/reports/planner_others.md
	$(BIN)/python -m benchmarks.waves --report benchmarks/reports/waves.md
	$(BIN)/python -m benchmarks.pipeline --json benchmarks/reports/pipeline.json \
	    --report benchmarks/reports/pipeline.md --plot benchmarks/reports/pipeline.png
	$(BIN)/python -m benchmarks.config_table --report benchmarks/reports/configs.md
	$(BIN)/python -m benchmarks.data --json benchmarks/reports/data.json --report benchmarks/reports/data.md
	$(BIN)/python -m benchmarks.attention_cpu --json benchmarks/reports/attention_cpu.json \
	    --report benchmarks/reports/attention_cpu.md
	$(BIN)/python -m benchmarks.kernel_report --json benchmarks/reports/kernels.json \
	    --report benchmarks/reports/kernels.md
	$(BIN)/python -m benchmarks.two_ranks --json benchmarks/reports/two_ranks.json \
	    --report benchmarks/reports/two_ranks.md --plot benchmarks/reports/two_ranks.png
	$(BIN)/python -m benchmarks.mesh --cpu-devices 8 --block 64 --json benchmarks/reports/mesh_cpu.json \
	    --report benchmarks/reports/mesh_cpu.md
	rm -rf runs/curves
	$(BIN)/python -m benchmarks.curves --json benchmarks/reports/curves.json --report benchmarks/reports/curves.md \
	    --plot benchmarks/reports/curves.png --csv benchmarks/reports/curves.csv

report: setup ## is it worth it? docs/report anew: the paper's tables and figures by the cluster model, in an hour on two cores
	$(BIN)/python -m benchmarks.paper $(ARGS)

requirements: setup ## pin requirements.txt anew from pyproject.toml; ARGS=--upgrade takes newer versions
	$(BIN)/uv pip compile --quiet --universal --python-version 3.12 --group dev --no-emit-index-url \
	    --custom-compile-command "make requirements" $(ARGS) pyproject.toml -o requirements.txt

wheel: setup ## build dist/*.whl
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build

clean: ## remove what builds and tools left
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name '.venv*' -prune -o -name .bootstrap -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the environment as well
	rm -rf .venv .venv-parity .bootstrap
