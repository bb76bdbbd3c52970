"""What the backward pass recomputes. The policies are written here and nowhere else."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxdist.collectives import active_axes
from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_LIKE

PyTree = Any
MODES = ("none", "full")


# Values that only move, cast or broadcast others: cheaper to redo than to keep. Keeping one that was made from a
# gathered parameter would keep the parameter (a norm's scale, broadcast to every position, is as large as an
# activation).
CHEAP = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "transpose")


def _all_but_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """Save every intermediate value except gathered parameters: they are gathered again (that is ZeRO-3, not ZeRO-2).

    Differentiation has inlined the forward rule of `gather_leaf` by the time a policy is asked, so the collective's own
    name is seen, as long as that rule holds no custom_vjp; a hand-written gather (ppermute) would need its name here.
    """
    return prim.name != "all_gather" and prim.name not in CHEAP


def _only_of_data(prim: Any, *operands: Any, **params: Any) -> bool:
    """Nor what is the same for every microbatch, like a rotary table: it does not vary over all axes that samples are
    spread over. A pipeline would keep it for each microbatch that is under way."""
    spread = set(active_axes(BATCH_LIKE))
    return _all_but_gathered(prim, **params) and any(spread <= operand.manual_axis_type.varying for operand in operands)


def after(value: jax.Array, tree: PyTree) -> PyTree:
    """The tree, which the compiler cannot have before `value`: or it would gather sharded parameters early, or once for
    two uses far apart, and keep them in between. Leaf by leaf: a barrier types all that goes through it alike."""
    value = lax.stop_gradient(value)  # its gradient, zero, would be summed over axes that only the leaf varies over
    return jax.tree.map(lambda leaf: lax.optimization_barrier((leaf, value))[0], tree)


def rematerialise(
    function: Callable[..., Any], mode: str, *, gathers: bool, in_scan: bool, constants: bool = True
) -> Callable[..., Any]:
    """Wrap one unit of the model (embedding, block, head).

    mode "none": keep all activations; "full": keep the unit's inputs and recompute the rest. gathers: the unit gathers
    sharded parameters, which are never kept. in_scan: a scan's body needs no barrier against merging the recomputation
    with the first run. constants: whether values that are the same for every microbatch may be kept.
    """
    if mode not in MODES:
        raise UserError(f"memory.remat: {mode!r} is not known; allowed: {', '.join(MODES)}")
    if mode == "full":
        return jax.checkpoint(function, prevent_cse=not in_scan)
    if gathers or not constants:
        policy = _all_but_gathered if constants else _only_of_data
        return jax.checkpoint(function, policy=policy, prevent_cse=not in_scan)
    return function
