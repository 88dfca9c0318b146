# SparkCache for vLLM. `make help` lists the targets; every target sets up what it needs.
#
# .venv    the tools' environment (build, verify, lint, unit tests), from requirements/tools.lock
# .engine  engine environments with a real vLLM on the CPU, made by the targets that run one

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Images like to set it. Here a few hundred processes import the same packages, an engine's among
# them: with it each compiles them anew, half a minute of processor time for a start of vLLM.
unexport PYTHONDONTWRITEBYTECODE

TARGET ?= v0.28.0
BASE ?= auto
PYTHON ?= python3

VENV := .venv
PY := $(VENV)/bin/python
TOOLS := $(VENV)/.made-from-lock

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(TOOLS): requirements/tools.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another with make PYTHON=…")'
	@test ! -L $(VENV) || { echo "tools: $(VENV) is a link, and making it anew would empty $$(realpath $(VENV)); remove the link and run make again" >&2; exit 1; }
	@echo "tools: making $(VENV) from requirements/tools.lock"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/tools.lock \
	  || { echo "tools: a package of requirements/tools.lock could not be installed; the message above says which. Check the network or pip's index configuration, then run make again." >&2; exit 1; }
	@touch $@

.PHONY: tools
tools: $(TOOLS) ## make the tools' environment

.PHONY: lint
lint: $(TOOLS) ## ruff and mypy, warnings are errors
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(PY) -m mypy
	@echo "lint: ruff and mypy found nothing"

.PHONY: test
test: $(TOOLS) ## every suite in its CI form; SUITES="unit lint" runs some of them
	@$(PY) -m tests.suites $(SUITES)

.PHONY: build
build: $(TOOLS) ## the patched vLLM's bundle, judged, in dist/; BASE=cpu-x86_64, BASE=all … choose another
	@$(PY) -m builder build --target $(TARGET) --base $(BASE)

.PHONY: verify
verify: $(TOOLS) ## judge what make build and make image made, by this checkout's pins
	@receipts=$$(ls dist/$(TARGET)/*/receipt.json 2>/dev/null) || \
	  { echo "verify: expected a bundle below dist/$(TARGET), found none; run make build first" >&2; exit 3; }; \
	worst=0; for receipt in $$receipts; do \
	  echo "verify: $$(dirname $$receipt)"; $(PY) -m verify bundle $$(dirname $$receipt) || worst=$$?; \
	done; \
	if [ -e dist/$(TARGET)/image ]; then \
	  echo "verify: dist/$(TARGET)/image"; \
	  $(PY) -m verify image dist/$(TARGET)/image:$(TARGET) --layer || worst=$$?; \
	fi; exit $$worst

.PHONY: reproduce
reproduce: $(TOOLS) ## two builds under different conditions, compared byte for byte
	@$(PY) -m tests.reproduce --target $(TARGET) --base $(BASE)

# ARCH and SITE say what the base image is; BASE_IMAGE=NAME@sha256:HEX names it, when known.
ARCH ?= $(shell uname -m)
SITE ?= /usr/local/lib/python3.12/dist-packages

.PHONY: image
image: $(TOOLS) ## an OCI image layout that goes over a vLLM image, in dist/
	@$(PY) -m builder build --target $(TARGET) --base cuda-$(ARCH)
	@$(PY) -m builder image --target $(TARGET) --arch $(ARCH) --site $(SITE) --base-image "$(BASE_IMAGE)"

.PHONY: image-check
image-check: $(TOOLS) ## build images with the layer, also on Debian with the published release (buildah, debootstrap; minutes)
	@$(PY) -m builder build --target $(TARGET) --base cuda-$(shell uname -m)
	@$(PY) -m pytest -q tests/image

.PHONY: engine
engine: $(TOOLS) ## the engine environments: .engine/stock (published vLLM) and .engine/patched (our wheel)
	@$(PY) -m builder build --target $(TARGET) --base cpu-x86_64
	@$(PYTHON) tests/support/engine_env.py

.PHONY: demo
demo: engine ## serve a tiny hybrid, kill it, serve it again: the same answer, restored
	@$(PY) -m tests.e2e.demo

.PHONY: conformance
conformance: engine ## vLLM's own tests on both builds; TESTS=--full for all of the touched area
	@$(PY) -m tests.conformance $(TESTS)

.PHONY: e2e
e2e: engine ## every end-to-end test on a real engine (make test runs a sample of each family)
	@$(PY) -m pytest -q tests/e2e

.PHONY: native
native: $(TOOLS) ## every test of the placement library (make test runs a sample of each kind)
	@$(PY) -m pytest -q tests/unit/native

.PHONY: gpu-check
gpu-check: $(TOOLS) ## the CUDA placement on this machine's GPU, if it has one; RECORD=1 keeps the table
	@$(PY) -m tests.gpu.check $(if $(RECORD),--record)

.PHONY: crash
crash: $(TOOLS) ## kill, power-loss, error and fuzz sweeps of the store in full (an hour; CI runs samples of them)
	@HYPOTHESIS_PROFILE=full $(PY) -m pytest -q tests/crash tests/fuzz tests/unit/store/test_store_model.py
	@$(PY) -m tests.crash.sweep_syscalls

MINUTES ?= 30
SEED ?= 1

.PHONY: soak
soak: engine ## random conversations, aborts, kills and a small quota, every answer checked; MINUTES=30
	@$(PY) -m tests.soak --minutes $(MINUTES) --seed $(SEED) $(if $(FAMILIES),--families $(FAMILIES))

.PHONY: bench
bench: engine ## measure builder, judge, store and engine against rulers of the same run; DIR=… chooses the store's disk
	@status=0; \
	for module in repack verify_venv; do $(PY) -m bench.$$module || status=1; done; \
	$(PY) -m bench.store $(DIR) || status=1; \
	$(PY) -m bench.engine || status=1; \
	exit $$status

.PHONY: overlay
overlay: engine ## the overlay's rules, its random tests in full (a third of an hour; CI runs a sample)
	@HYPOTHESIS_PROFILE=full SPARKCACHE_UNPATCHED_SCRIPTS=600 \
	  SPARKCACHE_STOCK_PYTHON=.engine/stock/bin/python \
	  .engine/patched/bin/python -m pytest -q tests/engine/overlay

.PHONY: mutants
mutants: engine ## break the overlay in many small ways; its tests must notice each
	@.engine/patched/bin/python tests/engine/overlay/mutants.py $(MUTANTS)

.PHONY: clean
clean: ## remove build products and environments (downloads stay in the user's cache)
	@rm -rf dist build .engine $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@echo "clean: done"
