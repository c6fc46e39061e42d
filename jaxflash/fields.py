"""Values for the fields of a dataclass, by its type hints: read from text, and held against literals."""

import functools
import types
import typing
from typing import Any, Literal

from sharding.names import did_you_mean


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
        value = next((option for option in args if str(option) == value), value)
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


_hints = functools.cache(typing.get_type_hints)  # `jaxflash plan` makes thousands of configurations


def check_literals(what: str, config: Any) -> None:
    for name, hint in _hints(type(config)).items():
        if typing.get_origin(hint) is Literal:
            _check_literal(what, name, getattr(config, name), typing.get_args(hint))


def _check_literal(what: str, name: str, value: Any, options: tuple) -> None:
    if value not in options:
        raise ValueError(f"{what}: unknown {name}={value!r}. {did_you_mean(str(value), options)}")
