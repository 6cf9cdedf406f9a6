# make train   set up and train the tiny model on real text, on the CPU
# make test    set up and run the quick tests (make test-all: the slow ones too)
# make lint    ruff, lint and format
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKDIR ?= runs/tiny

.PHONY: train test test-all lint format clean
.DELETE_ON_ERROR:

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tessera needs Python >= 3.11: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

train: $(VENV)/.ready
	$(BIN)/python -m train --config=configs/tiny.py --workdir=$(WORKDIR)

test: $(VENV)/.ready
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/.ready
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2

lint: $(VENV)/.ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.ready
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build *.egg-info
