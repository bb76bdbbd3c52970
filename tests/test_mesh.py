"""The mesh and the specs: sizes, the rest axis, order of devices, divisibility."""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.collectives.cost import LINKS
from jaxdist.collectives.group import default_link
from jaxdist.errors import UserError
from jaxdist.init import check_divisible
from jaxdist.mesh import AXES, abstract_mesh, batch_shards, check_mesh, count_hosts, host_of, make_mesh, sizes_of
from jaxdist.plan.traced.ledger import hosts_of
from jaxdist.specs import (
    BATCH_SPEC,
    batch_spec,
    bytes_per_device,
    claimed_axes,
    dim_of,
    shard_count,
    spec_axes,
    without_idle,
)


def test_all_six_axes_slowest_first_and_auto() -> None:
    mesh = make_mesh(data=2, tensor=2)
    assert mesh.axis_names == AXES == ("pipe", "data", "fsdp", "expert", "context", "tensor")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sizes_of(mesh) == {"pipe": 1, "data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3]  # the first four of eight


def test_the_rest_axis_takes_what_is_left() -> None:
    assert make_mesh(fsdp=-1).shape["fsdp"] == 8
    assert make_mesh(data=2, fsdp=-1, tensor=2).shape["fsdp"] == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 0}, "mesh.data=0: allowed are integers >= 1"),
        ({"data": -2}, "mesh.data=-2"),
        ({"data": -1, "fsdp": -1}, "only one axis may be -1, got data, fsdp"),
        ({"data": 3, "fsdp": -1}, "mesh.fsdp=-1: the other axes .* 3, which does not divide the 8 devices;"),
        (
            {"data": 4, "tensor": 4},
            "tensor=4 needs 16 devices, there are 8; make it smaller, or set jax_num_cpu_devices",
        ),
    ],
)
def test_meshes_that_cannot_be_are_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_mesh(**sizes)


def test_a_mesh_too_large_for_gpus_is_not_told_of_cpus() -> None:
    for devices in (devices_of(1, 8, lambda rank: 0), []):
        with pytest.raises(UserError, match=rf"data=16 needs 16 devices, there are {len(devices)}; make it smaller$"):
            make_mesh(data=16, devices=devices)  # type: ignore[arg-type]


class Device:
    """What a mesh reads of a device. host: `slice_index`, as JAX numbers the hosts of GPUs; None: a CPU, always 0."""

    def __init__(self, rank: int, number: int, host: int | None) -> None:
        self.process_index, self.id, self.platform = rank, number, "cpu" if host is None else "gpu"
        self.slice_index = host or 0


def devices_of(processes: int, each: int, host: Callable[[int], int | None]) -> list[Device]:
    """Listed alternately, as JAX may. host: of a process."""
    return [Device(rank, 64 * rank + i, host(rank)) for i in range(each) for rank in range(processes)]


