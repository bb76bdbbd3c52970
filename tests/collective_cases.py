"""What the collectives should give, from numpy; and running many of them in one program, as compiling is what costs."""

import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist import collectives, registry
from jaxdist.collectives import get_algorithm, to_varying
from jaxdist.mesh import BATCH_LIKE, make_mesh
from jaxdist.specs import without_idle

NAMES = registry.names("jaxdist.collectives.algorithms")
BY_HAND = [name for name in NAMES if name != "native"]
AXES = ("fsdp", "pipe", "data")  # in no particular order: ranks count in mesh order all the same
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
CUT = ("reduce_scatter", "all_to_all", "scatter")  # cut a dim into n parts
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter")
SIZES = (None, 0, 1, 7, 1000, 65_537)  # None: a scalar
DTYPES = (jnp.int32, jnp.int8, jnp.uint32, jnp.float32, jnp.bfloat16, jnp.float16)
UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum}

Groups = tuple[tuple[int, ...], ...]


class Call(NamedTuple):
    """One collective, and the array that each rank puts in: x[rank]."""

    operation: str
    x: np.ndarray
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.operation} {self.options} of {self.x.dtype}{list(self.x.shape[1:])}"


def devices(sizes: dict[str, int]) -> int:
    return int(np.prod(list(sizes.values())))


def on_every_device(function: Any, x: Any, **sizes: int) -> Any:
    """Leaves of x are [devices, ...]: row i goes to device i; the results come back stacked the same way."""
    mesh = make_mesh(**sizes)
    rows = without_idle(P(BATCH_LIKE), mesh)

    def region(x: Any) -> Any:
        results = function(jax.tree.map(lambda leaf: leaf[0], x))
        return jax.tree.map(lambda leaf: to_varying(leaf, BATCH_LIKE)[None], results)

    mapped = jax.shard_map(region, mesh=mesh, in_specs=rows, out_specs=rows)
    return jax.tree.map(np.asarray, jax.jit(mapped)(x))


def run(call: Call, x: jax.Array, *, algorithm: str, groups: Groups | None = None) -> jax.Array:
    """The call on one device."""
    chosen = {} if call.operation == "send_recv" else {"algorithm": algorithm}
    return getattr(collectives, call.operation)(x, AXES, groups=groups, **chosen, **call.options)


def _reduced(x: np.ndarray, op: str) -> np.ndarray:
    return UFUNCS[op].reduce(x, axis=0, dtype=x.dtype)  # in the dtype itself: integers wrap around


def _on(root: int, row: np.ndarray, n: int) -> list[np.ndarray]:
    return [row if rank == root else np.zeros_like(row) for rank in range(n)]


def rows_of(call: Call, x: np.ndarray) -> list[np.ndarray]:
    """What each rank of a group has after the call, when its ranks put in the rows of x."""
    n, options = len(x), call.options
    dim, root, op = options.get("dim", 0), options.get("root", 0), options.get("op", "sum")
    match call.operation:
        case "all_reduce":
            return [_reduced(x, op)] * n
        case "reduce_scatter":
            return np.split(_reduced(x, op), n, axis=dim)
        case "all_gather":
            return [np.concatenate(list(x), axis=dim)] * n
        case "all_to_all":
            parts = [np.split(row, n, axis=options["split_dim"]) for row in x]
            return [
                np.concatenate([parts[source][rank] for source in range(n)], options["concat_dim"]) for rank in range(n)
            ]
        case "broadcast":
            return [x[root]] * n
        case "reduce":
            return _on(root, _reduced(x, op), n)
        case "gather":
            return _on(root, np.concatenate(list(x), axis=dim), n)
        case "scatter":
            return np.split(x[root], n, axis=dim)
        case "send_recv":
            pairs = options["pairs"]
            pairs = [(rank, (rank + pairs) % n) for rank in range(n)] if isinstance(pairs, int) else pairs
            rows = [np.zeros_like(x[0]) for _ in range(n)]
            for source, target in pairs:
                rows[target] = x[source]
            return rows
    raise AssertionError(call.operation)


def wanted(call: Call, groups: Groups | None = None) -> np.ndarray:
    """[devices, ...]: what each device has after the call; devices in no group have zeros."""
    groups = groups or (tuple(range(len(call.x))),)
    rows: dict[int, np.ndarray] = {}
    for group in groups:
        rows |= dict(zip(group, rows_of(call, call.x[list(group)]), strict=True))
    nothing = np.zeros_like(rows[groups[0][0]])
    return np.stack([rows.get(rank, nothing) for rank in range(len(call.x))])


