"""Every implementation on every case: values and gradients against the oracle."""

import dataclasses
import itertools

import pytest

from pallas_kernels.attention import reference
from pallas_kernels.attention.api import IMPLEMENTATIONS
from pallas_kernels.attention.cases import CASES
from pallas_kernels.device import current_device
from tests.pallas_kernels.attention.check import against_oracle


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Tiles far smaller than the cases, of sizes that divide few of their lengths."""
    monkeypatch.setattr(reference, "chunk_sizes", lambda spec: (min(spec.T, 16), min(spec.S, 24)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda implementation: implementation.name)
def test_values_and_gradients(implementation, case):
    device = current_device()
    # An implementation that takes 16 bits only, or cannot return the LSE, is still held to everything else.
    for dtype, return_lse in itertools.product((CASES[case].dtype, "bfloat16"), (True, False)):
        attempt = dataclasses.replace(CASES[case], dtype=dtype)
        reason = implementation.why_not(attempt.spec(return_lse=return_lse), device)
        if reason is None:
            return against_oracle(attempt.arguments(), implementation.name, return_lse=return_lse)
    pytest.skip(reason)
