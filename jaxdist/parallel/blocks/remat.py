"""Rematerialisation: which values the backward pass computes again. All policies are in this file."""

import logging
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxdist.collectives import active_axes
from jaxdist.config.rules.remat import ATTENTION_RESULT, Remat
from jaxdist.mesh import BATCH_LIKE, HOST, AnyMesh, on_cpu
from jaxdist.specs import SHARD_AXES, PyTree

BLOCK_INPUT = "block.input"  # the name of the values that "offload" moves to the host
# Operations that only move, cast or broadcast are cheaper to redo than to keep. And their operand may be a gathered
# parameter: a norm's scale, broadcast to every position, is as large as an activation.
CHEAP = ("broadcast_in_dim", "convert_element_type", "layout_constraint", "reshape", "squeeze", "transpose")


def _all_but_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """The policy that saves everything but gathered parameters, which are gathered again (ZeRO-3, not ZeRO-2).

    Activations that are gathered over `tensor` are saved. The policy sees the all_gather by its own name, because
    `strategy.connect`, a custom_vjp, does not contain it. Keys and values that are gathered over `context`, and tokens
    over `expert`, have names, and are saved by these. A gather made of ppermutes would need another name here.
    """
    gathered = prim.name == "all_gather" and not {*SHARD_AXES}.isdisjoint(params["axis_name"])
    return not gathered and prim.name not in CHEAP


def _only_of_data(prim: Any, *operands: Any, **params: Any) -> bool:
    """The policy that also leaves out values that are the same for every microbatch, such as a rotary table.

    A pipeline would keep them once for each microbatch under way. Values of a microbatch vary over all axes that
    samples are spread over; these do not.
    """
    spread = set(active_axes(BATCH_LIKE))
    return _all_but_gathered(prim, **params) and any(spread <= operand.manual_axis_type.varying for operand in operands)


def _products(prim: Any, *operands: Any, **params: Any) -> bool:
    """The policy that saves results of matrix products, and of attention with the statistics that its backward pass
    reads. Gathered parameters are no products, and scores have batch dims."""
    attention = prim.name.startswith("dot_product_attention_fwd") or params.get("name") == ATTENTION_RESULT
    return attention or bool(jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *operands, **params))


def _policy(mode: Remat, *, constants: bool) -> Callable[..., Any] | None:
    """The policy for `jax.checkpoint`. None keeps nothing but the inputs."""
    policies = jax.checkpoint_policies
    if mode == "none":
        return _all_but_gathered if constants else _only_of_data
    if mode == "dots":
        return _products
    if mode == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[BLOCK_INPUT],
            offload_src="device",
            offload_dst=HOST,
        )
    return None if isinstance(mode, str) else policies.save_only_these_names(*mode)


def after(value: jax.Array, tree: PyTree) -> PyTree:
    """The tree, as values that the compiler cannot have before `value`.

    Otherwise it would gather sharded parameters early, or once for two uses far apart, and keep them in between.
    """
    value = lax.stop_gradient(value)  # its gradient, zero, would be summed over axes that only the leaf varies over
    # Leaf by leaf, because all operands of a barrier get the same type.
    return jax.tree.map(lambda leaf: lax.optimization_barrier((leaf, value))[0], tree)


def rematerialise(
    function: Callable[..., Any], mode: Remat, *, gathers: bool, in_scan: bool, constants: bool = True
) -> Callable[..., Any]:
    """The function (an embedding, a block or a user's loss) with the rematerialisation that `mode` asks for.

    mode: the values that are kept besides the inputs.
        - "none": all activations.
        - "dots": the results of matrix products, and of attention by cuDNN or in a ring.
        - a tuple: the values of these names.
        - "full": no others. "sqrt" is the same here; `sqrt_remat` is for stacks of blocks.
        - "offload": no others, and values named `BLOCK_INPUT` are kept in the host's memory.
    gathers: whether the function gathers sharded parameters. They are never kept.
    in_scan: whether it is the body of a scan. Then no barrier is needed to keep XLA from merging the recomputation with
        the first run.
    constants: whether values that are the same for every microbatch may be kept.
    """
    if mode == "none" and constants and not gathers:
        return function
    return jax.checkpoint(function, policy=_policy(mode, constants=constants), prevent_cse=not in_scan)


def available(mode: Remat, mesh: AnyMesh) -> Remat:
    """The mode. On CPUs, all of whose memory is the host's, "offload" becomes "full", with a warning."""
    if mode == "offload" and on_cpu(mesh):
        logging.getLogger(__name__).warning(
            "memory.remat: a CPU has no memory apart from the host's to offload to; 'offload' runs as 'full'"
        )
        return "full"
    return mode
