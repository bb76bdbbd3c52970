"""PartitionSpec trees, the only description of how arrays are sharded.

The same tree serves as `in_specs`, `out_specs`, `out_shardings` and restore target.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P
from optax import MaskedNode

from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_AXES, BATCH_LIKE, AnyMesh

PyTree = Any
BATCH_SPEC = P(BATCH_AXES)
# ZeRO splits parameters over these axes: their devices see other tokens, and would hold the same parameters. They are
# in the order of the mesh, in which collectives count ranks.
SHARD_AXES = ("fsdp", "expert", "context")
UNITS = ("embed", "blocks", "head")  # the top level of a `ModelDef`'s parameters, in order of use
STACKED = "blocks"  # the unit whose leaves stack all blocks along dim 0


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in a PartitionSpec's entry for one dim: "fsdp" -> ("fsdp",), None -> ()."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_by_dim(spec: P, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes of each dim of an array with `ndim` dims: P("fsdp"), 2 -> [("fsdp",), ()]."""
    return [entry_axes(entry) for entry in spec] + [()] * (ndim - len(spec))


def spec_axes(spec: P) -> tuple[str, ...]:
    """All mesh axes in a PartitionSpec, in dim order."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def dim_of(spec: P, axis: str) -> int | None:
    """The dim that is split over `axis`, or None."""
    return next((dim for dim, entry in enumerate(spec) if axis in entry_axes(entry)), None)


class Shard(NamedTuple):
    """How a strategy has split a parameter: along dim `dim`, over these of `SHARD_AXES`, in this order. `fsdp` may have
    one device, see `_marked`."""

    dim: int
    axes: tuple[str, ...]

    def parts(self, mesh: AnyMesh) -> int:
        """The number of shards on this mesh."""
        return math.prod(mesh.shape[axis] for axis in self.axes)


ShardOf = Callable[[P], Shard | None]


def shard_of(spec: P) -> Shard | None:
    """How a strategy has split a parameter with this spec; None for one that it has left whole.

    >>> shard_of(P(None, ("tensor", "fsdp", "expert")))
    Shard(dim=1, axes=('fsdp', 'expert'))
    >>> shard_of(P("expert", "fsdp"))  # the layer has split dim 0
    Shard(dim=1, axes=('fsdp',))
    """
    for dim, entry in enumerate(spec):
        axes = tuple(axis for axis in entry_axes(entry) if axis in SHARD_AXES)
        if {*axes} - {"expert"}:  # alone, or before the others, it is the layer's
            return Shard(dim, axes[1:] if axes[0] == "expert" else axes)
    return None


def has_shards(specs: PyTree) -> bool:
    """Whether a strategy has split any parameter of a tree of specs."""
    return any(shard_of(spec) is not None for spec in spec_leaves(specs))


def batch_spec(mesh: AnyMesh) -> P:
    """The PartitionSpec of batches on this mesh: `BATCH_SPEC` without the axes that are off."""
    return without_idle(BATCH_SPEC, mesh)


def claimed_axes(spec: P) -> tuple[str, ...]:
    """Batch-like axes along which a leaf has copies. Its gradient must be summed over exactly these axes."""
    return tuple(axis for axis in BATCH_LIKE if axis not in spec_axes(spec))


def from_entries(entries: Iterable[tuple[str, ...]]) -> P:
    """The PartitionSpec from each dim's mesh axes. The inverse of `entry_axes`: ("fsdp",), () -> P("fsdp", None)."""
    return P(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def without_idle(spec: P, mesh: AnyMesh) -> P:
    """The spec without axes of size 1. The layout is the same, but no value is typed varying over these axes."""
    return from_entries(tuple(axis for axis in entry_axes(entry) if mesh.shape[axis] > 1) for entry in spec)


def active_specs(specs: PyTree, mesh: AnyMesh) -> PyTree:
    """`without_idle` of each spec: the in_specs and out_specs of a manual region."""
    return map_specs(lambda spec: without_idle(spec, mesh), specs)


def placed_specs(specs: PyTree, mesh: AnyMesh) -> PyTree:
    """The specs with which parameters are stored: without axes of size 1, but for the `fsdp` of `_marked`."""

    def kept(axes: tuple[str, ...]) -> tuple[str, ...]:
        active = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        return _marked(active) if "expert" in active and "fsdp" in axes[: axes.index("expert")] else active

    return map_specs(lambda spec: from_entries(map(kept, map(entry_axes, spec))), specs)


def _marked(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a strategy's shard with a `fsdp` before `expert`, also where it has one device: it tells the shard
    from a layer's own over `expert`."""
    place = axes.index("expert") if "expert" in axes and "fsdp" not in axes else None
    return axes if place is None else (*axes[:place], "fsdp", *axes[place:])


def marked_specs(specs: PyTree, of_layers: PyTree) -> PyTree:
    """The specs of stored parameters; an `expert` that the layer's own spec does not name is a strategy's. Operations
    on arrays, such as the mean of two checkpoints, drop axes of size 1 from their specs."""

    def one(spec: P, own: P) -> P:
        return spec if "expert" in spec_axes(own) else from_entries(map(_marked, map(entry_axes, spec)))

    return map_specs(one, specs, of_layers)


def split_over(
    spec: P, shape: jax.ShapeDtypeStruct, *, axes: tuple[str, ...], mesh: AnyMesh, min_bytes: int, columns: bool = False
) -> P:
    """The spec of a leaf that is split over more axes, if it has `min_bytes` and a dim is divisible.

    The choice is the first dim that is not split yet, or else the first that can be split further, as ("tensor",
    "fsdp"). The dim along which blocks are stacked (`pipe`) is never chosen.

    axes: of the mesh, counted as one. Where no dim is divisible by them, as many of them as one is divisible by.
    min_bytes: smaller leaves keep their spec. Of stacked blocks, the bytes of one block count.
    columns: prefer the last dim among those that are not split.
    """
    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    entries = axes_by_dim(spec, len(shape.shape))
    stack_dim = dim_of(spec, "pipe")
    blocks = 1 if stack_dim is None else shape.shape[stack_dim]
    size = math.prod(shape.shape)
    parts = [math.prod(mesh.shape[axis] for axis in entry) for entry in entries]
    local = [size // part for size, part in zip(shape.shape, parts, strict=True)]
    last = len(entries) - 1 if columns else None
    enough = size and size * shape.dtype.itemsize >= min_bytes * blocks
    for count in range(len(axes), 0, -1) if enough else ():
        for some in itertools.combinations(axes, count):
            n = math.prod(mesh.shape[axis] for axis in some)
            fits = [dim for dim, size in enumerate(local) if dim != stack_dim and size % n == 0]
            # The first dim is best: shards then lie one after the other in the gathered array.
            best = max(fits, key=lambda dim: (parts[dim] == 1, dim == last, -dim), default=None)
            if best is not None:
                entries[best] = (*entries[best], *_marked(some))
                return from_entries(entries)
    return P(*spec)


def map_specs(function: Callable[..., Any], specs: PyTree, *trees: PyTree) -> PyTree:
    """`jax.tree.map` with the spec tree first. A PartitionSpec is a leaf."""
    return jax.tree.map(function, specs, *trees, is_leaf=lambda node: isinstance(node, P))


def map_named(function: Callable[..., Any], specs: PyTree, *trees: PyTree) -> PyTree:
    """`map_specs` in which a leaf's path names its equations, so that ledger and profiles show the path."""
    results = []
    for name, *leaves in named_leaves(specs, *trees):
        with jax.named_scope(name):
            results.append(function(*leaves))
    return jax.tree.unflatten(spec_structure(specs), results)


def named_leaves(specs: PyTree, *trees: PyTree) -> list[tuple[Any, ...]]:
    """(path, spec, leaf of each tree) for every PartitionSpec of a tree. path: "blocks.mlp.up.kernel"."""
    paths, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda node: isinstance(node, P))
    columns = [spec_structure(specs).flatten_up_to(tree) for tree in trees]
    return [
        (path_name(path) or "parameter", spec, *leaves) for (path, spec), *leaves in zip(paths, *columns, strict=True)
    ]


def spec_structure(specs: PyTree) -> Any:
    """The tree structure of PartitionSpecs, which is that of the arrays they describe."""
    return jax.tree.structure(specs, is_leaf=lambda node: isinstance(node, P))


def spec_leaves(specs: PyTree) -> list[P]:
    """The PartitionSpecs of a tree, in the order of `jax.tree.leaves` of the arrays."""
    return jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, P))


