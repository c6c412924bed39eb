# make demo | test | check | long | lint | format | fuzz | docs | screenshots | release | packages | locks | test-python | test-kernel | vectors | gpu | clean. Each makes .venv first; a second call finds it ready.
PYTHON ?= python3
TORCH ?= torch==2.13.0
FUZZ_S ?= 300
SOAK_MINUTES ?= 30
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export ORT_DISABLE_TELEMETRY := 1
# The packages come without bytecode, and each module is compiled when it is first imported.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check quick long lint format fuzz docs screenshots release packages locks test-python test-kernel vectors gpu clean

demo: $(READY)
	$(BIN)/shoal demo

# Two test processes more than cores, four at most: many tests wait for programs. An idle process takes tests from a busy one.
PROCESSES := -n $(shell expr $$(nproc) + 2) --maxprocesses 4 --dist worksteal

test: lint
	$(BIN)/python -m pytest $(PROCESSES)

# The check for every edit: static checks beside the quick unit tests.
check: $(READY)
	$(MAKE) --output-sync --jobs 2 lint quick

# Importing torch in every test process takes longer than the tests of these folders that need none.
TRAINING := $(addprefix --ignore=tests/unit/shoal/, simulation owner/task_compiler)

quick: $(READY)
	$(BIN)/python -m pytest $(PROCESSES) -m "not (broker or process or torch or slow or long)" $(TRAINING) tests/unit

# Scenarios that `make long` repeats with an aggregator of two and of three workers.
WITH_WORKERS := $(addprefix tests/scenarios/loss/, test_chaos.py test_recovery.py)

# About an hour on two cores; each test has a limit. One after the other, since they measure. Results go to results.
long: $(READY)
	SHOAL_SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/python -m pytest -m long
	SHOAL_SHARDS=2 $(BIN)/python -m pytest $(PROCESSES) -m "" $(WITH_WORKERS)
	SHOAL_SHARDS=3 $(BIN)/python -m pytest $(PROCESSES) -m "" $(WITH_WORKERS)
	$(BIN)/python -m pytest $(PROCESSES) tests/properties --hypothesis-profile long
	$(MAKE) test-kernel

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Bounded. atheris is no requirement: where it can't be installed, inputs are damaged at random.
fuzz: $(READY)
	$(BIN)/python -m pip install --quiet 'atheris>=3' || true
	$(BIN)/python tests/fuzz/fuzz_parsers.py --seconds $(FUZZ_S)

# build/docs/index.html; a broken link or anchor, or a page without a place in the navigation, is an error.
docs: $(READY) build/mermaid/mermaid.min.js
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs -d build/doctrees . build/docs

# The script that draws the diagrams; without npm the pages fetch it from jsdelivr.net.
MERMAID := mermaid-11.12.1
build/mermaid/mermaid.min.js:
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent $(subst -,@,$(MERMAID)) && tar -xzf $(MERMAID).tgz --strip-components=2 package/dist/$(@F) \
		&& rm $(MERMAID).tgz || echo 'no mermaid from npm: the diagrams of the built pages need the network'

# The documents' pictures, by the tests that look at the same pages; needs Chromium.
screenshots: $(READY)
	mkdir -p docs/pictures
	SHOAL_SCREENSHOTS=docs/pictures $(BIN)/python -m pytest tests/browser -k readable

# All files of a release of the commit that is checked out, in dist/VERSION: docs/releasing.md.
release: $(READY)
	$(BIN)/python -m deploy.release.make

# Debian packages of each party in dist, for this machine's architecture and the Python of .venv; ARCH=arm64 or PACKAGES=shoal-edge
# choose others. Where pip finds no CPU build of torch: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make packages
packages: $(READY)
	$(BIN)/python deploy/debian/build.py $(if $(ARCH),--arch $(ARCH)) $(PACKAGES)

# Versions and hashes of what images and Debian packages hold, from the versions in .venv: deploy/locks.
locks: $(READY)
	$(BIN)/python deploy/locks/make.py

# The quick unit tests on another Python, by default the newest that we support, without torch: its builds there bring CUDA.
NEWEST ?= python3.14
OTHER := .venv-other

test-python:
	$(or $(filter-out python3,$(PYTHON)),$(NEWEST)) -m venv --clear $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --editable '.[test]'
	$(OTHER)/bin/python -m pytest $(PROCESSES) -m "not (broker or process or torch or slow or long)" $(TRAINING) tests/unit

# The tests of masks and of whole rounds with the compiled kernel in use, which is removed again; needs a C compiler.
test-kernel: $(READY)
	$(BIN)/python -m pip install --quiet ./deploy/kernel
	$(BIN)/python -m pytest $(PROCESSES) -m "" tests/unit/crypto tests/properties/test_model_states.py \
		tests/scenarios/rounds/test_modes.py tests/scenarios/rounds/test_runs.py; \
		status=$$?; $(BIN)/python -m pip uninstall --quiet --yes shoal-kernel; exit $$status

# Known answers of masks, key schedule and precisions: any platform and Python with numpy and cryptography can run them.
vectors:
	$(PYTHON) -m tests.vectors.check

# An NVIDIA card beside the CPU, as one JSON document: any Python with torch can run it. Without a card each part is skipped by name.
gpu:
	@PYTHONPATH=.:lab $(PYTHON) -m tests.gpu.check

clean:
	rm -rf $(VENV) $(OTHER) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and on its own: the CPU build, where pip finds one. byzfl is an oracle of one test, which skips without it;
# it requires torchvision, whose wheels do not load beside the CPU build, so it comes without what it requires.
# The newest pip chooses versions in a third of the time that the one of Python 3.11 takes, and most modules are never imported.
BYZFL := byzfl==0.0.11
# Lists the packages of a release: a build tool, which no program and no extra needs.
CYCLONEDX := cyclonedx-bom==7.5.0
# On a terminal pip's newest line stands still, so that minutes of downloads are no silence.
PIP = $(BIN)/python -m pip install $(if $(MAKE_TERMOUT),--progress-bar off,--quiet)
SHOW = $(if $(MAKE_TERMOUT),| { while IFS= read -r line; do printf '\r%-78.78s' "$$line"; done; echo; })
$(READY): SHELL := bash
$(READY): .SHELLFLAGS := -o pipefail -c
$(READY): pyproject.toml lab/pyproject.toml
	@echo 'make: pip installs 1.6 GB into $(VENV): two to five minutes, once'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo '1 of 3: torch, the largest'
	@$(PIP) --no-compile $(TORCH) $(SHOW)
	@echo '2 of 3: Shoal, what it needs, and the tools of its tests'
	@$(PIP) --no-compile --editable '.[dev]' --editable lab $(CYCLONEDX) $(SHOW)
	@echo '3 of 3: a package that one test compares with'
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps $(BYZFL) || true
	@touch $@
