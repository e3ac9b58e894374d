# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INTEGRATIONS := tests/trainer/loggers tests/trainer/data/test_loaders.py tests/trainer/data/test_source.py \
	tests/dashboard/test_run_data.py
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: demo test test-all packages lint integrations docs benchmarks experiments clean

.venv/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

demo: .venv/installed
	$(BIN)/python -m looptape run adding_problem --workdir=runs/demo

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell *.md */*.md docs/reference trainer losses models experiments dashboard benchmarks

test: lint
	$(BIN)/python -m pytest -n 3 --dist loadfile

test-all: lint
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "long or not long"

# Builds the wheel and the sdist, and uses them in an empty environment beside a project with names like ours.
packages: .venv/installed
	$(BIN)/python -m pytest tests/test_packaging.py -m "long or not long"

# MLflow, Weights & Biases, pandas, PyTorch and Grain, in an environment of their own: elsewhere their tests are skipped.
.venv-integrations/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install --quiet --upgrade pip
	.venv-integrations/bin/python -m pip install --quiet --editable ".[test,integrations]"
	touch $@

integrations: .venv-integrations/installed
	.venv-integrations/bin/python -c "import grain, mlflow, pandas, torch, wandb"
	.venv-integrations/bin/python -m pytest $(INTEGRATIONS) -m "long or not long"

.venv/docs-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

docs: .venv/docs-installed
	$(BIN)/sphinx-build -q -W --keep-going -c docs . build/site
	@echo "open build/site/index.html, or run: $(BIN)/looptape docs"

benchmarks: .venv/installed
	$(BIN)/python -m benchmarks

experiments: .venv/installed
	$(BIN)/python -m looptape.experiments.tools.reproduce

clean:
	rm -rf .venv .venv-integrations build runs *.egg-info .pytest_cache .ruff_cache
