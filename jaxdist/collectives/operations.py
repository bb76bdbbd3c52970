"""Collectives by any algorithm, for use inside `jax.shard_map(check_vma=True)`.

Every function takes a pytree, and a mesh axis or a tuple of axes, which count as one in mesh order whatever order they
are given in. `groups`: lists of ranks that communicate among themselves only (torch.distributed's `new_group`), all of
one size; devices in none of them get zeros.

Types: `native` results have the type that JAX gives them, all_reduce an invariant one. All else is typed varying over
the axes: that devices hold the same value cannot be written in a type. `claim_replicated` takes such a value out of
`shard_map`; its module shows how.

Gradients are those of the operation as a map over all devices. A value typed varying counts once a device: if all n
devices compute the same loss from a hand-reduced value, the gradient is that of the sum of n losses. Divide by n, or
reduce with `native` (or `collectives.psum`), whose invariant result counts once.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist import registry
from jaxdist.collectives.algorithm import ALGORITHMS, Algorithm, get_algorithm
from jaxdist.collectives.cost import NOTHING, Cost, Link, make_link
from jaxdist.collectives.group import Axes, Group, Groups, Pairs, entering, make_group, shift
from jaxdist.collectives.parts import cut_parts, join_parts
from jaxdist.collectives.transpose import extremum, linear
from jaxdist.collectives.varying import varying_axes, zeros_varying_like
from jaxdist.config.rules.grad_sync import check_wire
from jaxdist.errors import UserError
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree

Run = Callable[[jax.Array], jax.Array]
EXTREMA = ("max", "min")
OPS = ("sum", "mean", *EXTREMA)


def function_of(algorithm: str, operation: str) -> Callable[..., jax.Array]:
    """The algorithm's function for an operation; `UserError` naming those that have it."""
    function = getattr(get_algorithm(algorithm), operation, None) if operation in Algorithm._fields else None
    if function is None:
        known = [name for name in registry.names(ALGORITHMS) if getattr(get_algorithm(name), operation, None)]
        hint = f"these have: {', '.join(known)}" if known else f"operations: {', '.join(Algorithm._fields[1:-1])}"
        raise UserError(f"algorithm={algorithm!r} has no {operation}; {hint}")
    return function


