# make demo: build a spec, test its kernels, show what happened.    make test: the tests of a push.
# Both set up .venv on a machine with Python alone. TORCH_INDEX=URL is the package index that torch is taken from.
# VENV=DIR reuses an environment that has a torch of its own; VENV=system uses the python3 on the PATH as it is and installs nothing.

VENV ?= .venv
PYTHON3 ?= python3
SPEC ?= specs/causal_mqa.yaml
TORCH_INDEX ?=
VERSIONS ?= .versions
SANITIZER ?= compute-sanitizer

ifeq ($(VENV),system)
PYTHON := $(PYTHON3)
READY :=
DEV_READY :=
DOCS_READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.attngen-ready
DEV_READY := $(VENV)/.attngen-dev-ready
DOCS_READY := $(VENV)/.attngen-docs-ready
endif

INSTALL := $(PYTHON) -m pip install --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' requirements-cpu.txt)
MKDOCS := $(shell grep -o 'mkdocs-material==[0-9.]*' pyproject.toml)
SELENIUM := $(shell grep -o 'selenium>=[0-9.]*' pyproject.toml)

.PHONY: help ready dev-ready docs-ready browser-ready demo test lint docs docs-check verify verify-all nightly versions regen gpu-test soak sanitize

help:
	@echo "make demo      build $(SPEC), test it against naive attention, show it"
	@echo "make test      the tests of a push (CPU: Triton's interpreter; with CUDA: on the device)"
	@echo "make lint      ruff and mypy"
	@echo "make docs      the site of the docs, into site/; a link that leads nowhere and a picture without a dark form fail it"
	@echo "make docs-check  read all pages of the site in Chromium: 400 and 1400 pixels wide, light and dark"
	@echo "make verify    compile, without a GPU, the kernels that changed and a share of the others"
	@echo "make verify-all  compile every kernel for every target"
	@echo "make nightly   verify-all, all tests, a million checks of random masks, the mutations, docs-check; writes tests/record.json"
	@echo "make versions  a short suite under each supported torch and Triton, in environments of their own (VERSIONS=DIR, 6 GB each)"
	@echo "make regen     rebuild generated/ from specs/"
	@echo "make gpu-test  rebuild, tests marked gpu, and docs/gpu-verification.md (needs CUDA)"
	@echo "make soak      1,000 runs of every module, while other work runs: each must give the same bits (needs CUDA)"
	@echo "make sanitize  compute-sanitizer's memcheck and racecheck over every module (needs CUDA; SANITIZER=FILE)"
	@echo "VENV=DIR reuses an environment that has torch; VENV=system uses python3 as it is"
	@echo "TORCH_INDEX=URL takes torch from there, as from https://download.pytorch.org/whl/cpu: small, without CUDA's libraries"

# Targets that only run attngen need READY; tests, lint and docs need DEV_READY, which adds their tools. An environment made here, or without
# torch, gets the pinned versions; another keeps its torch, and gets what is missing. Pins that a version of Python has no release of are left
# out there, and the last call of pip fills them from pyproject.toml.
HAS_OWN_TORCH = test ! -e $(VENV)/.attngen-made && $(PYTHON) -c "import torch" 2>/dev/null

$(READY): pyproject.toml requirements-cpu.txt
	@test -x $(VENV)/bin/python || { echo "making $(VENV)"; $(PYTHON3) -m venv $(VENV) && touch $(VENV)/.attngen-made; }
	@if $(HAS_OWN_TORCH); then \
	  echo "installing what $(VENV) lacks"; $(INSTALL) -e .; \
	else \
	  echo "installing torch, triton and the rest into $(VENV) (a minute or two)"; \
	  $(if $(TORCH_INDEX),$(INSTALL) --no-compile --no-deps --index-url $(TORCH_INDEX) $(TORCH) &&) \
	  $(INSTALL) --no-compile -r requirements-cpu.txt && $(INSTALL) --no-compile --no-build-isolation -e .; \
	fi
	@touch $@

ready: $(READY)

# Python's files are compiled afterwards, on all cores.
$(DEV_READY): $(READY) requirements-dev.txt
	@echo "installing the tools of tests, lint and docs into $(VENV)"
	@if $(HAS_OWN_TORCH); then \
	  $(INSTALL) -e ".[dev]"; \
	else \
	  $(INSTALL) --no-compile --no-build-isolation -r requirements-dev.txt -e ".[dev]" && \
	  { $(PYTHON) -m compileall -qq -j 0 $(VENV)/lib || true; }; \
	fi
	@touch $@

dev-ready: $(DEV_READY)

# Not as an extra of attngen, which would install attngen again while tests run.
$(DOCS_READY): $(DEV_READY) pyproject.toml
	$(INSTALL) $(MKDOCS)
	@touch $@

docs-ready: $(DEV_READY) $(DOCS_READY)

demo: $(READY)
	@echo "== $(SPEC)"; cat $(SPEC)
	@echo; echo "== attngen build $(SPEC)"; $(PYTHON) -m attngen build $(SPEC)
	@echo; echo "== attngen test $(SPEC) --brief"; $(PYTHON) -m attngen test $(SPEC) --brief
	@echo; echo "more: attngen explain $(SPEC)    does it fit, how fast"
	@echo "      attngen dump $(SPEC)       the IR of its kernels"

test: $(DEV_READY)
	$(PYTHON) -m pytest -n auto --dist worksteal

lint: $(DEV_READY)
	$(PYTHON) -m ruff check attngen docs/site tests examples generated
	$(PYTHON) -m ruff format --check attngen docs/site tests examples
	$(PYTHON) -m mypy

docs: docs-ready
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

browser-ready: docs-ready
	$(if $(READY),$(INSTALL) "$(SELENIUM)")

docs-check: browser-ready docs
	$(PYTHON) -m docs.site.check

verify: $(READY)
	$(PYTHON) -m attngen verify --all --changed

verify-all: $(READY)
	$(PYTHON) -m attngen verify --all

# Other masks every night: the date is the seed.
nightly: browser-ready verify-all
	$(PYTHON) -m pytest -n auto --dist worksteal -m "nightly or not nightly" --write-record
	$(PYTHON) -m tests.transforms.test_random_masks --checks 1000000 --seed $$(date +%Y%m%d)
	$(PYTHON) -m tests.mutations
	$(MAKE) docs-check

# Each pair of torch and Triton is installed once, with the default package index: a build for CUDA, which runs on a CPU too.
versions:
	$(PYTHON3) -m tests.versions --envs $(VERSIONS)

regen: $(READY)
	$(PYTHON) -m attngen build --all

gpu-test: $(DEV_READY)
	$(PYTHON) -m attngen build --all
	$(PYTHON) -m pytest -m gpu -n 8
	$(PYTHON) -m attngen test --all --report docs/gpu-verification.md

soak: $(DEV_READY)
	$(PYTHON) -m tests.soak specs/*.yaml

# Without the caching allocator each tensor is an allocation of its own, so that memcheck sees what lies beyond its end. Racecheck knows no
# mbarriers, by which warp groups of warp-specialized kernels wait for one another, so it has the portable kernels.
sanitize: $(DEV_READY)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck --error-exitcode 1 $(PYTHON) -m tests.soak --no-other-work --repeats 1 specs/*.yaml
	ATTNGEN_BACKEND=triton $(SANITIZER) --tool racecheck --error-exitcode 1 $(PYTHON) -m tests.soak --no-other-work --repeats 1 specs/*.yaml
