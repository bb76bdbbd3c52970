"""Diagnosis of a non-finite step: the block, devices, microbatch and pass in which it began.

The failing step is run again, once, with probes in the model. A probe is a parameter whose "gradient" is flags: its
forward rule passes a value on, and its backward rule puts a one at the place of this device if the value, or its
gradient, is not finite here. The strategy's own sums bring the flags of all devices together. So the diagnosis runs the
program that failed, in any layout, strategy and schedule, and steps that go well are not slowed down.

Legend: L blocks, N devices, C columns of a probe: two, (value, gradient), for the unit's output, and two for each
parameter that it reads.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import rank, to_varying
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.precision import LossScale
from jaxdist.errors import first_of
from jaxdist.mesh import AXES, batch_shards
from jaxdist.model import ModelDef
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.stages import order_of_model
from jaxdist.specs import STACKED, UNITS, PyTree, batch_spec, leaves_by_name, path_name, without_idle
from jaxdist.state import TrainState
from jaxdist.step import make_train_step

PROBE_LEAF = "probe"


class Finding(NamedTuple):
    """The first thing in a step that was not finite.

    - kind: "weight" (of the batch), "parameter" (before the step), "activation", "loss" or "gradient".
    - unit: "embed", "blocks" or "head".
    - block: its number from 0, for blocks.
    - parameter: the path of the first parameter with a non-finite gradient, if there is one in that unit.
    - devices: coordinates on the mesh, {axis: place}, of the devices that saw it.
    - microbatch: its number from 0; None if no single microbatch shows it.
    """

    kind: str
    unit: str
    block: int | None
    parameter: str | None
    devices: tuple[dict[str, int], ...]
    microbatch: int | None

    def __str__(self) -> str:
        place = self.unit if self.block is None else f"block {self.block}"
        what = {
            "weight": "the sum of the batch's weights is not finite: the data's doing",
            "parameter": f"parameter {self.parameter} was not finite before the step, in {place}",
            "activation": f"activations overflowed first: the output of {place}",
            "loss": "the loss overflowed first; all activations before it are finite",
            "gradient": f"gradients overflowed first: in {place}, after a finite loss",
        }[self.kind]
        gradient = f"; first gradient: {self.parameter}" if self.parameter and self.kind != "parameter" else ""
        devices = ["(" + " ".join(f"{axis}={n}" for axis, n in each.items()) + ")" for each in self.devices]
        on = f"; on {first_of(devices, 4)}" if any(self.devices) else ""
        return what + gradient + on + ("" if self.microbatch is None else f"; microbatch {self.microbatch}")


@jax.custom_vjp
def _mark(x: jax.Array, probe: jax.Array) -> jax.Array:
    return x


def _mark_forward(x: jax.Array, probe: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x, (_bad(x), probe)


def _mark_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    bad, probe = saved
    flags = jnp.stack([to_varying(each, AXES) for each in (bad, _bad(grad))]).astype(probe.dtype)
    return grad, jnp.zeros_like(probe).at[rank(AXES)].set(flags)


_mark.defvjp(_mark_forward, _mark_backward)


def _bad(x: jax.Array) -> jax.Array:
    return (~jnp.isfinite(x)).any() if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros((), bool)


def _watched(params: PyTree, read: PyTree = None) -> tuple[PyTree, PyTree, jax.Array]:
    """Probe the parameters that a unit reads. read: the embedding's, for a tied head.

    Returns the unit's own parameters, those of `read`, and the columns of the probe for the unit's output.
    """
    probe = to_varying(params[PROBE_LEAF], AXES)  # each device has its own flags
    leaves, treedef = jax.tree.flatten((_own(params), None if read is None else _own(read)))
    marked = [_mark(leaf, probe[:, 2 * i + 2 : 2 * i + 4]) for i, leaf in enumerate(leaves)]
    return *jax.tree.unflatten(treedef, marked), probe[:, :2]


def _own(unit: PyTree) -> PyTree:
    return {name: leaf for name, leaf in unit.items() if name != PROBE_LEAF}


def probed(model: ModelDef, devices: int) -> ModelDef:
    """The model with a probe in each unit, a parameter [N, C], for a mesh of N devices.

    It computes the same. An embedding's probe flags the device whose samples these are, not the column of its table.
    """
    shapes, specs = dict(model.shapes), dict(model.specs)
    for name, unit in model.shapes.items():
        leaf = jax.tree.leaves(unit)[0]
        rows, columns = leaf.shape[:1] if name == STACKED else (), 2 + 2 * len(_read(model, name))
        shapes[name] = {**unit, PROBE_LEAF: jax.ShapeDtypeStruct((*rows, devices, columns), leaf.dtype)}
        specs[name] = {**model.specs[name], PROBE_LEAF: P("pipe") if name == STACKED else P()}

    def embed(params: PyTree, batch: PyTree, keys: jax.Array) -> jax.Array:
        own, _, output = _watched(params)
        return _mark(model.embed(own, batch, keys), output)

    def block(params: PyTree, h: jax.Array, *given: PyTree) -> jax.Array:
        own, _, output = _watched(params)
        return _mark(model.block(own, h, *given), output)

    def head(params: PyTree, tied: PyTree | None, h: jax.Array, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        own, table, output = _watched(params, tied)
        loss, weight = model.head(own, table, h, batch)
        return _mark(loss, output), weight

    return model._replace(shapes=shapes, specs=specs, embed=embed, block=block, head=head, columns=False)


def make_diagnosis(
    model: ModelDef, mesh: Mesh, *, options: StepOptions
) -> Callable[[TrainState, PyTree], Finding | None]:
    """Make a function (state, batch) -> the `Finding` of the step that `state` has just skipped; None if all is finite.

    It runs the step again, and compiles it when first called. It consumes the state, of which it needs the parameters.

    options: as given to `make_train_step`.
    """
    watched, numbers = probed(model, mesh.size), order_of_model(model).tolist()
    rule, microbatches = options.precision.scale_rule, options.microbatches
    fixed = replace(options, grad_sync=GradSync(), freeze=(), max_skips=2**30, return_grads=True)
    make = functools.partial(make_train_step, watched, optax.set_to_zero(), mesh, fixed)
    # Alone each microbatch is the whole batch, as often as a pipeline with chunks needs it.
    times = mesh.shape["pipe"] if model.chunks > 1 else 1
    whole, alone = make(microbatches=microbatches), make(microbatches=times)

    def diagnose(state: TrainState, batch: PyTree) -> Finding | None:
        state, weight, flags = _flags(whole, _before(state, watched, mesh, rule), batch)
        if not math.isfinite(weight):  # by which flags were divided, like gradients
            return Finding("weight", "head", None, None, (), None)
        found = _first(flags, model, numbers, mesh)
        if found is None or found.kind == "parameter":
            return found
        for number in range(microbatches) if microbatches > 1 else ():
            part = _microbatch(batch, mesh, number=number, of=microbatches, times=times)
            state, _, flags = _flags(alone, state, part)
            if _first(flags, model, numbers, mesh) is not None:
                return found._replace(microbatch=number)
        return found if microbatches > 1 else found._replace(microbatch=0)

    return diagnose


def unknown_ids(batch: PyTree, vocab: int | None) -> str:
    """The first token id of a batch that is outside the vocabulary, in words; "" if there is none.

    - batch: of a language model, "inputs" and "targets"; a negative target counts nothing and is allowed.
    - vocab: the number of token ids; None if the model has none.
    """
    ids = {name: batch[name] for name in ("inputs", "targets") if name in batch}
    if vocab is None or not ids:
        return ""
    sharding = NamedSharding(jax.tree.leaves(ids)[0].sharding.mesh, P())
    ends = jax.jit(lambda ids: jax.tree.map(lambda x: (x.min(), x.max()), ids), out_shardings=sharding)(ids)
    for name, (least, most) in jax.device_get(ends).items():
        wrong = most if most >= vocab else least if name == "inputs" else 0
        if not 0 <= wrong < vocab:
            return (
                f"the batch's {name} hold the token id {wrong}, and the model's vocabulary has the ids 0 to {vocab - 1}"
            )
    return ""


def bad_leaf(batch: PyTree, mesh: Mesh) -> str | None:
    """The name of the first leaf of a batch that holds NaN or an infinity, "" for a batch without names; None if all
    are finite. Every process must call it."""
    floats = {name: leaf for name, leaf in leaves_by_name(batch).items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    finite = jax.jit(lambda leaf: jnp.isfinite(leaf).all(), out_shardings=NamedSharding(mesh, P()))
    return next((name for name, leaf in floats.items() if not finite(leaf)), None)


def _before(state: TrainState, watched: ModelDef, mesh: Mesh, rule: LossScale | None) -> TrainState:
    """The state before the failing step, with probes."""
    params = dict(state.params)
    for name in UNITS:
        shape, spec = watched.shapes[name][PROBE_LEAF], without_idle(watched.specs[name][PROBE_LEAF], mesh)
        zeros = functools.partial(jnp.zeros, shape.shape, shape.dtype)
        params[name] = {**params[name], PROBE_LEAF: jax.jit(zeros, out_shardings=NamedSharding(mesh, spec))()}
    step, scale = jax.device_get((state.step, state.guard.scale))
    guard = state.guard._replace(scale=_put(scale if rule is None else scale / np.float32(rule.factors[1]), mesh))
    return TrainState(_put(step - 1, mesh), params, optax.EmptyState(), (), guard, state.model_state)


def _put(number: Any, mesh: Mesh) -> jax.Array:
    return jax.device_put(number, NamedSharding(mesh, P()))


def _flags(
    step: Callable[..., Any], state: TrainState, batch: PyTree
) -> tuple[TrainState, float, dict[str, np.ndarray]]:
    """Run a step with probes. Returns the state, ready for the same step again; the batch's weight; and the flags of
    each unit, [L, N, C / 2, 2]."""
    number = jax.device_get(state.step)
    state, metrics = step(state, batch)
    probes = {name: metrics["grads"][name][PROBE_LEAF] for name in UNITS}
    whole = multihost_utils.process_allgather(probes, tiled=True) if jax.process_count() > 1 else probes
    seen = {name: np.asarray(each) != 0 for name, each in whole.items()}
    rows = {name: each.reshape(-1, each.shape[-2], each.shape[-1] // 2, 2) for name, each in seen.items()}
    state = state._replace(step=_put(number, state.step.sharding.mesh))
    return state, float(jax.device_get(metrics["weight"])), rows


def _microbatch(batch: PyTree, mesh: Mesh, *, number: int, of: int, times: int) -> PyTree:
    """The batch of one microbatch, each device's rows repeated `times` times."""
    shards = batch_shards(mesh)

    def cut(x: jax.Array) -> jax.Array:
        parts = x.reshape(shards, of, -1, *x.shape[1:])[:, number]
        return jnp.concatenate([parts] * times, axis=1).reshape(-1, *x.shape[1:])

    return jax.jit(lambda batch: jax.tree.map(cut, batch), out_shardings=NamedSharding(mesh, batch_spec(mesh)))(batch)


