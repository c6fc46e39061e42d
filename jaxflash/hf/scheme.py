"""quantization_config of a Hub folder <-> Scheme: the format, the groups, and which linears it is of.

Keys are those of GPTQModel, AutoAWQ, compressed-tensors and transformers' FineGrainedFP8Config.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jaxflash.hf.documents import MAX_CONFIG_BYTES, get_flag, get_size, read_object
from jaxflash.hf.selection import Selection
from pallas_kernels.dispatch import Unsupported
from sharding.names import did_you_mean

FP8 = "fp8"
FLOAT = "float-quantized"  # compressed-tensors' name of FP8 weights
_WHAT = "quantization_config"
_ANY = Selection(patterns=("",))


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a checkpoint is quantised.

    format: a name of quant.formats.api.FORMATS, or "fp8", or, to be written, "float-quantized". group: rows of a group,
    None for the whole column. symmetric, ordered: whether the configuration says that all zero points are 8, and that
    rows are in activation order. block: of FP8 scales, None for those of a tensor or of rows; by_row: which of the two,
    to be written. targets, ignored: the linears that are quantised are those among the first and not the second.
    """

    format: str
    group: int | None = None
    symmetric: bool = True
    ordered: bool = False
    block: tuple[int, int] | None = None
    by_row: bool = False
    targets: Selection = _ANY
    ignored: Selection = Selection()

    def quantises(self, linear: str) -> bool:
        """Whether the linear of this name is quantised."""
        return linear in self.targets and linear not in self.ignored


def read_scheme(folder: Path, values: Mapping[str, Any]) -> Scheme | None:
    """The scheme of the Hub folder whose config.json holds `values`; None for dense weights.

    It stands in config.json, in quantize_config.json (AutoGPTQ's, which names no method), or in both alike.

    Raises:
      ValueError: a key of the wrong type, or two places that contradict each other.
      Unsupported: a method, width or layout that is not served.
    """
    found = []
    if values.get(_WHAT) is not None:
        if not isinstance(values[_WHAT], Mapping):
            raise ValueError(f"load: config.json has {_WHAT}={values[_WHAT]!r} - must be an object.")
        found.append(to_scheme(values[_WHAT]))
    beside = folder / "quantize_config.json"
    if beside.is_file():
        found.append(to_scheme({"quant_method": "gptq", **read_object(beside, limit=MAX_CONFIG_BYTES)}))
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(
            f"load: config.json and quantize_config.json describe different weights: {found[0]} and {found[1]}. Keep "
            "the one that holds."
        )
    return found[0] if found else None


def to_scheme(values: Mapping[str, Any]) -> Scheme:
    """The scheme that a quantization_config describes. Raises what `read_scheme` does."""
    methods = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8}
    method = values.get("quant_method")
    if not isinstance(method, str) or method not in methods:
        _refuse(f"quant_method={method!r}", did_you_mean(str(method), methods))
    return methods[method](values)


def to_config(scheme: Scheme, dense: Sequence[str] = ()) -> dict[str, Any]:
    """The quantization_config of `scheme`, in the keys that transformers, vLLM and SGLang read.

    dense: linears of every layer that are not quantised, as "mlp.down_proj".
    """
    size = -1 if scheme.group is None else scheme.group
    if scheme.format in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": size,
            "desc_act": scheme.ordered,
            "sym": scheme.symmetric,
            "lm_head": False,
            "pack_dtype": "int32",
            "checkpoint_format": scheme.format,
            **({"dynamic": {_rule(name, "-:"): {} for name in dense}} if dense else {}),
        }
    if scheme.format == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": size,
            "version": "gemm",
            "zero_point": True,  # they are stored, whatever they are
            "modules_to_not_convert": list(dense) or None,
        }
    if scheme.format == FP8:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(scheme.block or ()) or None,
            "modules_to_not_convert": ["lm_head", *dense],
        }
    if scheme.format == FLOAT:
        return _float_quantized(scheme, dense)
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "dynamic": False,
        "actorder": "group" if scheme.ordered else None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(_rule(name, "re:") for name in dense)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _float_quantized(scheme: Scheme, dense: Sequence[str]) -> dict[str, Any]:
    strategy = "block" if scheme.block else "channel" if scheme.by_row else "tensor"
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = kind | {"strategy": strategy, "dynamic": False}
    inputs = kind | {"strategy": {"block": "group", "channel": "token", "tensor": "tensor"}[strategy], "dynamic": True}
    if scheme.block:
        weights["block_structure"] = list(scheme.block)
        inputs["group_size"] = scheme.block[1]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FLOAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(_rule(name, "re:") for name in dense)],
        "kv_cache_scheme": None,
    }


