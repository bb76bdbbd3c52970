"""Gradient buckets: many small arrays are fused into few large ones, so that each bucket pays a call's latency once."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.collectives.varying import varying_axes


def plan_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], limit: int) -> list[list[int]]:
    """Buckets, as lists of positions. A bucket has one kind, and at most `limit` bytes unless it is a single item.

    sizes: bytes of each item.
    kinds: the kind of each item; two kinds never share a bucket, and items of one kind keep their order.
    """
    buckets: list[list[int]] = []
    open_bucket: dict[Hashable, tuple[list[int], int]] = {}
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        bucket, filled = open_bucket.get(kind, ([], 0))
        if not bucket or filled + size > limit:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(position)
        open_bucket[kind] = (bucket, filled + size)
    return buckets


def fuse(leaves: Sequence[jax.Array]) -> jax.Array:
    """One flat array of all the leaves; a single leaf is not copied."""
    parts = [leaf.ravel() for leaf in leaves]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def unfuse(flat: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
    """The inverse of `fuse`: arrays shaped like `like`."""
    ends = list(itertools.accumulate(leaf.size for leaf in like))
    return [flat[end - leaf.size : end].reshape(leaf.shape) for end, leaf in zip(ends, like, strict=True)]


def in_buckets(
    function: Callable[..., tuple[jax.Array, ...]], *columns: Sequence[Any], limit: int
) -> tuple[list[jax.Array], ...]:
    """Apply an elementwise collective, such as an all-reduce, to flat buckets of the leaves.

    function: takes one flat array of each column, and returns as many. For example, (gradients) -> (sums,).
    columns: lists of leaves. The i-th leaves of all columns have one shape. The first column decides the buckets.
    limit: bytes of a bucket.
    """
    leaves = columns[0]
    # Fused, two leaves would both get the wider dtype and the larger set of varying axes: such leaves share no bucket.
    kinds = [(leaf.dtype, varying_axes(leaf)) for leaf in leaves]
    results: tuple[list[Any], ...] = tuple([None] * len(leaves) for _ in columns)
    for bucket in plan_buckets([leaf.nbytes for leaf in leaves], kinds, limit):
        flats = function(*(fuse([column[i] for i in bucket]) for column in columns))
        for result, flat in zip(results, flats, strict=True):
            for i, piece in zip(bucket, unfuse(flat, [leaves[i] for i in bucket]), strict=True):
                result[i] = piece
    return results
