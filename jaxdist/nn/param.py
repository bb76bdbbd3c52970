"""The one place that knows how a layer's PartitionSpec rides on a Flax NNX parameter."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxdist.specs import PyTree


def param(value: jax.Array, spec: Sequence[str | None] = ()) -> nnx.Param:
    """An `nnx.Param` that carries its layer's spec: one entry a dim, None = not split by the layer."""
    entries = tuple(spec) or (None,) * value.ndim
    assert len(entries) == value.ndim, (entries, value.shape)
    return nnx.Param(value, spec=P(*entries))


def normal(rngs: nnx.Rngs, shape: Sequence[int], std: float, spec: Sequence[str | None]) -> nnx.Param:
    """A parameter drawn from N(0, std^2)."""
    return param(std * jax.random.normal(rngs.params(), tuple(shape)), spec)


def zeros(shape: Sequence[int], spec: Sequence[str | None]) -> nnx.Param:
    """A parameter of zeros: biases."""
    return param(jnp.zeros(tuple(shape)), spec)


def specs_of(state: nnx.State) -> PyTree:
    """PartitionSpec tree of an NNX state whose parameters were made with `param`, as nested dicts."""

    def spec(variable: nnx.Variable) -> P:
        return variable.get_metadata().get("spec") or P(*(None,) * variable.get_value().ndim)

    return nnx.to_pure_dict(jax.tree.map(spec, state, is_leaf=lambda node: isinstance(node, nnx.Variable)))
