"""PartitionSpec trees: the one description of how an array is laid out. The same tree serves as `in_specs`,
`out_specs`, `out_shardings` and restore target."""

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from optax import MaskedNode

from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_AXES, BATCH_LIKE, AnyMesh

PyTree = Any
BATCH_SPEC = P(BATCH_AXES)
UNITS = ("embed", "blocks", "head")  # top level of a `ModelDef`'s parameters, in order of use
STACKED = "blocks"  # the one with a leaf for all blocks together


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of one dim's entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_axes(spec: P) -> tuple[str, ...]:
    """All mesh axes that a PartitionSpec names, in dim order."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def dim_of(spec: P, axis: str) -> int | None:
    """The dim that `axis` splits, or None."""
    return next((dim for dim, entry in enumerate(spec) if axis in entry_axes(entry)), None)


def batch_spec(mesh: AnyMesh) -> P:
    """How batches are split on this mesh: `BATCH_SPEC` without the axes that are off."""
    return without_idle(BATCH_SPEC, mesh)


def claimed_axes(spec: P) -> tuple[str, ...]:
    """Batch-like axes over which a leaf with this spec is a copy: its gradient must be summed over exactly these."""
    return tuple(axis for axis in BATCH_LIKE if axis not in spec_axes(spec))


def from_entries(entries: Iterable[tuple[str, ...]]) -> P:
    """The PartitionSpec of each dim's mesh axes: the inverse of `entry_axes`."""
    return P(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def without_idle(spec: P, mesh: AnyMesh) -> P:
    """The spec without the axes of size 1: the same layout, but nothing is typed varying over an axis that is off."""
    return from_entries(tuple(axis for axis in entry_axes(entry) if mesh.shape[axis] > 1) for entry in spec)


def split_over(
    spec: P, shape: jax.ShapeDtypeStruct, *, axis: str, mesh: AnyMesh, min_bytes: int, columns: bool = False
) -> P:
    """The spec with `axis` on one more dim of a leaf that has at least `min_bytes`, where one is divisible.

    columns: the last dim, if that can be. Else the first dim that no axis splits yet: where that is the first of all,
    shards lie one after the other in what is gathered, and nothing is transposed. Where there is none, the first that
    can be split further, as ("tensor", "fsdp"). The dim that blocks are stacked along (`pipe`, which then is the first)
    is never split, and their bytes are those of one.
    """
    n = mesh.shape[axis]
    entries = [entry_axes(entry) for entry in spec] + [()] * (len(shape.shape) - len(spec))
    stack_dim = dim_of(spec, "pipe")
    blocks = 1 if stack_dim is None else shape.shape[stack_dim]
    if n == 1 or math.prod(shape.shape) * shape.dtype.itemsize < min_bytes * blocks:
        return P(*spec)
    parts = [math.prod(mesh.shape[axis] for axis in entry) for entry in entries]
    local = [size // part for size, part in zip(shape.shape, parts, strict=True)]
    fits = [dim for dim, size in enumerate(local) if dim != stack_dim and size % n == 0 and size > 0]
    last = len(entries) - 1 if columns else None
    best = max(fits, key=lambda dim: (parts[dim] == 1, dim == last, -dim), default=None)
    if best is None:
        return P(*spec)
    entries[best] = (*entries[best], axis)
    return from_entries(entries)


def map_specs(function: Callable[..., Any], specs: PyTree, *trees: PyTree) -> PyTree:
    """`jax.tree.map` with the spec tree first. A PartitionSpec is a leaf."""
    return jax.tree.map(function, specs, *trees, is_leaf=lambda node: isinstance(node, P))


def map_named(function: Callable[..., Any], specs: PyTree, *trees: PyTree) -> PyTree:
    """`map_specs`, with the path of each leaf as the name of its equations: ledger and profiles show it."""

    def named(path: tuple[Any, ...], *leaves: Any) -> Any:
        with jax.named_scope(path_name(path) or "parameter"):
            return function(*leaves)

    return jax.tree_util.tree_map_with_path(named, specs, *trees, is_leaf=lambda node: isinstance(node, P))


def spec_leaves(specs: PyTree) -> list[P]:
    """The PartitionSpecs of a tree, in the order of `jax.tree.leaves` of the arrays they describe."""
    return jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, P))


def is_model(tree: PyTree) -> bool:
    """Whether a tree of parameters, or of their specs, has the units of a `ModelDef`."""
    return isinstance(tree, dict) and set(tree) == set(UNITS)


