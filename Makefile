# One door for everything; continuous integration calls the same targets.
#   make chat PROMPT="..."   set up, fetch the default model, start the daemon, stream an answer (no PROMPT: a conversation)
#   make test                the default suite        make test-long   the big counts
#   make test-failed         what failed last, once more
#   make check               ruff and mypy            make fix         what ruff can mend by itself
#   make bench               side-by-side figures
#   make demo                `tierd top` on a scripted load           make screenshots  the pictures of the README

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2:135m
# Test processes beside each other; those of the whole daemon run alone, for it weighs the disk against the processors.
WORKERS ?= 2
PROMPT ?=
export PROMPT
# Without a card nobody wants gigabytes of CUDA: the constraints file pins a CPU build of torch.
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,-c constraints-cpu.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS)
TEST_ENV := TIERD_TEST_MODELS=$(CURDIR)/.cache/test-models MYPYPATH=$(CURDIR)/.cache/mypy-path

.PHONY: chat test test-long test-failed check fix bench gpu demo screenshots clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "installing into $(VENV), about a minute"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev-ready: pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "installing into $(VENV), about a minute"
	$(PIP) -e ".[dev]"
	@mkdir -p .cache/mypy-path && ln -sfn $(CURDIR) .cache/mypy-path/tierd
	@touch $(VENV)/.run-ready $@

# The clients of other projects that the long tests drive.
$(VENV)/.sdk-ready: pyproject.toml constraints-cpu.txt | $(VENV)/.dev-ready
	$(PIP) -e ".[dev,sdk]"
	@touch $@

.cache/test-models/smollm2-135m/manifest.json: | $(VENV)/.dev-ready
	TIERD_MODELS_DIR=$(CURDIR)/.cache/test-models $(BIN)/tierd pull smollm2:135m

chat: $(VENV)/.run-ready
	@$(BIN)/tierd run $(MODEL) $(if $(PROMPT),"$$PROMPT")

test: $(VENV)/.dev-ready .cache/test-models/smollm2-135m/manifest.json
	@# Both runs, whatever the first one says: `test-failed` repeats what failed, not what was never run.
	@failed=0; \
	$(TEST_ENV) $(BIN)/pytest -m "not long" -n $(WORKERS) --durations=15 --ignore tests/test_system.py || failed=1; \
	$(TEST_ENV) $(BIN)/pytest -m "not long" tests/test_system.py || failed=1; \
	exit $$failed

test-long: $(VENV)/.sdk-ready .cache/test-models/smollm2-135m/manifest.json
	$(TEST_ENV) $(BIN)/pytest -m long -n $(WORKERS) --timeout=1800 --durations=15

# What failed last, once more and alone: tells a test that only a busy machine breaks from one that is broken.
test-failed: $(VENV)/.dev-ready .cache/test-models/smollm2-135m/manifest.json
	$(TEST_ENV) $(BIN)/pytest --last-failed --last-failed-no-failures none --timeout=1800

check: $(VENV)/.dev-ready
	$(BIN)/ruff check .
	$(TEST_ENV) $(BIN)/mypy --explicit-package-bases -p tierd.kernels -p tierd.tiers -p tierd.daemon -p tierd.clients -p tierd.tui

fix: $(VENV)/.dev-ready
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev-ready .cache/test-models/smollm2-135m/manifest.json
	$(TEST_ENV) $(BIN)/python -m tests.bench.kernels
	$(TEST_ENV) $(BIN)/python -m tests.bench.peers

# On a machine with a CUDA card: correctness, rooflines, end to end, within five minutes.
gpu: $(VENV)/.dev-ready
	@mkdir -p docs/measurements
	$(TEST_ENV) $(BIN)/python tests/bench/gpu.py --json docs/measurements/gpu.json

demo: $(VENV)/.dev-ready .cache/test-models/smollm2-135m/manifest.json
	@$(TEST_ENV) $(BIN)/python -m tests.bench.demo

screenshots: $(VENV)/.dev-ready .cache/test-models/smollm2-135m/manifest.json
	$(TEST_ENV) $(BIN)/python -m tests.bench.demo --shots docs/images

clean:
	rm -rf $(VENV) .cache
