"""XLA's collectives: `lax.psum`, `psum_scatter`, `all_gather` and `all_to_all` (NCCL on GPUs, gloo on CPUs).

How they communicate is the library's choice; their stated cost is that of rings. Operations that JAX lacks are made of
those that it has: a broadcast is a sum of one value and zeros, a gather is an all-gather.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import COMBINE, Algorithm
from jaxdist.collectives.algorithms import ring
from jaxdist.collectives.cost import Cost
from jaxdist.collectives.group import Array, Group
from jaxdist.collectives.parts import cut_parts, padded_parts, unpadded
from jaxdist.collectives.transpose import linear
from jaxdist.errors import UserError
from jaxdist.mesh import traced_for_gpus

_ORDERED = [jnp.dtype(each) for each in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)]  # as their bits are
REDUCE: dict[str, Callable[..., Array]] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


def _index_groups(group: Group) -> list[list[int]] | None:
    """The argument `axis_index_groups`; None if the group is all devices of the axes."""
    if not group.complete:
        raise UserError(f"groups={group.members}: native needs groups that cover the axis; use algorithm='ring'")
    return None if group.members == (tuple(range(group.n)),) else [list(members) for members in group.members]


def _extreme_by_bits(x: Array, group: Group, op: str) -> Array:
    """The maximum or minimum, NaN where there is one: XLA:CPU loses it. What is sent are integers of the same order and
    size, of which NaN is the last."""
    number = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    turned = lambda bits: jnp.where(bits < 0, bits ^ number.max, bits)  # noqa: E731  # to the order of floats, and back
    last = jnp.asarray(number.max if op == "max" else number.min, number.dtype)
    ordered = jnp.where(jnp.isnan(x), last, turned(lax.bitcast_convert_type(x, number.dtype)))
    return lax.bitcast_convert_type(turned(REDUCE[op](ordered, group.axes)), x.dtype)


def _all_reduce(x: Array, group: Group, op: str) -> Array:
    groups = _index_groups(group)
    if groups is None:
        drops_nan = op != "sum" and x.dtype in _ORDERED and not traced_for_gpus()
        return _extreme_by_bits(x, group, op) if drops_nan else REDUCE[op](x, group.axes)
    # psum, pmax and pmin have no groups under shard_map.
    mine = _reduce_scatter(padded_parts(x, group.n), group, op, 0)
    return unpadded(_gather(mine, group, 0), x)


def _scatter_is_unsafe() -> bool:
    """Whether `lax.psum_scatter` runs over gloo. No program of jaxdist then contains it, nor a transpose that does."""
    # gloo's reduce-scatter overwrites data that it is still sending. The end of rank 0's part is then wrong now and
    # then, without an error (jax issue 40830).
    return jax.distributed.is_initialized() and jax.default_backend() == "cpu"


def _reduce_scatter(x: Array, group: Group, op: str, dim: int) -> Array:
    if op == "sum":
        groups = _index_groups(group)
        if not x.size:  # XLA refuses to scatter an empty array
            return cut_parts(x, group.n, dim)[0]
        if _scatter_is_unsafe():  # as many bytes, in other messages
            return jnp.sum(_all_to_all(cut_parts(x, group.n, dim), group), axis=0, dtype=x.dtype)
        return lax.psum_scatter(x, group.axes, scatter_dimension=dim, axis_index_groups=groups, tiled=True)
    # Two by two: XLA:CPU may drop NaN in `jnp.max`.
    return functools.reduce(COMBINE[op], _all_to_all(cut_parts(x, group.n, dim), group))


def _all_gather(x: Array, group: Group, dim: int) -> Array:
    groups = _index_groups(group)
    if not x.size:  # XLA refuses to gather an empty array
        return jnp.concatenate([x] * group.n, axis=dim)

    def whole(x: Array) -> Array:
        return lax.all_gather(x, group.axes, axis=dim, axis_index_groups=groups, tiled=True)

    if not _scatter_is_unsafe():
        return whole(x)
    return linear(whole, lambda grad: _reduce_scatter(grad, group, "sum", dim), x)  # JAX's transpose is a psum_scatter


def _all_to_all(parts: Array, group: Group) -> Array:
    return lax.all_to_all(parts, group.axes, 0, 0, axis_index_groups=_index_groups(group), tiled=True)


def _broadcast(x: Array, group: Group, root: int) -> Array:
    alone = jnp.where(group.rank == root, x, jnp.zeros((), x.dtype))
    return _all_reduce(alone, group, "max" if x.dtype == jnp.bool_ else "sum")  # booleans cannot be added


def _reduce(x: Array, group: Group, op: str, root: int) -> Array:
    return _all_reduce(x, group, op)


def _gather(x: Array, group: Group, root: int) -> Array:
    return _all_gather(x[None], group, 0)


def _scatter(parts: Array, group: Group, root: int) -> Array:
    return _all_to_all(parts, group)[root]


def _cost(operation: str, size: int, group: Group) -> Cost:
    """The ring's cost; for an operation with a root, that of the operation that it is made of."""
    made_of = {"broadcast": "all_reduce", "reduce": "all_reduce", "gather": "all_gather", "scatter": "all_to_all"}
    return ring.cost(made_of.get(operation, operation), size, group)


native = Algorithm(
    _cost, _all_reduce, _reduce_scatter, _all_gather, _all_to_all, _broadcast, _reduce, _gather, _scatter
)
