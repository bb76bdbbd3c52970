"""What the backward pass recomputes. The policies are written here and nowhere else."""

import logging
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxdist.collectives import active_axes
from jaxdist.config.rules.remat import Remat
from jaxdist.mesh import BATCH_LIKE, HOST, AnyMesh, on_cpu
from jaxdist.specs import PyTree

BLOCK_INPUT = "block.input"  # the name of what "offload" moves; `[names]` are those of `config_memory`


# Values that only move, cast or broadcast others: cheaper to redo than to keep. Keeping one that was made from a
# gathered parameter would keep the parameter (a norm's scale, broadcast to every position, is as large as an
# activation).
CHEAP = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "transpose")


def _all_but_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """Save every intermediate value except gathered parameters: they are gathered again (that is ZeRO-3, not ZeRO-2).
    Activations that are gathered over `tensor` are saved.

    Differentiation has inlined the forward rule of `gather_leaf` by the time a policy is asked, so the collective's own
    name is seen, as long as that rule holds no custom_vjp; a hand-written gather (ppermute) would need its name here.
    """
    gathered = prim.name == "all_gather" and "fsdp" in tuple(params["axis_name"])
    return not gathered and prim.name not in CHEAP


def _only_of_data(prim: Any, *operands: Any, **params: Any) -> bool:
    """Nor what is the same for every microbatch, like a rotary table: it does not vary over all axes that samples are
    spread over. A pipeline would keep it for each microbatch that is under way."""
    spread = set(active_axes(BATCH_LIKE))
    return _all_but_gathered(prim, **params) and any(spread <= operand.manual_axis_type.varying for operand in operands)


def _policy(mode: Remat, *, constants: bool) -> Callable[..., Any] | None:
    """What `jax.checkpoint` keeps besides the unit's inputs. None: nothing."""
    policies = jax.checkpoint_policies
    if mode == "none":
        return _all_but_gathered if constants else _only_of_data
    if mode == "dots":  # a gathered parameter is no product, so it is not kept; nor are scores, which have batch dims
        return policies.dots_with_no_batch_dims_saveable
    if mode == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[BLOCK_INPUT],
            offload_src="device",
            offload_dst=HOST,
        )
    return None if isinstance(mode, str) else policies.save_only_these_names(*mode)


def after(value: jax.Array, tree: PyTree) -> PyTree:
    """The tree, which the compiler cannot have before `value`: or it would gather sharded parameters early, or once for
    two uses far apart, and keep them in between. Leaf by leaf: a barrier types all that goes through it alike."""
    value = lax.stop_gradient(value)  # its gradient, zero, would be summed over axes that only the leaf varies over
    return jax.tree.map(lambda leaf: lax.optimization_barrier((leaf, value))[0], tree)


def rematerialise(
    function: Callable[..., Any], mode: Remat, *, gathers: bool, in_scan: bool, constants: bool = True
) -> Callable[..., Any]:
    """Wrap the embedding or a block of a model, or a loss of a user's own.

    mode, of `config_memory.check_remat`: "none" keeps all activations, "dots" the results of matrix products, a tuple
    the values of these names, each with the unit's inputs; "full" keeps the inputs alone. "offload" is "full" with what
    is called `BLOCK_INPUT` in the host's memory; "sqrt" is "full" here, see `segments` for stacks of blocks. gathers:
    the unit gathers sharded parameters, which are never kept. in_scan: a scan's body needs no barrier against merging
    the recomputation with the first run. constants: whether values that are the same for every microbatch may be kept.
    """
    if mode == "none" and constants and not gathers:
        return function
    return jax.checkpoint(function, policy=_policy(mode, constants=constants), prevent_cse=not in_scan)


def available(mode: Remat, mesh: AnyMesh) -> Remat:
    """The mode, or "full" in place of "offload" on CPUs, with a notice: all their memory is the host's."""
    if mode == "offload" and on_cpu(mesh):
        logging.getLogger(__name__).warning(
            "memory.remat: a CPU has no memory apart from the host's to offload to; 'offload' runs as 'full'"
        )
        return "full"
    return mode
