"""Measurement of a model's own units: steps of one device at local shapes, with one block and with several."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.build import make_model, optimizer_of, step_options
from jaxdist.config.schema import Config
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.model import ModelDef
from jaxdist.plan.calibration.file import Compute
from jaxdist.plan.calibration.repeated import Timed, by_turns
from jaxdist.plan.changes import changed
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.precision.policy import precision_of
from jaxdist.step import make_train_step

_DEPTHS = (1, 3)  # blocks of the two steps that are compared
# The keys of a model that say how wide the parts of a layer are that `tensor` splits.
_SPLIT = ("heads", "kv_heads", "mlp_width", "vocab")


class LocalShape(NamedTuple):
    """Local shapes: remat, parts of each layer, sequences of a microbatch."""

    remat: Any
    tensor: int
    rows: int


def can_narrow(config: Config) -> bool:
    """Whether a part of each layer of the model can be measured by itself: it has keys for its width."""
    return all(hasattr(config.model, key) for key in (*_SPLIT, "head_width", "resolved"))


def narrowed(config: Config, shape: LocalShape, layers: int) -> Config:
    """The configuration of a step on one device with a part of each layer, of `layers` blocks."""
    usual, model = Config(), config.model
    if shape.tensor > 1:
        whole = model.resolved()
        parts = {key: max(1, getattr(whole, key) // shape.tensor) for key in _SPLIT}
        model = model.replace(head_width=whole.head_width, **parts)
    values = {
        "model": model.replace(layers=layers),
        "mesh": usual.mesh,
        "parallel": usual.parallel,
        "data.global_batch": shape.rows,
        "memory.remat": shape.remat,
        "memory.offload": usual.memory.offload,
    }
    return changed(config, values)


def measure_blocks(
    config: Config, shapes: Sequence[LocalShape], *, progress: Callable[[str], None]
) -> tuple[tuple[Compute, ...], float]:
    """(the seconds of blocks and ends at these shapes, seconds of the optimizer for a byte of parameters and state).

    All processes of a job must call it: each measures on its first device, at the same time.
    """
    plain = dict.fromkeys(shape._replace(remat="none") for shape in shapes)  # the ends do not depend on remat
    wanted = [
        *((shape, _DEPTHS[0]) for shape in plain),
        *((shape, _DEPTHS[1]) for shape in {**plain, **dict.fromkeys(shapes)}),
    ]
    programs: dict[Any, Callable[[], Any]] = {}
    for i, (shape, layers) in enumerate(wanted, start=1):
        progress(
            f"compiling {i}/{len(wanted)}: {layers} blocks, remat {shape.remat}, 1/{shape.tensor} of each layer,"
            f" {shape.rows} sequences"
        )
        programs[shape, layers] = _passes(narrowed(config, shape, layers))
    update, nbytes = _update(narrowed(config, shapes[0], _DEPTHS[1]))
    timed = by_turns(programs | {"optimizer": update})
    found = []
    for shape in shapes:
        alike = shape._replace(remat="none")
        few, many = (timed[alike, layers] for layers in _DEPTHS)
        found.append(_compute(shape, few, many, timed[shape, _DEPTHS[1]]))
    return tuple(found), timed["optimizer"].median / nbytes


def _compute(shape: LocalShape, few: Timed, many: Timed, own: Timed) -> Compute:
    """few, many: seconds of steps with these numbers of blocks, without remat. own: of the larger one, with it."""
    block = max(many.median - few.median, 0.0) / (_DEPTHS[1] - _DEPTHS[0])
    ends = max(0.0, few.median - _DEPTHS[0] * block)
    return Compute(
        str(shape.remat), shape.tensor, shape.rows, max(0.0, own.median - ends) / _DEPTHS[1], ends, own.spread
    )


def _passes(config: Config) -> Callable[[], Any]:
    """Loss and gradients of one microbatch, by the region that trains."""
    mesh = make_mesh(devices=jax.local_devices()[:1])
    model = make_model(config, precision_of(config.precision), stages=1, training=True)
    assert isinstance(model, ModelDef)
    still = optax.set_to_zero()
    step = make_train_step(model, still, mesh, step_options(config, mesh), return_grads=True)
    target = state_target(model, still, mesh, step_options(config, mesh))
    rng, batch = np.random.default_rng(0), batch_of(config, mesh)

    def filled(each: Any) -> Any:
        small = (
            0.02 * rng.standard_normal(each.shape) if jnp.issubdtype(each.dtype, jnp.floating) else np.zeros(each.shape)
        )
        return jax.device_put(small.astype(each.dtype), each.sharding)

    held, data = [jax.tree.map(filled, target)], jax.tree.map(filled, batch)
    program = step.lower(held[0], data).compile()

    def run() -> Any:
        held[0], metrics = program(held[0], data)
        return metrics["loss"]

    return run


def _update(config: Config) -> tuple[Callable[[], Any], int]:
    """(an update by the configured optimizer, the bytes of parameters and state)."""
    optimizer = optimizer_of(config)
    shapes = make_model(config, precision_of(config.precision), stages=1, training=True).shapes  # type: ignore[union-attr]
    device = jax.local_devices()[0]
    params = jax.tree.map(lambda each: jax.device_put(np.full(each.shape, 0.02, each.dtype), device), shapes)
    opt_state = jax.jit(optimizer.init)(params)

    @jax.jit
    def update(params: Any, opt_state: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 counts with floats
            changes, new = optimizer.update(params, opt_state, params)
        return optax.apply_updates(params, changes), new

    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params, opt_state)))
    return (lambda: update(params, opt_state)), nbytes
