"""`make aot`: every kernel compiles to sm_90a without spills and without serialised wgmma (see aot.py), and XLA calls
each as often as the program does.

Not a test of the suite, whose environment has no ptxas. A kernel's shapes are added to `candidates`.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

from jaxflash import step
from jaxflash.config import train_preset
from jaxflash.model import abstract
from pallas_kernels.attention import (
    api,
    fp8,
    hopper,
    hopper_bwd,
    hopper_bwd_wide,
    hopper_config,
    hopper_fp8,
    hopper_fp8_config,
    hopper_fp8_prologue,
)
from pallas_kernels.attention.hopper_config import Config
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.device import H200
from pallas_kernels.fp8 import api as fp8_api
from sharding.mesh import make_mesh
from tests.mosaic import aot
from tests.mosaic.aot import Candidate, check, compile_candidate
from tests.pallas_kernels.fp8 import aot_candidates as fp8_products
from tests.pallas_kernels.w4a16 import aot_candidates

plgpu: Any = mosaic_gpu

LENGTHS = {"query_lengths": ("B",), "kv_lengths": ("B",)}
SEGMENTS = {"query_segments": ("B", "T"), "kv_segments": ("B", "S")}
# What each mask sets in the spec, and the arrays that come with it.
MASKS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, ...]]]] = {
    "plain": ({}, {}),
    "tail": ({"S": 4100}, {}),
    "causal": ({"is_causal": True}, {}),
    "window": ({"window": (500, 200)}, {}),
    "segments": ({"is_causal": True, "segments": True}, SEGMENTS),
    "lengths": ({"query_lengths": True, "kv_lengths": True}, LENGTHS),
    "everything": (
        {"is_causal": True, "causal_alignment": "bottom_right", "window": (500, 200), "segments": True}
        | {"query_lengths": True, "kv_lengths": True},
        LENGTHS | SEGMENTS,
    ),
}


def candidates() -> list[Candidate]:
    """Every kernel of the library, at the block sizes it is tuned for."""
    return [
        *forward_candidates(),
        *fp8_candidates(),
        *backward_candidates(),
        *aot_candidates.candidates(),
        *fp8_products.candidates(),
    ]


def forward_candidates() -> list[Candidate]:
    def candidate(H: int, H_v: int, mask: str, spare: Config | None = None) -> Candidate:
        facts, optional = MASKS[mask]
        spec = _spec(H=H, H_v=H_v, **facts)
        query, key, value = _shapes(spec, "BTNH", "BSKH", "BSKV")
        function = functools.partial(hopper.attend, spec, scale=spec.default_scale, config=spare)
        return _candidate(f"fwd-{H}-{H_v}-{mask}{_changes(spare)}", function, spec, (query, key, value), optional)

    dims = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
    # What `pallas_kernels.tune` chooses from, the default left out.
    spares = {(H, H_v): hopper_config.candidates(_spec(H=H, H_v=H_v))[1:] for H, H_v in dims}
    return [
        *(candidate(H, H_v, mask) for H, H_v in dims for mask in MASKS),
        *(candidate(*dims, mask, spare) for dims, of in spares.items() for spare in of for mask in ("plain", "causal")),
    ]


def fp8_candidates() -> list[Candidate]:
    def candidate(H: int, H_v: int, mask: str, spare: hopper_fp8_config.Fp8Config | None = None) -> Candidate:
        facts, optional = MASKS[mask]
        spec = _spec(H=H, H_v=H_v, precision="fp8", **facts)
        config = spare or hopper_fp8_config.default(spec)
        quantise = functools.partial(fp8.quantise, spec, block=config.kv_block)
        operands = jax.eval_shape(quantise, *_shapes(spec, "BTNH", "BSKH", "BSKV"))

        def attend(*arrays: Any, **facts: Any) -> Any:
            given = fp8.Operands(*arrays)
            return hopper_fp8.attend_operands(spec, given, scale=spec.default_scale, config=config, **facts)

        return _candidate(f"fp8-{H}-{H_v}-{mask}{_changes(spare)}", attend, spec, tuple(operands), optional)

    def prologue(H: int, H_v: int, mask: str) -> Candidate:
        facts, optional = MASKS[mask]
        spec = _spec(H=H, H_v=H_v, precision="fp8", **facts)
        quantise = functools.partial(hopper_fp8_prologue.quantise, spec)
        return _candidate(
            f"fp8-prologue-{H}-{H_v}-{mask}", quantise, spec, _shapes(spec, "BTNH", "BSKH", "BSKV"), optional
        )

    dims = [(64, 64), (128, 128), (192, 128), (256, 256)]
    # What `pallas_kernels.bench_attention_fp8 --candidates` times, the default left out.
    spares = {(H, H_v): hopper_fp8_config.candidates(_spec(H=H, H_v=H_v, precision="fp8"))[1:] for H, H_v in dims}
    return [
        *(candidate(H, H_v, mask) for H, H_v in dims for mask in MASKS),
        *(candidate(*dims, mask, spare) for dims, of in spares.items() for spare in of for mask in ("plain", "causal")),
        *(prologue(H, H_v, mask) for H, H_v in dims for mask in ("plain", "segments")),
    ]


def backward_candidates() -> list[Candidate]:
    def candidate(H: int, H_v: int, mask: str) -> Candidate:
        facts, optional = MASKS[mask]
        spec = _spec(H=H, H_v=H_v, **facts)
        arrays = _shapes(spec, "BTNH", "BSKH", "BSKV", "BTNV", "BTN", "BTNV", "BTN")
        kernel: Any = hopper_bwd_wide if hopper_config.is_wide(spec) else hopper_bwd
        function = functools.partial(kernel.backward, spec, scale=spec.default_scale)
        return _candidate(f"bwd-{H}-{H_v}-{mask}", function, spec, arrays, optional)

    dims = [(64, 64), (128, 128), (192, 128), (256, 256)]
    return [candidate(H, H_v, mask) for H, H_v in dims for mask in MASKS]


def _spec(**facts: Any) -> AttentionSpec:
    return AttentionSpec(**{"B": 2, "T": 4096, "S": 4096, "N": 8, "K": 4, "dtype": "bfloat16"} | facts)


def _shapes(spec: AttentionSpec, *dims: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of arrays with these dims; V is the value head dim, and the LSE, without head dim, is float32."""
    sizes = {name: getattr(spec, name) for name in "BTSNKH"} | {"V": spec.H_v}
    return tuple(
        jax.ShapeDtypeStruct([sizes[d] for d in array], spec.dtype if array[-1] in "HV" else jnp.float32)
        for array in dims
    )