def _rule(linear: str, prefix: str) -> str:
    return prefix + r".*\." + linear.replace(".", r"\.") + "$"


def _gptq(values: Mapping[str, Any]) -> Scheme:
    _four_bits(values, "bits")
    stored = values.get("checkpoint_format") or values.get("format") or "gptq"
    if get_flag(values, "is_marlin_format", False, what=_WHAT) or stored not in ("gptq", "gptq_v2"):
        _refuse(f"GPTQ weights in {stored!r} order", "Use a checkpoint in gptq or gptq_v2 order.")
    if values.get("pack_dtype") not in (None, "int32"):
        _refuse(f"pack_dtype={values['pack_dtype']!r}", "Use a checkpoint packed into int32.")
    if get_flag(values, "lm_head", False, what=_WHAT):
        _refuse("lm_head=true", "The head is dense here: use a checkpoint in which it is.")
    scheme = Scheme(
        format=stored,
        group=_group(values, "group_size"),
        symmetric=get_flag(values, "sym", True, what=_WHAT),
        ordered=get_flag(values, "desc_act", False, what=_WHAT),
        targets=_gptq_targets(values),
        ignored=Selection(patterns=tuple(_gptq_skipped(values))),
    )
    for rule, changes in _dynamic(values).items():
        if not rule.startswith("-:"):
            own = {**values, **changes, "dynamic": None}
            if _gptq(own) != _gptq({**values, "dynamic": None}):
                _refuse(
                    f"other settings for {rule!r} ({str(changes)[:80]})",
                    "All layers of a linear are quantised alike here.",
                )
    return scheme


def _dynamic(values: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    held = values.get("dynamic")
    if held is None:
        return {}
    if not isinstance(held, Mapping) or not all(isinstance(changes, Mapping) for changes in held.values()):
        raise ValueError(f"load: {_WHAT} has dynamic={held!r} - must map patterns to objects.")
    return dict(held)


def _gptq_skipped(values: Mapping[str, Any]) -> list[str]:
    return [rule.removeprefix("-:") for rule in _dynamic(values) if rule.startswith("-:")]


def _gptq_targets(values: Mapping[str, Any]) -> Selection:
    held = values.get("modules_in_block_to_quantize")
    if held is None:
        return _ANY
    flat = [name for part in _list(held) for name in (part if isinstance(part, list) else [part])]
    return Selection(parts=tuple(f".{name}" for name in _texts(flat, "modules_in_block_to_quantize")))


def _awq(values: Mapping[str, Any]) -> Scheme:
    bits, size = (old if old in values else new for old, new in (("w_bit", "bits"), ("q_group_size", "group_size")))
    _four_bits(values, bits)
    version = str(values.get("version", "gemm")).lower()
    if version not in ("gemm", "gemv"):
        _refuse(f"AWQ {version=}", "Use a checkpoint of version gemm.")
    return Scheme(
        format="awq" if version == "gemm" else "awq_gemv",
        group=_group(values, size),
        symmetric=not get_flag(values, "zero_point", True, what=_WHAT),
        ignored=Selection(parts=tuple(_texts(values.get("modules_to_not_convert"), "modules_to_not_convert"))),
    )


def _fp8(values: Mapping[str, Any]) -> Scheme:
    block = values.get("weight_block_size")
    return Scheme(format=FP8, block=None if block is None else _block(block))


def _compressed_tensors(values: Mapping[str, Any]) -> Scheme:
    sparsity = values.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        _refuse(f"sparse weights ({sparsity.get('format')!r})", "Use a checkpoint that is not.")
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"load: {_WHAT} has config_groups={groups!r} - must be an object with a group.")
    schemes = {key: _group_scheme(str(key), group, values) for key, group in groups.items()}
    first = next(iter(schemes.values()))
    if any(scheme != first for scheme in schemes.values()):
        _refuse(f"groups that differ ({', '.join(map(str, schemes))})", "All linears are quantised alike here.")
    targets = [t for group in groups.values() for t in _texts(group.get("targets"), "targets")]
    return Scheme(
        format=first.format,
        group=first.group,
        symmetric=first.symmetric,
        ordered=first.ordered,
        block=first.block,
        targets=_ANY if "Linear" in targets else _selection(targets),
        ignored=_selection(_texts(values.get("ignore"), "ignore")),
    )


