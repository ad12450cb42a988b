# Two commands do everything: `make train` and `make test`. Both make .venv first; re-runs install nothing.
PYTHON ?= python3
VENV   ?= .venv
# Where torch comes from. The CPU index avoids gigabytes of CUDA libraries:
#   make test TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"
TORCH_INDEX ?=
# Workers of the test run; each worker uses one thread.
JOBS   ?= 2
ARGS   ?=
# The release of torch of `make test-torch`, and what is run there: TORCH_RUN=opinfo, fuzz, vision, bench.
TORCH  ?= 2.15.0
TORCH_RUN ?= unit
# Random training steps of `make fuzz`: how many, and which.
N      ?= 5000
SEED   ?= 0

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt

.PHONY: train test test-torch vision libraries gpu slow distributed fuzz opinfo bench cpython docs lint types unit clean help
.DELETE_ON_ERROR:

help:
	@echo "make train | make test | make test-torch TORCH=2.15.0 | make slow | make fuzz N=5000 | make bench ARGS='--only mlp_tiny' | make cpython | make opinfo | make libraries | make gpu | make docs | make lint | make clean"

# A stamp is newer than what it was installed from, so an up-to-date .venv costs nothing.
$(VENV)/.stamp-venv:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	touch $@

# torch first and alone: resolved together with the rest, a plain `torch` may bring another build.
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv constraints.txt
	$(PIP) $(TORCH_INDEX) torch==2.13.0
	$(PIP) 'setuptools>=77' wheel
	touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-torch pyproject.toml
	$(PIP) --no-build-isolation -e .
	$(PIP) wandb || echo "wandb could not be installed: runs are not logged to it"
	touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-run
	$(PIP) --no-build-isolation -e '.[test]'
	touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-run
	$(PIP) --no-build-isolation -e '.[docs]'
	touch $@

train: $(VENV)/.stamp-run
	$(BIN)/python examples/quickstart.py $(ARGS)

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.stamp-test
	$(BIN)/mypy

unit: $(VENV)/.stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test: lint types unit

# The tests on another release of torch, in .venv-torch-$(TORCH). PyPI has CUDA builds (5 GB), which need no device.
test-torch:
	test -x .venv-torch-$(TORCH)/bin/python || $(PYTHON) -m venv .venv-torch-$(TORCH)
	sed 's/^torch==.*/torch==$(TORCH)/; /^triton==/d' constraints.txt > .venv-torch-$(TORCH)/constraints.txt
	.venv-torch-$(TORCH)/bin/python -m pip --disable-pip-version-check install -q -c .venv-torch-$(TORCH)/constraints.txt \
		torch==$(TORCH) torchvision 'setuptools>=77' wheel
	.venv-torch-$(TORCH)/bin/python -m pip --disable-pip-version-check install -q -c .venv-torch-$(TORCH)/constraints.txt \
		--no-build-isolation -e '.[test]'
	touch $(foreach stamp,venv torch run test,.venv-torch-$(TORCH)/.stamp-$(stamp))
	$(MAKE) $(TORCH_RUN) VENV=.venv-torch-$(TORCH)

# On a machine with a CUDA device, with any torch that the virtual environment has.
gpu:
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# What takes long, or proves little more than its like in `make test`: the rest of its grids among it.
slow: $(VENV)/.stamp-test
	SIDEFX_CHECK_GRAPHS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m slow --ignore tests/fuzz $(ARGS)

# DistributedDataParallel with four processes, and thousands of random steps with two. One of them: ARGS="-k views"
distributed: $(VENV)/.stamp-test
	SIDEFX_TEST_PROCESSES=4 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" \
		tests/distributed/test_data_parallel.py tests/distributed/test_fit.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" tests/distributed/test_soak.py $(ARGS)

fuzz: $(VENV)/.stamp-test
	FUZZ_N=$(N) FUZZ_SEED=$(SEED) FUZZ_PARTS=$(JOBS) SIDEFX_CHECK_GRAPHS=1 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n $(JOBS) -m slow tests/fuzz $(ARGS)

# CPython's own tests, interpreted: minutes. Some: make cpython ARGS="-v test_with test_generators"
cpython: $(VENV)/.stamp-test
	$(BIN)/python tests/cpython/run.py $(ARGS)

# Every operator and module of torch's own lists, minutes. Some: make opinfo ARGS="-v softmax linalg"
opinfo: $(VENV)/.stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python tests/opinfo/run.py -j $(JOBS) $(ARGS)

# Models of torchvision and timm, compared with eager: make test-torch TORCH_RUN=vision
vision: $(VENV)/.stamp-test
	$(BIN)/python -m pip --disable-pip-version-check install -q -c $(or $(wildcard $(VENV)/constraints.txt),constraints.txt) \
		torchvision timm
	OMP_NUM_THREADS=1 $(BIN)/python tests/vision/run.py $(ARGS)

# Models of libraries that train with Lightning, and steps in plain loops with others, plainly and captured, in
# .venv-libraries. Figures are kept: a second run goes on where the first stopped.
# Some: make libraries ARGS="-k darts --backends eager"
LIBRARIES := lightly monai chemprop pytorch-forecasting gluonts[torch] darts scvi-tools neuralforecast
# Installed alone: some name older releases of torch and of others.
LIBRARIES_ALONE := pytorch-tabular einops omegaconf antlr4-python3-runtime==4.9.3 \
	ema-pytorch x-transformers torch-einops-utils loguru einx frozendict denoising-diffusion-pytorch pytorch-fid \
	vit-pytorch byol-pytorch beartype kornia kornia-rs torch_geometric xxhash e3nn opt-einsum-fx opt-einsum \
	pytorch-metric-learning entmax vector-quantize-pytorch zuko nflows umnn gpytorch linear-operator jaxtyping \
	pyro-ppl pyro-api torchdiffeq pytorch-tcn geoopt tensordict pyvers stable-baselines3 gymnasium cloudpickle \
	farama-notifications schedulefree lion-pytorch prodigyopt torch-optimizer pytorch-ranger pytorch-optimizer
LIBRARIES_TORCH ?= 2.13.0
libraries:
	test -x .venv-libraries/bin/python || $(PYTHON) -m venv .venv-libraries
	sed 's/^torch==.*/torch==$(LIBRARIES_TORCH)/; /^triton==/d; /^numpy==/d; /^pandas==/d; /^transformers==/d; /^matplotlib==/d' \
		constraints.txt > .venv-libraries/constraints.txt
	.venv-libraries/bin/python -m pip --disable-pip-version-check install -q -c .venv-libraries/constraints.txt \
		$(TORCH_INDEX) torch==$(LIBRARIES_TORCH) torchvision
	.venv-libraries/bin/python -m pip --disable-pip-version-check install -q 'setuptools>=77' wheel
	.venv-libraries/bin/python -m pip --disable-pip-version-check install -q -c .venv-libraries/constraints.txt \
		--no-build-isolation -e . $(LIBRARIES) accelerate peft diffusers
	.venv-libraries/bin/python -m pip --disable-pip-version-check install -q --no-deps $(LIBRARIES_ALONE)
	OMP_NUM_THREADS=1 .venv-libraries/bin/python tests/libraries/run.py $(ARGS)

bench: $(VENV)/.stamp-run
	$(BIN)/python -m sidefx_train.bench --suite core $(ARGS)

# HTML in build/docs; a warning, such as a link that leads nowhere, is an error.
docs: $(VENV)/.stamp-docs
	$(BIN)/python -m sphinx -b html -W --keep-going -n -q -d build/doctrees docs build/docs
	@echo build/docs/index.html

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache runs
