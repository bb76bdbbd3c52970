"""Parameters of layers: `nnx.Param` with the layer's PartitionSpec as metadata, and with its own update rule if it has
one. No other module reads this metadata."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.moe import check_rounding
from jaxdist.errors import UserError
from jaxdist.model import UpdateRule
from jaxdist.specs import PyTree

OWNED_AXES = ("tensor", "expert", "context")  # those that layers own


def param(value: jax.Array, spec: Sequence[str | None] = (), *, update: UpdateRule | None = None) -> nnx.Param:
    """An `nnx.Param` with the layer's spec.

    spec: one mesh axis for each dim, or None for a dim that the layer does not split; () if it splits none.
    update: its own update in place of the optimizer's, see `UpdateRule`. Blocks are alike only if these compare equal.

    Raises `UserError` for a spec of other axes, or of another length.
    """
    entries = tuple(spec) or (None,) * value.ndim
    if len(entries) != value.ndim or not {*entries} <= {*OWNED_AXES, None}:
        raise UserError(
            f"spec: {entries} of an array {list(value.shape)}; allowed: for each dim one of {', '.join(OWNED_AXES)},"
            " over which the layer splits it itself, or None; a strategy splits over the other axes"
        )
    return nnx.Param(value, spec=P(*entries), update=update)


def normal(rngs: nnx.Rngs, shape: Sequence[int], std: float, spec: Sequence[str | None]) -> nnx.Param:
    """A parameter drawn from N(0, std^2)."""
    return param(std * jax.random.normal(rngs.params(), tuple(shape)), spec)


def zeros(shape: Sequence[int], spec: Sequence[str | None], *, update: UpdateRule | None = None) -> nnx.Param:
    """A parameter of zeros, as for biases. update: as for `param`."""
    return param(jnp.zeros(tuple(shape)), spec, update=update)


def spec_of(variable: nnx.Variable) -> P:
    """The PartitionSpec of one parameter."""
    found: P = variable.get_metadata().get("spec") or P(*(None,) * variable.get_value().ndim)
    return found


def specs_of(state: nnx.State) -> PyTree:
    """The PartitionSpecs of an NNX state, as nested dicts. Its parameters come from `param`."""

    return nnx.to_pure_dict(jax.tree.map(spec_of, state, is_leaf=lambda node: isinstance(node, nnx.Variable)))


def update_rules_of(state: nnx.State) -> dict[str, UpdateRule]:
    """The parameters of an NNX state with an update rule of their own, by their dotted paths."""
    found = {".".join(map(str, path)): leaf.get_metadata().get("update") for path, leaf in nnx.to_flat_state(state)}
    return {path: rule for path, rule in found.items() if rule is not None}


def check_rules(rules: Mapping[str, UpdateRule], sync: GradSync, reduce_dtype: Any) -> None:
    """Raise `UserError` for sums that would round what parameters with update rules count."""
    moved = next((name for name, rule in rules.items() if rule is not jnp.zeros_like), "")
    check_rounding(next(iter(rules)), sync.wire_dtype, jnp.dtype(reduce_dtype).name, goes_by=moved)
