# `make demo` and `make test` need nothing but Python 3.11, pip and make; every target sets .venv up by itself.

PYTHON ?= python3
BIN := .venv/bin
PACKAGES := libs/api libs/common libs/engine services/router services/inference-worker tools
SOURCES := libs services tools tests
MODEL ?= models/reference

.PHONY: setup demo serve test lint bench proto lock clean

setup: .venv/ready

.venv/ready: requirements.lock $(PACKAGES:%=%/pyproject.toml) libs/engine/setup.py $(wildcard libs/engine/src/lockstep_engine/kernels/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation $(PACKAGES:%=-e %)
	touch $@

demo: setup
	$(BIN)/lockstep demo $(MODEL)

serve: setup
	$(BIN)/lockstep serve $(MODEL)

test: setup
	$(BIN)/pytest $(ARGS)

lint: setup
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy libs/common/src libs/engine/src services/router/src services/inference-worker/src tools/src
	$(BIN)/python -m lockstep_tools.gen_protos --check

bench: setup
	$(BIN)/python tools/bench/run.py $(ARGS)

proto: setup
	$(BIN)/python -m lockstep_tools.gen_protos

lock: setup
	$(BIN)/pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	  --allow-unsafe --no-header --annotation-style=line --output-file requirements.lock requirements.in
	sed -i 's/^\(torch==[0-9.]*\)+cpu/\1/' requirements.lock  # any build of that release

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
