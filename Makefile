# Entry points of the project. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
COLLECTIONS := $(CURDIR)/.build/collections
export ANSIBLE_COLLECTIONS_PATH := $(COLLECTIONS)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help venv
help: ## list the entry points
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

venv: $(VENV)/.ready ## the tools, pinned in requirements/dev.txt

$(VENV)/.ready: requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --quiet install --requirement requirements/dev.txt
	mkdir -p $(COLLECTIONS)/ansible_collections/gpufleet
	ln -sfn $(CURDIR) $(COLLECTIONS)/ansible_collections/gpufleet/inference
	touch $@
