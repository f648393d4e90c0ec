# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3.11
PIP = .venv/bin/python -m pip --quiet --disable-pip-version-check
AXE = 4.14.0

.PHONY: demo test lint coverage api hooks browser docs clean

demo: .venv/installed  ## install, then draw eight texts
	.venv/bin/svs sample -n 8

test: .venv/installed-dev lint browser  ## install the development tools, then run every check and test
	.venv/bin/python -m pytest

lint: .venv/installed-dev  ## style, types and import rules
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

coverage: .venv/installed-dev browser  ## all tests, and the lines they run: printed, and as pages in htmlcov/
	.venv/bin/python -m pytest --cov --cov-report=term --cov-report=html

api: .venv/installed-dev  ## record the public API in tests/api.txt after an intended change
	.venv/bin/python tests/api_snapshot.py > .venv/api.txt
	mv .venv/api.txt tests/api.txt

hooks: .venv/installed-dev  ## run the quick checks before each commit
	.venv/bin/pre-commit install

browser: .venv/installed-dev  ## Chromium and axe-core; the tests of the page in a browser are skipped without them
	@for name in chromium chromium-browser google-chrome; do command -v $$name && break; done >/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& { apt-get install -y chromium || { apt-get update && apt-get install -y chromium; }; } >/dev/null 2>&1; } \
		|| echo "Chromium could not be installed: the tests of the page in a browser are skipped"
	@test -f .venv/axe.min.js || { cd .venv && npm pack --silent axe-core@$(AXE) >/dev/null 2>&1 \
		&& tar -xzf axe-core-$(AXE).tgz --strip-components=1 package/axe.min.js && rm axe-core-$(AXE).tgz; } \
		|| echo "axe-core could not be downloaded: the accessibility test is skipped"

docs: .venv/installed-docs  ## build the site into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --editable '.[web]'
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed $@

.venv/installed-docs: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --editable '.[docs]'
	touch .venv/installed $@

clean:
	rm -rf .venv results site htmlcov .coverage
