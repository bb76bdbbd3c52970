"""Optimizers with statistics of a tensor, run on each block of a stack by itself.

The parameters of a model's blocks are stacked: one array [L, ...] holds a parameter of all L blocks. To an optimizer
that takes means over a parameter, such as Adafactor, the stack would be one parameter, and a block with small gradients
would move as far as the others.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.interpreters.partial_eval import dce_jaxpr

from jaxdist.specs import STACKED, PyTree, is_model

EXPERTS = "experts"  # the layer whose kernels stack those of all experts
FACTORED = 128  # the smallest dim of a matrix that Adafactor factors (optax's default)


class PerBlock(NamedTuple):
    """The state of a `per_block` optimizer.

    blocks: the optimizer's state for one block, all that depends on the block with a leading dim of blocks.
    others: its state for embedding and head.
    """

    blocks: Any
    others: Any


def has_stack(params: PyTree) -> bool:
    """Whether the blocks of these parameters are stacked: `is_model`, and all leaves of blocks have as many rows."""
    return is_model(params) and len({leaf.shape[:1] for leaf in jax.tree.leaves(params[STACKED])}) <= 1


def counted_dims(path: tuple[Any, ...]) -> int:
    """How many leading dims of a block's kernel count kernels, and are none of a matrix: 1 for those of experts."""
    return int(any(getattr(key, "key", None) == EXPERTS for key in path))


def _as_matrices(blocks: PyTree) -> PyTree:
    """A block's kernels [input, *outputs] as matrices [input, outputs], where Adafactor would factor these; those of
    experts, [E, input, *outputs], as a stack of matrices.

    Smaller ones keep their dims: their statistics then have the parameter's shape, and are sharded like it.
    """

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        lead = counted_dims(path)
        matrix = leaf.shape[lead:]
        large = len(matrix) > 2 and min(matrix[0], math.prod(matrix[1:])) >= FACTORED
        kernel = getattr(path[-1], "key", "") == "kernel"
        return leaf.reshape(*leaf.shape[: lead + 1], -1) if large and kernel else leaf

    return jax.tree_util.tree_map_with_path(one, blocks)


def _own_leaves(update: Callable[..., Any], block: PyTree, state: PyTree) -> list[bool]:
    """For each leaf of the state of a block whether it depends on the block: arrays do, and numbers that an update
    computes from gradients, parameters, or such leaves; a count or a rate does not."""
    leaves, size = jax.tree.leaves(state), len(jax.tree.leaves(block))
    own = [bool(leaf.ndim) for leaf in leaves]
    if all(each or jnp.issubdtype(leaf.dtype, jnp.integer) for each, leaf in zip(own, leaves, strict=True)):
        return own
    traced = jax.make_jaxpr(lambda *given: jax.tree.leaves(update(*given)[1]))(block, state, block)
    found: list[bool] = []
    while own != found:
        found, read = own, [True] * size + own + [True] * size
        reads = [dce_jaxpr(traced.jaxpr, [i == j for j in range(len(own))])[1] for i in range(len(own))]
        own = [each or any(map(operator.and_, read, used)) for each, used in zip(own, reads, strict=True)]
    return own


def per_block(optimizer: optax.GradientTransformation, *, matrices: bool = False) -> optax.GradientTransformation:
    """The optimizer, as if every block of a `ModelDef`'s parameters were a tree of its own. Other trees are one.

    A `ModelDef` stacks its blocks, so that a norm's scale [W] is one array [L, W] of all L blocks. Wrap what looks at
    the dims or the norm of a parameter: masks by `ndim`, Muon, LAMB, LARS, Adafactor, `adaptive_grad_clip`. What adds
    up over all parameters stays outside; so do optimizers that estimate one number of all, as Prodigy's.

    optimizer: of optax, whose update takes (grads, state, params). A mask must be a function of the tree: it sees
        {"blocks": one block}, and {"embed": ..., "head": ...}.
    matrices: whether large kernels [input, *outputs] are matrices to it.

    >>> decayed = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    >>> adamw = jaxdist.per_block(optax.adamw(1e-3, mask=decayed))
    >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    """
    shaped = _as_matrices if matrices else lambda blocks: blocks

    def parts(params: PyTree) -> tuple[PyTree, PyTree] | None:
        if not has_stack(params) or not jax.tree.leaves(params[STACKED]):
            return None
        return {STACKED: params[STACKED]}, {name: unit for name, unit in params.items() if name != STACKED}

    def init_block(block: PyTree) -> Any:
        return optimizer.init(shaped(block))

    def axes_of(blocks: PyTree) -> PyTree:
        """The stacked dim of each leaf of the state: 0, but None for what does not depend on the block, as counts."""
        one = jax.eval_shape(lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), blocks)
        state = jax.eval_shape(init_block, one)
        own = _own_leaves(update_block, one, state)
        return jax.tree.unflatten(jax.tree.structure(state), [0 if each else None for each in own])

    def init(params: PyTree) -> Any:
        if (cut := parts(params)) is None:
            return optimizer.init(params)
        blocks, others = cut
        return PerBlock(jax.vmap(init_block, out_axes=axes_of(blocks))(blocks), optimizer.init(others))

    def update_block(grads: PyTree, state: Any, block: PyTree) -> tuple[PyTree, Any]:
        updates, state = optimizer.update(shaped(grads), state, shaped(block))
        return jax.tree.map(lambda update, grad: update.reshape(grad.shape), updates, grads), state

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        cut, own = parts(grads), None if params is None else parts(params)
        if cut is None:
            return optimizer.update(grads, state, params)
        assert own is not None, "these optimizers read the parameters"
        axes = axes_of(own[0])
        run = jax.vmap(update_block, in_axes=(0, axes, 0), out_axes=(0, axes))
        blocks, of_blocks = run(cut[0], state.blocks, own[0])
        others, of_others = optimizer.update(cut[1], state.others, own[1])
        return {**blocks, **others}, PerBlock(of_blocks, of_others)

    return optax.GradientTransformation(init, update)


def adafactor(rate: optax.Schedule, *, weight_decay: float, mask: Any) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235): the parts of `optax.adafactor`, per block.

    The decay is multiplied by the learning rate, as adamw's is; optax's own adafactor takes it as it stands, so that it
    would not follow the schedule.
    """
    parts = (
        optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(rate),
    )
    return per_block(optax.chain(*parts), matrices=True)
