# `make demo` and `make test` need nothing but Python 3.11, pip and make; every target sets .venv up by itself.

PYTHON ?= python3
BIN := .venv/bin
PACKAGES := libs/api libs/common libs/client libs/engine services/router services/inference-worker services/kv-state-server tools
SOURCES := libs services tools tests conftest.py
# Minutes of waiting for alerts, drains and queues: first of all, so that the other processes compute meanwhile.
WAITING_SYSTEM_TESTS := $(addprefix tests/integration/,test_alerts.py test_state_alerts.py test_balance_alerts.py test_worker_alerts.py test_gpu_stack.py test_dashboards.py test_native_histograms.py test_trace_moves.py test_waiting.py)
# The longest tests first, so that no process is left with them at the end.
PARALLEL_SYSTEM_TESTS := $(addprefix tests/,hostile/test_doors.py console hostile/test_state_door.py hostile/test_worker_door.py integration/test_refused_models.py \
  integration/test_prefix_reports.py integration/test_remote_cache.py integration/test_traces.py integration/test_debug.py integration/test_secrecy.py integration/test_causes.py \
  integration/test_serve.py integration/test_routers.py integration/test_client.py)
# Nothing that imports triton may come before libs, whose tests choose its interpreter.
PARALLEL_TESTS := $(WAITING_SYSTEM_TESTS) tests/simulation tests/conformance libs $(PARALLEL_SYSTEM_TESTS) tests/contract services tools/tests tests/deployment
SYSTEM_TESTS := tests/integration tests/hostile tests/chaos tests/cluster $(addprefix --ignore=,$(WAITING_SYSTEM_TESTS) $(PARALLEL_SYSTEM_TESTS))
# Tests wait longer than they compute.
JOBS ?= $(shell nproc | awk '{jobs = $$1 * 5 / 2; print jobs < 10 ? int(jobs) : 10}')
# These compute all the time.
COMPUTING_JOBS ?= $(shell nproc | awk '{print $$1 < 4 ? $$1 + 1 : 4}')
QUICK := not slow and not exhaustive
SLOW := slow and not exhaustive
# Of the slow ones, two wait beside those that compute.
SLOW_JOBS ?= $(shell expr $(COMPUTING_JOBS) + 2)
MODEL ?= models/reference
# Where it is set, every process that a test starts compiles our sources again, half a second each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo serve check test test-slow test-exhaustive test-bits test-strangers lint bench proto lock wheels images push model-image chart chart-docs api-docs metric-docs dashboards manifests clean

setup: .venv/ready