def _candidate(
    name: str, function: Callable[..., Any], spec: AttentionSpec, arrays: tuple[Any, ...], optional: dict[str, Any]
) -> Candidate:
    integers = [jax.ShapeDtypeStruct([getattr(spec, d) for d in dims], jnp.int32) for dims in optional.values()]

    def call(*args: Any) -> Any:
        return function(*args[: len(arrays)], **dict(zip(optional, args[len(arrays) :], strict=True)))

    allowed: dict[str, Any] = {}
    if name == "fwd-256-256-everything":
        reason = "with every mask at once; of the loop over keys one load a step (SASS, 2026-11)"
        allowed = {"spill_bytes": 44, "reason": reason}
    elif name.startswith("fp8-256-256"):
        reason = "constants, saved once and read after the loop over keys (SASS, 2026-11)"
        allowed = {"spill_bytes": 60, "reason": reason}
    elif name.startswith("fp8-") and name.endswith("-everything"):
        allowed = {"spill_bytes": 24, "reason": "with every mask at once; where is not looked into (2026-11): open"}
    elif name.startswith("fp8-128-128-segments"):
        allowed = {"spill_bytes": 12, "reason": "few numbers; where is not looked into (2026-11): open"}
    elif name.startswith("bwd-128"):
        reason = "constants of the loops, saved once; no spill in the loop of full blocks (SASS, 2026-11)"
        allowed = {"spill_bytes": 24, "reason": reason}
    elif name.startswith("bwd-64"):
        reason = "constants of the loops, and at most 9 loads a step of full blocks (SASS, 2026-11): open"
        allowed = {"spill_bytes": 380, "reason": reason}
    return Candidate(name=name, function=call, args=(*arrays, *integers), **allowed)


