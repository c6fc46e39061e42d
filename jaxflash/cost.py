"""What a training step takes of a device: bytes held, bytes sent and seconds, from a configuration and a mesh alone.

    arguments   parameters, two float32 moments and the batch, as the rules of `sharding.rules` split them: exact
    gradients   float32, and beside the sums over microbatches those of the one at work
    activations what `model.remat` keeps of every layer of the microbatches under way
    buffers     logits and their gradient, or what one layer's backward computes again; weights gathered for their use

On one and two H200s the sum was within 10 % of the measured peak (tests/jaxflash/test_plan.py).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxflash import stages
from jaxflash.config import ModelConfig, TrainConfig
from jaxflash.model import abstract, attention_flops_per_token, flops_per_token
from sharding import rules
from sharding.cost import Links, all_gather, all_reduce

_FLOAT32 = 4
_UPDATE_BYTES = 28  # of AdamW, for each element: gradient, parameter and moments read, the last three written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What a device gives. memory: bytes, of which JAX takes `usable` (its default: XLA_PYTHON_CLIENT_MEM_FRACTION).

    peak: dense bfloat16 FLOP/s (NVIDIA's data sheet of the H200). efficiency: the part of it that a step reaches
    without collectives; 0.525 is `1b` on one H200 (notebooks/results/scaling_h200.jsonl). copy: bytes a second of
    elementwise work (measured). links: collectives of two H200s reached 250 GB/s there, by NVLink; 50 GB/s is the
    nominal rate of one 400 Gb/s adapter for each GPU.
    """

    memory: float = 141e9
    usable: float = 0.75
    peak: float = 989e12
    efficiency: float = 0.525
    copy: float = 3.4e12
    links: Links = Links(within=250e9, between=50e9, per_host=8)

    def __post_init__(self):
        if not (0 < self.usable <= 1 and 0 < self.efficiency <= 1 and self.peak > 0 and self.links.per_host > 0):
            raise ValueError(
                f"plan: {self.usable=} and {self.efficiency=} must lie in (0, 1], {self.peak=} and the devices of a "
                f"host, {self.links.per_host}, be positive."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device at the peak of a step."""

    parameters: int
    optimizer: int
    inputs: int
    gradients: int
    activations: int
    buffers: int

    @property
    def arguments(self) -> int:
        """What the compiled step is called with."""
        return self.parameters + self.optimizer + self.inputs

    @property
    def total(self) -> int:
        return self.arguments + self.gradients + self.activations + self.buffers


class Step:
    """One step of `config` on `mesh`, which `step.check_layout` accepts."""

    def __init__(self, config: TrainConfig, mesh: Mesh | AbstractMesh):
        self.config, self.mesh, self.model = config, mesh, config.model
        self.sizes = dict(mesh.shape)
        self.schedule = stages.schedule_of(config, mesh)
        self.stored, self.split, self.gathered = _elements(config.model, mesh, config.schedule, config.zero)
        self.param, self.compute = (_itemsize(d) for d in (self.model.param_dtype, self.model.compute_dtype))
        rows = config.batch_size // config.accumulate // rules.ways("batch", mesh)
        self.length = config.seq_len // rules.ways("sequence", mesh)
        self.tokens = rows * self.length  # of a microbatch, on a device
        if self.schedule is None:
            self.layers = self.model.n_layers
        else:
            self.layers = self.schedule.capacity(self.model.n_layers) * self.schedule.chunks
        self._stream = self.tokens * self.model.d_model * self.compute  # the residual stream of a microbatch

    @property
    def _dealt(self) -> int:
        """Elements of the blocks that are stored in another order than the stages take them (`sharding.chunks`)."""
        in_order = self.schedule is None or stages.layout_rules(self.config, self.mesh)["layer"]
        return 0 if in_order else self.stored.blocks

    @property
    def bubble(self) -> float:
        return 0.0 if self.schedule is None else self.schedule.bubble(self.model.n_layers)

    @functools.cached_property
    def memory(self) -> Memory:
        config, split = self.config, self.split.total
        several = config.accumulate > 1
        sums = self.stored.total if several else split
        field_bytes = 3 * 4 + 1 + 4 * (config.packing == "documents")  # tokens, targets, positions; mask; segment ids
        return Memory(
            parameters=self.stored.total * self.param,
            optimizer=split * 2 * _FLOAT32 + 3 * 4,  # AdamW, the schedule and the state count steps
            inputs=config.accumulate * self.tokens * field_bytes,
            # A pipeline adds a layer's to the sums as it finds them.
            gradients=sums * (_FLOAT32 + self.param * (several and self.schedule is None)),
            activations=self._activations(),
            buffers=self._buffers(gathers=config.zero == 3 and self.gathered.total > split),
        )

    def _activations(self) -> int:
        of_layers = self.tokens * _kept_bytes(self.model, self.model.remat, self.sizes["tensor"], self.compute)
        if self.schedule is None:
            return self.layers * of_layers + 3 * self._stream  # embedded, hidden, and the gradient on its way
        chunk = self.schedule.capacity(self.model.n_layers) * of_layers
        return self.schedule.stash * (chunk + self._stream) + 3 * self._stream

    def _buffers(self, *, gathers: bool) -> int:
        """The larger of the head's and a layer's backward; weights in the compute dtype, and their gradients."""
        tensor = self.sizes["tensor"]
        places = min(self.length, -(-self.config.loss_chunk // rules.ways("sequence", self.mesh)))
        places = -(-places // self.sizes["stage"])
        logits = self.tokens // self.length * places * self.model.vocab_size // tensor
        layer = self.tokens * _kept_bytes(self.model, "none", tensor, self.compute)
        weights = self.gathered.others + self.gathered.blocks // self.layers
        each = self.compute + _FLOAT32 + (self.param if gathers else 0)
        return max(logits * (_FLOAT32 + self.compute), layer) + weights * each + self._dealt * self.param

    @functools.cached_property
    def sent(self) -> dict[str, float]:
        """Bytes that a device sends along each mesh axis in a step; 0 along those of size 1."""
        n, accumulate, model = self.sizes, self.config.accumulate, self.model
        whole, split = self.gathered.total, self.split.total
        sent = dict.fromkeys(n, 0.0)
        sent["data"] = all_reduce(split * _FLOAT32, n["data"])
        # ZeRO-3 gathers for the forward and again for the backward pass, and scatters what that finds; ZeRO-1 scatters
        # and gathers once.
        sent["fsdp"] = all_gather(whole * (self.param + _FLOAT32), n["fsdp"])
        if self.config.zero == 3:
            sent["fsdp"] = accumulate * all_gather(3 * whole * self.param, n["fsdp"])
        again = model.remat in ("full", "attention")
        products = self.layers * (4 + again) + 2  # two of a layer's products end in a sum, and so do their gradients
        sent["tensor"] = accumulate * products * all_reduce(self._stream, n["tensor"])
        _, kv = _heads(model, n["tensor"])
        hop = self.tokens * 2 * kv
        passes = (2 + (model.remat in ("full", "dots"))) * self.compute + _FLOAT32  # k and v, and at last dk and dv
        ring = self.layers * (n["context"] - 1) * hop * passes
        sent["context"] = accumulate * (ring + all_reduce(split * self.param, n["context"]))
        if self.schedule is not None:
            moved = 2 * self.schedule.chunks * self._stream
            ends = all_gather(self._stream, n["stage"])  # parts of what leaves the last layer, or gradients of these
            shared = all_reduce(self.stored.others * _FLOAT32, n["stage"])
            dealt = all_gather(self._dealt * (self.param + _FLOAT32), n["stage"])  # and their gradients, collected
            sent["stage"] = accumulate * (moved + ends) + shared + dealt
        return sent

    @functools.cached_property
    def flops(self) -> float:
        """Of a device in a step, what is computed again included."""
        config, model = self.config, self.model
        layers = sum(size for in_blocks, size, names in _parameters(model) if in_blocks and len(names) == 3)
        products, attention = (
            2.0 * layers,
            attention_flops_per_token(model, config.seq_len) / 3,
        )  # forward, of the layers
        again = {
            "none": 0.0,
            "dots_and_attention": 0.0,
            "dots": attention,
            "attention": products,
            "full": products + attention,
        }[model.remat]
        return (_flops_per_token(model, config.seq_len) + again) * config.batch_size * config.seq_len / self.mesh.size

    def seconds(self, machine: Machine) -> float:
        """Computing, waiting in the bubble, updating and sending, one after the other: nothing is taken to overlap."""
        computing = self.flops / (machine.peak * machine.efficiency) / (1 - self.bubble)
        updating = _UPDATE_BYTES * self.split.total / machine.copy
        return (
            computing
            + updating
            + sum(size / machine.links.bandwidth(self.sizes, axis) for axis, size in self.sent.items())
        )


@functools.lru_cache(maxsize=8)
def parameter_shapes(model: ModelConfig) -> tuple[Any, Any]:
    """Shapes and logical axes of the parameters; to be read, not changed."""
    return abstract(model)[1:]


class _Elements(NamedTuple):
    """Of the parameters on a device: of the blocks, and of the others."""

    blocks: int
    others: int

    @property
    def total(self) -> int:
        return self.blocks + self.others


@functools.lru_cache(maxsize=4096)
def _elements(
    model: ModelConfig, mesh: Mesh | AbstractMesh, schedule: str, zero: int
) -> tuple[_Elements, _Elements, _Elements]:
    """As they are stored; as gradients and moments are; and with what fsdp splits gathered."""
    facts: Any = TrainConfig(model=model, seq_len=1, schedule=schedule, zero=zero)  # type: ignore[arg-type]
    split = stages.layout_rules(facts, mesh)

    def held(table: rules.Rules) -> _Elements:
        sums = [0, 0]
        for in_blocks, size, names in _parameters(model):
            sums[not in_blocks] += size // math.prod(rules.ways(name, mesh, table) for name in names if name)
        return _Elements(*sums)

    return held(stages.parameter_rules(facts, mesh)), held(split), held(rules.whole_over("fsdp", split))


@functools.lru_cache(maxsize=64)
def _parameters(model: ModelConfig) -> tuple[tuple[bool, int, tuple[str | None, ...]], ...]:
    """(whether it is of the blocks, size, logical axes) of every parameter."""
    shapes, axes = parameter_shapes(dataclasses.replace(model, remat="none"))
    names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return tuple((path[0].key == "blocks", leaf.size, n) for (path, leaf), n in zip(leaves, names, strict=True))


_flops_per_token = functools.lru_cache(maxsize=64)(flops_per_token)


def _itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def _heads(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Width of the queries and of the keys on a device; key/value heads that do not divide are whole on each."""
    kv = model.n_kv_heads * model.head_dim
    return model.n_heads * model.head_dim // tensor, kv // tensor if model.n_kv_heads % tensor == 0 else kv


def _kept_bytes(model: ModelConfig, remat: str, tensor: int, itemsize: int) -> int:
    """Bytes of a token that one layer keeps for its backward pass: what the policies of `model.REMAT_POLICIES` save."""
    (q, kv), d, ff = _heads(model, tensor), model.d_model, model.d_ff // tensor
    attention = q * itemsize + model.n_heads // tensor * _FLOAT32  # output and LSE
    dots = (d + q + 2 * kv + 2 * ff) * itemsize  # all but `down`, whose output nobody needs
    if remat == "none":
        # Both norms in float32 thrice; what their products read; q, k and v rotated; six of the MLP's width.
        return 2 * 3 * d * _FLOAT32 + (3 * d + q + 2 * kv + 6 * ff) * itemsize + attention
    kept = {"full": 0, "dots": dots, "attention": attention, "dots_and_attention": dots + attention}
    return d * itemsize + kept[remat]
