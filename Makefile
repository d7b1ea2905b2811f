# `make serve` and `make test` need nothing but a Python >= 3.11: they create .venv themselves.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
HOST   := 127.0.0.1
PORT   := 8000

# A local Ray cluster of our own needs no token; see "Ray clusters" in README for shared ones.
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0

# What needs no GPU and is not for the night.
EVERYDAY := not gpu and not multi_gpu and not nightly

.PHONY: serve test test-lab nightly check format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(STAMP)
	@$(VENV)/bin/python -c "import socket, sys; sys.exit('$(HOST):$(PORT) is taken: stop what listens there\
	 (Serve would share the port silently)' if not socket.socket().connect_ex(('$(HOST)', $(PORT))) else 0)"
	$(VENV)/bin/serve run serve_app:app

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not ray and not lab and $(EVERYDAY)"
	$(VENV)/bin/python -m pytest -m "ray and not lab and $(EVERYDAY)"

# Tests of our own benches and checks; .ci/run says when.
test-lab: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 -m "lab and $(EVERYDAY)"

nightly: $(STAMP)
	$(VENV)/bin/python -m pytest -m "(nightly or lab) and not gpu and not multi_gpu"

check: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV)
