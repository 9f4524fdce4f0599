# Every target makes the virtual environment that it needs. Variables: PYTHON (interpreter that makes it), VENV (its place).
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin

# megatron-core of `make parity` and `make test-dist`: that of constraints.txt, or another supported one in an environment of its own.
MCORE_PINNED := $(shell sed -n 's/^megatron-core==//p' constraints.txt)
MCORE ?= $(MCORE_PINNED)
ifeq ($(filter-out 0.16.0,$(filter 0.16.% 0.17.% 0.18.% 0.19.%,$(MCORE))),)
$(error MCORE is $(MCORE), supported are 0.16.1 to 0.19.x; use MCORE=0.19.2, or leave it out for $(MCORE_PINNED))
endif
ifeq ($(MCORE),$(MCORE_PINNED))
MCORE_VENV := $(VENV)
PARITY_ARGS :=
else
MCORE_VENV := .venv-mcore-$(MCORE)
PARITY_ARGS := --max-ranks 2 --out benchmarks/results/parity_mcore_$(MCORE).json --dumps runs/parity_mcore_$(MCORE)
endif

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE = 1

.PHONY: help install engine-conformance test-sglang quickstart quickstart-sft quickstart-ppo quickstart-seeds smollm2 smollm2-ppo test check map format test-dist parity split-invariance replay-layouts test-long chaos soak bench bench-kernels gpu-check install-cuda cuda-rehearsal sglang-cpu sglang-smoke clean clean-runs

help:
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  \1\t/' | expand -t 20

$(VENV)/.installed: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev,demo]'
	@touch $@

install: $(VENV)/.installed  ## make the virtual environment

quickstart: $(VENV)/.installed  ## train a tiny model: warm-up, then GRPO on addition at tp2 pp2 (4 processes on CPUs; ARGS="trainer.device=cuda": 4 GPUs)
	$(BIN)/rlhf-megatron train configs/quickstart.yaml trainer.device=cpu $(ARGS)

quickstart-sft: $(VENV)/.installed  ## the same model learns addition from answers alone, at tp2 (2 processes)
	$(BIN)/rlhf-megatron sft configs/quickstart_sft.yaml trainer.device=cpu $(ARGS)

quickstart-ppo: $(VENV)/.installed  ## the same task with PPO: a critic on the actor's ranks, from the warmed-up weights
	$(BIN)/rlhf-megatron train configs/quickstart_ppo.yaml trainer.device=cpu $(ARGS)

quickstart-seeds: $(VENV)/.installed  ## three seeds of a quickstart, and the mean gain; ARGS="--config configs/quickstart_ppo.yaml": of another
	$(BIN)/python -m benchmarks.quickstart_seeds $(ARGS)

smollm2: $(VENV)/.installed  ## GRPO on the real SmolLM2-135M-Instruct at pp2
	$(BIN)/rlhf-megatron fetch smollm2
	$(BIN)/rlhf-megatron train configs/smollm2_grpo.yaml $(ARGS)

smollm2-ppo: $(VENV)/.installed  ## PPO with a critic on SmolLM2-135M-Instruct at pp2
	$(BIN)/rlhf-megatron fetch smollm2
	$(BIN)/rlhf-megatron train configs/smollm2_ppo.yaml $(ARGS)

# Two processes, a file of tests in one of them; in the order of the folders: the long files first, many short ones last.
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed  ## all tests that need no GPU
	$(BIN)/python -m pytest tests $(IN_TWO) -m "not gpu and not chaos and not long" $(ARGS)

check: $(VENV)/.installed  ## format, lint, types, layering, fast tests: before each commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests -q $(IN_TWO) -m "not dist and not gpu and not smollm2 and not sglang and not chaos and not long" $(ARGS)

map:  ## every module of the package with its purpose
	@$(PYTHON) -m tools.file_map

format: $(VENV)/.installed  ## format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-dist: $(MCORE_VENV)/.installed  ## only the tests with several processes; MCORE as for parity
	$(MCORE_VENV)/bin/python -m pytest tests -m "dist and not gpu and not chaos and not long" $(ARGS)

test-long: $(VENV)/.installed  ## the tests that `make test` leaves out: runs that are killed and started again, further configurations
	$(BIN)/python -m pytest tests -m "(chaos or long) and not gpu" $(ARGS)

parity: $(MCORE_VENV)/.installed  ## every layout against transformers in float64; MCORE=0.19.2: with that megatron-core
	$(MCORE_VENV)/bin/python -m benchmarks.parity $(PARITY_ARGS) $(ARGS)

# Another megatron-core than the pinned one. What its metadata asks for (a newer Python) is not what it needs; triton
# is imported at its start, and torch for a machine without a GPU does not bring it.
.venv-mcore-%/.installed: setup.py constraints.txt
	$(PYTHON) -m venv .venv-mcore-$*
	.venv-mcore-$*/bin/python -m pip install --quiet --upgrade pip
	.venv-mcore-$*/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev,demo]'
	.venv-mcore-$*/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps --ignore-requires-python megatron-core==$*
	.venv-mcore-$*/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps triton
	@touch $@

