# `make demo` and `make test` do all the set-up by themselves: Python 3.11 or newer, pip and make are enough.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: demo test check crash bench clean

demo: .venv/ready
	$(BIN)/holdfast demo

test: .venv/ready
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

crash: .venv/ready
	$(BIN)/python -m holdfast.testing.crash --kills 5000

bench: .venv/ready
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist src/holdfast.egg-info

# Made anew when what is to be installed has changed; the stamp is written last, so a half-made one is not taken for whole.
.venv/ready: pyproject.toml constraints.txt
	rm -rf .venv
	$(PYTHON) -c 'import sys; sys.exit("holdfast needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	touch .venv/ready
