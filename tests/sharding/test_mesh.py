"""make_mesh and parse_mesh: shapes, device order, and errors that name the remedy."""

import jax
import pytest
from jax.sharding import AxisType

from sharding.mesh import AXES, make_mesh, parse_mesh
from tests.processes import run_together, script


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        (None, {"fsdp": 8}),
        ({}, {"fsdp": 8}),
        ({"fsdp": 4, "tensor": 2}, {"fsdp": 4, "tensor": 2}),
        ({"tensor": 2, "data": -1}, {"data": 4, "tensor": 2}),
        ({"data": 2, "fsdp": -1, "tensor": 4}, {"data": 2, "tensor": 4}),
        ({"data": 8, "fsdp": 1}, {"data": 8}),
        ({"context": -1, "tensor": 2}, {"context": 4, "tensor": 2}),
    ],
)
def test_every_axis_exists(axes, sizes):
    mesh = make_mesh(axes)
    assert mesh.axis_names == AXES
    assert mesh.shape == dict.fromkeys(AXES, 1) | sizes
    assert mesh.axis_types == (AxisType.Auto,) * len(AXES)
    assert list(mesh.devices.flat) == jax.devices()


def test_one_device_is_all_ones():
    assert set(make_mesh(devices=jax.devices()[:1]).axis_sizes) == {1}


def test_a_smaller_mesh_takes_the_first_devices():
    assert list(make_mesh({"tensor": 2}).devices.flat) == jax.devices()[:2]


@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        ({"tensr": 2}, ["make_mesh", "'tensr'", ", ".join(AXES), "Did you mean 'tensor'?"]),
        ({"fsdp": 0}, ["'fsdp'", "size=0", "positive"]),
        ({"fsdp": -2}, ["'fsdp'", "size=-2", "-1 for the rest"]),
        ({"data": -1, "fsdp": -1}, ["['data', 'fsdp']", "one can take the rest"]),
        ({"fsdp": 4, "tensor": 4}, ["16", "count=8", "fsdp=4,tensor=2", "--cpu-devices 16", "JAX_NUM_CPU_DEVICES=16"]),
        ({"data": 3, "fsdp": -1}, ["count=8", "must divide", "data=4,fsdp=2"]),
    ],
)
def test_refusals_name_the_remedy(axes, parts):
    with pytest.raises(ValueError) as error:
        make_mesh(axes)
    for part in parts:
        assert part in str(error.value)


def test_no_devices():
    with pytest.raises(ValueError, match="a mesh needs a device"):
        make_mesh(devices=[])


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("", {}),
        ("fsdp=4,tensor=2", {"fsdp": 4, "tensor": 2}),
        (" data = 2 , fsdp = -1 ", {"data": 2, "fsdp": -1}),
    ],
)
def test_parse(text, axes):
    assert parse_mesh(text) == axes


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("fsdp", ["part='fsdp'", "name=size"]),
        ("fsdp=4,", ["part=''", "name=size"]),
        ("fsdp=four", ["part='fsdp=four'"]),
        ("fsdp=2.5", ["part='fsdp=2.5'"]),
        ("fsdp=2,fsdp=4", ["'fsdp'", "twice"]),
        ("tensors=2", ["parse_mesh", "Did you mean 'tensor'?"]),
        ("fsdp=0", ["parse_mesh", "size=0"]),
    ],
)
def test_parse_refusals(text, parts):
    with pytest.raises(ValueError) as error:
        parse_mesh(text)
    for part in parts:
        assert part in str(error.value)


PROCESS = """
    import sys
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    from sharding.mesh import make_mesh

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]), initialization_timeout=60)

    def processes(mesh, index):
        return {d.process_index for d in mesh.devices[index].flat}

    # However the devices are listed, the outermost axis that can cross processes does, and no other.
    shuffled = jax.devices()[::2] + jax.devices()[1::2]
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, devices=shuffled)
    assert [processes(mesh, i) for i in range(2)] == [{0}, {1}], mesh.devices
    mesh = make_mesh({"fsdp": 4, "tensor": 2}, devices=shuffled)
    assert [processes(mesh, (0, i)) for i in range(4)] == [{0}, {0}, {1}, {1}], mesh.devices

    try:
        make_mesh({"fsdp": 4})
    except ValueError as error:
        assert "a mesh over 2 processes uses every device" in str(error), error
    else:
        raise AssertionError("a mesh over half of the processes' devices was accepted")
    try:
        make_mesh({"fsdp": -1}, devices=jax.devices()[:6])
    except ValueError as error:
        assert "different numbers of devices" in str(error), error
    else:
        raise AssertionError("an uneven mesh was accepted")

    with jax.set_mesh(mesh):
        ones = jax.jit(lambda: jnp.ones((8, 2)), out_shardings=P("fsdp", "tensor"))()
        assert float(jax.jit(jnp.sum, out_shardings=P())(ones)) == 16
"""


@pytest.mark.timeout(400)
def test_two_processes():
    run_together(script(PROCESS), timeout=120)
