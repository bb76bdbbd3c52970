"""The device mesh. It always has the same six named axes, slowest link first. An axis of size 1 is off.

Each axis has one owner: `tensor`, `context` and `expert` belong to the layers in `nn/`, `data` and `fsdp` to the
strategy (ZeRO splits parameters over the two latter, too), `pipe` to the schedule. A mesh has axes, a tensor dims.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxdist.errors import UserError, nearest

AnyMesh = Mesh | AbstractMesh  # layouts and traces need no devices
AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
# Dim 0 of every batch leaf is split over these axes: each coordinate along them sees other samples.
BATCH_AXES = ("data", "fsdp", "expert")
# Each coordinate along these axes computes a part of the loss and of each gradient; `tensor` repeats the loss.
BATCH_LIKE = ("pipe", "data", "fsdp", "expert", "context")
HOST = "pinned_host"  # JAX's name for host memory that devices read and write by themselves


def make_mesh(
    *given: Never,
    pipe: int = 1,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
    **unknown: int,
) -> Mesh:
    """A `jax.sharding.Mesh` over all six axes, with Auto axis types.

    pipe, data, fsdp, expert, context, tensor: sizes. One may be -1, "the rest of the devices". Else the mesh may be
        smaller than the machine: it takes the first devices. The logger "jaxdist" says so, unless `devices` is given.
    devices: default `jax.devices()`. They are sorted by host (`host_of`) and process, however the launcher has numbered
        these. So `tensor`, the last and fastest axis, stays inside a host if its size allows that.

    Raises `UserError` for an axis of another name, if a size is not positive, if the mesh needs more devices than there
    are, or if it leaves a process without a device.

    >>> jaxdist.make_mesh(data=2, fsdp=-1).shape["fsdp"]  # of 8 devices
    4
    """
    if wrong := given or ((devices,) if isinstance(devices, int | str) else ()):
        raise UserError(f"mesh: {wrong[0]!r:.60} names no axis; allowed: {', '.join(AXES)}; give sizes by name: fsdp=8")
    for axis in unknown:
        near = nearest(axis, AXES, cutoff=0.5)
        hint = f"; did you mean {near}={unknown[axis]}?" if near else ""
        raise UserError(f"mesh.{axis}: is no axis; allowed: {', '.join(AXES)}{hint}")
    pool = list(jax.devices() if devices is None else devices)
    pool.sort(key=lambda device: (host_of(device), device.process_index, device.id))
    sizes = dict(zip(AXES, (pipe, data, fsdp, expert, context, tensor), strict=True))
    for axis, size in sizes.items():
        if type(size) is bool or not hasattr(size, "__index__") or (size < 1 and size != -1):
            raise UserError(f"mesh.{axis}={size!r}: allowed are integers >= 1, or -1 for the rest of the devices")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError(f"mesh: only one axis may be -1, got {', '.join(free)}; give the others a size")
    known = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if len(pool) % known:
            of_pool = f"which does not divide the {len(pool)} devices"
            raise UserError(f"mesh.{free[0]}=-1: the other axes multiply to {known}, {of_pool}; change one of them")
        sizes[free[0]] = len(pool) // known
    total = math.prod(sizes.values())
    if total > len(pool):
        shape = sizes_text(sizes, none="")
        more = ", or set jax_num_cpu_devices" if any(each.platform == "cpu" for each in pool) else ""
        raise UserError(f"mesh: {shape} needs {total} devices, there are {len(pool)}; make it smaller{more}")
    if missing := {device.process_index for device in pool} - {device.process_index for device in pool[:total]}:
        raise UserError(
            f"mesh: {total} devices leave process {min(missing)} without one; enlarge it, or start fewer processes"
        )
    if devices is None and total < len(pool) and jax.process_index() == 0:
        _tell_idle(total, len(pool))
    grid = np.asarray(pool[:total], dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@functools.cache  # once
def _tell_idle(used: int, there: int) -> None:
    logging.getLogger("jaxdist").warning(
        f"mesh: uses {used} of {there} devices, the others are idle; give one axis -1, as fsdp=-1, to use all, or"
        f" make_mesh devices=jax.devices()[:{used}] if these are meant"
    )


def check_mesh(mesh: Any) -> None:
    """Raise `UserError` unless it is a mesh with the six axes, all of them Auto."""
    is_mesh = isinstance(mesh, AnyMesh)
    if is_mesh and set(mesh.axis_names) == set(AXES) and set(mesh.axis_types) == {AxisType.Auto}:
        return
    names = f"axes {', '.join(map(str, mesh.axis_names))}" if is_mesh else ""
    told = f"{' '.join(sorted({kind.name for kind in mesh.axis_types}))} {names}" if is_mesh else repr(mesh)
    sizes = dict(mesh.shape) if is_mesh else mesh if isinstance(mesh, dict) else {str(mesh): -1}
    own = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if axis in AXES and size != 1) or "fsdp=-1"
    raise UserError(f"mesh: {told}; allowed: what jaxdist.make_mesh makes, Auto axes; give jaxdist.make_mesh({own})")


def abstract_mesh(*, platform: str | None = None, **sizes: int) -> AbstractMesh:
    """A mesh without devices, of any size, for layouts and traces on any machine.

    platform: "gpu" for traces of what GPUs run (`traced_for_gpus`).
    """
    return AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in AXES),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        abstract_device=AbstractDevice(platform, None, platform) if platform else None,
    )


def has_host_memory(mesh: AnyMesh) -> bool:
    """Whether arrays of these devices can be in pinned host memory (`HOST`); without devices, as of GPUs, they can."""
    if not isinstance(mesh, Mesh):
        return True
    device = mesh.local_devices[0]
    kinds = {kind.kind for kind in device.addressable_memories()}
    return HOST in kinds or (not kinds and device.platform == "gpu")  # GPUs that are only described list no memories


def fetched(tree: Any) -> Any:
    """The tree with the arrays of host memory copied to devices: an operation on both memories is an error."""
    return jax.tree.map(lambda leaf: _moved(leaf, jax.memory.Space.Device), tree)


def stored_like(tree: Any, old: Any) -> Any:
    """The tree with each array in the memory in which that of `old` is."""
    return jax.tree.map(lambda leaf, old: _moved(leaf, jax.typeof(old).memory_space), tree, old)


def _moved(leaf: jax.Array, space: Any) -> jax.Array:
    return leaf if jax.typeof(leaf).memory_space == space else jax.device_put(leaf, space)


def on_cpu(mesh: AnyMesh) -> bool:
    """Whether these are CPU devices. A mesh without devices stands for one of GPUs."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"


