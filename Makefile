# make demo: compress a small transformer on this machine and show what happened.
# make test: lint, format, types and tests. Both set up everything they need.
# make docs: the documentation as a site, in site/. A dead link or an unlisted page fails.
# make kernels: the GPU's kernels in Triton's interpreter, which it installs (260 MB).
# make tables: results/README.md, every table and figure of the paper beside ours, from JSON, and
# the pictures of rivals.
# make torture: kills, failing disks and spoiled files by the hundred, into results/.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# One process for each core: a third on two cores imports torch once more and gains nothing, because
# the checks run beside the tests.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores : 4)))

.PHONY: demo test docs kernels tables torture lint format clean wheel

demo: $(READY)
	$(BIN)/gaugelasso train configs/retrieval/demo.toml --out runs/demo --overwrite --device cpu
	$(BIN)/gaugelasso report runs/demo

# The checks run beside the tests, which leave some of the machine unused; what they say follows in the
# end. Compiled tests are kept also where Python is told not to: to compile them again takes each
# process five seconds.
test: $(READY)
	@said=$$(mktemp); $(MAKE) --no-print-directory lint >"$$said" 2>&1 & checks=$$!; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal; \
	tests=$$?; wait $$checks; checks=$$?; cat "$$said"; rm -f "$$said"; \
	exit $$((tests ? tests : checks))

# Not --quiet: it would hide warnings from --strict as well.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

kernels: $(READY)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet triton==3.9.0
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels

tables: $(READY)
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.rival_pictures

torture: $(READY)
	$(BIN)/python -m tests.trust.torture --out results/reliability.json

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	$(BIN)/python -m build --wheel

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "gaugelasso needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.11 ..." % v[:2])'
	@test -x $(BIN)/python || echo 'setting up $(VENV): 1.7 GB and a minute or two, more where torch brings CUDA'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) dist build site runs .pytest_cache .mypy_cache .ruff_cache