def _changes(config: Any) -> str:
    """
    >>> _changes(Config(stages=3))
    '-stages=3'
    """
    if config is None:
        return ""
    fields = [(f.name, getattr(config, f.name), f.default) for f in dataclasses.fields(config)]
    return "".join(f"-{name}={value}" for name, value, default in fields if value != default) or "-unchanged"


def probes() -> dict[Candidate, list[str]]:
    """Small kernels, and the faults that the check must find in them."""

    def product(accumulate: Callable[..., Any], accumulators: int) -> Callable[..., Any]:
        def body(a_gmem, b_gmem, out_gmem, a, b, loaded):
            plgpu.copy_gmem_to_smem(a_gmem, a, loaded)
            plgpu.copy_gmem_to_smem(b_gmem, b, loaded)
            plgpu.barrier_wait(loaded)
            scratch = [plgpu.ACC((64, 256), jnp.float32)] * accumulators
            out_gmem[...] = pl.run_scoped(lambda *refs: accumulate(a, b, *refs), *scratch)

        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((64, 256), jnp.float32),
            scratch_types=[
                plgpu.SMEM((64, 64), jnp.bfloat16, transforms=transforms),
                plgpu.SMEM((64, 256), jnp.bfloat16, transforms=transforms),
                plgpu.Barrier(num_arrivals=2),
            ],
        )

    def once(a, b, acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    def too_early(a, b, acc):
        plgpu.wgmma(acc, a, b)
        return plgpu.wgmma_accumulator_load(acc, wait_n=1)

    def too_large(a, b, first, second):
        plgpu.wgmma(first, a, b)
        plgpu.wgmma(second, a, b)
        return first[...] * second[...]

    args = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 256), jnp.bfloat16))
    expected = [(once, 1, []), (too_early, 1, ["serialised"]), (too_large, 2, ["spills", "serialised"])]
    return {
        Candidate(name=f.__name__, function=product(f, accumulators), args=args): faults
        for f, accumulators, faults in expected
    }


def calls_of_a_step() -> tuple[int, int]:
    """How often a compiled training step calls kernels of attention and XLA's products of 8 bits, for one layer."""
    changes = {"model.n_layers": 4, "model.d_model": 256, "model.n_heads": 4, "model.n_kv_heads": 2, "model.d_ff": 512}
    changes |= {"model.vocab_size": 512, "seq_len": 512, "loss_chunk": 512, "accumulate": 2, "batch_size": 4}
    changes |= {"model.attention": "hopper", "model.linear_precision": "fp8"}
    config = train_preset("1b", **changes)
    rows = {name: jax.ShapeDtypeStruct((2, 2, 512), jnp.int32) for name in ("tokens", "targets", "positions")}
    args = abstract(config.model)[1], rows | {"loss_mask": jax.ShapeDtypeStruct((2, 2, 512), bool)}
    options: Any = step.COMPILER_OPTIONS | {"xla_gpu_enable_triton_gemm": False}
    options |= {"xla_gpu_autotune_level": "0"}  # there is no device to time on
    found = [mock.patch.object(family, "current_device", lambda: H200) for family in (api, fp8_api)]
    with found[0], found[1], aot.everything_printed([]):
        gradients = step.loss_functions(config, make_mesh({"fsdp": 1}, devices=jax.devices()[:1]))[0]
        text = aot.lower(gradients, args).compile(compiler_options=options).as_text()
    return text.count("mosaic_gpu_v2"), text.count('"__cublas$lt$matmul$f8"')


def main() -> int:
    for probe, faults in probes().items():
        found = compile_candidate(probe).faults(probe)
        if len(found) != len(faults) or not all(word in text for word, text in zip(faults, found, strict=True)):
            print(f"check_aot: the probe {probe.name} should have {faults}, and {found} was found")
            return 1
    if (calls := calls_of_a_step()) != (2, 21):
        print(f"check_aot: a training step calls {calls} kernels of attention and 8-bit products a layer, not (2, 21)")
        return 1
    failed = check(every := candidates())
    if not every:
        print("check_aot: there are no candidates - nothing was checked")
        return 1
    print(f"{len(every) - failed} of {len(every)} kernels without faults")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
