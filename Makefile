# Everything runs in .venv, which `make venv` makes (scripts/bootstrap.sh); every target but clean calls it first.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv demo check test lint types docs bench test-long test-gpu sbom audit clean

BIN := .venv/bin
CONFIG ?= examples/frozenlake.toml
PYTEST_ARGS ?=
# Tests run in two processes, file by file; without engines in three, as a third of that time is waiting. JOBS=0 runs them in
# one, where a debugger or `-s` is wanted.

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: ## Make .venv with CPU builds of the stock engines (3 to 5 minutes; returns at once when it is there)
	@scripts/bootstrap.sh

demo: venv ## Train an agent on FrozenLake with real engines (CONFIG=FILE for another run); prints where the report is
	@$(BIN)/rl-coserve train $(CONFIG)

lint: venv ## ruff, its format, spelling and the import rules (.pre-commit-config.yaml has the same)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/lint-imports

types: venv ## mypy
	@$(BIN)/mypy

docs: venv ## The documentation as a site in build/site, every link checked
	@$(BIN)/python scripts/config_reference.py && $(BIN)/python scripts/draw_concepts.py && $(BIN)/python scripts/draw_step.py
	@$(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html

check: lint types ## Lint, types and the tests that need no engine and no seconds: after each change
	@$(BIN)/pytest -m "not long and not slow and not engine" -n $(or $(JOBS),3) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test: lint types ## Lint, types and the test suite (what CI runs; PYTEST_ARGS='-k ledger' for a part)
	@$(BIN)/pytest -m "not long" -n $(or $(JOBS),2) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

bench: venv ## Time the micro-benchmarks of tests/benchmarks (`rl-coserve bench` measures the figures of docs/results)
	@$(BIN)/pytest tests/benchmarks --benchmark-enable --benchmark-columns=min,median,max,rounds --benchmark-sort=name $(PYTEST_ARGS)

# pytest's exit code 5 says that no test is marked so: true, and no failure.
test-long: venv ## Soaks, kills, many seeds; property tests on new examples
	@$(BIN)/pytest -m "long or hypothesis" --hypothesis-profile=random --timeout=3600 $(PYTEST_ARGS) || (code=$$?; [ $$code -eq 5 ] && echo "no test is marked long" || exit $$code)

test-gpu: venv ## The tests that need an NVIDIA GPU
	@$(BIN)/pytest -m gpu $(PYTEST_ARGS) || (code=$$?; [ $$code -eq 5 ] && echo "no test is marked gpu" || exit $$code)

TOOLS := .venv/tools
$(TOOLS)/bin/cyclonedx-py: pyproject.toml
	@python3 -m venv $(TOOLS) && $(TOOLS)/bin/pip install --quiet --disable-pip-version-check $$($(BIN)/python scripts/licences.py --extra audit)
	@touch $@

sbom: venv $(TOOLS)/bin/cyclonedx-py ## The bill of materials of .venv, CycloneDX: sbom.cdx.json; licences that are not allowed are an error
	@$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.cdx.json $(BIN)/python
	@$(BIN)/python scripts/licences.py sbom.cdx.json

audit: venv $(TOOLS)/bin/cyclonedx-py ## Known vulnerabilities of what is installed in .venv (pip-audit asks OSV, over the network; offline: an error that says so)
	@$(BIN)/python scripts/audit.py $(TOOLS)/bin/pip-audit

clean: ## Remove .venv, caches and build products; keeps runs/
	rm -rf .venv build dist orchestrator/transfer/delta/_native.ctypes.so vllm_rlplugin/kvpool/ledger/_pages.ctypes.so *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
