# Everything runs through uv; where it is missing, pip brings it into a folder of its own (.uv).
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .uv/bin/uv)
RUN := $(UV) run --frozen
BRING := $(filter .uv/bin/uv,$(UV))

# A few minutes of what a new jax breaks first: sharding, attention with all its derivatives, the cuDNN adapter, training
# with checkpoints.
NEWEST := tests/sharding/test_mesh.py tests/sharding/test_rules.py tests/pallas_kernels/test_dispatch.py \
	$(addprefix tests/pallas_kernels/attention/test_,probes.py reference.py api.py cudnn.py) \
	tests/jaxflash/test_checkpoint.py

# A test's processes, and the second worker, find compiled what the first one imported.
unexport PYTHONDONTWRITEBYTECODE

# Neighbours share programs: each worker takes a run of tests, and what is left of the other's at the end.
PYTEST := pytest -n 2 --dist worksteal

.PHONY: demo test test-slow test-newest aot lint format

demo: $(BRING)
	$(RUN) jaxflash demo

test: $(BRING)
	$(RUN) $(PYTEST) -m "not slow"

test-slow: $(BRING)
	$(RUN) $(PYTEST) -m slow

# The newest jax that pyproject.toml allows, in an environment of its own; uv.lock stays as it is.
test-newest: $(BRING)
	$(UV) venv --quiet --clear .venv-newest
	$(UV) pip install --no-config --quiet --python .venv-newest --upgrade . --group dev
	.venv-newest/bin/python -c "import jax; print('jax', jax.__version__)"
	.venv-newest/bin/python -m $(PYTEST) -m "not slow" $(NEWEST)

# Kernels to sm_90a without a GPU (tests/mosaic/aot.py), in an environment of their own: the locked jax, its CUDA plugin
# and the compiler's own wheels, without the gigabytes that only running needs.
CUDA := '^(jax-cuda13-(plugin|pjrt)|nvidia-(cuda-nvcc|nvvm))=='

aot: $(BRING)
	UV_PROJECT_ENVIRONMENT=.aot $(UV) sync --quiet --frozen --inexact --no-dev --no-install-project
	$(UV) export --quiet --frozen --no-dev --no-emit-project --no-hashes --no-annotate --no-header --extra cuda13 \
		| grep -E $(CUDA) > .aot/cuda.txt
	$(UV) pip install --no-config --quiet --python .aot --no-deps -r .aot/cuda.txt nvidia-cuda-nvdisasm
	.aot/bin/python -m tests.mosaic.check_aot

lint: $(BRING)
	$(RUN) ruff format --check
	$(RUN) ruff check
	$(RUN) pyright

format: $(BRING)
	$(RUN) ruff format
	$(RUN) ruff check --fix

.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet uv
