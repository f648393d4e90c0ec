# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3.11
PIP = .venv/bin/python -m pip --quiet --disable-pip-version-check

AXE = 4.14.0

.PHONY: demo test lint browser docs clean

demo: .venv/installed  ## install, then run the main job
	.venv/bin/svs sample -n 8

test: .venv/installed-dev lint browser  ## install with development tools, then every check and test
	.venv/bin/python -m pytest

browser: .venv/installed-dev  ## Chromium and axe-core for the tests of the page, which are skipped where they cannot be had
	@for name in chromium chromium-browser google-chrome; do command -v $$name && break; done >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& { apt-get install -y chromium || { apt-get update && apt-get install -y chromium; }; } >/dev/null 2>&1; } \
		|| echo "no Chromium, and no way to install it here: the tests of the page in a browser are skipped"
	@test -f .venv/axe.min.js || { cd .venv && npm pack --silent axe-core@$(AXE) >/dev/null 2>&1 \
		&& tar -xzf axe-core-$(AXE).tgz --strip-components=1 package/axe.min.js && rm axe-core-$(AXE).tgz; } \
		|| echo "no axe-core from npm: the test of accessibility is skipped"

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
	$(PIP) install --constraint constraints.txt --editable '.[web]'
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed $@

.venv/installed-docs: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt --editable '.[docs]'
	touch .venv/installed $@

clean:
	rm -rf .venv results site
