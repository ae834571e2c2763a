# Two commands do all the set-up a fresh machine needs: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Of what pip says while it installs: every twentieth package, downloads of more than 1 MB, and the last phase.
PROGRESS := /^(Collecting|Processing) / && ++n % 20 == 0 {print "    " n " packages found"} \
	/^ *(Downloading|Using cached) .* [MG]B\)/ {sub(/^ */, "    "); print} \
	/^Installing collected/ {print "    installing them"} \
	{fflush()}
# Packages of which training imports little, and the modules that import that: compiling them whole would take minutes.
LARGE := mpmath|mypy|mypyc|narwhals|networkx|pip|pygments/lexers|scipy|setuptools|sklearn|sympy|tests|torch/_inductor|torch/ao|torch/onnx|torch/testing|torchmetrics|transformers
IMPORTED := torch._dynamo, torch.distributed.run, transformers.trainer, transformers.models.gpt2.modeling_gpt2, lightning.pytorch
IMG ?= resile:dev
# The cluster that `make cluster` brings up, unless another one was chosen.
ifeq ($(KUBECONFIG),)
ifneq ($(wildcard /var/lib/resile-cluster/kubeconfig),)
export KUBECONFIG := /var/lib/resile-cluster/kubeconfig
endif
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench bench-kube soak data cluster cluster-down deploy undeploy test-kube clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv with resile and everything the targets need

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (1.6 GB; the first time takes a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "resile needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@echo "  1 of 3: the virtual environment"
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --upgrade pip
	@echo "  2 of 3: packages, torch among them (all that pip says is in $(VENV)/setup.log)"
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile -c constraints.txt \
		-e '.[torch,huggingface,lightning,dev]' 2>&1 | tee $(VENV)/setup.log | awk '$(PROGRESS)' || { tail -n 20 $(VENV)/setup.log; exit 1; }
	@echo "  3 of 3: compiling them"
	@$(BIN)/python -m compileall -qq -j 0 -x '/($(LARGE))/' $(VENV)/lib src || true  # some packages have files for other versions of Python
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import $(IMPORTED)' > /dev/null 2>&1 || true
	@touch $@

data: $(READY)  ## write the handwritten digits as PNG files under .cache/mnist_png
	@$(BIN)/python examples/pytorch/mnist/make_mnist_png.py --output .cache/mnist_png

demo: $(READY) data  ## train on three local nodes while a process and then a whole node are killed
	@$(BIN)/python examples/demo.py

test: $(READY) data  ## the whole test suite (500 random fault schedules included)
	@$(BIN)/python hack/suite.py run --budget 600 tests -n 3 --dist loadfile --no-loadscope-reorder

lint: $(READY)  ## ruff, mypy --strict, and the design's layers
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache --no-logo

format: $(READY)  ## rewrite the code in the house format
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: $(READY)  ## measure everything, with its peers in the same run; writes docs/benchmarks.md (30 minutes)
	@$(BIN)/python -m benchmarks --write

bench-kube: $(READY)  ## the same for jobs on a cluster (after `make cluster`; 6 minutes)
	@$(BIN)/python -m benchmarks.kube --write

soak: $(READY)  ## the long proofs: 10,000 simulated fault schedules, and kills drawn by lot among real processes
	@$(BIN)/python hack/suite.py run tests -m soak --timeout 7200 -n 2

cluster: $(READY) data  ## bring up a real Kubernetes on this machine (Debian, root; builds it the first time, 7 minutes)
	@hack/cluster/cluster.py up

cluster-down:  ## take it down and leave nothing behind
	@hack/cluster/cluster.py down

deploy: $(READY)  ## install the CRDs and the operator on the cluster of KUBECONFIG (IMG=image of the operator)
	@$(BIN)/resile manifests --image $(IMG) | kubectl apply -f -
	@kubectl -n resile-system rollout status deployment/resile-operator --timeout=120s

test-kube: $(READY) data  ## the tests that need a cluster (after `make cluster`)
	@RESILE_KUBE_TESTS=1 $(BIN)/python hack/suite.py run --budget 360 tests/kube --timeout 600 -m "not alone and not deployed" -n 3 --dist loadfile --no-loadscope-reorder
	@RESILE_KUBE_TESTS=1 $(BIN)/python hack/suite.py run --budget 360 tests/kube --timeout 600 -m deployed -n 3 --dist loadfile --no-loadscope-reorder
	@RESILE_KUBE_TESTS=1 $(BIN)/python hack/suite.py run --budget 150 tests/kube --timeout 600 -m alone

undeploy:  ## remove the operator and its rights; jobs, CRDs and the dlrover namespace stay
	@kubectl delete --ignore-not-found -k config/operator
	@kubectl delete --ignore-not-found -k config/rbac
	@kubectl delete namespace resile-system --ignore-not-found

clean:  ## remove what the targets made
	rm -rf $(VENV) .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