def is_model(tree: PyTree) -> bool:
    """Whether a tree of parameters, or of specs, is as a `ModelDef`'s. Lists, and `nnx.List`s, number their blocks."""
    units = isinstance(tree, dict) and set(tree) == set(UNITS) and isinstance(tree[STACKED], dict)
    return units and not any(str(key).isdigit() for key in tree[STACKED])


def unit_specs(specs: PyTree) -> PyTree:
    """The specs of a model's parameters, but with those of a single block, which has no stacked dim."""
    return {**specs, STACKED: map_specs(lambda spec: P(*spec[1:]), specs[STACKED])}


def shard_count(spec: P, mesh: AnyMesh) -> int:
    """The number of different shards of an array with this spec."""
    return math.prod(mesh.shape[axis] for axis in spec_axes(spec))


def bytes_per_device(shape: jax.ShapeDtypeStruct, spec: P, mesh: AnyMesh) -> int:
    """The bytes of an array on one device. Exact, since `check_divisible` has passed."""
    return math.prod(shape.shape) * shape.dtype.itemsize // shard_count(spec, mesh)


def only(chosen: PyTree, tree: PyTree) -> PyTree:
    """The tree with a MaskedNode, which has no leaves, for each part whose leaf of `chosen` is false."""
    return jax.tree.map(lambda yes, part: part if yes else MaskedNode(), chosen, tree)


def path_name(path: tuple[Any, ...]) -> str:
    """The dotted name of a key path of `jax.tree_util`, as "blocks.attention.qkv.kernel"."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their dotted paths: {"blocks.attention.qkv.kernel": leaf}.

    Raises `UserError` for two leaves with the same path, as of {"a.b": x, "a": {"b": y}}.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if path_name(path) in found:
            raise UserError(f"{path_name(path)}: two leaves of the tree have this path; rename a key that holds a dot")
        found[path_name(path)] = leaf
    return found


def format_bytes(nbytes: float, digits: str = ".2f") -> str:
    """A number of bytes in its largest unit: "1.50 GiB", "12.00 KiB", "17 B". digits: a format, such as ".4g"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:{digits}} {unit}"
    return f"{nbytes:.0f} B"