def traced_for_gpus() -> bool:
    """Whether what is traced now, inside `shard_map`, is for GPUs, as far as its mesh has devices or describes them."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described is not None and described.platform != "cpu"


def host_of(device: jax.Device) -> int:
    """The number of a device's host. Of GPUs, JAX finds it by boot ids (`slice_index`), or is given one for a rack that
    NVLink joins (`jax.distributed.initialize(partition_index=)`). Of CPUs, each process is taken for a host."""
    # JAX gives 0 to CPUs of all hosts, and to devices that are only described to the compiler.
    by_process = device.platform == "cpu" or jax.process_count() == 1
    return device.process_index if by_process else getattr(device, "slice_index", device.process_index)


def count_hosts(mesh: AnyMesh | None = None) -> int:
    """The number of hosts of a mesh, by default of all devices of the job. A mesh without devices has one."""
    if isinstance(mesh, AbstractMesh):
        return 1
    return len({host_of(each) for each in (jax.devices() if mesh is None else mesh.devices.flat)})


def sizes_of(mesh: AnyMesh) -> dict[str, int]:
    """Axis sizes in mesh order, for printing: {"pipe": 1, "data": 2, ...}."""
    return {str(axis): int(size) for axis, size in mesh.shape.items()}


def sizes_text(sizes: Mapping[str, int], none: str = "one device") -> str:
    """The axes that are on, for a message: "data=2 fsdp=4"; `none` if none is. sizes: such as the shape of a mesh."""
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or none


def batch_shards(mesh: AnyMesh) -> int:
    """The number of parts into which dim 0 of a batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
