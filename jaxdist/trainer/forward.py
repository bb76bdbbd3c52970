"""Forward-only programs on the training layout: evaluation and sampling."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import psum, to_varying
from jaxdist.mesh import BATCH_LIKE
from jaxdist.nn import ModelDef
from jaxdist.parallel.program import make_logits, make_program
from jaxdist.parallel.strategy import Strategy
from jaxdist.specs import STACKED, PyTree, batch_spec


def _unused_keys(rows: int) -> jax.Array:
    """Dropout is off in a model for evaluation; the keys that the program passes on are never read."""
    return jax.random.split(jax.random.key(0), rows)


def make_eval_step(model: ModelDef, mesh: Mesh, specs: PyTree, strategy: Strategy) -> Callable[..., Any]:
    """Compiled (params, batch) -> (loss sum, weight sum) over the global batch. `model` must have no dropout."""
    program = make_program(model, strategy, specs)

    def region(params: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        rows = jax.tree.leaves(batch)[0].shape[0]
        batch = to_varying({**batch, "keys": _unused_keys(rows)}, BATCH_LIKE)
        return psum(to_varying(program.loss(*strategy.begin(params, specs, STACKED), batch), BATCH_LIKE), BATCH_LIKE)

    return jax.jit(jax.shard_map(region, mesh=mesh, in_specs=(specs, batch_spec(mesh)), out_specs=(P(), P())))


def make_sampler(
    model: ModelDef, mesh: Mesh, specs: PyTree, strategy: Strategy, *, temperature: float = 0.8
) -> Callable[..., jax.Array]:
    """Compiled (params, tokens [R, S], start, stop, key) -> tokens with positions start..stop-1 sampled one after the
    other.

    R must be divisible by the batch shards, stop at most S. Each token costs a forward pass over S positions: made for
    a look at what was learned, not for serving.
    """
    assert mesh.shape["context"] == 1, "sampling runs the model on whole sequences"
    logits_of = make_logits(model, strategy, specs)

    def region(params: PyTree, tokens: jax.Array, position: jax.Array) -> jax.Array:
        batch = to_varying({"inputs": tokens, "keys": _unused_keys(tokens.shape[0])}, BATCH_LIKE)
        return logits_of(params, batch, position)

    rows = batch_spec(mesh)
    forward = jax.shard_map(region, mesh=mesh, in_specs=(specs, rows, P()), out_specs=rows)

    def sample(params: PyTree, tokens: jax.Array, start: jax.Array, stop: jax.Array, key: jax.Array) -> jax.Array:
        def extend(position: jax.Array, tokens: jax.Array) -> jax.Array:
            logits = forward(params, tokens, position - 1)
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logits / temperature)
            return lax.dynamic_update_slice_in_dim(tokens, drawn[:, None].astype(tokens.dtype), position, axis=1)

        return lax.fori_loop(start, stop, extend, tokens)

    return jax.jit(sample)