def check_exact(calls: list[Call], *, algorithm: str, groups: Groups | None = None, **sizes: int) -> None:
    """All calls in one program: dtype, shape and every bit as numpy has them."""

    def function(rows: list[jax.Array]) -> list[jax.Array]:
        return [run(call, x, algorithm=algorithm, groups=groups) for call, x in zip(calls, rows, strict=True)]

    results = on_every_device(function, [call.x for call in calls], **sizes)
    for call, got in zip(calls, results, strict=True):
        want = wanted(call, groups)
        assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{algorithm} {sizes} {groups}: {call}"
        np.testing.assert_array_equal(got, want, err_msg=f"{algorithm} {sizes} {groups}: {call}")
        assert got.tobytes() == want.tobytes(), f"{algorithm} {sizes} {groups}: {call}: a zero with another sign"


def values(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Of integers the whole range, so that sums wrap around; floats so small that sums of eight are exact."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    return rng.integers(-8, 9, shape).astype(dtype)


def draw(choice: random.Random, operation: str, op: str, size: int | None, n: int, *, devices: int) -> Call:
    """A call of this size in one of the dtypes, along one of the dims, with one of the roots."""
    options: dict[str, Any] = {"op": op} if operation in REDUCTIONS else {}
    dtype = choice.choice(DTYPES if op == "sum" and operation in REDUCTIONS else (*DTYPES, jnp.bool_))
    if operation in ("broadcast", "reduce", "gather", "scatter"):
        options["root"] = choice.choice((0, n // 2, n - 1))
    length = -(-(size or 0) // n) * n if operation in CUT else size
    dim = choice.choice((0, 1))
    shape: tuple[int, ...] = () if length is None else (length,)
    if operation in ("all_reduce", "broadcast", "reduce"):
        dim = 0
    elif operation == "all_to_all":
        options |= {"split_dim": dim, "concat_dim": choice.choice((0, 1))}
        shape = (2, *shape) if dim else (*shape, 2)
    else:
        options["dim"] = choice.choice((dim, dim - 2)) if dim else dim
        shape = (2, *shape) if dim else shape
    return Call(operation, values((devices, *shape), dtype, choice.randrange(2**32)), options)


def has(algorithm: str, operation: str) -> bool:
    return getattr(get_algorithm(algorithm), operation) is not None


def everyday_calls(algorithm: str, n: int, *, devices: int | None = None) -> list[Call]:
    """Every operation that the algorithm has, sums and extrema apart; of the rest a choice, another for every n."""
    choice, calls = random.Random(f"{algorithm} {n} {devices}"), []
    for operation in OPERATIONS:
        if has(algorithm, operation):
            ops = ["sum", choice.choice(("max", "min"))] if operation in REDUCTIONS[:2] else ["sum"]
            ops = [choice.choice(("sum", "max", "min"))] if operation == "reduce" else ops
            calls += [draw(choice, operation, op, choice.choice(SIZES[2:]), n, devices=devices or n) for op in ops]
    return calls


def all_calls(algorithm: str, n: int) -> list[Call]:
    """Every operation with every op: of the sizes every other, the rest for the next n; dtypes by chance."""
    choice, calls = random.Random(f"all {algorithm} {n}"), []
    for operation in OPERATIONS:
        if has(algorithm, operation):
            scalars = operation in ("all_reduce", "broadcast", "reduce")
            ops = ("sum", "max", "min") if operation in REDUCTIONS else ("sum",)
            sizes = [size for size in SIZES[n % 2 :: 2] if size is not None or scalars]
            calls += [draw(choice, operation, op, size, n, devices=n) for op in ops for size in sizes]
    return calls


def empty_calls(algorithm: str, n: int, *, devices: int) -> list[Call]:
    """Every operation, of nothing."""
    choice = random.Random(f"empty {algorithm} {n}")
    operations = [operation for operation in OPERATIONS if has(algorithm, operation)]
    return [draw(choice, operation, "sum", 0, n, devices=devices) for operation in operations]


def draw_pairs(n: int) -> list[Call]:
    """send_recv by several shifts and by pairs, in every dtype."""
    choice = random.Random(n)
    ranks = list(range(n))
    targets = choice.sample(ranks, n)
    some = list(zip(ranks, targets, strict=True))[: (n + 1) // 2]
    moves = [0, 1, -1, n + 2, some, list(zip(ranks, targets, strict=True)), [(0, n - 1)], []]
    kinds = (*DTYPES, jnp.bool_)
    shapes = [(), (0,), (7,), (2, 3)]
    return [
        Call("send_recv", values((n, *shapes[i % 4]), kinds[(i + n) % 7], i), {"pairs": pairs})
        for i, pairs in enumerate(moves)
    ]
