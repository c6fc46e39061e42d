"""Choosing: order of preference, refusals with their reasons, and the table that explains them."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from pallas_kernels.device import Device
from pallas_kernels.dispatch import Implementation, Unsupported, choose, explain

CPU = Device(platform="cpu", kind="cpu")


@dataclass(frozen=True)
class Even:
    op: ClassVar[str] = "halve"
    n: int


def implementation(name, why_not):
    return Implementation(name=name, why_not=why_not, forward=lambda spec: name)


FAST = implementation("fast", lambda spec, device: None if device.platform == "gpu" else f"needs a GPU, not {device}")
SMALL = implementation("small", lambda spec, device: None if spec.n < 10 else f"takes n below 10, not {spec.n}")
ANY = implementation("any", lambda spec, device: None)


def test_the_first_that_applies_is_chosen():
    assert choose((FAST, SMALL, ANY), Even(4), CPU) is SMALL
    assert choose((FAST, SMALL, ANY), Even(40), CPU) is ANY
    assert choose((FAST, SMALL, ANY), Even(40), Device(platform="gpu", kind="x")) is FAST


def test_a_name_gets_that_implementation_or_its_reason():
    assert choose((FAST, SMALL, ANY), Even(4), CPU, "any") is ANY
    with pytest.raises(
        Unsupported, match=r"halve: cannot run on cpu - 'fast': needs a GPU, not cpu\. Pass impl"
    ) as error:
        choose((FAST, SMALL, ANY), Even(4), CPU, "fast")
    assert error.value.rejected == (("fast", "needs a GPU, not cpu"),)
    assert isinstance(error.value, NotImplementedError)


def test_all_refusals_are_reported():
    with pytest.raises(Unsupported, match="'fast': .*; 'small': takes n below 10, not 40") as error:
        choose((FAST, SMALL), Even(40), CPU)
    assert [name for name, _ in error.value.rejected] == ["fast", "small"]


@pytest.mark.parametrize("call", [choose, explain])
def test_an_unknown_name_gets_the_nearest(call):
    with pytest.raises(
        ValueError, match=r"halve: unknown name='smal' .* Did you mean 'small'\? Known: fast, small, any\."
    ):
        call((FAST, SMALL, ANY), Even(4), CPU, "smal")


def test_explain_gives_a_reason_against_each():
    explanation = explain((FAST, SMALL, ANY), Even(4), CPU)
    assert explanation.chosen == "small"
    assert explanation.rejected == (("fast", "needs a GPU, not cpu"), ("any", "applies, but 'small' is preferred"))
    assert str(explanation).splitlines() == [
        "halve on cpu",
        "  Even(n=4)",
        "  fast   needs a GPU, not cpu",
        "> small  chosen",
        "  any    applies, but 'small' is preferred",
    ]


def test_explain_agrees_with_choose_and_does_not_raise():
    named = explain((FAST, SMALL, ANY), Even(4), CPU, "any")
    assert named.chosen == "any" and ("small", "applies, but 'any' was asked for") in named.rejected
    nothing = explain((FAST, SMALL), Even(40), CPU)
    assert nothing.chosen is None and len(nothing.rejected) == 2
