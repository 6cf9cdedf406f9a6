# make train   set up and train the tiny model on real text, on the CPU
# make test    set up and run the quick tests (make test-all: the slow ones too)
# make lint    ruff, lint and format
# make libtpu  the compiler for TPUs, in a folder that only those who name it see
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/tiny.py
WORKDIR ?= runs/tiny

.PHONY: train test test-all lint format libtpu clean
.DELETE_ON_ERROR:

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tessera needs Python >= 3.11: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

train: $(VENV)/.ready
	$(BIN)/python -m train --config=$(CONFIG) --workdir=$(WORKDIR)

test: $(VENV)/.ready
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/.ready
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2

lint: $(VENV)/.ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.ready
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

# Not in $(VENV), where JAX would look for a TPU at every start.
libtpu: .libtpu/.ready
.libtpu/.ready: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --upgrade --target .libtpu libtpu
	touch $@

clean:
	rm -rf $(VENV) .libtpu runs build *.egg-info
