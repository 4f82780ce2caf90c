# Two commands matter: `make serve` and `make test`; both set up `.venv` first. `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
# An index that has torch without CUDA, which saves gigabytes; by default pip's own.
TORCH_INDEX ?=
BIN    := $(VENV)/bin
CONFIG ?= configs/serve/quickstart.yaml
PART   ?= short
ORDINARY := not slow and not gpu and not multi_gpu
# What starts servers, clusters or groups of worker processes runs after the others, which run a core for each: in two
# suites side by side, one test at a time in each, as most of their time is waiting. tests/test_suites.py holds the lists.
# HOST_ARGS is for the others, PROCESSES_ARGS for these, as `--reruns`.
SERVERS := $(addprefix tests/,e2e examples deployments/admin/test_over_http.py worker/spec_decode/test_drafting.py)
WORKERS := $(addprefix tests/,distributed engine/executor deployments/replica/test_ray_metrics.py)
WORKERS += $(addprefix tests/,deployments/ingress/test_readiness.py deployments/serve/test_tenant_store.py)
WORKERS += $(addprefix tests/,cli/test_ray_ids.py deployments/test_serve_graph.py loadtest/faults/test_rig.py)
# Ray notes the last cluster that was started in its directory, and who asks for "the" cluster gets that one.
OWN_RAY := d=$$(mktemp -d) && trap 'rm -rf "$$d"' EXIT && RAY_TMPDIR=$$d
LOADTEST_ARGS ?= --users 1,4,16 --duration 15
export RAY_USAGE_STATS_ENABLED := 0
export RAY_AUTH_MODE ?= token
# Ray runs workers at nice 15, where any other process of the machine starves a server.
export RAY_worker_niceness ?= 0
# Ray starts a worker for every core at once; none of ours fits them, and they take the time of those that do.
export RAY_prestart_worker_first_driver ?= 0
# Or each Ctrl-C would end with an error: Serve's controller ends itself, and Ray reports the call that asked it to.
export RAY_enable_output_error_log_if_still_retry ?= 0

.PHONY: help setup setup-dev serve test test-full test-part test-host test-processes test-servers test-workers lint docs bench loadtest oldest-triton acceptance clean
.DEFAULT_GOAL := help

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
	  || { echo "Manta needs Python 3.11 or 3.12; name one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One made by an earlier choice stays.
TORCH = $(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --index-url "$(TORCH_INDEX)" torch)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt constraints-dev.txt | $(BIN)/python
	$(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --constraint constraints-dev.txt --editable '.[dev,audio,clients,cluster,docs,formats]'
	@touch $@ $(VENV)/.installed

setup: $(VENV)/.installed  ## make .venv and install what serving needs

setup-dev: $(VENV)/.installed-dev  ## the same, and what tests and linters need

serve: setup  ## serve the built-in model at http://127.0.0.1:8000 (another: make serve CONFIG=...)
	@echo "Starting Ray, Serve and the model, on two cores in 15 to 30 s; a line with 'open at' says when it is done."
	@$(BIN)/python -m app.cli serve $(CONFIG)

test: setup-dev  ## run the short part of the test suite (under 8 minutes on two cores)
	@$(MAKE) --no-print-directory test-part PART=short

test-full: setup-dev  ## run the rest of it (under 25 minutes)
	@$(MAKE) --no-print-directory test-part PART=rest

# tests/parts.py tells the rule; `make test test-full PYTEST_ARGS="--seconds tests/seconds.json"` measures anew.
test-part: setup-dev
	@$(MAKE) --no-print-directory --keep-going test-host test-processes

test-host: setup-dev
	$(BIN)/python -m pytest -m "$(ORDINARY)" --part $(PART) tests $(SERVERS:%=--ignore=%) $(WORKERS:%=--ignore=%) \
	  -n logical --maxprocesses 8 --dist loadfile $(PYTEST_ARGS) $(HOST_ARGS)

test-processes: setup-dev
	@echo "Servers, clusters and worker groups: two suites side by side; each shows its output when it has ended."
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync test-servers test-workers

test-servers: setup-dev
	$(OWN_RAY) $(BIN)/python -m pytest -m "$(ORDINARY)" --part $(PART) $(SERVERS) $(PYTEST_ARGS) $(PROCESSES_ARGS)

test-workers: setup-dev
	$(OWN_RAY) $(BIN)/python -m pytest -m "$(ORDINARY)" --part $(PART) $(WORKERS) $(PYTEST_ARGS) $(PROCESSES_ARGS)

lint: setup-dev  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup-dev  ## build the documentation site; then python3 -m http.server -d build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict  # with --quiet it would not count warnings

bench: setup-dev  ## tokens/s of the engine alone, with its drafter, through HTTP, and against transformers (8 minutes)
	$(BIN)/python -m benchmarks.http_vs_engine --out results/bench.json
	$(BIN)/python -m benchmarks.built_in_drafts --streams 1 16 64 --drafters tiny-chat-eagle3 --out results/drafts.json
	$(BIN)/python -m benchmarks.cpu_step --models llama-100m --dtypes float32 bfloat16 --steps 5 --repeats 2 \
	  --out results/cpu_step.json

loadtest: setup-dev  ## a short load test of a server that it starts itself; report in results/loadtest/report.html
	$(BIN)/python -m loadtest.sweep --serve $(CONFIG) $(LOADTEST_ARGS) --out results/loadtest

# The oldest that pyproject.toml allows: GPU machines have it, and what .venv's compiles it may refuse.
build/oldest-triton: pyproject.toml | $(BIN)/python
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ \
	  "triton==$$(sed -n 's/^gpu = \["triton>=\([0-9.]*\),.*/\1/p' pyproject.toml).*"
	@touch $@

oldest-triton: build/oldest-triton  ## the oldest Triton that kernels must compile with, into build/

acceptance: setup-dev  ## the long and the timed checks, and whole grids; figures and outcomes go to results/
	-@$(MAKE) --no-print-directory oldest-triton  # 190 MB; without it one test is skipped
	$(BIN)/python -m pytest -m slow tests --outcomes results/acceptance_tests.json $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "$(ORDINARY)" --part grids tests --outcomes results/acceptance_grids.json $(PYTEST_ARGS)

clean:  ## remove .venv, caches and results
	rm -rf $(VENV) build dist results .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
