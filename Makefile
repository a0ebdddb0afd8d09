# Two commands matter: `make demo` and `make test`. Everything else serves them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The package is the repository root; tools that resolve imports from files find it by this link.
LINK := $(VENV)/source/outrider
# Torch threads that spin while they wait make busy machines 10 times slower.
export GOMP_SPINCOUNT = 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO = 0
export OUTRIDER_CRDS ?= $(wildcard ../shared/crds)

.PHONY: demo test test-slow clients clients-vllm clients-guidellm bench check lint docs format clean

demo: $(STAMP)
	$(BIN)/python -m outrider.demo.run

# Processes that share the tests out, file by file; each computes on one core.
TEST_PROCESSES ?= 2

PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=20

test test-slow: export OMP_NUM_THREADS = 1
# What a test process has compiled, the next one and those that it starts read.
test test-slow: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) $(LINK)
	$(PYTEST) -m "not slow"

# Long matrices, kill tests, soaks and other people's clients; what was skipped is listed.
test-slow: $(STAMP) $(LINK)
	$(PYTEST) -m slow -rs

# Other people's clients, a part of `test-slow`: the tests install each in an environment of its own
# under `.clients/`, since their pins exclude ours and one another's. The load
# clients below take part where they are installed: by their targets, or on the PATH.
clients: $(STAMP) $(LINK)
	$(BIN)/python -m pytest tests/cluster/serve/openai/test_clients.py -m slow -rs

# These load clients bring all of vLLM, or torch with CUDA, so only these targets install them.
clients-vllm clients-guidellm: clients-%: $(STAMP) $(LINK)
	$(BIN)/python -m venv .clients/$*
	.clients/$*/bin/pip install -q -r tests/helpers/clients/requirements-$*.txt
	$(BIN)/python -m pytest tests/cluster/serve/openai/test_clients.py -m slow -k $*

# What takes part beside Outrider and transformers, and how much is run: bench/README.md.
BENCH_MODEL ?= demo/models/target
BENCH ?=

bench: $(STAMP)
	$(BIN)/outrider bench suite --model $(BENCH_MODEL) --dtype bfloat16 $(BENCH)

check: lint
	$(BIN)/python -m pytest tests/test_style.py

lint: $(STAMP) $(LINK)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(VENV)/source $(BIN)/mypy --config-file pyproject.toml -p outrider

# The documentation as a site, in build/site; a broken link is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[docs]"
	$(BIN)/python -m mkdocs build --strict --quiet

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Torch's newest release would bring gigabytes of CUDA; the range in pyproject.toml does not.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "torch>=2.10,<2.14"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(STAMP)

$(LINK): $(STAMP)
	mkdir -p $(dir $(LINK))
	ln -sfn "$(CURDIR)" $(LINK)

clean:
	rm -rf $(VENV) build dist *.egg-info
