"""What attention sends over the mesh axis `context`: closed forms, which tests compare with the ledger."""

from dataclasses import asdict
from typing import NamedTuple

import jax.numpy as jnp

from jaxdist.build import form_of, resolved_model
from jaxdist.config.rules.remat import keeps_ring, names_value
from jaxdist.config.rules.transformer import CONTEXT_FORMS, shares_heads
from jaxdist.config.schema import Config
from jaxdist.precision.policy import accumulation_dtype, precision_of
from jaxdist.specs import format_bytes


class Traffic(NamedTuple):
    """Bytes that a device sends for one block and microbatch: forward, backward, and for what is computed again."""

    forward: float
    backward: float
    again: float

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self)


def traffic(
    form: str, *, queries: float, keys: float, devices: int, remat: str | tuple[str, ...] = "none", widened: float = 1
) -> Traffic:
    """What attention sends in a form of `jaxdist.nn.context.forms`.

    - queries, keys: bytes of one device's queries, and of its keys and values together.
    - remat: `memory.remat`. What "sqrt" computes a third time is not counted.
    - widened: by how much gradients are wider than keys; 2 in bf16, whose sums the ring sends in fp32.
    """
    others = devices - 1
    kept = keeps_ring(remat) if form == "ring" else names_value(remat, "attention.context")
    if form == "all_to_all":  # queries, keys and values there, the result back
        there = (queries + keys) * others / devices
        once = backward = there + queries * others / devices
        kept_again = there
    elif form == "gather":
        once = backward = kept_again = keys * others
    else:
        once, backward, kept_again = keys * others, (1 + widened) * keys * others, 0.0
    again = 0.0 if remat == "none" else kept_again if kept else once
    return Traffic(once, backward, again)


def context_text(config: Config) -> str | None:
    """A line that says what a token costs in each form; None where `context` is off."""
    if (form := form_of(config)) is None:
        return None
    model, mesh = resolved_model(config), config.mesh
    dtype = jnp.dtype(precision_of(config.precision).compute)
    of_a_head = (model.head_width or model.width // model.heads) * dtype.itemsize / mesh.tensor
    heads, kv_heads = model.heads, model.kv_heads or model.heads
    costs = {
        each: traffic(
            each,
            queries=heads * of_a_head,
            keys=2 * kv_heads * of_a_head,
            devices=mesh.context,
            remat=config.memory.remat,
            widened=accumulation_dtype(dtype).itemsize / dtype.itemsize,
        ).total
        for each in CONTEXT_FORMS
        if each != "all_to_all" or shares_heads(model, asdict(mesh))
    }
    others = ", ".join(f"{format_bytes(cost)} by {each}" for each, cost in costs.items() if each != form)
    return (
        f"context={mesh.context}: of each token and block a device sends {format_bytes(costs[form])} for attention by"
        f" {form} ({others})"
    )
