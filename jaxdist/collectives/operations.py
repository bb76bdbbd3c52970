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

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist import registry
from jaxdist.collectives.algorithm import ALGORITHMS, get_algorithm
from jaxdist.collectives.compression import all_reduce_lossy, reduce_parts_lossy
from jaxdist.collectives.cost import NOTHING, Cost, Link, make_link
from jaxdist.collectives.group import Axes, Group, Groups, Pairs, entering, make_group, shift
from jaxdist.collectives.parts import cut_parts, join_parts
from jaxdist.collectives.transpose import extremum, linear, with_loss
from jaxdist.collectives.varying import varying_axes, zeros_varying_like
from jaxdist.config.rules.grad_sync import check_wire
from jaxdist.errors import UserError
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree

Run = Callable[[jax.Array, Group], jax.Array]
OPS = ("sum", "mean", "max", "min")


def function_of(algorithm: str, operation: str) -> Callable[..., jax.Array]:
    """The algorithm's function for an operation; `UserError` naming those that have it."""
    function = getattr(get_algorithm(algorithm), operation)
    if function is None:
        known = [name for name in registry.names(ALGORITHMS) if getattr(get_algorithm(name), operation) is not None]
        raise UserError(f"algorithm={algorithm!r} has no {operation}; these have: {', '.join(known)}")
    return function


def cost(operation: str, nbytes: int, *sizes: int, algorithm: str = "ring", itemsize: int = 4) -> Cost:
    """What one call costs on `sizes` devices (n; or outer, inner), for an input of nbytes on each device."""
    group = Group.of(*sizes)
    function_of(algorithm, operation)
    if group.n == 1:
        return NOTHING
    return get_algorithm(algorithm).cost(operation, nbytes // itemsize, group).scaled(itemsize)


def _check_op(x: jax.Array, op: str, wire_dtype: str | None = None) -> None:
    if op not in OPS:
        raise UserError(f"op={op!r} is not known; allowed: {', '.join(OPS)}")
    if op == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact):
        raise UserError(f"op='mean': {x.dtype} has no fractions; cast to a float, or sum and divide")
    if op == "sum" and x.dtype == jnp.bool_:
        raise UserError("op='sum' of bool: use max for any, min for all, or cast to int32 to count")
    if wire_dtype is not None and not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(f"wire_dtype={wire_dtype!r}: is for floats, not for {x.dtype}; leave it out")
    if wire_dtype == "int8" and op in ("max", "min"):
        raise UserError(f"wire_dtype='int8': not with op={op!r}; allowed: sum, mean")


def _check_dim(x: jax.Array, dim: int, operation: str, group: Group | None = None) -> int:
    """`dim` counted from the front; `UserError` unless it exists and, with a group, the devices divide it."""
    if not -x.ndim <= dim < x.ndim:
        raise UserError(f"{operation}: dim {dim} of {x.shape} does not exist; allowed: {-x.ndim} to {x.ndim - 1}")
    if group is not None and x.shape[dim] % group.n:
        name = f"{'*'.join(group.axes)}={group.n}" if len(group.members) == 1 else f"groups of {group.n}"
        raise UserError(f"{operation}: dim {dim} of {x.shape} is not divisible by {name}; pad it")
    return dim % x.ndim


def _check_root(root: int, group: Group | None) -> None:
    n = 1 if group is None else group.n
    if not 0 <= root < n:
        raise UserError(f"root={root}: allowed are the ranks 0 to {n - 1} of the group")


def _on_the_wire(group: Group, wire_dtype: str | None, link: Link | str | None) -> Group:
    """The group for one call. int8 is encoded before it is sent, not cast on the way."""
    link = make_link(link) if isinstance(link, str) else link
    return replace(group, wire=None if wire_dtype == "int8" else wire_dtype, link=link)


def _only(condition: jax.Array, x: jax.Array) -> jax.Array:
    """x where the condition holds, else zeros."""
    return jnp.where(condition, x, jnp.zeros((), x.dtype))


