"""Attention between the positions of all devices of `context`, in three forms with the same result.

- `all_to_all`: heads instead of positions. Each device gets all positions of some heads, and attends to them alone
  (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv 2309.14509). Its devices share the key/value heads evenly.
- `gather`: the keys and values of all positions on every device (Llama 3, Grattafiori et al. 2024, section 3.3.2).
- `ring`: keys and values travel from device to device (Liu et al. 2023, arXiv 2310.01889): `jaxdist.nn.context.ring`.

Legend: B batch, S positions of the whole sequence, s those of this device, n key/value heads on this device, G query
heads of each, K head width, C devices of `context`.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import all_gather, all_to_all
from jaxdist.errors import UserError
from jaxdist.nn.context.positions import ContextSplit, by_device, context_size, in_order, own_numbers


class Attend(Protocol):
    """The attention of a layer, by its own kernel: (q [B, S, n, G, K], k and v [B, T, n, K]) -> [B, S, n, G, K]."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        split: ContextSplit,
        positions: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """split: what of the arguments `context` has split. positions: of queries and keys; None: all, in order."""


def over_heads(attend: Attend, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The form `all_to_all`. A device sends (C - 1) / C of its q, k and v, and of its result."""
    if k.shape[2] % (count := context_size()):
        raise UserError(
            f"context: all_to_all shares the {k.shape[2]} key/value heads of a device among context={count} devices,"
            f" and {count} does not divide them; allowed: a context that does, or ring or gather in place of all_to_all"
        )
    whole = (in_order(all_to_all(x, "context", split_dim=2, concat_dim=1), dim=1) for x in (q, k, v))
    heads = by_device(attend(*whole, split="heads"), dim=1)
    return checkpoint_name(all_to_all(heads, "context", split_dim=1, concat_dim=2), "attention.context")


def over_queries(attend: Attend, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The form `gather`. A device sends its k and v C - 1 times."""
    k, v = (in_order(all_gather(x, "context", dim=1), dim=1) for x in (k, v))
    k, v = (checkpoint_name(x, "attention.keys") for x in (k, v))  # or they would be gathered again: `blocks.remat`
    positions = own_numbers(q.shape[1])[None], jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    return attend(q, k, v, split="queries", positions=positions)


OVER_CONTEXT: dict[str, Callable[[Attend, jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "all_to_all": over_heads,
    "gather": over_queries,
}
RING = "ring"  # which has a kernel of its own


def check_context_form(form: str | None, *, causal: bool) -> None:
    """Raise `UserError` for a form that is none, or that the attention of a layer cannot have."""
    if form is None:
        return
    if form not in (*OVER_CONTEXT, RING):
        raise UserError(f"context: {form!r} is none; allowed: {', '.join((*OVER_CONTEXT, RING))}, or None")
    if not causal:
        raise UserError(f"context: {form!r} is for causal attention; allowed with causal=False: None")
