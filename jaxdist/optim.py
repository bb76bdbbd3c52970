"""Optimizers: stock optax transformations, chosen by the configuration.

They run in the global region, on whole arrays. clip_by_global_norm, adafactor and muon need statistics of a whole
tensor; in the manual region they would silently use those of a shard.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.config.rules.grad_sync import refuse_optimizer
from jaxdist.errors import UserError
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.precision.reproducible import PRODUCTS, products_rounded, rounded
from jaxdist.specs import PyTree, fitting, is_model

if TYPE_CHECKING:
    from jaxdist.config.schema import OptimizerConfig

NOT_DECAYED = ("bias", "scale")  # vectors, even if stacked blocks give them a second dim


def learning_rate(config: "OptimizerConfig", steps: int) -> optax.Schedule:
    """The learning rate schedule: linear warm-up to `lr`, then `cosine`, `linear` or `constant`.

    Cosine and linear end at `final_lr_ratio * lr` at the last step.
    """
    after, final = max(1, steps - config.warmup_steps - 1), config.lr * config.final_lr_ratio
    tail = {
        "cosine": lambda: optax.cosine_decay_schedule(config.lr, after, alpha=config.final_lr_ratio),
        "linear": lambda: optax.linear_schedule(config.lr, final, after),
        "constant": lambda: optax.constant_schedule(config.lr),
    }[config.schedule]()
    if not config.warmup_steps:
        return tail
    # Step 0 must change the parameters, so it has lr / warmup_steps, the first of warmup_steps equal rises.
    rise = optax.linear_schedule(config.lr / config.warmup_steps, config.lr, max(1, config.warmup_steps - 1))
    return optax.join_schedules([rise, tail], [config.warmup_steps])


def learning_rates(config: "OptimizerConfig", steps: int) -> np.ndarray:
    """The learning rate of every step, [steps], on the host: metrics must not wait for the device."""
    with jax.numpy_dtype_promotion("standard"):  # optax divides its int32 counts
        return np.asarray(jax.vmap(learning_rate(config, steps))(jnp.arange(steps)), np.float64)


def decay_mask(params: PyTree) -> PyTree:
    """The mask of weight decay: true for matrices and tables, false for biases and the scales of norms."""

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        return (not path or getattr(path[-1], "key", None) not in NOT_DECAYED) and leaf.ndim >= 2

    return jax.tree_util.tree_map_with_path(decays, params)


def muon_dims(params: PyTree) -> PyTree:
    """The matrix dims of each parameter that Muon orthogonalises, and None for those that Adam updates.

    Muon gets the kernels of blocks, as matrices of the input dim by all output dims; stacked blocks are a batch of
    matrices. Adam gets embeddings, head and vectors (Jordan et al. 2024). In a tree that is not a `ModelDef`'s, Muon
    gets all 2-D leaves.
    """
    stacked = is_model(params)

    def dims(path: tuple[Any, ...], leaf: Any) -> Any:
        if not stacked:
            return optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 else None
        if path[0].key != "blocks" or path[-1].key != "kernel":
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=tuple(range(2, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(dims, params)


def _core(config: "OptimizerConfig", rate: optax.Schedule) -> optax.GradientTransformation:
    decay: dict[str, Any] = {"weight_decay": config.weight_decay}
    makers: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": lambda: optax.adamw(rate, config.b1, config.b2, config.eps, mask=decay_mask, **decay),
        "lion": lambda: optax.lion(rate, config.b1, config.b2, mask=decay_mask, **decay),
        "sgd": lambda: optax.chain(
            optax.add_decayed_weights(config.weight_decay, decay_mask), optax.sgd(rate, config.momentum or None)
        ),
        # optax's adafactor does not multiply its decay by the learning rate; adamw's does.
        "adafactor": lambda: optax.adafactor(
            rate, weight_decay_rate=config.weight_decay * config.lr or None, weight_decay_mask=decay_mask
        ),
        "muon": lambda: optax.contrib.muon(
            rate,
            beta=config.momentum,
            weight_decay_mask=decay_mask,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=muon_dims,
            consistent_rms=0.2,  # updates as large as AdamW's, so that one learning rate serves both (Liu et al. 2025)
            **decay,
        ),
    }
    if config.name not in makers:
        raise UserError(f"optimizer.name: {config.name!r} is not known; allowed: {', '.join(makers)}")
    return makers[config.name]()


def make_optimizer(
    config: "OptimizerConfig", *, steps: int, deterministic: bool = False
) -> optax.GradientTransformation:
    """The optimizer of a configuration: clipping by global norm (unless `clip_norm` is 0), then the update.

    steps: the length of the learning rate schedule.
    deterministic: clip by `ordered_norm`.
    """
    core = _core(config, learning_rate(config, steps))
    clip = clip_by_ordered_norm if deterministic else optax.clip_by_global_norm
    return optax.chain(clip(config.clip_norm), core) if config.clip_norm else core


def leave_out(tree: PyTree, patterns: Sequence[str]) -> PyTree:
    """The tree with a MaskedNode (optax) for every leaf whose path ("blocks.mlp.up.kernel") fits a pattern ("embed.*").

    tree: its leaves may be PartitionSpecs, too.

    Raises `UserError` if a pattern fits no leaf, or if no leaf remains.
    """
    frozen = fitting(tree, patterns, key="optimizer.freeze")
    if all(jax.tree.leaves(frozen)):
        raise UserError(f"optimizer.freeze: {', '.join(patterns)} leaves nothing to train; leave one of them out")
    return jax.tree.map(lambda out, leaf: optax.MaskedNode() if out else leaf, frozen, tree)


def only_trained(optimizer: optax.GradientTransformation, patterns: Sequence[str]) -> optax.GradientTransformation:
    """The optimizer for a tree with frozen parameters. It has no state for parameters that fit a pattern."""
    if not patterns:
        return optimizer

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        trained = None if params is None else leave_out(params, patterns)
        return optimizer.update(leave_out(grads, patterns), state, trained)

    return optax.GradientTransformation(lambda params: optimizer.init(leave_out(params, patterns)), update)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """The parameters after `optax.apply_updates`. A parameter whose update is a MaskedNode does not change."""

    def one(update: Any, param: jax.Array) -> jax.Array:
        return param if isinstance(update, optax.MaskedNode) else optax.apply_updates(param, update)

    return jax.tree.map(one, updates, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


def ordered_sum(x: jax.Array) -> jax.Array:
    """The sum of all elements, added in an order that depends on the shape only.

    `jnp.sum` adds the elements of a device first, so that its bits depend on the layout. Here every dim is cut into 2^k
    equal parts, with the largest k <= 10 that divides it. Elements are added by pairs inside each part, which lies on
    one device, and then the parts are added.
    """

    def fold(x: jax.Array) -> jax.Array:  # along dim 0
        while (n := x.shape[0]) > 1:
            pairs = x[: n - n % 2].reshape(n // 2, 2, *x.shape[1:])
            halved = pairs[:, 0] + pairs[:, 1]
            x = jnp.concatenate([halved, x[n - 1 :]]) if n % 2 else halved
        return x[0]

    if not x.size:
        return jnp.zeros((), x.dtype)
    for _ in range(x.ndim):
        parts = math.gcd(x.shape[0], 2**10)
        whole = x.reshape(parts, -1, *x.shape[1:])
        x = fold(fold(jnp.moveaxis(whole, 1, 0)))
    return x


def global_norm(tree: PyTree) -> jax.Array:
    """The global norm, as optax.tree.norm, in at least fp32: squares of half-precision gradients overflow."""
    return optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(accumulation_dtype(leaf.dtype)), tree))


def ordered_norm(tree: PyTree) -> jax.Array:
    """The global norm with the same bits in every layout (`ordered_sum`)."""
    wide = max((accumulation_dtype(leaf.dtype) for leaf in jax.tree.leaves(tree)), key=lambda dtype: dtype.itemsize)
    leaves = [leaf.astype(wide) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(functools.reduce(jnp.add, [ordered_sum(rounded(leaf * leaf)) for leaf in leaves]))


def clip_by_ordered_norm(max_norm: float) -> optax.GradientTransformation:
    """Clipping as by optax.clip_by_global_norm, with the same bits in every layout (`GradSync(deterministic=True)`)."""

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        norm = ordered_norm(updates)
        factor = jnp.where(norm < max_norm, jnp.ones_like(norm), max_norm / norm)
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def with_rounded_products(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with `products_rounded`, outside of loops and conditions (`check_order` refuses those)."""
    return optax.GradientTransformation(optimizer.init, products_rounded(optimizer.update))


def check_order(optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> None:
    """Raise `UserError` for an optimizer whose bits would depend on the layout of sharded parameters.

    Such an optimizer sums over elements of a parameter, or multiplies inside a loop or condition, where
    `with_rounded_products` does not reach.
    """
    if all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params)):
        return
    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(optimizer.update)(params, opt_state, params)
    if found := sorted(_sums(jaxpr)):
        refuse_optimizer(", ".join(found))


def _sums(jaxpr: Any) -> set[str]:
    """Names of the primitives in a jaxpr that add up elements of an array, or multiply inside a loop or condition."""
    from jaxdist.jaxpr.evaluate import CALLS  # only deterministic steps come here
    from jaxdist.jaxpr.walk import every_equation

    found: set[str] = set()
    for site in every_equation(jaxpr):
        name, operands = site.equation.primitive.name, site.equation.invars
        if name in ("reduce_sum", "dot_general", "cumsum", "reduce") and operands[0].aval.size > 1:
            found.add(name)
        around = [each.primitive.name for each in site.inside if each.primitive.name not in CALLS]
        if around and name in PRODUCTS and any(atom.aval.size > 1 for atom in operands):
            found.add(f"{name} inside {around[0]}")
    return found
