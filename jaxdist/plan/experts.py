"""What a mixture of experts sends over the mesh axis `expert`: closed forms, which tests compare with the ledger."""

import jax.numpy as jnp

from jaxdist.build import resolved_model
from jaxdist.config.rules.remat import names_value
from jaxdist.config.schema import Config
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.nn.experts.capacity import places
from jaxdist.plan.context import Traffic
from jaxdist.precision.policy import accumulation_dtype, precision_of
from jaxdist.specs import format_bytes

ID_BYTES = 4  # of the number of an expert


def expert_traffic(
    moe: MoEConfig,
    *,
    width: int,
    devices: int,
    itemsize: int,
    gate_bytes: int,
    dispatch: str,
    remat: str | tuple[str, ...] = "none",
) -> Traffic:
    """Bytes that a device of `expert` sends for one of its tokens in one block.

    - itemsize: of activations. gate_bytes: of a token's weight of one of its experts.
    - dispatch: "capacity" or "dropless".
    - remat: `memory.remat`. What "sqrt" computes a third time is not counted.
    """
    others, kept = devices - 1, names_value(remat, "mlp.rows")
    if dispatch == "capacity":  # all places are sent, the empty ones too: there and back, and so in the backward pass
        rows = moe.experts * places(moe) / moe.group
        there = rows * width * itemsize * others / devices
        return Traffic(2 * there, 2 * there, 0.0 if remat == "none" else there if kept else 2 * there)
    token, choices = width * itemsize, moe.top_k
    gathered = (token + choices * (ID_BYTES + gate_bytes)) * others
    back = (2 * token + choices * gate_bytes) * others
    again = choices * (ID_BYTES + gate_bytes) * others if kept else gathered
    whole = remat == "none" or names_value(remat, "mlp.tokens")
    return Traffic(gathered + token * others, back, 0.0 if whole else again)


def experts_text(config: Config) -> str | None:
    """A line that says what a token costs by each way of dispatch; None without experts, or where `expert` is off."""
    moe, devices = getattr(resolved_model(config), "moe", MoEConfig()), config.mesh.expert
    if not moe.on or devices == 1:
        return None
    dtype = jnp.dtype(precision_of(config.precision).compute)
    costs = {
        each: expert_traffic(
            moe,
            width=config.model.width,
            devices=devices,
            itemsize=dtype.itemsize,
            gate_bytes=accumulation_dtype(dtype).itemsize,
            dispatch=each,
            remat=config.memory.remat,
        ).total
        for each in ("capacity", "dropless")
    }
    (other,) = costs.keys() - {moe.dispatch}
    return (
        f"expert={devices}: of each token and block a device sends {format_bytes(costs[moe.dispatch])} to experts and"
        f" back by {moe.dispatch} ({format_bytes(costs[other])} by {other})"
    )
