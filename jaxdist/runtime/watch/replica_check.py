"""Silent corruption of the state: copies on several devices that should be equal bit for bit, and are not.

Every device computes a digest of the bits of its own part of each leaf. Devices with the same part (they differ only
along mesh axes that the leaf's spec does not name) must come to the same digest.

Legend: N devices, in the mesh's order, L leaves of the state.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.errors import first_of
from jaxdist.mesh import AXES, fetched
from jaxdist.specs import PyTree, path_name, spec_axes

DEVICES_SHOWN = 4  # in a line


class Odd(NamedTuple):
    """A leaf whose copies differ."""

    leaf: str
    devices: tuple[int, ...]  # indices in the mesh of those that differ from the majority; all where there is none
    sure: bool  # whether there is a majority, so that it is known which devices are wrong
    copies: int  # how many devices have this part of the leaf


class ReplicasDiffer(Exception):
    """The state is corrupt. step: after which it was seen."""

    def __init__(self, step: int, text: str) -> None:
        super().__init__(text)
        self.step = step


def digest(x: jax.Array) -> jax.Array:
    """A digest of the bits of x, as uint32: its words, times odd numbers, are summed modulo 2^32. So a change of any
    one word changes it."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    size = min(x.dtype.itemsize, 4)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}")).ravel().astype(jnp.uint32)
    odd = jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(2) + jnp.uint32(1)
    return jnp.sum(words * odd, dtype=jnp.uint32)


def make_digests(specs: Sequence[P], mesh: Mesh) -> Callable[[list[jax.Array]], jax.Array]:
    """A function: leaves -> digests, uint32 [N, L], a row on each device. It communicates nothing, because a device
    must look at its own copy."""

    def region(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([digest(leaf) for leaf in leaves])[None]

    run = jax.shard_map(region, mesh=mesh, in_specs=(list(specs),), out_specs=P(AXES))
    return jax.jit(lambda leaves: run(fetched(leaves)))


def odd_ones(table: np.ndarray, names: Sequence[str], specs: Sequence[P], mesh_shape: Sequence[int]) -> list[Odd]:
    """The leaves whose copies differ. table: digests [N, L]. mesh_shape: sizes of `AXES`."""
    places = np.stack(np.unravel_index(np.arange(math.prod(mesh_shape)), mesh_shape), axis=1)
    found = []
    for column, (name, spec) in enumerate(zip(names, specs, strict=True)):
        kept = [axis in spec_axes(spec) for axis in AXES]
        groups = defaultdict[tuple[int, ...], list[int]](list)
        for device, place in enumerate(places):
            groups[tuple(place[kept].tolist())].append(device)
        for devices in groups.values():
            counts = Counter(int(table[device, column]) for device in devices).most_common()
            if len(counts) == 1:
                continue
            sure = counts[0][1] > counts[1][1]
            unlike = [device for device in devices if not sure or table[device, column] != counts[0][0]]
            found.append(Odd(name, tuple(unlike), sure, len(devices)))
    return found


def describe_odd(found: Sequence[Odd], mesh: Mesh) -> str:
    """A line about the first leaf that differs, and its devices."""
    first, devices = found[0], mesh.devices.flat
    parts = []
    for place in first.devices:
        coordinates = zip(AXES, np.unravel_index(place, mesh.devices.shape), strict=True)
        where = " ".join(f"{axis}={n}" for axis, n in coordinates if mesh.shape[axis] > 1)
        parts.append(f"device {devices[place].id} of rank {devices[place].process_index} ({where})")
    names = first_of(parts, DEVICES_SHOWN, " and ")
    leaves = len({each.leaf for each in found})
    more = f"; so do {leaves - 1} more leaves" if leaves > 1 else ""
    if first.sure:
        return f"{first.leaf} on {names} differs from its other {first.copies - len(first.devices)} copies{more}"
    return f"{first.leaf} differs between {names}: which of them is wrong cannot be told{more}"


class ReplicaCheck:
    """A check of states of one layout. Every process must call it at the same steps."""

    def __init__(self, target: PyTree, mesh: Mesh) -> None:
        """target: the state as ShapeDtypeStructs with shardings."""
        leaves = jax.tree_util.tree_leaves_with_path(target)
        self._names = [path_name(path) for path, _ in leaves]
        self._specs = [leaf.sharding.spec for _, leaf in leaves]
        self._mesh, self._digests = mesh, make_digests(self._specs, mesh)

    def __call__(self, step: int, state: PyTree) -> None:
        """Raise `ReplicasDiffer`, on every process, if copies differ. Waits for the state."""
        digests = self._digests(jax.tree.leaves(state))
        several = jax.process_count() > 1
        table = multihost_utils.process_allgather(digests, tiled=True) if several else jax.device_get(digests)
        found = odd_ones(np.asarray(table), self._names, self._specs, self._mesh.devices.shape)
        if found:
            raise ReplicasDiffer(step, f"corrupt state after step {step}: {describe_odd(found, self._mesh)}")
