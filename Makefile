# Two commands do all set-up: `make demo` and `make test`. `make check` is what CI runs.
# Only relative paths are used, so a folder with spaces in its name is fine.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN := .venv/bin/python -m
WORKERS ?= 2
# a worker that hangs in native code is ended, and with it the run; what hangs in Python fails before, see tests/conftest.py
HANGING := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true --max-worker-restart 0
PYTEST := $(RUN) pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 15 $(HANGING)

.PHONY: demo test test-all hunt check lint format parity survey clean

demo: .venv/installed
	$(RUN) meshwright train examples/demo.toml

test: .venv/installed
	$(PYTEST)

# every row of the large tables; `make test` runs a sample of them
test-all: .venv/installed
	$(PYTEST) --every-row

# properties of the search, the cost model and the values on examples that no run has tried; ARGUMENTS="tests/pure/test_joint.py" for some
hunt: .venv/installed
	$(PYTEST) --hypothesis-profile hunt $(or $(ARGUMENTS),tests/pure)

check: lint test

lint: .venv/installed
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	.venv/bin/lint-imports

format: .venv/installed
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

# ARGUMENTS="--models gpt,moe --only cp2" fills some of the table and keeps the rest
parity: .venv/installed
	.venv/bin/python tests/cpu/parity.py $(ARGUMENTS)

# ARGUMENTS="--only swin --again" runs some cells again; the rest is kept
survey: .venv/installed
	.venv/bin/python tests/cpu/survey.py $(ARGUMENTS)

.venv/installed: pyproject.toml constraints.txt
	@"$(PYTHON)" -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "Meshwright needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x .venv/bin/python || "$(PYTHON)" -m venv .venv || \
		{ echo "could not make a virtual environment: on Debian, apt-get install python3-venv"; exit 1; }
	$(RUN) pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch .venv/installed

clean:
	rm -rf .venv runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
