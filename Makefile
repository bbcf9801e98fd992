# Entry points of the project. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= $(shell scripts/find-python.sh)
VENV := .venv
BIN := $(VENV)/bin
COLLECTIONS := $(CURDIR)/.build/collections
LINK := $(COLLECTIONS)/ansible_collections/gpufleet/inference
SUITE := $(BIN)/python scripts/suite.py
export ANSIBLE_COLLECTIONS_PATH := $(COLLECTIONS)
export GPUFLEET_CACHE ?= $(CURDIR)/.cache
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help venv check test test-long demo demo-down bench score docs build clean

help: ## list the entry points
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

venv: $(VENV)/.ready $(LINK) ## the tools, pinned in requirements/dev.txt

$(VENV)/.ready: requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --quiet install --requirement requirements/dev.txt
	touch $@

$(LINK):
	mkdir -p $(dir $@)
	ln -sfn $(CURDIR) $@

check: venv ## format, types, lint and unit tests: before each commit (<= 3 min)
	$(SUITE) check

test: venv ## check + sanity + build + test bed + Molecule + demo (<= 40 min cold; stops itself at 60)
	$(SUITE) test

test-long: venv ## every count and every scenario; resumes where it stopped, writes docs/tested.md
	$(SUITE) long

demo: venv ## two simulated GPU hosts, three vLLM instances, one completion from each
	$(BIN)/python scripts/demo.py up

demo-down: venv ## take the demo away, with everything it left on this machine
	$(BIN)/python scripts/demo.py down

bench: venv ## facts against ping; tasks, remote executions and bytes per host
	$(BIN)/python tests/bench/bench.py

score: venv ## accuracy of the memory model on recorded starts
	$(BIN)/python scripts/score.py

docs: venv ## role and module pages from the specifications
	$(BIN)/python scripts/make_docs.py

build: venv ## the collection as a tarball in .build/dist
	mkdir -p .build/dist
	$(BIN)/ansible-galaxy collection build --force --output-path .build/dist

clean: ## drop what the suites built, keep the cache and the tools
	rm -rf .build/sanity .build/dist .build/suite
