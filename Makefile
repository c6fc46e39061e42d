# Everything runs through uv; where it is missing, pip brings it into a folder of its own (.uv).
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .uv/bin/uv)
RUN := $(UV) run --frozen

.PHONY: demo test test-slow test-newest lint format

demo: $(UV)
	$(RUN) jaxflash demo

test: $(UV)
	$(RUN) pytest -m "not slow"

test-slow: $(UV)
	$(RUN) pytest -m slow

# The newest jax that pyproject.toml allows, in an environment of its own; uv.lock stays as it is.
test-newest: $(UV)
	$(UV) venv --quiet --clear .venv-newest
	$(UV) pip install --no-config --quiet --python .venv-newest --upgrade . --group dev
	.venv-newest/bin/python -c "import jax; print('jax', jax.__version__)"
	.venv-newest/bin/python -m pytest -m "not slow" tests/pallas_kernels tests/sharding

lint: $(UV)
	$(RUN) ruff format --check
	$(RUN) ruff check
	$(RUN) pyright

format: $(UV)
	$(RUN) ruff format
	$(RUN) ruff check --fix

.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet uv
