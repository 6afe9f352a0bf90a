PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-long clean

demo: .venv/.installed
	$(BIN)/zo2 demo

test: .venv/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

# All cases of these tests, and many more drawn examples.
test-long: .venv/.tools
	$(BIN)/pytest -n 2 --dist worksteal --long

.venv/.installed: pyproject.toml constraints.txt $(wildcard src/zo2core/kernels/*.[ch])
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[peft]'
	touch $@

.venv/.tools: .venv/.installed
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build src/zo2core/kernels/*.so
