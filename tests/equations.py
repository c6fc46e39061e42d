"""The equations of a traced program, for tests of what it computes and how often."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params


def equations(jaxpr: Any, primitive: str) -> Iterator[Any]:
    """Every equation of this primitive in a jaxpr, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, primitive)