def cost(operation: str, nbytes: int, *sizes: int, algorithm: str = "ring", itemsize: int = 4) -> Cost:
    """What one call costs on `sizes` devices (n; or outer, inner), for an input of nbytes on each device."""
    if not all(hasattr(each, "__index__") for each in (nbytes, *sizes)) or nbytes < 0 or min(sizes, default=0) < 1:
        raise UserError(f"cost: {nbytes} bytes on {sizes} devices; allowed: bytes >= 0, each number of devices >= 1")
    function_of(algorithm, operation)
    found, group = get_algorithm(algorithm).cost, Group.of(*sizes)
    return NOTHING if group.n == 1 else found(operation, -(-nbytes // itemsize), group).scaled(itemsize)


def _check_op(x: PyTree, op: str, wire_dtype: str | None = None) -> None:
    """Raise `UserError` unless all leaves can be reduced by `op`, in `wire_dtype` on the wire."""
    if op not in OPS:
        raise UserError(f"op={op!r} is not known; allowed: {', '.join(OPS)}")
    if wire_dtype == "int8" and op in EXTREMA:
        raise UserError(f"wire_dtype='int8': not with op={op!r}; allowed: sum, mean")
    for dtype in (jnp.result_type(leaf) for leaf in jax.tree.leaves(x)):
        if op == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
            raise UserError(f"op='mean': {dtype} has no fractions; cast to a float, or sum and divide")
        if op == "sum" and dtype == jnp.bool_:
            raise UserError("op='sum' of bool: use max for any, min for all, or cast to int32 to count")
        if wire_dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise UserError(f"wire_dtype={wire_dtype!r}: is for floats, not for {dtype}; leave it out")


def _check_dim(x: PyTree, dim: int, operation: str, group: Group | None = None) -> None:
    """Raise `UserError` unless all leaves have this dim and, with a group, its devices divide it."""
    for shape in (jnp.shape(leaf) for leaf in jax.tree.leaves(x)):
        rank = len(shape)
        if not -rank <= dim < rank:
            raise UserError(f"{operation}: dim {dim} of {shape} does not exist; allowed: {-rank} to {rank - 1}")
        if group is not None and shape[dim] % group.n:
            name = f"{'*'.join(group.axes)}={group.n}" if len(group.members) == 1 else f"groups of {group.n}"
            raise UserError(f"{operation}: dim {dim} of {shape} is not divisible by {name}; pad it")


def _group_with_root(axis: Axes, groups: Groups | None, root: int) -> Group:
    """The group; `UserError` unless it has the rank `root`."""
    group = make_group(axis, groups)
    if not 0 <= root < group.n:
        raise UserError(f"root={root}: allowed are the ranks 0 to {group.n - 1} of the group")
    return group


def _group_of_call(axis: Axes, groups: Groups | None, wire_dtype: str | None, link: Link | str | None) -> Group:
    """The group, with the options of one call. int8 is encoded before it is sent, not cast on the way."""
    link = make_link(link) if isinstance(link, str) else link
    return replace(make_group(axis, groups), wire=None if wire_dtype == "int8" else wire_dtype, link=link)


def _only(condition: jax.Array, x: jax.Array) -> jax.Array:
    """x where the condition holds, else zeros."""
    return jnp.where(condition, x, jnp.zeros((), x.dtype))


def _over(x: PyTree, group: Group, run: Run) -> PyTree:
    """`run` on every leaf as it enters the group. In a group of one device all operations are the identity."""

    def enter(leaf: Any) -> jax.Array:
        leaf = entering(jnp.asarray(leaf), group)
        return leaf if group.n == 1 else run(leaf)

    return jax.tree.map(enter, x)


def _as_linear(algorithm: str, forward: Run, transpose: Run) -> Run:
    """`forward` with `transpose` as its derivative. What native is made of, JAX can transpose itself."""
    return forward if algorithm == "native" else functools.partial(linear, forward, transpose)


def _reduced(x: PyTree, group: Group, op: str, wire_dtype: str | None, *, total: Run, extreme: Run) -> PyTree:
    """Every leaf reduced by `op`, in its dtype; with a `wire_dtype`, the sums are in at least fp32.

    total: the sum over the devices, with its derivative.
    extreme: the maximum or minimum over the devices.
    """

    def run(leaf: jax.Array) -> jax.Array:
        wide = leaf if wire_dtype is None else leaf.astype(accumulation_dtype(leaf.dtype))
        result = extreme(wide) if op in EXTREMA else total(wide)
        return (result / group.n if op == "mean" else result).astype(leaf.dtype)

    return _over(x, group, run)


def _extreme_of_all(x: jax.Array, group: Group, op: str, algorithm: str) -> jax.Array:
    """The maximum or minimum over the devices, on every device."""
    function = function_of(algorithm, "all_reduce")

    def add(x: jax.Array) -> jax.Array:
        return function(x, group, "sum")

    def total(value: jax.Array) -> jax.Array:
        # The gradient of a result that is typed invariant is a total already.
        return linear(add, add, value) if set(group.axes) & varying_axes(value) else value

    return extremum(lambda x: function(x, group, op), total, x)


def all_reduce(
    x: PyTree,
    axis: Axes,
    *,
    op: str = "sum",
    algorithm: str = "native",
    groups: Groups | None = None,
    wire_dtype: str | None = None,
    link: Link | str | None = None,
) -> PyTree:
    """`op` (sum, mean, max, min) of `x` over the devices, on every device, in the dtype of `x`. Any shape.

    wire_dtype: "bfloat16" or "int8", which is sent instead of floats; sums stay in fp32. Not with native; int8 with
        ring and balanced_fusion only, and see `all_reduce_with_feedback`.
    link: the link for which "auto" and "two_level" decide: a `Link`, its name, or a rate.

    The gradient of max and min is shared equally by the devices that attain it.
    """
    check_wire(wire_dtype, algorithm)
    function = function_of(algorithm, "all_reduce")
    group = _group_of_call(axis, groups, wire_dtype, link)
    _check_op(x, op, wire_dtype)

    def total(x: jax.Array) -> jax.Array:
        if wire_dtype != "int8":
            return function(x, group, "sum")
        from jaxdist.collectives.compression import all_reduce_lossy

        return all_reduce_lossy(x, group, algorithm)[0]

    def extreme(x: jax.Array) -> jax.Array:
        # Rounded first: the result is then one of the values, by which its gradient finds whose it was.
        return _extreme_of_all(group.rounded(x), group, op, algorithm)

    return _reduced(x, group, op, wire_dtype, total=_as_linear(algorithm, total, total), extreme=extreme)


def all_reduce_with_feedback(
    x: PyTree, residual: PyTree, axis: Axes, *, op: str = "sum", algorithm: str = "ring", groups: Groups | None = None
) -> tuple[PyTree, PyTree]:
    """`all_reduce` with int8 on the wire, and what that lost on this device: (result, new residual).

    residual: the new residual of the call before, fp32 and shaped like x; zeros at first. It is added to x, so that
        errors do not add up over many calls.

    The gradient is that of the sum of x; none flows through the residual.
    """
    from jaxdist.collectives.compression import all_reduce_lossy

    check_wire("int8", algorithm)
    group = make_group(axis, groups)
    _check_op(x, op, "int8")

    def lossy(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return all_reduce_lossy(x, group, algorithm)

    def run(leaf: jax.Array, lost: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = entering(leaf.astype(jnp.float32) + lax.stop_gradient(lost), group)
        if group.n == 1:
            return total.astype(leaf.dtype), jnp.zeros_like(lost)
        # The derivative is that of the sum, sent in int8, too.
        total, lost = linear(lossy, lambda grads: lossy(grads[0])[0], total)
        return (total / group.n if op == "mean" else total).astype(leaf.dtype), lax.stop_gradient(lost)

    both = jax.tree.map(run, x, residual)
    return jax.tree.map(lambda _, pair: pair[0], x, both), jax.tree.map(lambda _, pair: pair[1], x, both)


def reduce_scatter(
    x: PyTree,
    axis: Axes,
    *,
    dim: int = 0,
    op: str = "sum",
    algorithm: str = "native",
    groups: Groups | None = None,
    wire_dtype: str | None = None,
    link: Link | str | None = None,
) -> PyTree:
    """This device's share of the reduction of `x`: the rank-th of n equal parts of `dim`.

    op, wire_dtype, link: as for `all_reduce`. But devices that attain a maximum or minimum together share its gradient
        as the algorithm combines them.

    Raises `UserError` when the n devices of the group do not divide `dim`.
    """
    check_wire(wire_dtype, algorithm)
    function, gather = function_of(algorithm, "reduce_scatter"), function_of(algorithm, "all_gather")
    group = _group_of_call(axis, groups, wire_dtype, link)
    _check_op(x, op, wire_dtype)
    _check_dim(x, dim, "reduce_scatter", group)

    def total(x: jax.Array) -> jax.Array:
        if wire_dtype != "int8":
            return function(x, group, "sum", dim % x.ndim)
        from jaxdist.collectives.compression import reduce_parts_lossy

        parts = cut_parts(x, group.n, dim % x.ndim)
        flat = parts.reshape(group.n, -1).astype(jnp.float32)
        return reduce_parts_lossy(flat, group, algorithm)[0].reshape(parts.shape[1:]).astype(x.dtype)

    total_with_gradient = _as_linear(algorithm, total, lambda grad: gather(grad, group, dim % grad.ndim))
    extreme = lambda x: function(x, group, op, dim % x.ndim)  # noqa: E731
    return _reduced(x, group, op, wire_dtype, total=total_with_gradient, extreme=extreme)


def all_gather(
    x: PyTree,
    axis: Axes,
    *,
    dim: int = 0,
    algorithm: str = "native",
    groups: Groups | None = None,
    link: Link | None = None,
) -> PyTree:
    """The devices' `x` concatenated along `dim`, in rank order: n times as large, on every device."""
    function, scatter = function_of(algorithm, "all_gather"), function_of(algorithm, "reduce_scatter")
    group = _group_of_call(axis, groups, None, link)
    _check_dim(x, dim, "all_gather")
    forward = lambda x: function(x, group, dim % x.ndim)  # noqa: E731
    transpose = lambda grad: scatter(grad, group, "sum", dim % grad.ndim)  # noqa: E731
    return _over(x, group, _as_linear(algorithm, forward, transpose))


def all_to_all(
    x: PyTree,
    axis: Axes,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    algorithm: str = "native",
    groups: Groups | None = None,
) -> PyTree:
    """Cut `split_dim` into n parts, send the i-th to rank i, and concatenate what comes along `concat_dim`.

    Raises `UserError` when the n devices of the group do not divide `split_dim`.
    """
    function = function_of(algorithm, "all_to_all")
    group = make_group(axis, groups)
    _check_dim(x, split_dim, "all_to_all", group)
    _check_dim(x, concat_dim, "all_to_all")

    def move(at: int, to: int, x: jax.Array) -> jax.Array:
        return join_parts(function(cut_parts(x, group.n, at % x.ndim), group), to % x.ndim)

    forward, transpose = (functools.partial(move, *dims) for dims in ((split_dim, concat_dim), (concat_dim, split_dim)))
    return _over(x, group, _as_linear(algorithm, forward, transpose))


def broadcast(
    x: PyTree, axis: Axes, *, root: int = 0, algorithm: str = "native", groups: Groups | None = None
) -> PyTree:
    """The `x` of rank `root` on every device."""
    function, back = function_of(algorithm, "broadcast"), function_of(algorithm, "reduce")
    group = _group_with_root(axis, groups, root)
    forward = lambda x: function(x, group, root)  # noqa: E731
    transpose = lambda grad: _only(group.rank == root, back(grad, group, "sum", root))  # noqa: E731
    return _over(x, group, _as_linear(algorithm, forward, transpose))


def reduce(
    x: PyTree, axis: Axes, *, root: int = 0, op: str = "sum", algorithm: str = "native", groups: Groups | None = None
) -> PyTree:
    """`op` (sum, mean, max, min) of `x` over the devices, on rank `root`; zeros elsewhere.

    Gradients of max and min are as for `reduce_scatter`.
    """
    function, back = function_of(algorithm, "reduce"), function_of(algorithm, "broadcast")
    group = _group_with_root(axis, groups, root)
    _check_op(x, op)

    def total(x: jax.Array) -> jax.Array:
        return _only(group.rank == root, function(x, group, "sum", root))

    def extreme(x: jax.Array) -> jax.Array:
        native = algorithm == "native"  # which cannot be differentiated through
        result = _extreme_of_all(x, group, op, algorithm) if native else function(x, group, op, root)
        return _only(group.rank == root, result)

    total_with_gradient = _as_linear(algorithm, total, lambda grad: back(grad, group, root))
    return _reduced(x, group, op, None, total=total_with_gradient, extreme=extreme)


def gather(
    x: PyTree, axis: Axes, *, root: int = 0, dim: int = 0, algorithm: str = "native", groups: Groups | None = None
) -> PyTree:
    """The devices' `x` concatenated along `dim`, in rank order, on rank `root`; zeros elsewhere."""
    function, back = function_of(algorithm, "gather"), function_of(algorithm, "scatter")
    group = _group_with_root(axis, groups, root)
    _check_dim(x, dim, "gather")
    forward = lambda x: _only(group.rank == root, join_parts(function(x, group, root), dim % x.ndim))  # noqa: E731
    transpose = lambda grad: back(cut_parts(grad, group.n, dim % grad.ndim), group, root)  # noqa: E731
    return _over(x, group, _as_linear(algorithm, forward, transpose))


def scatter(
    x: PyTree, axis: Axes, *, root: int = 0, dim: int = 0, algorithm: str = "native", groups: Groups | None = None
) -> PyTree:
    """The rank-th of n equal parts of `dim` of the `x` of rank `root`. Raises `UserError` when n does not divide it."""
    function, back = function_of(algorithm, "scatter"), function_of(algorithm, "gather")
    group = _group_with_root(axis, groups, root)
    _check_dim(x, dim, "scatter", group)
    forward = lambda x: function(cut_parts(x, group.n, dim % x.ndim), group, root)  # noqa: E731
    transpose = lambda grad: _only(group.rank == root, join_parts(back(grad, group, root), dim % grad.ndim))  # noqa: E731
    return _over(x, group, _as_linear(algorithm, forward, transpose))


def send_recv(x: PyTree, axis: Axes, pairs: Pairs | int, *, groups: Groups | None = None) -> PyTree:
    """Move `x` from rank to rank: pairs of (source, target), or a number of places round the ring.

    A rank may send to one target and receive from one source; where nothing arrives there are zeros.
    """
    n = (group := make_group(axis, groups)).n
    chosen = shift(n, pairs) if isinstance(pairs, int) else list(pairs)
    for ends in zip(*(pair if len(jax.tree.leaves(pair)) == 2 else (-1, -1) for pair in chosen), strict=True):
        if len(set(ends)) < len(ends) or not all(0 <= rank < n for rank in ends):
            raise UserError(f"pairs={chosen}: each rank from 0 to {n - 1} once as source and once as target")
    moved = _over(x, group, lambda leaf: group.permute(leaf, chosen))
    return zeros_varying_like(moved) if n == 1 and not chosen else moved