def _first(flags: dict[str, np.ndarray], model: ModelDef, numbers: Sequence[int], mesh: Mesh) -> Finding | None:
    """The first non-finite thing: parameters, then activations in order, then gradients in the order of the backward
    pass. Without its microbatch."""
    row_of = {block: row for row, block in enumerate(numbers) if block >= 0}
    order = [("embed", 0, None), *((STACKED, row_of[block], block) for block in sorted(row_of)), ("head", 0, None)]

    def finding(kind: str, place: int, seen_N: Any) -> Finding:
        unit, row, block = order[place]
        column = 0 if kind == "parameter" else 1
        bad = flags[unit][row, :, 1:, column].any(axis=0)
        name = _read(model, unit)[int(np.argmax(bad))] if bad.any() else None
        return Finding(kind, unit, block, name, _devices(seen_N, mesh), None)

    for place, (unit, row, _) in enumerate(order):
        if (seen_NC := flags[unit][row, :, 1:, 0]).any():
            return finding("parameter", place, seen_NC.any(axis=1))
    for place, (unit, row, _) in enumerate(order):
        if (seen_N := flags[unit][row, :, 0, 0]).any():
            return finding("loss" if unit == "head" else "activation", place, seen_N)
    for place in reversed(range(len(order))):
        unit, row, _ = order[place]
        if (seen_N := flags[unit][row, :, 0, 1]).any():  # it came from the unit behind, which had a finite one
            return finding("gradient", min(place + 1, len(order) - 1), seen_N)
        if (seen_NC := flags[unit][row, :, 1:, 1]).any():
            return finding("gradient", place, seen_NC.any(axis=1))
    return None


def _read(model: ModelDef, unit: str) -> list[str]:
    """The paths of the parameters that a unit reads, in the order of its probe's columns."""
    units = (unit, "embed") if model.tied and unit == "head" else (unit,)
    found = [jax.tree_util.tree_leaves_with_path({name: model.shapes[name]}) for name in units]
    return [path_name(path) for leaves in found for path, _ in leaves]


def _devices(seen_N: Any, mesh: Mesh) -> tuple[dict[str, int], ...]:
    """The coordinates of the flagged devices, on axes of size > 1."""
    sizes = [mesh.shape[axis] for axis in AXES]
    places = [zip(AXES, np.unravel_index(int(n), sizes), strict=True) for n in np.flatnonzero(seen_N)]
    return tuple({axis: int(n) for axis, n in place if mesh.shape[axis] > 1} for place in places)
