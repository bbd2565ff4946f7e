# make demo: see it work.  make test: the tests.  make help: the rest.
VENV := .venv
PY := $(VENV)/bin/python
SHOAL := $(VENV)/bin/shoal
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP_EMPTY = build/empty/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: notebooks help demo test test-whole test-all test-distributed check docs generate results clean
.PHONY: test-portable release-check

help:  ## list what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: $(VENV)/demo  ## compare four methods on 20 uneven devices, write a report
	@rm -rf runs/demo
	$(SHOAL) compare fedavg "fedprox(mu=0.1)" scaffold fedavgm \
	  --data digits --model mlp --split dirichlet:0.1 --devices 20 --sample 5 --rounds 60 --epochs 2 --batch 16 \
	  --lr 0.05 --seeds 3 --target 0.85 --fleet tiers --metrics devices --out runs/demo
	$(SHOAL) report runs/demo --out runs/demo/report.html

test: $(VENV)/test  ## run the tests of one machine, 8 minutes on two cores
	$(PY) -m pytest

test-whole: $(VENV)/test  ## run what test-all adds: every engine for every part, every pair, large models, the pages
	$(PY) -m pytest -m whole

test-all: test test-whole  ## run every test of one machine, 20 minutes on two cores

test-distributed: $(VENV)/test  ## run the tests of clusters and real devices, several processes each
	$(PY) -m pytest tests/distributed -n 0

test-portable: $(VENV)/portable  ## run the tests that need neither fork nor signals, Ray or Flower, with those hidden
	$(PY) -m pytest --portable

check: $(VENV)/dev  ## format, lint, names, types, imports, docs
	$(VENV)/bin/ruff format --check src tests benchmarks tools
	$(VENV)/bin/ruff check src tests benchmarks tools
	$(PY) tools/check_names.py
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports --no-cache --no-logo
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	$(PY) tools/check_site.py

docs: $(VENV)/dev  ## serve the documentation
	$(VENV)/bin/mkdocs serve

generate: $(VENV)/dev  ## write tables, navigation and command help of the documentation anew from the code
	$(PY) tools/generate_docs.py

notebooks: $(VENV)/test  ## run the notebooks of docs/notebooks anew, and keep what they put out
	$(PY) tools/run_notebooks.py

results: $(VENV)/dev  ## build tables and pictures of docs/results anew from the ledger in results/
	$(PY) tools/build_results.py

release-check: $(VENV)/dev  ## build sdist and wheel, check them, try the wheel in an empty environment
	$(PY) tools/check_release.py
	rm -rf build dist
	$(PY) -m build --outdir dist
	$(PY) -m twine check --strict dist/*
	python3 -m venv build/empty
	$(PIP_EMPTY) "$$(grep '^torch==' constraints.txt)"
	$(PIP_EMPTY) dist/*.whl
	cd build/empty && bin/shoal run --rounds 2 --devices 4 --sample 2 --out run && bin/shoal resume run --set rounds=3 \
	  && bin/shoal list tables && bin/shoal export run model.safetensors
	$(PIP_EMPTY) "$$(ls dist/*.whl)[plot]"
	cd build/empty && bin/shoal report run --out report.html
	@echo "$$(ls dist) can be published"

clean:  ## remove the environment and everything built
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	python3 -m venv $(VENV)

# torch first and by its exact version, so that no other build of it is considered
$(VENV)/demo $(VENV)/portable $(VENV)/test $(VENV)/dev: $(VENV)/%: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable ".[$*]"
	@touch $@