split-invariance: $(VENV)/.installed  ## the gradient against token budget, dp, cp, pp, order and aggregation mode
	$(BIN)/python -m benchmarks.split_invariance $(ARGS)

replay-layouts: $(VENV)/.installed  ## the same recorded rollouts trained in every layout
	$(BIN)/python -m benchmarks.replay_layouts $(ARGS)

chaos: $(VENV)/.installed  ## kill, stop and terminate every process at every named point; compare with a run left alone
	$(BIN)/python -m benchmarks.chaos $(ARGS)

soak: $(VENV)/.installed  ## ten minutes of learning with twenty random faults
	$(BIN)/python -m benchmarks.soak --minutes 10 --faults 20 --seed 1 $(ARGS)

bench: $(VENV)/.installed .venv-trl/.installed  ## all benchmarks; JSON under benchmarks/results/
	$(BIN)/python -m benchmarks.run_all $(ARGS)

bench-kernels: $(VENV)/.installed  ## the kernels on a CPU: ratios to naive and published ones in one run, one thread
	$(BIN)/python -m benchmarks.kernels $(ARGS)

# The baseline of the GRPO benchmark, in an environment of its own.
.venv-trl/.installed: benchmarks/requirements-trl.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --upgrade pip
	.venv-trl/bin/python -m pip install --quiet $(PIP_ARGS) -r benchmarks/requirements-trl.txt
	@touch $@

gpu-check:  ## GPU tests and benchmarks with the system's Python and torch
	$(PYTHON) -m benchmarks.gpu_check $(ARGS)

# torch's CUDA build with its libraries, some 5 GB: the environment of a machine with GPUs, and of the rehearsal.
.venv-cuda/.installed: setup.py constraints.txt constraints-cuda.txt
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet --upgrade pip
	.venv-cuda/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints-cuda.txt -e . pytest
	.venv-cuda/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints-cuda.txt --no-deps --target .venv-cuda/transformer_engine --upgrade transformer-engine
	@touch $@

.venv-sglang/.installed-cuda .venv-sglang-cuda/.installed: requirements-sglang-cuda.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps -r requirements-sglang-cuda.txt
	@touch $@

install-cuda: .venv-cuda/.installed .venv-sglang/.installed-cuda  ## a machine with GPUs: trainer in .venv-cuda, SGLang in .venv-sglang

cuda-rehearsal: $(VENV)/.installed  ## the CUDA code path without a GPU: right numbers, whole runs, mistakes that it catches
	@if $(MAKE) --no-print-directory .venv-cuda/.installed; then \
	$(BIN)/python -m pytest -v tests/end_to_end/test_cuda_rehearsal*.py $(ARGS) && .venv-cuda/bin/python -m tools.cuda_rehearsal; \
	else echo "SKIPPED: what constraints-cuda.txt lists cannot be installed here; pip says why above."; fi

clean:  ## remove virtual environments and build outputs; never a run, weights or .cache
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-runs:  ## say what is under runs/ and .cache/; YES=1: remove it
	@du -sh runs/* .cache/* 2>/dev/null || echo "nothing is there"
	@if [ "$(YES)" = 1 ]; then rm -rf runs .cache && echo "removed"; else echo "YES=1 removes all of this"; fi

.venv-sglang/.installed: tools/sglang_cpu/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --upgrade pip
	.venv-sglang/bin/python -m pip install --quiet $(PIP_ARGS) torch==2.13.0 numpy
	.venv-sglang/bin/python -m pip install --quiet $(PIP_ARGS) -r tools/sglang_cpu/requirements.txt
	.venv-sglang/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps sglang==0.5.21 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 torchvision==0.28.0 sglang-router==0.3.2
	@touch $@

sglang-cpu: .venv-sglang/.installed  ## stock SGLang for a machine without a GPU, in a virtual environment of its own

# SGLANG_PYTHON: an interpreter that has SGLang, on a machine with GPUs; else that of `make sglang-cpu`.
ifdef SGLANG_PYTHON
export RLHF_MEGATRON_SGLANG_PYTHON := $(SGLANG_PYTHON)
SGLANG_READY :=
else
SGLANG_READY := sglang-cpu
endif
ENGINE ?= local

engine-conformance: $(VENV)/.installed $(if $(filter sglang,$(ENGINE)),$(SGLANG_READY))  ## what every engine promises, against ENGINE=local or ENGINE=sglang
	$(BIN)/python -m pytest tests/engines/test_engine_conformance*.py -m "not gpu" -k $(ENGINE) -v $(ARGS)

test-sglang: $(VENV)/.installed $(SGLANG_READY)  ## all tests against stock SGLang, the long ones too
	$(BIN)/python -m pytest tests -m "sglang and not gpu" $(ARGS)

sglang-smoke: $(VENV)/.installed sglang-cpu  ## ten steps of the quickstart with stock SGLang as the engine
	$(BIN)/rlhf-megatron train configs/quickstart_sglang.yaml $(ARGS)
