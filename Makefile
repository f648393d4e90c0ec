# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3.11
PIP = .venv/bin/python -m pip --quiet --disable-pip-version-check

.PHONY: demo test lint docs clean

demo: .venv/installed  ## install, then run the main job
	.venv/bin/svs sample -n 8

test: .venv/installed-dev lint  ## install with development tools, then every check and test
	.venv/bin/python -m pytest

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

docs: .venv/installed-docs  ## build the site into site/, any warning being an error
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --editable .
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed $@

.venv/installed-docs: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --editable '.[docs]'
	touch .venv/installed $@

clean:
	rm -rf .venv results site
