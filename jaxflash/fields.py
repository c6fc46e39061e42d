"""Values from outside, strings and JSON, as fields of dataclasses: by their types, or an error that names the field."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from sharding.names import did_you_mean


def build[C](cls: type[C], values: Mapping[str, Any], where: str) -> C:
    """The dataclass `cls` of the JSON object `values`; ValueError, in the name of `where`, for what it is not."""
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise ValueError(f"{where}: unknown key {key!r}. {did_you_mean(key, hints)}")
    kwargs = {}
    for key, value in values.items():
        inner = next((t for t in (hints[key], *typing.get_args(hints[key])) if dataclasses.is_dataclass(t)), None)
        nested = inner is not None and isinstance(value, Mapping)
        path = f"{where}.{key}"
        kwargs[key] = build(inner, value, path) if nested else read(path, value, hints[key])  # type: ignore[arg-type]
    try:
        return cls(**kwargs)
    except TypeError as error:
        raise ValueError(f"{where}: {error}. Is the file from another version?") from error


def read(where: str, value: Any, hint: Any) -> Any:
    """`value`, or what the string `value` says, as the type `hint`."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None or (isinstance(value, str) and value.lower() == "none" and type(None) in options):
        if type(None) not in options:
            raise ValueError(f"{where}: None is not allowed.")
        return None
    target = next(t for t in options if t is not type(None))
    origin, args = typing.get_origin(target), typing.get_args(target)
    if origin is Literal:
        what, _, name = where.rpartition(".")
        _check_literal(what, name, value, args)
        return value
    try:
        if origin is tuple:
            items = [part for part in value.split(",") if part] if isinstance(value, str) else value
            return tuple(read(where, item, args[0]) for item in items)
        if target is bool:
            return value if isinstance(value, bool) else {"true": True, "false": False}[str(value).lower()]
        if target is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        if target is int or target is float or target is str:
            return target(value)
        if not isinstance(value, origin or target):
            raise TypeError
    except (ValueError, TypeError, KeyError):
        kind = getattr(target, "__name__", str(target))
        raise ValueError(f"{where}: {value!r} is not of type {kind}. Give a {kind}.") from None
    return value


def check_literals(what: str, config: Any) -> None:
    """Raises ValueError for a field of type Literal that holds none of its values."""
    for name, hint in typing.get_type_hints(type(config)).items():
        if typing.get_origin(hint) is Literal:
            _check_literal(what, name, getattr(config, name), typing.get_args(hint))


def _check_literal(what: str, name: str, value: Any, options: tuple) -> None:
    if value not in options:
        raise ValueError(f"{what}: unknown {name}={value!r}. {did_you_mean(str(value), options)}")
