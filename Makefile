# `make demo` and `make test` need nothing but Python 3.11, pip and make; every target sets .venv up by itself.

PYTHON ?= python3
BIN := .venv/bin
PACKAGES := libs/api libs/common libs/engine services/router services/inference-worker tools
SOURCES := libs services tools tests
MODEL ?= models/reference

.PHONY: setup demo serve test lint bench proto lock wheels images push model-image chart chart-docs manifests clean

setup: .venv/ready

.venv/ready: requirements.lock $(PACKAGES:%=%/pyproject.toml) libs/engine/setup.py $(wildcard libs/engine/src/lockstep_engine/kernels/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile -r requirements.lock
	$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true  # pip would compile its 16,000 modules on one core
	$(BIN)/pip install --quiet --no-deps --no-build-isolation $(PACKAGES:%=-e %)
	touch $@

demo: setup
	$(BIN)/lockstep demo $(MODEL)

serve: setup
	$(BIN)/lockstep serve $(MODEL)

test: setup
	$(BIN)/pytest $(ARGS)

lint: setup
	$(BIN)/pip check --quiet
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
	$(IMAGES) lock-cuda

VARIANT ?= cpu
IMAGES = $(BIN)/python -m lockstep_tools.images
IMAGE_OPTIONS = --variant $(VARIANT) $(ONLY:%=--only %) $(if $(DEV),--dev)

wheels: setup
	$(IMAGES) wheels $(IMAGE_OPTIONS)

images: setup
	$(IMAGES) build $(IMAGE_OPTIONS) $(BASE:%=--base %)

push: setup
	$(IMAGES) push $(IMAGE_OPTIONS) $(REGISTRY:%=--registry %)

model-image: setup
	$(IMAGES) model --model $(MODEL) --name $(or $(NAME),$(notdir $(MODEL))) $(TAG:%=--tag %) $(REGISTRY:%=--registry %) $(BASE:%=--base %)

chart: setup
	PYTHON=$(CURDIR)/$(BIN)/python charts/lockstep/tests/check

chart-docs: setup
	$(BIN)/python -m lockstep_tools.chart_schema
	helm-docs --chart-search-root charts/lockstep --sort-values-order file --log-level warning

manifests: setup
	$(BIN)/python -m lockstep_tools.manifests $(ARGS)

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
