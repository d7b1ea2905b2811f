# `make serve` and `make test` need nothing but a Python >= 3.11: they create .venv themselves.
PYTHON ?= python3
VENV    := .venv
PIP     := $(VENV)/bin/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# By all cores: pip would use one, for a minute. A file that does not compile is not imported either.
COMPILE := $(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true
SERVING := $(VENV)/.serving
TESTING := $(VENV)/.testing
# `make serve HOST=0.0.0.0 PORT=8080`; the shell's own HOST is its machine's name and is not meant.
HOST    := $(or $(LAPS_HOST),127.0.0.1)
PORT    := $(or $(LAPS_PORT),8000)

# A local Ray cluster of our own needs no token; see "Ray clusters" in docs/operations.md for others.
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0
# Tests start hundreds of processes, none of which should compile again what another has compiled.
export PYTHONDONTWRITEBYTECODE :=

# One tree has one verdict: what tests draw at random follows from it (tests/harness/seeds.py).
test test-lab: export TEST_SEED ?= $(shell git rev-parse HEAD^{tree} 2>/dev/null)

PYTEST  := $(VENV)/bin/python -m pytest --durations 10

# What needs no GPU and is not for the night.
EVERYDAY := not gpu and not multi_gpu and not nightly

.PHONY: serve test test-without-ray test-with-ray test-lab nightly check format clean

# What serving needs, and no more; pip shows what it downloads.
$(SERVING): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) -e .
	@$(COMPILE)
	@touch $@

# Linters and test tools, into the same environment.
$(TESTING): $(SERVING)
	$(PIP) --quiet -e '.[dev]'
	@$(COMPILE)
	@touch $@

serve: $(SERVING)
	$(VENV)/bin/serve run serve_app:app host=$(HOST) port=$(PORT)

# Both parts at once: tests with Ray wait for processes half of the time.
test: $(TESTING)
	@$(MAKE) --no-print-directory --jobs 2 test-with-ray test-without-ray

# The other part gives way, and is shown while it runs; this one when it has ended. A SIGTERM that
# make passes on to the shell is passed on to pytest; Ctrl-C reaches pytest by itself.
test-with-ray: $(TESTING)
	@trap 'wait $$!' INT; trap 'kill $$!; wait $$!' TERM; \
	$(PYTEST) -m "ray and not lab and $(EVERYDAY)" > $(VENV)/with-ray.txt 2>&1 & \
	wait $$!; status=$$?; cat $(VENV)/with-ray.txt; exit $$status

test-without-ray: $(TESTING)
	exec nice -n 19 $(PYTEST) -n 2 --dist worksteal -m "not ray and not lab and $(EVERYDAY)"

# Tests of our own benches and checks; .ci/run says when.
test-lab: $(TESTING)
	$(VENV)/bin/python -m pytest -n 2 -m "lab and $(EVERYDAY)"

nightly: $(TESTING)
	$(VENV)/bin/python -m pytest -m "(nightly or lab) and not gpu and not multi_gpu"

check: $(TESTING)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(TESTING)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV)
