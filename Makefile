# make demo       train the embedded job and write its report
# make test       lint, types, tests
# make test-slow  the tests that take longest
# make test-ui    the web app in a real browser (Chromium); CI runs all three
# make test-drawn the tests over drawn examples, with new and more examples each time
# Each target makes .venv on first use and reinstalls when pyproject.toml or constraints.txt change.

VENV := .venv
ifeq ($(OS),Windows_NT)
PYTHON ?= python
BIN := $(VENV)/Scripts
EXE := .exe
else
PYTHON ?= python3
BIN := $(VENV)/bin
endif
# Tests start many processes, which compile every module anew where bytecode is not kept.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types tests test-slow test-ui test-drawn test-services install-slurm soak test-gpu test-gpu-sanitizer format docs clean

demo: $(VENV)/core
	$(BIN)/slipstream train

test: lint
	$(MAKE) -j2 types tests

lint: $(VENV)/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: $(VENV)/dev
	$(BIN)/mypy

tests: $(VENV)/dev
	$(BIN)/python -m pytest -n auto

test-slow: $(VENV)/dev
	$(BIN)/python -m pytest -n auto -m "slow and not gpu and not services and not ui"

test-drawn: $(VENV)/dev
	$(BIN)/python -m pytest -n auto --hypothesis-profile drawn \
		$$(grep -rlE '^@(hypothesis\.)?given' tests)

test-ui: $(VENV)/dev
	$(BIN)/python -m pytest -m ui tests/ui

soak: $(VENV)/dev
	$(BIN)/python -m tests.soak

test-services: $(VENV)/services
	$(BIN)/python -m pytest -m services tests/services

install-slurm: # for test-services: Debian's packages; needs root
	command -v slurmctld || apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge

test-gpu: $(VENV)/dev
	$(BIN)/python -m pytest -m gpu

test-gpu-sanitizer: $(VENV)/dev # needs compute-sanitizer, of the CUDA toolkit
	for tool in memcheck racecheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python -m pytest -m gpu \
			-p no:benchmark tests/kernels/cuda/test_on_gpu.py -k under_the_sanitizer || exit 1; \
	done

format: $(VENV)/dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/dev
	$(BIN)/python dev/settings.py
	$(BIN)/python dev/benchmarks.py
	$(BIN)/python dev/api.py
	$(BIN)/python dev/events.py

clean:
	rm -rf $(VENV) runs

$(VENV)/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Slipstream needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python$(EXE) || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/dev: $(VENV)/core
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/services: $(VENV)/dev
	$(PIP) --editable '.[dev,services]'
	test -x $(VENV)/mlflow/bin/mlflow || $(PYTHON) -m venv $(VENV)/mlflow # a server, apart from its clients
	$(VENV)/mlflow/bin/python -m pip install --quiet mlflow
	test -x $(VENV)/moto/bin/moto_server || $(PYTHON) -m venv $(VENV)/moto # servers of S3 and of Google; boto pins old packages
	$(VENV)/moto/bin/python -m pip install --quiet 'moto[s3]==5.2.5' flask flask-cors gcp-storage-emulator==2026.7.19
	@touch $@