.venv/ready: requirements.lock $(PACKAGES:%=%/pyproject.toml) libs/engine/setup.py $(wildcard libs/engine/src/lockstep_engine/kernels/*.[ch])
	@echo "setting up .venv: a few minutes, once"
	@$(PYTHON) -m venv .venv
# The CPU build of torch where an index or a folder of pip's has it. PyPI's own build for Linux needs the CUDA libraries.
	@sed -n '/^torch==/,/[^\\]$$/s/^torch==[^ ]*/&+cpu/p;/^torch==/,/[^\\]$$/{/^ /p}' requirements.lock > .venv/torch-cpu.lock
	@$(BIN)/pip install --quiet --no-compile --no-deps --require-hashes -r .venv/torch-cpu.lock || echo "PyPI's build of torch is taken"
# The lock is complete (`make lint` checks it). With dependencies, pip 23 takes an extra's newest release and has no hash for it.
	@$(BIN)/pip install --quiet --no-compile --no-deps --require-hashes -r requirements.lock $$($(BIN)/pip show --quiet torch 2>/dev/null || echo -r requirements-cuda.lock)
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true  # pip would compile its 16,000 modules on one core
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation $(PACKAGES:%=-e %)
	@touch $@

demo: setup
	$(BIN)/lockstep demo "$(MODEL)"

serve: setup
	$(BIN)/lockstep serve "$(MODEL)"

# Format, lint, types and the unit tests that the change touches, in a minute and a half.
check: setup
	$(BIN)/python -m lockstep_tools.repository.check $(ARGS)

# Most tests in parallel; then those that time silences and count processes, one after the other.
test: setup
ifdef ARGS
	$(BIN)/pytest $(ARGS)
else
	@failed=0; \
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m "$(QUICK)" $(PARALLEL_TESTS) || failed=$$?; \
	$(BIN)/pytest -m "$(QUICK)" $(SYSTEM_TESTS) || failed=$$?; \
	exit $$failed
endif

# The tests that `make test` leaves out because they take long, and those again whose length can be chosen.
test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(SLOW_JOBS) --dist loadfile --durations=20 -m "$(SLOW)" $(PARALLEL_TESTS)
	$(BIN)/pytest --durations=20 -m "$(SLOW)" $(SYSTEM_TESTS) --ignore=tests/chaos/test_random_kills.py --ignore=tests/hostile/test_schema.py
	$(BIN)/pytest -n 2 tests/hostile/test_schema.py --fuzz-cases 10000
	$(BIN)/pytest tests/chaos/test_random_kills.py --kills 12

# Before a release: many cases of what other tests run a few of.
test-exhaustive: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(COMPUTING_JOBS) --dist loadfile -m exhaustive $(PARALLEL_TESTS)
	$(BIN)/pytest -m exhaustive $(SYSTEM_TESTS)

# The tests of equal bits again, after those of `make test` and `make test-slow`, which have the kernels, one thread and nothing set, as on
# other machines: without the kernels, and with the libraries' settings changed. The slow ones again without the kernels alone, whose place
# the libraries take there.
BITS = $(BIN)/pytest -n $(COMPUTING_JOBS) $$(grep -rl 'mark\.bits' libs/engine/tests)
test-bits: setup
	env -u MKL_CBWR -u ATEN_CPU_CAPABILITY OMP_NUM_THREADS=2 LOCKSTEP_CPU_KERNELS=off $(BITS) -m "bits and not exhaustive"
	MKL_CBWR=AUTO,STRICT ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1 LOCKSTEP_CPU_KERNELS=off $(BITS) -m "bits and $(QUICK)"
	MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=2 $(BITS) -m "bits and $(QUICK)"

# Other projects' clients, in an environment of their own, against systems that run in .venv.
test-strangers: setup .venv-strangers/ready
	.venv-strangers/bin/pytest --confcutdir=tests/strangers $(or $(ARGS),tests/strangers)

.venv-strangers/ready: requirements-strangers.lock
	$(PYTHON) -m venv .venv-strangers
	.venv-strangers/bin/pip install --quiet --no-deps --require-hashes -r requirements-strangers.lock
	touch $@

lint: setup
	$(BIN)/pip check --quiet
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy libs/common/src libs/client/src libs/engine/src services/router/src services/inference-worker/src services/kv-state-server/src tools/src
	$(BIN)/python -m lockstep_tools.repository.gen_protos --check

bench: setup
	$(BIN)/python tools/bench/run.py $(ARGS)

proto: setup
	$(BIN)/python -m lockstep_tools.repository.gen_protos

lock: setup
	$(BIN)/python -m lockstep_tools.repository.lock

VARIANT ?= cpu
IMAGES = $(BIN)/python -m lockstep_tools.repository.images
IMAGE_OPTIONS = --variant $(VARIANT) $(ONLY:%=--only %) $(if $(DEV),--dev)

wheels: setup
	$(IMAGES) wheels $(IMAGE_OPTIONS)

images: setup
	$(IMAGES) build $(IMAGE_OPTIONS) $(BASE:%=--base %)

push: setup
	$(IMAGES) push $(IMAGE_OPTIONS) $(REGISTRY:%=--registry %)

model-image: setup
	$(IMAGES) model --model "$(MODEL)" --name "$(or $(NAME),$(notdir $(MODEL)))" $(TAG:%=--tag %) $(REGISTRY:%=--registry %) $(BASE:%=--base %)

chart: setup
	PYTHON=$(CURDIR)/$(BIN)/python charts/lockstep/tests/check

chart-docs: setup
	$(BIN)/python -m lockstep_tools.repository.chart_schema
	helm-docs --chart-search-root charts/lockstep --sort-values-order file --log-level warning

api-docs: setup
	$(BIN)/python -m lockstep_tools.repository.api_docs

metric-docs: setup
	$(BIN)/python -m lockstep_tools.repository.metric_docs

# Needs grafana-foundation-sdk, which is among the requirements for development.
dashboards: setup
	$(BIN)/python tools/dashboards/generate.py

manifests: setup
	$(BIN)/python -m lockstep_tools.repository.manifests $(ARGS)

clean:
	rm -rf .venv .venv-strangers build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
