"""What ptxas prints, read without it: the compiler itself runs under `make aot`."""

import jax
import jax.numpy as jnp
import pytest

from tests.mosaic.aot import Candidate, parse, shape_struct

LOG = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 90 by compiler to allow use of registers in GMMA
ptxas info    : Compiling entry function 'a' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
{note}
ptxas warning : Registers are spilled to local memory in function 'b', 312 bytes spill stores, 492 bytes spill loads
    304 bytes stack frame, 312 bytes spill stores, 492 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers
"""
SERIALISED = "ptxas info : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
WAIT = "ptxas info : (C7517) warpgroup.wait is injected in around line 367 by compiler to allow use of registers"


def candidate(**changes):
    return Candidate(name="kernel", function=jnp.add, args=(), **changes)


def test_a_log():
    report = parse(LOG.format(note=""))
    assert report.registers == (168, 255) and report.spill_bytes == (0, 492) and report.serialised == ()
    assert report.faults(candidate()) == ["492 bytes of spills, 0 allowed"]
    assert report.faults(candidate(spill_bytes=492, reason="outside the loop")) == []


@pytest.mark.parametrize("note", [SERIALISED, WAIT])
def test_serialised_wgmma(note):
    report = parse(LOG.format(note=note))
    assert report.serialised == (note,)
    assert len(report.faults(candidate())) == 2
    assert report.faults(candidate(spill_bytes=500, serialised=True, reason="a probe")) == []


def test_a_log_without_kernels_is_a_fault():
    assert parse("").faults(candidate()) == ["no Mosaic kernel was compiled"]


def test_allowed_faults_need_a_reason():
    with pytest.raises(ValueError, match="reason"):
        candidate(spill_bytes=8)


def test_shapes_of_the_command_line():
    assert shape_struct("e4m3[]") == jax.ShapeDtypeStruct((), jnp.float8_e4m3fn)
    assert shape_struct("u8[3,1]") == jax.ShapeDtypeStruct((3, 1), jnp.uint8)
    with pytest.raises(ValueError, match="bf16"):
        shape_struct("3,4")