def unit_specs(specs: PyTree) -> PyTree:
    """Specs of what one unit of a `ModelDef` has: one block, without the dim that blocks are stacked along."""
    return {**specs, STACKED: map_specs(lambda spec: P(*spec[1:]), specs[STACKED])}


def apply_rules(specs: PyTree, rules: Sequence[tuple[str, P]]) -> PyTree:
    """The specs, but for leaves whose path fits a rule's pattern: those get the spec of the first that fits.

    Raises `UserError` for a rule that no path reaches, and for a spec that splits otherwise than one dim over fsdp.
    """
    used = set()

    def one(path: tuple[Any, ...], spec: P) -> P:
        for i, (pattern, chosen) in enumerate(rules):
            if fnmatch.fnmatchcase(path_name(path), pattern):
                used.add(i)
                return chosen
        return spec

    for pattern, chosen in rules:
        if spec_axes(chosen) not in ((), ("fsdp",)):
            raise UserError(f"rules: {pattern!r}: {chosen}; allowed: one dim over fsdp, as P(None, 'fsdp'), or P()")
    chosen_specs = jax.tree_util.tree_map_with_path(one, specs, is_leaf=lambda node: isinstance(node, P))
    if missed := [pattern for i, (pattern, _) in enumerate(rules) if i not in used]:
        raise UserError(
            f"rules: {missed[0]!r} is reached by no parameter (the first rule that fits wins); leave it "
            "out, or put it earlier"
        )
    return chosen_specs


def fitting(tree: PyTree, patterns: Sequence[str], *, key: str, optional: Sequence[str] = ()) -> PyTree:
    """For each leaf, whether its path ("blocks.mlp.up.kernel") fits a pattern ("embed.*"). PartitionSpecs and
    MaskedNodes are leaves. Raises `UserError`, which names `key`, for a pattern that fits nothing and is not
    `optional`."""
    if isinstance(patterns, str):
        raise UserError(f"{key}: {patterns!r} is one text; give a list of patterns, [{patterns!r}]")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, P | MaskedNode))
    names = [path_name(path) for path, _ in leaves]
    for pattern in patterns:
        if pattern not in optional and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"{key}: {pattern!r} fits no parameter; allowed: patterns such as {names[0]!r} or "
                f"'{names[0].partition('.')[0]}.*'; parameters: {', '.join(names[:40])}"
            )
    return jax.tree.unflatten(
        treedef, [any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in names]
    )


def shard_count(spec: P, mesh: AnyMesh) -> int:
    """Into how many different parts an array with this spec is cut."""
    return math.prod(mesh.shape[axis] for axis in spec_axes(spec))


def bytes_per_device(shape: jax.ShapeDtypeStruct, spec: P, mesh: AnyMesh) -> int:
    """Bytes that one device holds of an array; exact, since `check_divisible` holds."""
    return math.prod(shape.shape) * shape.dtype.itemsize // shard_count(spec, mesh)


def only(chosen: PyTree, tree: PyTree) -> PyTree:
    """The parts of `tree` whose leaf of `chosen` is true, and MaskedNodes, which have no leaves, for the others."""
    return jax.tree.map(lambda yes, part: part if yes else MaskedNode(), chosen, tree)


def path_name(path: tuple[Any, ...]) -> str:
    """ "blocks.attention.qkv.kernel" from a key path of `jax.tree_util`."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def check_divisible(shapes: PyTree, specs: PyTree, mesh: AnyMesh) -> None:
    """Raise `UserError` naming the parameter, dim and axis when a dim is not divisible by the axes that split it."""

    def check(path: tuple[Any, ...], spec: P, shape: jax.ShapeDtypeStruct) -> None:
        if len(spec) > len(shape.shape):
            raise UserError(f"{path_name(path)}: spec {spec} has more entries than the shape {shape.shape} has dims")
        for dim, entry in enumerate(spec):
            parts = math.prod(mesh.shape[axis] for axis in entry_axes(entry))
            if shape.shape[dim] % parts:
                raise UserError(
                    f"{path_name(path)}: dim {dim} of {tuple(shape.shape)} is {shape.shape[dim]}, not divisible by "
                    f"{'*'.join(entry_axes(entry))}={parts}; change the width or the mesh"
                )

    jax.tree_util.tree_map_with_path(check, specs, shapes, is_leaf=lambda node: isinstance(node, P))


def format_bytes(nbytes: float, digits: str = ".2f") -> str:
    """A number of bytes in its largest unit: "1.50 GiB", "12.00 KiB", "17 B". digits: a format, such as ".4g"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:{digits}} {unit}"
    return f"{nbytes:.0f} B"
