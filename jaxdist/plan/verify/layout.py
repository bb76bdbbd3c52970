"""Training in two layouts, and what differs: losses, gradients leaf by leaf, parameters."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.mesh import AnyMesh, sizes_text
from jaxdist.parallel.options import StepOptions
from jaxdist.plan.verify.follow import close, quick
from jaxdist.plan.verify.subject import narrowing
from jaxdist.specs import PyTree, batch_spec, leaves_by_name
from jaxdist.state import TrainState
from jaxdist.train_step import TrainStep


class Training(NamedTuple):
    """Some steps: the loss and the gradients of each, and parameters and model_state after the last, on the host.

    narrow: `narrowing` of the step
    figures: a loss's own metrics in the first step
    """

    losses: list[float]
    grads: list[PyTree]
    params: PyTree
    model_state: PyTree
    narrow: tuple[int, list[str]]
    figures: dict[str, np.ndarray]


def train_steps(
    step: TrainStep,
    state: TrainState,
    batches: Sequence[PyTree],
    blocks_in_order: Callable[[PyTree], PyTree] = lambda tree: tree,
) -> Training:
    """step: with `return_grads`. blocks_in_order: puts stacked blocks into the order of the model."""
    losses, grads, figures = [], [], []
    mesh = state.step.sharding.mesh
    sharding = NamedSharding(mesh, batch_spec(mesh))
    batches = [jax.device_put(batch, sharding) for batch in batches]
    traced = step.trace(state, batches[0])
    program = traced.lower().compile(compiler_options=quick())
    for batch in batches:
        state, metrics = program(state, batch)
        losses.append(float(metrics["loss"]))
        figures.append(jax.device_get(metrics["own"]))
        grads.append(blocks_in_order(jax.device_get(metrics["grads"])))
    return Training(
        losses,
        grads,
        blocks_in_order(jax.device_get(state.params)),
        jax.device_get(state.model_state),
        narrowing(without_dead_code(traced.jaxpr), casts=True),
        figures[0],
    )


def differences(got: Training, want: Training, order: Sequence[str], tol: float, size: float = 0.0) -> list[str]:
    """A line for each kind of thing that differs.

    order: names of parameters, in the order of their first use. size: of losses, before their terms cancel.
    """
    found = []
    for step, (a, b) in enumerate(zip(got.losses, want.losses, strict=True)):
        if not abs(a - b) <= tol * max(abs(a), abs(b), size):
            found.append(f"loss of step {step + 1}: {a:.12g}, on one device {b:.12g}")
            break
    for step, (grads, wanted) in enumerate(zip(got.grads, want.grads, strict=True)):
        if line := _apart(f"gradients of step {step + 1}", grads, wanted, order, tol):
            found.append(line)
            break
    left_out = {} if found else _of_rounding(got, want, tol)
    for what, without in (("params", left_out), ("model_state", {})):
        pair = getattr(got, what), getattr(want, what)
        if line := _apart(f"{what} after {len(got.losses)} steps", *pair, order, tol, without):
            found.append(line)
    return found


def _of_rounding(got: Training, want: Training, tol: float) -> dict[str, np.ndarray]:
    """Where in each parameter a gradient was rounding alone, in both trainings.

    A key's bias in attention has a gradient of 0 but for rounding. Optimizers that take its sign, such as Lion, or
    divide by its size, as Adafactor does, then make full steps of it, to either side. What is 0 in both is none.
    """
    noise: dict[str, np.ndarray] = {}
    for grads, wanted in zip(got.grads, want.grads, strict=True):
        ours, floor = leaves_by_name(grads), 1e-3 * tol * largest_number(wanted)  # what `_apart` takes for the same
        for name, leaf in leaves_by_name(wanted).items():
            size = np.maximum(np.abs(leaf), np.abs(ours[name]))
            noise[name] = noise.get(name, np.zeros(size.shape, bool)) | ((size > 0) & (size <= floor))
    return noise


def largest_number(tree: PyTree) -> float:
    """The largest number of a tree of NumPy arrays, without its sign."""
    return max((float(np.abs(leaf).max(initial=0)) for leaf in jax.tree.leaves(tree)), default=0.0)


def figures_apart(got: Training, want: Training, tol: float, sizes: Mapping[str, float] = MappingProxyType({})) -> str:
    """Which of a loss's own metrics differ, with their values; "" where none does. sizes: as in `differences`."""
    pairs = {name: (got.figures[name], wanted) for name, wanted in want.figures.items()}
    return ", ".join(
        f"{name} {ours:.9g}, on one device {wanted:.9g}"
        for name, (ours, wanted) in pairs.items()
        if not close(ours, wanted, tol, np.asarray(sizes.get(name, 0.0)))
    )


def layout_text(mesh: AnyMesh, options: StepOptions) -> str:
    """The layout in words."""
    strategy = options.strategy if isinstance(options.strategy, str) else getattr(options.strategy, "__name__", "")
    return f"{sizes_text(mesh.shape)}, {strategy}, {options.microbatches} microbatches"


def _apart(
    what: str,
    got: PyTree,
    want: PyTree,
    order: Sequence[str],
    tol: float,
    left_out: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> str | None:
    """A line about the leaves that differ, the first in order of use with the ratio; None where none does.

    left_out: {name: the places of a leaf that are not compared}.
    """
    ours, theirs = leaves_by_name(got), leaves_by_name(want)
    largest = largest_number(want)
    far = []
    for name, b in theirs.items():
        a = ours[name]
        # A leaf that is zero but for rounding is compared with the others.
        size = max(float(np.abs(a).max(initial=0)), float(np.abs(b).max(initial=0)), 1e-3 * largest)
        if not ((np.abs(np.asarray(a, np.float64) - b) <= tol * size) | left_out.get(name, False)).all():
            far.append(name)
    if not far:
        return None
    place = {name: i for i, name in enumerate(order)}
    first = min(far, key=lambda name: place.get(name, len(place)))
    told = _beside(ours[first], theirs[first])
    return f"{what}: {len(far)} of {len(theirs)} differ; the first that is used: {first}, {told}"


def _beside(a: Any, b: Any) -> str:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    ratio = float((a * b).sum() / max(float((b * b).sum()), 1e-300))
    times = f"{ratio:.6g}"
    if times != "1" and np.abs(a - ratio * b).max(initial=0) <= 1e-6 * np.abs(a).max(initial=0):
        return f"{times} times that of one device"
    return f"{np.abs(a - b).max():.3g} apart, of {np.abs(b).max():.3g}"
