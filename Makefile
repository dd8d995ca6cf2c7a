# make run: everything set up and running.  make test: everything set up and tested.
# Both need Python 3.11 or newer and nothing else; what they install goes to .venv.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LOCK := $(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-header --no-annotate --quiet

.DEFAULT_GOAL := help
.PHONY: help setup setup-test run test lint bench bench-peers format messages lock clean

help:
	@echo "make run    set up, start everything, and print a sign-in link (ARGS='--port 8001 --no-demo')"
	@echo "make test   set up, and run all tests (ARGS='-k inbox')"
	@echo "make lint   linters, types, import rules, templates, migrations"
	@echo "make bench  measure (ARGS='--quick'); make bench-peers first installs what to measure beside"
	@echo "make setup  only set up"

# Debian keeps ensurepip in a package of its own: then the outer pip fills the environment.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and was not found."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is older. Name another one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV); }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --python $(BIN)/python install --quiet pip

$(VENV)/.server: requirements.txt | $(BIN)/python
	@echo "Installing what the server needs ..."
	@$(PIP) install --require-hashes -r requirements.txt
	@touch $@

$(VENV)/.test: requirements-test.txt $(VENV)/.server
	@echo "Installing what the tests need ..."
	@$(PIP) install --require-hashes -r requirements-test.txt
	@touch $@

# So that examples, and agents of your own, find the package wherever they are started.
$(VENV)/.here: | $(BIN)/python
	@$(BIN)/python -c "import pathlib, sysconfig; \
		pathlib.Path(sysconfig.get_path('purelib'), 'rehydrate.pth').write_text('$(CURDIR)\n')"
	@touch $@

setup: $(VENV)/.server $(VENV)/.here

setup-test: $(VENV)/.test $(VENV)/.here
	@bash .ci/tools

run: setup
	@exec $(BIN)/python manage.py up $(ARGS)

test: setup-test
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: setup-test
	@bash .ci/lint

bench: $(VENV)/.test
	@$(BIN)/python -m tests.bench $(ARGS)

# Other systems, in an environment of their own below .bench; Restate's server comes in a package of npm's.
BENCH := .bench
PEERS := "psycopg[binary,pool]" langgraph langgraph-checkpoint-postgres dbos openai-agents restate-sdk aiohttp hypercorn

bench-peers: $(BIN)/python
	@$(PYTHON) -m venv $(BENCH) 2>/dev/null || { rm -rf $(BENCH) && $(PYTHON) -m venv --without-pip $(BENCH); }
	@$(BIN)/python -m pip --python $(BENCH)/bin/python --disable-pip-version-check --quiet install $(PEERS)
	@if command -v npm >/dev/null; then npm install --silent --prefix $(BENCH)/npm @restatedev/restate-server; \
		else echo "npm was not found: Restate's server is left out."; fi

format: $(VENV)/.test
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

messages: setup-test
	@$(BIN)/python manage.py makemessages --locale zh_Hans --no-location --ignore .venv --ignore tests

# New pins; the files name no host, so that they install from whatever registry is configured.
lock: $(VENV)/.test
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install uv
	@$(LOCK) --extra server --output-file requirements.txt
	@$(LOCK) --extra server --extra test --constraint requirements.txt --output-file requirements-test.txt

clean:
	@rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache staticfiles
