# One word a verb; .ci/run calls the same words.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.13.0
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run test test-all mutants check docs format zoo bench sanitize setup clean

run: setup
	$(BIN)/nonet run quickstart
	@echo
	$(BIN)/nonet recommend last --like "Alien" "Blade Runner" --top 5

# Three workers, a file to one of them: each has its own local Ray, and waits for processes more than it computes.
# tests/conftest.py puts long files first; xdist itself would put files with many tests first.
test: setup
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not slow"

test-all: setup $(VENV)-tensorflow
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
	$(BIN)/python tests/mutants.py

# An interpreter with TensorFlow beside the packages of $(VENV), for the tests that need it.
$(VENV)-tensorflow: $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m venv $@.part
	$@.part/bin/python -m pip install --quiet 'keras>=3.13.2,<4' 'tensorflow-cpu>=2.20'
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$($@.part/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz_nonet.pth
	mv $@.part $@

# Single lines changed one at a time, each of which a test must notice; MUTANTS="--folder rl" makes some of them.
mutants: setup
	$(BIN)/python tests/mutants.py $(MUTANTS)

# The native core's own checks under the address and undefined sanitizers; `make test-all` runs them too.
sanitize:
	bash embedding/native/sanitize.sh

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The generated reference pages, then the site in build/site.
docs: setup
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Tiny Hugging Face architectures through what a run does with them; writes the table of docs/benchmarks/backbones.md. Ten minutes.
zoo: setup
	$(BIN)/nonet bench zoo --set write=true

bench: setup
	$(BIN)/nonet bench all

setup: $(STAMP)

# Without a GPU the CPU build of torch is taken where one is at hand (about 200 MB); else what PyPI has (2 GB with CUDA).
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || { \
	  if command -v nvidia-smi >/dev/null; then \
	    echo "installing torch $(TORCH) for CUDA (about 2 GB)"; $(BIN)/pip install -q torch==$(TORCH); \
	  else \
	    echo "no GPU here: installing the CPU build of torch $(TORCH) (about 200 MB)"; \
	    $(BIN)/pip install -q torch==$(TORCH)+cpu 2>/dev/null \
	    || $(BIN)/pip install -q --retries 1 --timeout 20 --extra-index-url https://download.pytorch.org/whl/cpu torch==$(TORCH)+cpu 2>/dev/null \
	    || { echo "no CPU build at hand: installing PyPI's (about 2 GB)"; $(BIN)/pip install -q torch==$(TORCH); }; \
	  fi; }
	@echo "installing nonet and its dependencies (ray, pyarrow, ...; about 250 MB)"
	@$(BIN)/pip install -q -e ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .pytest_cache .ruff_cache
