"""A `ModelDef`, and what a configuration says, in a layout and on one device in float64: `verify` for these."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import AnyMesh, make_mesh
from jaxdist.model import ModelDef, rules_of
from jaxdist.optim import only_trained
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.stages import arrange_rows, order_of_blocks, rows_of_blocks
from jaxdist.plan.verify.findings import Fault, Verification
from jaxdist.plan.verify.layout import Training, differences, layout_text, train_steps
from jaxdist.plan.verify.subject import in_float64, moved, precision_text, tolerance
from jaxdist.precision.policy import make_precision
from jaxdist.specs import STACKED, PyTree, leaves_by_name
from jaxdist.state import place_params
from jaxdist.step import make_train_step


def verify_model(
    model: ModelDef,
    params: PyTree,
    batches: Sequence[PyTree],
    mesh: Mesh,
    options: StepOptions,
    optimizer: optax.GradientTransformation,
) -> Verification:
    """`verify` of a model whose blocks are in their own order. params: None for those of its `init`."""
    if model.chunks > 1 or model.stages:
        raise UserError("loss: a ModelDef that was arranged for stages; verify a configuration: jaxdist verify CONFIG")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, _wide(leaf.dtype)), model.shapes)
        model = model._replace(shapes=shapes)
        if params is None:
            params = jax.jit(model.init)(jax.random.key(options.seed))
        params = jax.tree.map(lambda leaf, like: np.asarray(leaf).astype(like.dtype), params, shapes)
        params = jax.device_get(moved(params))
        order = order_of_blocks(model.layers, stages=mesh.shape["pipe"])
        alone = StepOptions(seed=options.seed, freeze=options.freeze, precision=make_precision("fp64"))
        wide, one = replace(options, precision=alone.precision), make_mesh(devices=[mesh.devices.flat[0]])
        want = training_of(model, optimizer, one, alone, params, batches, order_of_blocks(model.layers, stages=1))
        got = training_of(model, optimizer, mesh, wide, params, batches, order)
    return verdict(got, want, mesh, options)


def _wide(dtype: Any) -> Any:
    return jnp.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype


def training_of(
    model: ModelDef,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    options: StepOptions,
    params: PyTree,
    batches: Sequence[PyTree],
    order: np.ndarray,
) -> Training:
    """The losses, gradients and parameters of a few steps on these batches, in float64 as the options say.

    params: in the order of the model, which those of the training have, too.
    order: that of the blocks in the layout.
    """
    stored = {**params, STACKED: arrange_rows(params[STACKED], order)}
    target = state_target(model, optimizer, mesh, options)
    state = place_params(stored, only_trained(optimizer, options.freeze, rules_of(model)), target)
    step = make_train_step(model, optimizer, mesh, replace(options, return_grads=True))
    back = functools.partial(blocks_in_order, rows_of_blocks(order))
    return train_steps(step, state, [in_float64(batch) for batch in batches], back)


def blocks_in_order(rows: np.ndarray, tree: PyTree) -> PyTree:
    """Parameters or gradients with their blocks in the order of the model. rows: where each is stored."""
    return {**tree, STACKED: jax.tree.map(lambda leaf: leaf[rows], tree[STACKED])}


def verdict(got: Training, want: Training, mesh: AnyMesh, options: StepOptions, left_out: str = "") -> Verification:
    """What two trainings say. left_out: of the layout, in words."""
    units = {"embed": 0, STACKED: 1, "head": 2}
    order = sorted(leaves_by_name(want.params), key=lambda name: units.get(name.partition(".")[0], 3))
    size, lines = min(got.narrow, want.narrow)
    apart = differences(got, want, order, tolerance(size))
    steps = len(got.losses)
    pair = f"loss {got.losses[-1]:.12g} at step {steps}, on one device {want.losses[-1]:.12g}"
    compared = f"{layout_text(mesh, options)}: {pair}"
    found = [Fault("layouts differ", (), "; ".join(apart))] if apart else []
    return Verification(found, (compared, *filter(None, [left_out])), precision_text(size, lines))
