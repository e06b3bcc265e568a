# Two commands do everything: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
DEMO_ARGS ?=

# Images often set it. A suite of processes would compile our sources again in each of them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo check format test chaos bench proto docs clean

help:
	@echo "make demo    install, then train a small model on this machine with three nodes"
	@echo "make test    install, then run the whole suite"
	@echo "make chaos   kill everything everywhere; CHAOS_SEED=7 draws other times"
	@echo "make check   format, lint, types, import rules, generated pages"
	@echo "make bench   every benchmark in its quick form"
	@echo "make setup   only install everything into $(VENV)"
	@echo "make proto   make the wire code again from distribai.proto"
	@echo "make docs    make the generated reference pages again"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("DistribAI needs Python 3.11 or later; set PYTHON=") if sys.version_info < (3, 11) else 0'
	@$(PYTHON) -m venv $(VENV) || { \
		echo "why: this Python cannot make virtual environments."; \
		echo "try: apt install python3-venv, then make again."; rm -rf $(VENV); exit 1; }

$(VENV)/.node: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing DistribAI and PyTorch into $(VENV); this happens once ..."
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[node]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing DistribAI, PyTorch and the tools of development into $(VENV) ..."
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.node

setup: $(VENV)/.dev

demo: $(VENV)/.node
	@exec $(BIN)/distribai demo $(DEMO_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/gendocs.py --check

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal -q

chaos: $(VENV)/.dev
	CHAOS=all $(BIN)/pytest -q tests/chaos tests/e2e

bench: $(VENV)/.dev
	@names=$$($(BIN)/python -m bench --list) && test -n "$$names" && \
		for name in $$names; do $(BIN)/python -m bench $$name --quick || exit 1; done

proto: $(VENV)/.dev
	cd src/distribai/wire && ../../../$(BIN)/python -m grpc_tools.protoc -I. \
		--python_out=v1 --pyi_out=v1 --grpc_python_out=v1 distribai.proto
	sed -i 's/^import distribai_pb2/from distribai.wire.v1 import distribai_pb2/' \
		src/distribai/wire/v1/distribai_pb2_grpc.py

docs: $(VENV)/.dev
	$(BIN)/python tools/gendocs.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
