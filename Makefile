# Needs Linux, python3 >= 3.11 and make; everything else goes into .venv.
#
#   make train         train on handwritten digits, on every device
#   make test          the core tests
#   make test-all      every test, less those of
#   make test-cluster  SLURM, mpirun, Ray and Kubernetes; installs them first (Debian)
#   make test-oldest   the heart of the tests on Python 3.11 and JAX 0.10
#   make lint          format, lint and types, as CI checks them
#
# PYTHON=/path/to/python picks the Python; EXTRA=cuda12 (cuda13, tpu) adds the
# accelerator to a new .venv; ARGS="-k name" goes to pytest.

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
OLDEST := .venv311
OLDEST_TESTS := import tree devices placement rng metrics varying parallel per_device \
    step replicas loop callbacks data prefetching evaluation examples checkpoint \
    preemption

.PHONY: train test test-all test-cluster test-oldest lint format bench lock clean

# Where JAX finds no accelerator it runs on the CPU: as four devices.
train: $(READY)
	@rm -rf run
	JAX_NUM_CPU_DEVICES=$${JAX_NUM_CPU_DEVICES:-4} $(BIN)/python examples/digits.py

test: $(READY)
	$(BIN)/python -m pytest -m "not full and not cluster" $(ARGS)

test-all: $(READY)
	$(BIN)/python -m pytest -m "not cluster" $(ARGS)

test-cluster: $(READY)
	tests/cluster/run.sh $(BIN)/python $(ARGS)

test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest $(OLDEST_TESTS:%=tests/test_%.py) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/table.py $(ARGS)

lock:
	for version in 3.11 3.12 3.13; do \
	    uv pip compile pyproject.toml --extra dev --python-version $$version \
	        --upgrade --quiet --no-header --no-annotate --no-emit-index-url \
	        --no-emit-find-links \
	        -o requirements/py$$(echo $$version | tr -d .).txt || exit 1; \
	done

clean:
	rm -rf $(VENV) $(OLDEST) run dist .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(OLDEST)/ready: VERSION := 3.11

# Also after a change of the locks: pip then installs only what differs.
%/ready: requirements/make_venv.sh $(wildcard requirements/*.txt) pyproject.toml
	requirements/make_venv.sh $* $(VERSION)
