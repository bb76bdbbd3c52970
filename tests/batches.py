"""Batches of a language model: random tokens, every one of which counts; or their shapes alone."""

import jax
import numpy as np


def random_tokens(rows: int = 8, length: int = 8, *, vocab: int = 32, seed: int = 0) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, vocab, (rows, length + 1)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((rows, length), np.float32)}


def token_shapes(rows: int, length: int = 8) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct((rows, length), np.float32 if name == "weights" else np.int32)
        for name in ("inputs", "targets", "weights")
    }
