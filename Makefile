# `make demo` and `make test` take a fresh machine (Python >= 3.10) to a finished result.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CACHE  := $(VENV)/cache
FLOORS := plugins runtime exporter calibrate tools
NATIVE := $(shell find plugins -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name CMakeLists.txt)
WITH_CACHE = XDG_CACHE_HOME=$(abspath $(CACHE))

.PHONY: install demo test lint bench train-demo clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,text,video,dev]'
	touch $@

demo: install
	$(BIN)/toprovar demo --out out/demo

# the tests build real engines; the builder is 95 MB that nothing else needs
$(VENV)/.tensorrt-rtx: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[tensorrt-rtx]'
	touch $@

# The operator library, where tests find it: kernels for all GPUs and TensorRT's host if nvcc is there, else for the processor.
$(CACHE)/.plugins: $(VENV)/.tensorrt-rtx $(NATIVE)
	$(WITH_CACHE) $(BIN)/toprovar plugins build $(if $(shell command -v nvcc),--tensorrt-headers pip)
	touch $@

test: $(VENV)/.tensorrt-rtx $(CACHE)/.plugins
	$(WITH_CACHE) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# mypy wants a folder named like the package: a farm of links to the floors
	rm -rf $(VENV)/typing && mkdir -p $(VENV)/typing/toprovar
	for floor in $(FLOORS); do ln -s ../../../$$floor $(VENV)/typing/toprovar/$$floor; done
	MYPYPATH=$(VENV)/typing $(BIN)/mypy -p toprovar

bench: install
	$(BIN)/toprovar bench out/demo/bundle

# Retrains the demo model: needs a CUDA GPU and the network (npm packages with the drawings); about half an hour.
train-demo: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check resvg_py==0.5.0
	$(BIN)/python -m toprovar.tools.train_demo.prepare --out .data/demo
	$(BIN)/python -m toprovar.tools.train_demo.train all --data .data/demo --out out/train-demo --minutes 30

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache
