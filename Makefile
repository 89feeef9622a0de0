# Every target makes .venv on first use and installs again only after pyproject.toml or constraints.txt changed.
PYTHON  ?= python3
ARGS    ?=
BENCH   ?= vs_trl
# The whole suite gains from a second process; a selection is done before that one has imported torch.
WORKERS ?= $(if $(ARGS),0,2)

PY  := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint bench

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

# Waiting threads that spin make it eight times slower when another program uses a core; asleep they cost nothing.
quickstart: export OMP_WAIT_POLICY ?= PASSIVE
quickstart: .venv/test.stamp  ## train a tiny model towards a target distribution, on CPU
	$(PY) examples/quickstart.py $(ARGS)

# One thread a worker: two workers of two threads each would fight over two cores. Nothing may use the network.
test: export OMP_NUM_THREADS = 1
test: export TOKENIZERS_PARALLELISM = false
test: export HF_HUB_OFFLINE = 1
test: export WANDB_MODE = disabled
test: .venv/test.stamp  ## run the tests; ARGS="tests/functional -k kl" selects, WORKERS=2 runs two processes
	$(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

lint: .venv/dev.stamp  ## check style, types and the direction of imports
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports

bench: .venv/test.stamp  ## run a script in benchmarks/: BENCH=vs_trl ARGS="--help"
	$(PY) benchmarks/$(BENCH).py $(ARGS)

# torch comes first and alone: what is installed or offered as a CPU wheel is taken before anything asks for more.
.venv/torch.stamp: constraints.txt
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(PIP) torch
	touch $@

.venv/test.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) --editable '.[test]'
	touch $@

# dev includes test.
.venv/dev.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) --editable '.[dev]'
	touch .venv/test.stamp $@
