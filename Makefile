# Everything on a fresh machine: `make demo`, then `make test`. What is done already is not done
# again; `make clean` starts over. PYTHON=python3.12 chooses the interpreter.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
FREE_GIB := 8
# What else may not be skipped; CI says browser,elastic, for which a user's machine need not have
# the programs (chromium, chromium-driver, openssh-server).
REQUIRE ?=
TWO_WORKERS := $(BIN)/horovodrun --gloo -np 2 $(BIN)/python

.PHONY: help demo test test-image test-multihost lint matrix clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    install everything into $(VENV), then train digits with two workers,'
	@echo '             in PyTorch and in Keras'
	@echo 'make test    ruff, mypy and all tests'
	@echo 'make test-image  the Docker image, built and run; as root'
	@echo 'make test-multihost  tests on several hosts (network namespaces) and under Slurm; as root'
	@echo 'make lint    ruff and mypy alone'
	@echo 'make matrix  build and test with each supported version, in fresh environments (an hour'
	@echo '             or more, by hand; ROWS="NAME ..." for some, ROWS=--list for the names)'
	@echo 'make clean   remove $(VENV) and .matrix (the cache of Horovod wheels stays)'

demo: $(VENV)/horovod.stamp
	$(TWO_WORKERS) examples/torch/digits.py --summary $(VENV)/torch.json
	@# TensorFlow speaks on stderr however its log level is set: shown if something fails.
	TF_CPP_MIN_LOG_LEVEL=3 $(TWO_WORKERS) examples/tensorflow/digits_keras.py \
	  --summary $(VENV)/keras.json 2>$(VENV)/keras.log || { cat $(VENV)/keras.log >&2; exit 1; }
	@$(BIN)/python examples/side_by_side.py $(VENV)/torch.json $(VENV)/keras.json

test: lint $(VENV)/horovod.stamp
	HVDKIT_REQUIRE=distributed,examples,$(REQUIRE) $(BIN)/python -m pytest

test-multihost: $(VENV)/horovod.stamp $(VENV)/dev.stamp
	HVDKIT_REQUIRE=multihost,slurm $(BIN)/python -m pytest tests/multihost tests/cluster

test-image: $(VENV)/horovod.stamp $(VENV)/dev.stamp
	HVDKIT_REQUIRE=docker $(BIN)/python -m pytest tests/image

# Before Horovod is built: a missing import need not wait for minutes of compilation.
lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hvdkit

matrix:
	$(or $(PYTHON),python3) tests/matrix.py $(ROWS)

clean:
	rm -rf $(VENV) .matrix

# Looks before it starts: a missing compiler must not show up after minutes of downloads.
$(VENV)/python.stamp:
	@fail() { echo "hvdkit: $$1" >&2; exit 1; }; \
	python=; \
	for one in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10); do \
	  if "$$one" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
	    2>/dev/null; then python=$$one; break; fi; \
	done; \
	[ -n "$$python" ] || fail "no $(or $(PYTHON),python3) of version 3.10 to 3.13 found: install \
	Python (Debian: apt-get install python3 python3-venv python3-dev) or name one with PYTHON="; \
	"$$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$$python cannot make virtual \
	environments: install its venv module (Debian: apt-get install python3-venv)"; \
	"$$python" -c 'import os, sys, sysconfig; \
	sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' \
	  || fail "$$python has no headers to compile against: install them (Debian: apt-get install \
	python3-dev; Fedora: dnf install python3-devel)"; \
	compiler=; for one in $${CXX:-c++ g++}; do compiler=$${compiler:-$$(command -v "$$one")}; done; \
	[ -n "$$compiler" ] || fail "no C++ compiler found: install one (Debian: apt-get install g++; \
	Fedora: dnf install gcc-c++)"; \
	free=$$(df -Pk . | awk 'NR == 2 { print int($$4 / 1048576) }'); \
	[ "$$free" -ge $(FREE_GIB) ] || fail "$$free GiB of disk free in $$PWD, $(FREE_GIB) GiB needed \
	for the frameworks and the build: make room"; \
	echo "$$python -m venv $(VENV)"; "$$python" -m venv --clear $(VENV)
	@touch $@

$(VENV)/frameworks.stamp: $(VENV)/python.stamp setup.py constraints.txt
	$(PIP) install --constraint constraints.txt --editable '.[torch,tensorflow,examples]'
	@touch $@

$(VENV)/horovod.stamp: $(VENV)/frameworks.stamp $(wildcard hvdkit/install/*.py hvdkit/install/*.h)
	$(BIN)/hvdkit install
	@touch $@

$(VENV)/dev.stamp: $(VENV)/frameworks.stamp
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@# Not an extra: with its dependencies it would bring a TensorFlow of its own choice.
	$(PIP) install --constraint constraints.txt --no-deps tf_keras
	@touch $@
