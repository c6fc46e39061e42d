"""The quantised linears of a Hub folder: which tensors are whose, and what can be checked before anything is placed."""

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from jaxflash.config import ModelConfig
from jaxflash.hf.names import HEAD, Place, some, wanted
from jaxflash.hf.scheme import Scheme
from jaxflash.hf.tensors import StoredTensor
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.w4a16.layout import padded
from pallas_kernels.w4a16.spec import GROUPS, SCALE_DTYPES
from quant.formats import gptq
from quant.formats.api import FORMATS
from quant.formats.grid import Format, Grid, LinearSpec, Tensors

_EVERYTHING = slice(None)


@dataclass(frozen=True, kw_only=True)
class StoredLinear:
    """One quantised weight of a checkpoint, of which `spec` is known and nothing has been read.

    name: the linear's, as "model.layers.0.mlp.up_proj". tensors: by their suffix.
    """

    name: str
    place: Place
    format: Format
    spec: LinearSpec
    tensors: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def grid(self) -> Grid:
        """What its codes stand for. Raises ValueError, with its name, for values that no weight has."""
        try:
            return self.format.read_grid(self._grid_tensors(), self.spec)
        except ValueError as error:
            raise ValueError(f"load: {self.name!r}: {error}") from error

    def codes(self, columns: slice = _EVERYTHING) -> UInt8[np.ndarray, "k n"]:
        """The codes of these columns of W, whose bounds are multiples of 8 or W's own; no others are read."""
        start, stop, _ = columns.indices(self.spec.N)
        dim, each = self.format.columns
        index = [_EVERYTHING, _EVERYTHING]
        index[dim] = slice(start // each, -(-stop // each))
        words = self.tensors[self.format.codes].read(tuple(index))
        return self.format.read_codes(words, dataclasses.replace(self.spec, N=stop - start))

    def _grid_tensors(self) -> Tensors:
        names = (name for name in self.tensors if name != self.format.codes)
        return {name: self.tensors[name].read((_EVERYTHING,) * len(self.tensors[name].shape)) for name in names}


@dataclass(frozen=True, kw_only=True)
class StackFacts:
    """What all layers of one parameter have in common, so that they can be one stack."""

    shape: tuple[int, int]
    group: int
    zeros: bool
    ordered: bool
    scale_dtype: str


def take_linears(
    config: ModelConfig, scheme: Scheme, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredLinear], dict[str, StoredTensor]]:
    """(linears that are quantised, by the names of their dense weights, and the tensors that are left). Reads nothing.

    Raises:
      ValueError: tensors of a linear that are missing, or of another shape or dtype than the configuration makes them.
      Unsupported: a group size that is not served, a quantised head, or a parameter quantised in some layers only.
    """
    form, rest, linears, missing = FORMATS[scheme.format], dict(stored), {}, []
    quantised_head = f"{HEAD.removesuffix('weight')}{form.codes}"
    if quantised_head in stored:
        _refuse(f"{quantised_head!r}, a quantised head", "The head is dense here: use a checkpoint in which it is.")
    for name, place in wanted(config, stored).items():
        module = name.removesuffix(".weight")
        if place.layer is None or not place.transposed or not scheme.quantises(module):
            continue
        spec = _spec(module, scheme, place.shape)
        layout = form.layout(spec)
        missing += [f"{module}.{suffix}" for suffix in layout if f"{module}.{suffix}" not in stored]
        tensors = {suffix: rest.pop(f"{module}.{suffix}") for suffix in layout if f"{module}.{suffix}" in rest}
        linears[name] = StoredLinear(name=module, place=place, format=form, spec=spec, tensors=tensors)
    if missing:
        raise ValueError(
            f"load: {len(missing)} tensors of quantised weights are missing: {some(missing)} - the checkpoint is not "
            "complete, or quantization_config is of another one. Fetch both again."
        )
    for linear in linears.values():
        _check_layout(linear)
    _check_stacks(config, linears)
    return linears, rest


def _spec(module: str, scheme: Scheme, shape: tuple[int, ...]) -> LinearSpec:
    N, K = shape
    group = min(scheme.group or K, K)
    if group < K and group not in GROUPS:
        _refuse(f"groups of {group} of the {K} rows of {module!r}", f"Served are {GROUPS}, and whole columns.")
    return LinearSpec(K=K, N=N, group=group, zeros=not scheme.symmetric, ordered=scheme.ordered)


def _check_layout(linear: StoredLinear) -> None:
    for suffix, (shape, dtypes) in linear.format.layout(linear.spec).items():
        tensor = linear.tensors[suffix]
        if tensor.shape != shape or tensor.dtype.name not in dtypes:
            raise ValueError(
                f"load: {tensor.name!r} has shape={tensor.shape} and dtype={tensor.dtype.name!r}, a weight of "
                f"{linear.spec.K} inputs and {linear.spec.N} outputs in groups of {linear.spec.group} makes it {shape} "
                f"of {' or '.join(dtypes)} - files and configuration are of different models. Fetch both again."
            )


