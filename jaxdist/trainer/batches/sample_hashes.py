"""Hashes of the samples that each step was trained on, for `observe.samples`.

A line of samples.jsonl is {"step": 1, "samples": [hash of each row of the global batch]}. The rows are hashed as they
lie on the devices: inputs, targets and weights. So two runs in any layouts saw the same data exactly if their files are
equal.
"""

import hashlib
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdist.observe import MetricsWriter

_BYTES = 8  # of SHA-256


def log_samples(writer: MetricsWriter | None, step: int, batch: Mapping[str, jax.Array]) -> None:
    """Write the line of a step. Every process must call it; writer: of process 0, None on the others."""
    found = hashes_of(batch)
    if writer is not None:
        writer.write(step, {"samples": found})


def hashes_of(batch: Mapping[str, jax.Array]) -> list[str]:
    """The hash of each row, in order; the same on every process, each of which must call it. Waits for the devices."""
    rows = len(next(iter(batch.values())))
    own, found = {}, np.zeros((rows, _BYTES), np.uint8)
    for leaf in sorted(batch):
        for shard in batch[leaf].addressable_shards:
            assert all(part == slice(None) for part in shard.index[1:]), "a row is whole on each device"
            start = shard.index[0].indices(rows)[0]
            for i, row in enumerate(np.asarray(shard.data), start):
                own[i, leaf] = row.tobytes()
    for i in {i for i, _ in own}:
        digest = hashlib.sha256(b"".join(own[i, leaf] for leaf in sorted(batch))).digest()
        found[i] = np.frombuffer(digest[:_BYTES], np.uint8)
    every = np.asarray(multihost_utils.process_allgather(found, tiled=False)).reshape(-1, rows, _BYTES)
    for each in every:
        assert not np.any((each != every.max(0)) & each.any(axis=1, keepdims=True)), "processes have different rows"
    return [bytes(row).hex() for row in every.max(0)]
