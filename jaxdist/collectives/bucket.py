"""Fuse many small arrays into few large ones before a collective: the latency of each call is paid once a bucket."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.collectives.varying import varying_axes


def plan_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], limit: int) -> list[list[int]]:
    """Group positions so that a bucket holds one kind only and at most `limit` bytes, or one item that is larger.

    Items keep their order inside a kind. sizes: bytes of each item; kinds: what must not be mixed.
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


def in_buckets(function: Callable[[jax.Array], jax.Array], leaves: Sequence[Any], *, limit: int) -> list[jax.Array]:
    """Apply an elementwise collective such as an all-reduce to flat buckets of the leaves. `limit` in bytes.

    Leaves of different dtype or varying type never share a bucket: the result would lose the narrower one.
    """
    kinds = [(leaf.dtype, varying_axes(leaf)) for leaf in leaves]
    results: list[Any] = [None] * len(leaves)
    for bucket in plan_buckets([leaf.nbytes for leaf in leaves], kinds, limit):
        parts = [leaves[i].ravel() for i in bucket]
        flat = function(jnp.concatenate(parts) if len(parts) > 1 else parts[0])
        offset = 0
        for i in bucket:
            results[i] = flat[offset : offset + leaves[i].size].reshape(leaves[i].shape)
            offset += leaves[i].size
    return results