# A process a host; a process a GPU with ranks in blocks, dealt out cyclically, as pods are that come up in any order,
# and all on one host; two processes a host; racks of two hosts that NVLink joins.
LAUNCHES = {
    "a process a host": (2, 4, lambda rank: rank, 2),
    "CPUs": (2, 4, lambda rank: None, 2),
    "blocks": (8, 1, lambda rank: rank // 4, 2),
    "cyclic": (8, 1, lambda rank: rank % 2, 2),
    "pods": (8, 1, [1, 0, 0, 1, 1, 0, 1, 0].__getitem__, 2),
    "one host": (8, 1, lambda rank: 0, 1),
    "two processes a host, cyclic": (4, 2, lambda rank: rank % 2, 2),
    "racks": (4, 2, lambda rank: rank // 2, 2),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_tensor_stays_inside_a_host(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, each, host, hosts = LAUNCHES[launch]
    devices = devices_of(processes, each, host)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    mesh = make_mesh(data=2, tensor=4)
    for row in mesh.devices.reshape(2, 4):
        assert len({host_of(device) for device in row}) == 1
        ranks = [device.process_index for device in row]
        assert ranks == sorted(ranks)  # devices of a process are neighbours
    assert count_hosts() == count_hosts(mesh) == hosts
    found = hosts_of(mesh, 4).reshape(2, 4)
    assert (np.diff(found, axis=1) == 0).all() and len(np.unique(found)) == hosts


def test_described_devices_have_a_process_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX describes all hosts of an ahead-of-time compilation as one slice."""
    mesh = make_mesh(data=2, tensor=4, devices=devices_of(2, 4, lambda rank: 0))  # type: ignore[arg-type]
    assert count_hosts(mesh) == 2
    assert count_hosts(abstract_mesh(data=2)) == 1


@pytest.mark.parametrize(("slices", "link"), [(1, "nvlink"), (2, "infiniband")])
def test_the_link_is_that_between_hosts_not_between_processes(
    slices: int, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `algorithm: auto`, with a process a GPU."""
    devices = devices_of(8, 1, lambda rank: rank % slices)
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    described = SimpleNamespace(abstract_device=SimpleNamespace(platform="gpu"))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: described)
    assert default_link() == LINKS[link]


entries = st.sampled_from([None, "tensor", "fsdp", ("data", "fsdp"), ("tensor", "fsdp"), "pipe"])


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(entries, max_size=3))
def test_a_spec_and_its_complement_name_every_batch_like_axis_once(parts: list[str | tuple[str, ...] | None]) -> None:
    spec = P(*parts)
    assert set(claimed_axes(spec)) | set(spec_axes(spec)) >= {"pipe", "data", "fsdp", "expert", "context"}
    assert not set(claimed_axes(spec)) & set(spec_axes(spec))
    mesh = make_mesh(data=2, tensor=2)
    assert set(spec_axes(without_idle(spec, mesh))) == set(spec_axes(spec)) & {"data", "tensor"}
    assert shard_count(without_idle(spec, mesh), mesh) == shard_count(spec, mesh)


def test_bytes_and_dims() -> None:
    mesh, leaf = make_mesh(fsdp=2, tensor=4), jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    spec = P(("tensor", "fsdp"), None)
    assert (dim_of(spec, "fsdp"), dim_of(spec, "data")) == (0, None)
    assert bytes_per_device(leaf, spec, mesh) == 16 * 8 * 2 // 8
    array = jax.device_put(jnp.zeros((16, 8), jnp.bfloat16), NamedSharding(mesh, spec))
    assert array.addressable_shards[0].data.nbytes == bytes_per_device(leaf, spec, mesh)
    with pytest.raises(UserError, match=r"w: dim 1 of \(16, 6\) is 6, not divisible by tensor=4"):
        check_divisible({"w": jax.ShapeDtypeStruct((16, 6), jnp.float32)}, {"w": P(None, "tensor")}, mesh)
    blocks, over_pipe = {"blocks": {"w": jax.ShapeDtypeStruct((3, 6), jnp.float32)}}, {"blocks": {"w": P("pipe")}}
    with pytest.raises(UserError, match=r"blocks.w: .* number of blocks, 3, not .* pipe=2; .*arrange\(model, stages=2"):
        check_divisible(blocks, over_pipe, make_mesh(pipe=2))


def test_axes_of_another_type_are_refused() -> None:
    """`jax.make_mesh` makes them; a step would fail in its shard_map."""
    mesh = jax.make_mesh((1, 2, 4, 1, 1, 1), AXES, axis_types=(AxisType.Explicit,) * 6)
    line = r"^mesh: Explicit axes pipe, .*; allowed: .*, Auto axes; give jaxdist.make_mesh\(data=2, fsdp=4\)$"
    with pytest.raises(UserError, match=line):
        check_mesh(mesh)
    check_mesh(jax.make_mesh((1, 2, 4, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 6))


def test_batch_specs_split_alike() -> None:
    mesh = make_mesh(data=2, fsdp=2)
    assert batch_shards(mesh) == 4
    x = np.zeros((8, 3))
    assert NamedSharding(mesh, BATCH_SPEC).is_equivalent_to(NamedSharding(mesh, batch_spec(mesh)), x.ndim)