def _over(x: PyTree, group: Group | None, run: Run, check: Callable[[jax.Array], Any]) -> PyTree:
    """`run` on every leaf as it enters the group. A group of one device has nothing to do, all maps are the identity;
    what a call on several would refuse it refuses too."""

    def enter(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        check(leaf)
        if group is None:
            return leaf
        leaf = entering(leaf, group)
        return leaf if group.n == 1 else run(leaf, group)

    return jax.tree.map(enter, x)


def _as_linear(algorithm: str, forward: Run, transpose: Run, leaf: jax.Array, group: Group) -> jax.Array:
    """forward(leaf), with `transpose` as its derivative; what native is made of, JAX can transpose itself."""
    if algorithm == "native":
        return forward(leaf, group)
    return linear(lambda x: forward(x, group), lambda g: transpose(g, group), leaf)


def _all_extremum(x: jax.Array, group: Group, op: str, algorithm: str) -> jax.Array:
    function = function_of(algorithm, "all_reduce")

    def total(value: jax.Array) -> jax.Array:
        if not set(group.axes) & varying_axes(value):  # a gradient of a result typed invariant is one already
            return value
        return linear(lambda x: function(x, group, "sum"), lambda x: function(x, group, "sum"), value)

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

    wire_dtype: "bfloat16" or "int8", what travels instead of floats; sums stay in fp32. Not with native; int8 with
    ring and balanced_fusion only, and see `all_reduce_with_feedback`. link: what "auto" and "two_level" reckon with,
    or its name, or a rate.
    The gradient of max and min is shared equally by the devices that attain it.
    """
    check_wire(wire_dtype, algorithm)
    function = function_of(algorithm, "all_reduce")

    def run(leaf: jax.Array, group: Group) -> jax.Array:
        group = _on_the_wire(group, wire_dtype, link)
        wide = leaf if wire_dtype is None else leaf.astype(accumulation_dtype(leaf.dtype))
        if op in ("max", "min"):  # rounded first: the result is one of the values, and its gradient finds whose
            return _all_extremum(group.rounded(wide), group, op, algorithm).astype(leaf.dtype)

        def total(x: jax.Array, group: Group) -> jax.Array:
            return all_reduce_lossy(x, group, algorithm)[0] if wire_dtype == "int8" else function(x, group, "sum")

        result = _as_linear(algorithm, total, total, wide, group)
        return (result / group.n if op == "mean" else result).astype(leaf.dtype)

    return _over(x, make_group(axis, groups), run, lambda leaf: _check_op(leaf, op, wire_dtype))


def all_reduce_with_feedback(
    x: PyTree, residual: PyTree, axis: Axes, *, op: str = "sum", algorithm: str = "ring", groups: Groups | None = None
) -> tuple[PyTree, PyTree]:
    """`all_reduce` with int8 on the wire, and what that lost on this device: (result, new residual).

    residual: fp32, shaped like x, zeros at first; hand in what the call before gave back. It is added to x, so that
    over many calls errors do not add up. The gradient is that of the sum of x; none flows through the residual.
    """
    check_wire("int8", algorithm)
    group = make_group(axis, groups)

    def run(leaf: jax.Array, lost: jax.Array) -> tuple[jax.Array, jax.Array]:
        _check_op(leaf, op, "int8")
        wide = leaf.astype(jnp.float32) + lax.stop_gradient(lost)
        if group is None or group.n == 1:
            wide = wide if group is None else entering(wide, group)
            return wide.astype(leaf.dtype), jnp.zeros_like(lost)
        total, lost = with_loss(lambda x: all_reduce_lossy(x, group, algorithm), entering(wide, group))
        return (total / group.n if op == "mean" else total).astype(leaf.dtype), lost

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

    Raises `UserError` when the n devices of the group do not divide `dim`. op, wire_dtype, link: as for `all_reduce`,
    but devices that attain a maximum or minimum together share its gradient as the algorithm combines them.
    """
    check_wire(wire_dtype, algorithm)
    function, gather = function_of(algorithm, "reduce_scatter"), function_of(algorithm, "all_gather")

    def run(leaf: jax.Array, group: Group) -> jax.Array:
        at = _check_dim(leaf, dim, "reduce_scatter", group)
        group = _on_the_wire(group, wire_dtype, link)
        wide = leaf if wire_dtype is None else leaf.astype(accumulation_dtype(leaf.dtype))
        if op in ("max", "min"):
            return function(wide, group, op, at).astype(leaf.dtype)

        def reduce(x: jax.Array, group: Group) -> jax.Array:
            if wire_dtype != "int8":
                return function(x, group, "sum", at)
            parts = cut_parts(x, group.n, at)
            flat = parts.reshape(group.n, -1).astype(jnp.float32)
            return reduce_parts_lossy(flat, group, algorithm)[0].reshape(parts.shape[1:]).astype(x.dtype)

        result = _as_linear(algorithm, reduce, lambda g, group: gather(g, group, at), wide, group)
        return (result / group.n if op == "mean" else result).astype(leaf.dtype)

    def check(leaf: jax.Array) -> None:
        _check_op(leaf, op, wire_dtype)
        _check_dim(leaf, dim, "reduce_scatter")

    return _over(x, make_group(axis, groups), run, check)


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

    def run(leaf: jax.Array, group: Group) -> jax.Array:
        at = _check_dim(leaf, dim, "all_gather")
        back = lambda g, group: scatter(g, group, "sum", at)  # noqa: E731
        return _as_linear(algorithm, lambda x, group: function(x, group, at), back, leaf, replace(group, link=link))

    return _over(x, make_group(axis, groups), run, lambda leaf: _check_dim(leaf, dim, "all_gather"))


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

    def run(leaf: jax.Array, group: Group) -> jax.Array:
        at = _check_dim(leaf, split_dim, "all_to_all", group)
        to = _check_dim(leaf, concat_dim, "all_to_all")

        def move(x: jax.Array, group: Group, at: int, to: int) -> jax.Array:
            return join_parts(function(cut_parts(x, group.n, at), group), to)

        return _as_linear(
            algorithm, lambda x, group: move(x, group, at, to), lambda g, group: move(g, group, to, at), leaf, group
        )

    def check(leaf: jax.Array) -> None:
        _check_dim(leaf, split_dim, "all_to_all")
        _check_dim(leaf, concat_dim, "all_to_all")

    return _over(x, make_group(axis, groups), run, check)


def broadcast(
    x: PyTree, axis: Axes, *, root: int = 0, algorithm: str = "native", groups: Groups | None = None
) -> PyTree:
    """The `x` of rank `root` on every device."""
    function, back = function_of(algorithm, "broadcast"), function_of(algorithm, "reduce")

    group = make_group(axis, groups)
    _check_root(root, group)

    def run(leaf: jax.Array, group: Group) -> jax.Array:
        gradient = lambda g, group: _only(group.rank == root, back(g, group, "sum", root))  # noqa: E731
        return _as_linear(algorithm, lambda x, group: function(x, group, root), gradient, leaf, group)

    return _over(x, group, run, lambda leaf: None)


def reduce(
    x: PyTree, axis: Axes, *, root: int = 0, op: str = "sum", algorithm: str = "native", groups: Groups | None = None
) -> PyTree:
    """`op` (sum, mean, max, min) of `x` over the devices, on rank `root`; zeros elsewhere. Gradients of max and min: as
    for `reduce_scatter`."""
    function, back = function_of(algorithm, "reduce"), function_of(algorithm, "broadcast")

    group = make_group(axis, groups)
    _check_root(root, group)

    def run(leaf: jax.Array, group: Group) -> jax.Array:
        if op in ("max", "min"):
            native = algorithm == "native"  # which cannot be differentiated through
            result = _all_extremum(leaf, group, op, algorithm) if native else function(leaf, group, op, root)
            return _only(group.rank == root, result)
        forward = lambda x, group: _only(group.rank == root, function(x, group, "sum", root))  # noqa: E731
        result = _as_linear(algorithm, forward, lambda g, group: back(g, group, root), leaf, group)
        return result / group.n if op == "mean" else result

    return _over(x, group, run, lambda leaf: _check_op(leaf, op))


def gather(
    x: PyTree, axis: Axes, *, root: int = 0, dim: int = 0, algorithm: str = "native", groups: Groups | None = None
) -> PyTree:
    """The devices' `x` concatenated along `dim`, in rank order, on rank `root`; zeros elsewhere."""
    function, back = function_of(algorithm, "gather"), function_of(algorithm, "scatter")

    group = make_group(axis, groups)
    _check_root(root, group)

    def run(leaf: jax.Array, group: Group) -> jax.Array:
        at = _check_dim(leaf, dim, "gather")
        return _as_linear(
            algorithm,
            lambda x, group: _only(group.rank == root, join_parts(function(x, group, root), at)),
            lambda g, group: back(cut_parts(g, group.n, at), group, root),
            leaf,
            group,
        )

    return _over(x, group, run, lambda leaf: _check_dim(leaf, dim, "gather"))


def scatter(
    x: PyTree, axis: Axes, *, root: int = 0, dim: int = 0, algorithm: str = "native", groups: Groups | None = None
) -> PyTree:
    """The rank-th of n equal parts of `dim` of the `x` of rank `root`. Raises `UserError` when n does not divide it."""
    function, back = function_of(algorithm, "scatter"), function_of(algorithm, "gather")

    group = make_group(axis, groups)
    _check_root(root, group)

    def run(leaf: jax.Array, group: Group) -> jax.Array:
        at = _check_dim(leaf, dim, "scatter", group)
        return _as_linear(
            algorithm,
            lambda x, group: function(cut_parts(x, group.n, at), group, root),
            lambda g, group: _only(group.rank == root, join_parts(back(g, group, root), at)),
            leaf,
            group,
        )

    return _over(x, group, run, lambda leaf: _check_dim(leaf, dim, "scatter"))


def send_recv(x: PyTree, axis: Axes, pairs: Pairs | int, *, groups: Groups | None = None) -> PyTree:
    """Move `x` from rank to rank: pairs of (source, target), or a number of places round the ring.

    A rank may send to one target and receive from one source; where nothing arrives there are zeros.
    """
    group = make_group(axis, groups)
    n = 1 if group is None else group.n
    chosen = shift(n, pairs) if isinstance(pairs, int) else list(pairs)
    for ends in zip(*chosen, strict=True):
        if len(set(ends)) < len(ends) or not all(0 <= rank < n for rank in ends):
            raise UserError(f"pairs={chosen}: each rank from 0 to {n - 1} once as source and once as target")
    moved = _over(x, group, lambda leaf, group: group.permute(leaf, chosen), lambda leaf: None)
    if n == 1 and not chosen:
        return zeros_varying_like(jax.tree.map(jnp.asarray, moved))
    return moved
