"""Process groups: the devices of one collective. They lie along some mesh axes, or are lists of ranks along these."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.cost import LINKS, Link
from jaxdist.collectives.transpose import linear
from jaxdist.collectives.varying import active_axes, to_varying
from jaxdist.errors import UserError
from jaxdist.mesh import count_hosts, traced_for_gpus

Array = jax.Array
Axes = str | tuple[str, ...]
Groups = Sequence[Sequence[int]]
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Group:
    """A group of n devices with ranks 0 to n-1, or several such groups side by side, which all do the same.

    axes: active mesh axes, in mesh order; () for a single device.
    members: for each group, the ranks of its devices along `axes`, counted as one axis.
    inner: the size of a fast neighbourhood: that of the last axis, if there are several, else 1.
    wire: the float dtype in which `permute` sends; None: the values' own. Sums stay in the values' dtype.
    link: the link between neighbourhoods, if the caller knows it; None: `default_link`.

    For example, on data=2, tensor=2, the axes ("data", "tensor") give members ((0, 1, 2, 3),) and inner 2.
    """

    axes: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]
    inner: int
    wire: str | None = None
    link: Link | None = None

    @staticmethod
    def of(*sizes: int) -> "Group":
        """A group of all devices of axes of these sizes. Without a mesh it is there to ask for costs."""
        return Group((), (tuple(range(math.prod(sizes))),), sizes[-1] if len(sizes) > 1 else 1)

    @property
    def n(self) -> int:
        """The number of devices of a group."""
        return len(self.members[0])

    @property
    def rank(self) -> Array:
        """This device's rank in its group, int32; 0 on devices of no group."""
        index = lax.axis_index(self.axes)
        if self.members == (tuple(range(self.n)),) and self.n == lax.axis_size(self.axes):
            return index
        ranks = [0] * lax.axis_size(self.axes)
        for group in self.members:
            for rank, member in enumerate(group):
                ranks[member] = rank
        return jnp.asarray(ranks, jnp.int32)[index]

    @property
    def network(self) -> Link:
        """The link for which algorithms decide."""
        return self.link or default_link()

    @property
    def complete(self) -> bool:
        """Whether every device of the axes is in a group."""
        return self.n * len(self.members) == lax.axis_size(self.axes)

    def is_member(self) -> Array:
        """Whether this device is in a group."""
        inside = {member for group in self.members for member in group}
        return jnp.asarray([i in inside for i in range(lax.axis_size(self.axes))])[lax.axis_index(self.axes)]

    def at(self, table: Sequence[int]) -> Array:
        """This rank's entry of a table of Python ints."""
        return jnp.asarray(table, jnp.int32)[self.rank]

    def among(self, ranks: Iterable[int]) -> Array:
        """Whether this device's rank is one of these."""
        chosen = set(ranks)
        return jnp.asarray([rank in chosen for rank in range(self.n)])[self.rank]

    def permute(self, x: Array, pairs: Pairs) -> Array:
        """Point-to-point messages: each pair (source, target) moves x from one rank to another.

        A rank that is no target gets zeros. With `wire` set, x travels in that dtype. Hand-written algorithms
        communicate in this way only.
        """
        everywhere = [(group[source], group[target]) for group in self.members for source, target in pairs]
        if self.wire is None and x.dtype != jnp.bfloat16:
            return lax.ppermute(x, self.axes, everywhere)

        def move(x: Array, pairs: Pairs) -> Array:
            sent = x if self.wire is None else x.astype(self.wire)
            if sent.dtype != jnp.bfloat16:
                return lax.ppermute(sent, self.axes, pairs).astype(x.dtype)
            # XLA:CPU sends bf16 as 4 bytes, but integers as they are. Autodiff sees no gradient in integers: `linear`.
            bits = lax.ppermute(lax.bitcast_convert_type(sent, jnp.uint16), self.axes, pairs)
            return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(x.dtype)

        turned = [(target, source) for source, target in everywhere]
        return linear(lambda x: move(x, everywhere), lambda grad: move(grad, turned), x)

    def rounded(self, x: Array) -> Array:
        """x as it arrives in `wire`. A device that sends x to others keeps this, so that all have the same bits."""
        return x if self.wire is None else x.astype(self.wire).astype(x.dtype)

    def split(self) -> tuple["Group", "Group"]:
        """(outer, inner): groups with one device of each fast neighbourhood, and the neighbourhoods as groups."""
        size = self.inner
        inner = [group[i : i + size] for group in self.members for i in range(0, self.n, size)]
        outer = [group[i::size] for group in self.members for i in range(size)]
        return replace(self, members=tuple(outer), inner=1), replace(self, members=tuple(inner), inner=1)


def default_link() -> Link:
    """The link that the platform and the number of hosts suggest. `make_link` makes others."""
    near, far = ("nvlink", "infiniband") if traced_for_gpus() else ("local", "tcp")
    return LINKS[far if count_hosts() > 1 else near]


def shift(n: int, by: int = 1) -> list[tuple[int, int]]:
    """Pairs for `permute`: every rank sends to the rank that is `by` places further round the ring."""
    return [(rank, (rank + by) % n) for rank in range(n)]


def make_group(axis: Axes, groups: Groups | None = None) -> Group:
    """The group of the devices along `axis`. Inside `shard_map` only.

    axis: one or several mesh axes, in any order; ranks count in mesh order.
    groups: disjoint lists of ranks, all of one length, that communicate among themselves (torch.distributed's
        `new_group`); devices in none of them get zeros.
    """
    axes = active_axes(axis, inside=True)
    sizes = [lax.axis_size(name) for name in axes]
    if groups is None:
        return replace(Group.of(*sizes), axes=axes)
    total = math.prod(sizes)
    lists = [*groups] if hasattr(groups, "__iter__") else []
    members = tuple(map(tuple, lists)) if all(hasattr(group, "__iter__") for group in lists) else ()
    ranks = [rank for group in members for rank in group if hasattr(rank, "__index__")]
    if not ranks or len({len(group) for group in members}) > 1 or len(ranks) < sum(map(len, members)):
        raise UserError(f"groups={groups!r:.80}: give at least one group, a list of ranks, all of the same size")
    if len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= total:
        raise UserError(f"groups={members}: each rank from 0 to {total - 1} may be in one group, once")
    return Group(axes, members, 1)


def entering(x: Array, group: Group) -> Array:
    """The input of an algorithm: x, typed varying over the axes, and zero on devices that are in no group."""
    x = to_varying(x, group.axes)
    return x if group.complete else jnp.where(group.is_member(), x, jnp.zeros((), x.dtype))