def _check_stacks(config: ModelConfig, linears: Mapping[str, StoredLinear]) -> None:
    layers: dict[tuple[str, ...], set[int | None]] = {}
    for linear in linears.values():
        layers.setdefault(linear.place.path, set()).add(linear.place.layer)
    for path, found in layers.items():
        if len(found) < config.n_layers:
            dense = next(layer for layer in range(config.n_layers) if layer not in found)
            _refuse(
                f"{'/'.join(path)!r} quantised in {len(found)} of {config.n_layers} layers, not in layer {dense}",
                "All layers of a parameter are quantised here, or none.",
            )


def survey(
    linears: Mapping[str, StoredLinear], scheme: Scheme
) -> tuple[dict[str, StoredLinear], dict[tuple[str, ...], StackFacts]]:
    """(the linears, of the version that their zero points show, and the facts of each stack). Reads all but the codes.

    A GPTQ checkpoint that says it is symmetric shows by its zero points which version it is of; where that is not the
    version that it says, a warning tells, and so does one where it is not symmetric at all.

    Raises:
      ValueError: scales that are not finite, or groups that no weight has.
      Unsupported: scales of no dtype that the product has.
    """
    shown = _shown_version(linears, scheme)
    if shown is not None and shown != scheme.format:
        _warn(f"has checkpoint_format={scheme.format!r}, but its symmetric zero points are {shown!r}'s; read as those")
        linears = {name: dataclasses.replace(linear, format=FORMATS[shown]) for name, linear in linears.items()}
    stacks: dict[tuple[str, ...], StackFacts] = {}
    dtypes: dict[tuple[str, ...], dict[str, bool]] = {}
    odd: dict[str, str] = {}
    for linear in linears.values():
        grid, path = linear.grid(), linear.place.path
        before = stacks.get(path)
        K, group = linear.spec.K, linear.spec.group
        stacks[path] = StackFacts(
            shape=(K, linear.spec.N),
            group=group if group < K else padded(K),
            zeros=grid.zeros is not None or (before is not None and before.zeros),
            ordered=grid.g_idx is not None or (before is not None and before.ordered),
            scale_dtype=_linear_dtype(grid),
        )
        fits = dtypes.setdefault(path, dict.fromkeys(SCALE_DTYPES, True))
        dtypes[path] = {dtype: ok and _holds(grid, dtype) for dtype, ok in fits.items()}
        if scheme.symmetric and grid.zeros is not None:
            odd.setdefault("says that it is symmetric, but has zero points that are not 8", linear.name)
        if not scheme.ordered and grid.g_idx is not None:
            odd.setdefault("says that rows are in order, but has a g_idx that is not", linear.name)
    for fact, name in odd.items():
        _warn(f"{fact}, first in {name!r}; they are used as stored")
    return dict(linears), {
        path: dataclasses.replace(facts, scale_dtype=_common_dtype(path, facts.scale_dtype, dtypes[path]))
        for path, facts in stacks.items()
    }


def _shown_version(linears: Mapping[str, StoredLinear], scheme: Scheme) -> str | None:
    if scheme.format not in gptq.SYMMETRIC_WORDS or not scheme.symmetric:
        return None
    shown = {gptq.version_of_zeros(linear.tensors["qzeros"].read((_EVERYTHING,) * 2)) for linear in linears.values()}
    return shown.pop() if len(shown) == 1 else None


def _linear_dtype(grid: Grid) -> str:
    return jnp.dtype(grid.scales.dtype).name


def _holds(grid: Grid, dtype: str) -> bool:
    with np.errstate(over="ignore"):
        cast = grid.scales.astype(jnp.dtype(dtype)).astype(np.float32)
    return bool((cast == grid.scales.astype(np.float32)).all())


def _common_dtype(path: tuple[str, ...], stored: str, fits: Mapping[str, bool]) -> str:
    """A dtype that holds every scale of a stack as it is; the stored one, where that is served."""
    if fits.get(stored):
        return stored
    exact = [dtype for dtype, ok in fits.items() if ok]
    if not exact:
        _refuse(f"{stored} scales of {'/'.join(path)!r} that {' and '.join(SCALE_DTYPES)} round", "Quantise it anew.")
    return exact[0]


def _warn(fact: str) -> None:
    warnings.warn(f"load: quantization_config {fact}.", stacklevel=2)


def _refuse(reason: str, remedy: str) -> NoReturn:
    raise Unsupported(f"load: the checkpoint has {reason}. {remedy}", [("quantised weights", reason)])
