# Everything runs from here on a machine that has python3 (3.10 or later), make and a C compiler.
#
# The default python3 gets `.venv`; another interpreter gets a folder of its own beside it (`make test PYTHON=python3.12`
# uses `.venv-3.12`), so that both engines can be tested from one clone. pip's own settings (mirrors, caches) apply.

PYTHON ?= python3
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
DEFAULT_VERSION := $(shell python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV ?= $(if $(filter $(PYTHON_VERSION),$(DEFAULT_VERSION)),.venv,.venv-$(PYTHON_VERSION))

# 3.10 and 3.11 stand on one engine release, 3.12 and later on another.
ENGINE := $(if $(filter 3.10 3.11,$(PYTHON_VERSION)),py311,py312)
CONSTRAINTS := constraints/constraints-$(ENGINE).txt
TRANSFORMER_ENGINE := constraints/transformer-engine-$(ENGINE).txt
BESIDE := constraints/beside.txt
EXTRAS ?= dev
STAMP := $(VENV)/.set-up-$(PYTHON_VERSION)
RUN := $(VENV)/bin/python

# Threads of one process do not fight those of another: the distributed tests start up to four.
QUIET_THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

# Files of tests that run at a time, for two cores. A distributed test waits for much of its time; each worker has ranks
# of its own, which share what is loaded with the process that forked them.
WORKERS ?= 4

# Byte code is kept whatever the caller's environment says: each rank of each test would else compile torch and the
# engine for itself, which more than doubles the time that a start takes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all soak check docs bench gpu gpu-wheels lock clean

help: ## this list
	@echo "make TARGET [PYTHON=python3.12]; now: $(PYTHON) is Python $(PYTHON_VERSION), environment $(VENV)"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(STAMP) ## make the environment and install everything, with pinned versions
	@echo "ready: $(RUN)"

demo: $(STAMP) ## prepare real text, train a small DeepSeek-V3 on 2 processes, evaluate, generate (FRESH=1: start over)
	@$(RUN) tools/demo.py $(if $(filter-out 0,$(FRESH)),--fresh)

PYTEST := $(QUIET_THREADS) $(RUN) -m pytest -q --durations=15 --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

test: $(STAMP) ## run the test suite (ARGS="tests/moe -k router" narrows it, WORKERS=1 runs one file at a time)
	$(PYTEST) $(ARGS)

test-all: $(STAMP) ## run every row of every matrix, with both ways in which a CPU multiplies half precision
	MEGATRON_MOE_CPU_HALF_PRODUCTS=native $(PYTEST) --all $(ARGS)
	MEGATRON_MOE_CPU_HALF_PRODUCTS=fp32 $(PYTEST) --all --engine $(ARGS)

soak: $(STAMP) ## the long runs of docs/internals/reliability.md: kills, faults, corruption (ARGS="tests/soak/test_kills.py --soak-scale 0.1")
	$(QUIET_THREADS) $(RUN) -m pytest -q --durations=0 $(if $(filter tests/%,$(ARGS)),,tests/soak) $(ARGS)

check: $(STAMP) docs ## style, format, types, the generated pages, the site
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(STAMP) ## build the site into build/site, strictly; open build/site/index.html
	PYTHONPATH=. $(RUN) docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet

BENCH ?= moe_layer
bench: $(STAMP) ## compare our MoE layer with others' on this machine (BENCH=whole_step: a training step with transformers')
	@$(RUN) -W ignore -m benchmarks.$(BENCH) $(ARGS)

# On a GPU machine nothing is installed but what is missing, from wheels/gpu, and torch never is: its own Python is taken.
DRY_RUN := $(filter-out 0,$(DRY))
gpu: $(if $(DRY_RUN),$(STAMP)) ## verify on this GPU what no CPU shows, in ten minutes (DRY=1: on the CPU; ARGS="--only 3,4")
ifneq ($(DRY_RUN),)
	@PYTHONPATH=. $(RUN) -W ignore -m tests.gpu --dry $(ARGS)
else
	@GPU_PYTHON="$(if $(filter-out file default undefined,$(origin PYTHON)),$(PYTHON))" $(PYTHON) -m tests.gpu.wheels start $(ARGS)
endif

PYTHONS ?= 3.12
gpu-wheels: ## collect what a GPU machine without a network lacks beside torch (PYTHONS="3.11 3.12": for these)
	@$(PYTHON) -m tests.gpu.wheels collect $(PYTHONS)

lock: $(STAMP) ## write the installed versions into the constraints file, after an upgrade
	@$(RUN) constraints/lock.py > $(CONSTRAINTS).new && mv $(CONSTRAINTS).new $(CONSTRAINTS)
	@touch $(STAMP)
	@echo "wrote $(CONSTRAINTS)"

clean: ## remove environments, caches and build output; runs/ is kept
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp, and not the folder, says that the set-up is complete: an interrupted one is done again. The environment is
# started anew only where it belongs to another Python. Byte code is made by a first import, of what every rank imports:
# pip would spend more than a minute on thousands of modules that are never used. Some go into folders of their own:
# Transformer Engine's Python, a wheel of 1 MB that is no use without its libraries, for tests/helpers/te_stub.py alone;
# and what $(BESIDE) lists, which would be imported at every start. DeepSpeed comes as source, of which nothing is built.
$(STAMP): setup.py pyproject.toml $(CONSTRAINTS) $(TRANSFORMER_ENGINE) $(BESIDE)
	@test -n "$(PYTHON_VERSION)" || { echo "make: '$(PYTHON)' does not run; give one with PYTHON=" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "make: $(PYTHON) is Python $(PYTHON_VERSION); 3.10 or later is needed, give one with PYTHON=" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "make: $(PYTHON) cannot make environments; install its venv package (Debian: python3-venv)" >&2; exit 2; }
	@echo "setting up $(VENV) with Python $(PYTHON_VERSION), versions from $(CONSTRAINTS)"
	@test "$$($(RUN) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$(PYTHON_VERSION)" \
	  || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --progress-bar on --no-compile --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	$(RUN) -m pip install --progress-bar on --no-compile --no-deps --only-binary :all: --upgrade --quiet \
	  --target $(VENV)/transformer_engine_python --requirement $(TRANSFORMER_ENGINE)
	$(if $(findstring dev,$(EXTRAS)),$(RUN) -m pip install --progress-bar on --no-compile --no-deps \
	  --prefer-binary --upgrade --quiet --target $(VENV)/beside --requirement $(BESIDE))
	@$(RUN) -W ignore -c 'import megatron_moe.training.run'
	@touch $@