def _group_scheme(key: str, group: Any, values: Mapping[str, Any]) -> Scheme:
    """The scheme of one of `config_groups`, its targets apart."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError(f"load: {_WHAT} has no weights in config_groups.{key} - must be an object.")
    stored, kind = group.get("format") or values.get("format"), (weights.get("num_bits"), weights.get("type", "int"))
    strategy, order = weights.get("strategy"), weights.get("actorder")
    if (stored, kind) in (("float-quantized", (8, "float")), ("naive-quantized", (8, "float"))):
        if strategy not in ("tensor", "channel", "block"):
            _refuse(f"{strategy=} of FP8 weights", "Use one by tensor, channel or block.")
        return Scheme(format=FP8, block=_block(weights.get("block_structure")) if strategy == "block" else None)
    if stored != "pack-quantized" or kind != (4, "int"):
        bits, type_ = kind
        _refuse(f"format={stored!r} of {bits!r} bits, type={type_!r}", "Use pack-quantized of 4-bit int, or FP8.")
    if group.get("input_activations") is not None:
        _refuse("quantised activations of 4-bit weights", "Use a checkpoint of weights only (W4A16).")
    if strategy not in ("group", "channel"):
        _refuse(f"{strategy=} of 4-bit weights", "Use one by group or channel.")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise ValueError(f"load: {_WHAT} has actorder={order!r} - must be group, weight or null.")
    return Scheme(
        format="compressed-tensors",
        group=_group(weights, "group_size") if strategy == "group" else None,
        symmetric=get_flag(weights, "symmetric", True, what=_WHAT),
        ordered=order in (True, "group", "dynamic"),
    )


def _selection(names: Sequence[str]) -> Selection:
    """compressed-tensors' rules: "re:" and a pattern, or a name."""
    return Selection(
        names=frozenset(name for name in names if not name.startswith("re:")),
        patterns=tuple(name.removeprefix("re:") for name in names if name.startswith("re:")),
    )


def _four_bits(values: Mapping[str, Any], key: str) -> None:
    bits = get_size(values, key, what=_WHAT)
    if bits != 4:
        _refuse(f"{bits} bits", "Weights of 4 are served: use such a checkpoint, or a dense one.")


def _group(values: Mapping[str, Any], key: str) -> int | None:
    return None if values.get(key) == -1 else get_size(values, key, what=_WHAT)


def _block(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"load: {_WHAT} has blocks of {value!r} - must be two sizes.")
    rows, columns = (get_size({"block size": size}, "block size", what=_WHAT) for size in value)
    return rows, columns


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"load: {_WHAT} has {value!r} - must be a list.")
    return value


def _texts(value: Any, key: str) -> list[str]:
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise ValueError(f"load: {_WHAT} has {key}={value!r} - must be a list of texts.")
    return value or []


def _refuse(reason: str, remedy: str) -> NoReturn:
    raise Unsupported(f"load: {_WHAT} has {reason}, which is not served. {remedy}", [(_WHAT, reason)])
