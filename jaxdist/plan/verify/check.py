"""`verify`: the checks in order, from what costs a trace to the layout itself."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdist.errors import UserError
from jaxdist.init import init_state
from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.jaxpr.forbidden import is_shared
from jaxdist.jaxpr.walk import every_equation
from jaxdist.mesh import BATCH_AXES, make_mesh
from jaxdist.model import ModelDef
from jaxdist.parallel.microbatch import check_batch_shape
from jaxdist.parallel.modules.module_loss import ModuleLoss
from jaxdist.parallel.options import StepOptions, make_options
from jaxdist.parallel.program import check_axes
from jaxdist.parallel.schedule import UserLoss
from jaxdist.plan.verify.adds_up import Adder
from jaxdist.plan.verify.findings import Fault, Verification, together
from jaxdist.plan.verify.layout import differences, figures_apart, layout_text, train_steps
from jaxdist.plan.verify.program import pair_up
from jaxdist.plan.verify.subject import (
    NARROW,
    Subject,
    line_of,
    moved,
    narrowing,
    precision_text,
    subject_of,
    tolerance,
    widened,
)
from jaxdist.plan.verify.trace import findings_of_trace, first_line_of
from jaxdist.precision.policy import make_precision
from jaxdist.precision.widen import widen_fixed
from jaxdist.specs import PyTree, leaves_by_name
from jaxdist.step import make_train_step

STEPS_COMPARED = 2  # so that the second has other keys, other parameters and another model_state


def verify_training(
    loss: UserLoss | ModelDef,
    params: PyTree,
    batch: PyTree,
    mesh: Mesh,
    *,
    model_state: PyTree = (),
    options: StepOptions | None = None,
    **keywords: Any,
) -> Verification:
    """Whether a loss of your own, or a `ModelDef`, trains the same on this mesh as on one device; and if not, why.

    loss: a loss_fn(params, batch, keys), what `nnx_loss` or `linen_loss` gave, or a `ModelDef`.
    params: its parameters; None for those that a module or a `ModelDef` has by itself.
    batch: one batch, a pytree of arrays [B, ...], whose rows differ. B as `make_train_step` wants it, and 2 or more.
    options, keywords: a `StepOptions`, or its fields, as for `make_train_step`. It computes in float64, whatever the
        precision is, so that rounding hides nothing.

    Each cause is a `Fault`: a line with the place in your file and the remedy. Raises `UserError` for arguments that
    `make_train_step` refuses too, and for a loss that does not run.

    >>> loss = lambda params, batch, keys: (((batch @ params["w"]) ** 2).mean(), 1.0)
    >>> found = jaxdist.verify(loss, {"w": jnp.ones(4)}, np.eye(8, 4), jaxdist.make_mesh(fsdp=2), strategy="zero3")
    >>> found.clean, [each.cause for each in found.findings]
    (False, ['mean of means'])
    """
    options = make_options(options, keywords)
    _check(loss, params, batch, mesh)
    check_batch_shape(batch, mesh, options.on(mesh))
    if isinstance(loss, ModelDef):
        from jaxdist.plan.verify.models import verify_model

        return verify_model(loss, params, [batch], mesh, options, optax.sgd(1e-2))
    if isinstance(loss, ModuleLoss):
        params, model_state = _of_module(loss, params, model_state, options)
    with jax.numpy_dtype_promotion("standard"):
        return _verify_loss(subject_of(loss, params, batch, model_state, seed=options.seed), mesh, options)


def _check(loss: Any, params: PyTree, batch: PyTree, mesh: Any) -> None:
    """Raise `UserError` for arguments of another kind."""
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh: is a {type(mesh).__name__}; allowed: a mesh with devices, jaxdist.make_mesh(fsdp=2)")
    check_axes(loss, mesh, "loss")
    if params is None and not isinstance(loss, ModelDef | ModuleLoss):
        raise UserError("params: None; allowed: the parameters of a loss_fn of your own, a pytree of arrays")
    leaves = jax.tree.leaves(batch)
    rows = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in leaves}
    if len(rows) != 1 or min(rows) < 2:
        raise UserError(
            f"batch: leaves of {sorted(rows)} rows; allowed: the same dim 0 in all leaves, of 2 rows or more"
        )


def _of_module(loss: ModuleLoss, params: PyTree, model_state: PyTree, options: StepOptions) -> tuple[PyTree, PyTree]:
    made = (loss.params, loss.model_state) if loss.init is None else loss.init(jax.random.key(options.seed))
    return (made[0] if params is None else params), (model_state if jax.tree.leaves(model_state) else made[1])


def _verify_loss(subject: Subject, mesh: Mesh, options: StepOptions) -> Verification:
    found, runs = findings_of_trace(subject)
    if not runs:
        return Verification(together(found))
    with _wide(subject, options.seed) as (wide, size, told):
        tol = tolerance(size)
        whole = wide.traced(wide.results)
        shared = any(map(is_shared, every_equation(whole)))
        adder = Adder(wide, shared=shared, tol=tol)
        if not _finite(adder):
            wide = wide._replace(params=_as(subject.params, wide.params))
            adder = Adder(wide, shared=shared, tol=tol)
            if not _finite(adder):
                raise UserError("batch: sum, weight or gradients are not finite; allowed: a batch that trains")
        more, compared = adder.findings()
        found = together([*found, *more, *adder.moving_weight(options.freeze)])
        apart = _layouts(adder, mesh, options, order_of_use(wide, whole), found)
        if apart and not found:
            found = together(adder.findings_of(_parts(mesh, options)))
    if apart and not found:
        found = [Fault("layouts differ", (), "; ".join(apart))]
    else:
        compared += apart
    return Verification(found, tuple(compared), told)


@contextmanager
def _wide(subject: Subject, seed: int) -> Iterator[tuple[Subject, int, str]]:
    """(the subject in float64, with parameters moved; the bytes of its narrowest floats; what to say of them)."""
    with jax.enable_x64(True):
        wide = widened(subject, seed=seed)
        wide = wide._replace(params=moved(wide.params))
        try:
            size, lines = narrowing(without_dead_code(wide.traced(wide.results)))
        except UserError:
            raise
        except Exception as error:  # code that is written for float32 only
            why = f"it does not run in float64 ({line_of(error)}: {first_line_of(error)})"
        else:
            if size < 8:  # by constants, perhaps, such as frozen parameters that meet integers only
                wide = wide._replace(loss=widen_fixed(subject.loss))
                size, lines = narrowing(without_dead_code(wide.traced(wide.results)))
            yield wide, size, precision_text(size, lines)
            return
    yield subject._replace(params=moved(subject.params)), 4, f"computed in float32, compared to {NARROW[4]:g}: {why}"


def _parts(mesh: Mesh, options: StepOptions) -> int:
    """How many parts a step cuts a batch into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES) * options.on(mesh).microbatches


def _as(params: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, like: jax.numpy.asarray(leaf, like.dtype), params, like)


def _finite(adder: Adder) -> bool:
    [found] = adder.totals([np.arange(adder.subject.rows)])
    return all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(found))


def order_of_use(subject: Subject, whole: Any) -> list[str]:
    """The names of the parameters, in the order in which the loss first reads them."""
    first: dict[int, int] = {}
    for place, operation in enumerate(pair_up(whole, whole).operations):
        for number in operation.reads:
            first.setdefault(number, place)
    names = list(leaves_by_name(subject.params))
    return sorted(names, key=lambda name: first.get(names.index(name), len(first)))


def _layouts(adder: Adder, mesh: Mesh, options: StepOptions, order: Sequence[str], found: list[Fault]) -> list[str]:
    """What differs between one device and the layout. Where causes were found, the layout may not run."""
    subject, tol = adder.subject, adder.tol
    dtype = str(jax.tree.leaves(subject.params)[0].dtype)
    options = replace(options, precision=make_precision("fp64" if dtype == "float64" else "fp32"), return_grads=True)
    alone = StepOptions(precision=options.precision, return_grads=True, seed=options.seed, freeze=options.freeze)
    optimizer, runs = optax.sgd(1e-2), []
    for where, how in ((make_mesh(devices=[mesh.devices.flat[0]]), alone), (mesh, options)):
        try:
            state = init_state(subject.params, optimizer, where, how, model_state=subject.model_state)
            step = make_train_step(subject.loss, optimizer, where, how)
            runs.append(train_steps(step, state, [subject.batch] * STEPS_COMPARED))
        except Exception as error:  # a user's code may fail in any way with as few rows as a device has
            if not found and isinstance(error, UserError):
                raise
            told = f"the layout does not run: {first_line_of(error)}"
            if not found:
                found.append(Fault("fixed number of rows", (line_of(error),), told))
            return [told]
    drawn = any(fault.cause == "one key for all samples" for fault in found)  # other masks: other metrics, too
    told, apart = figures_apart(runs[1], runs[0], tol), differences(runs[1], runs[0], order, tol)
    if (told or apart) and not found:  # where terms cancel each other, rounding is all that is left
        told = figures_apart(runs[1], runs[0], tol, adder.sizes.figures)
        apart = differences(runs[1], runs[0], order, tol, adder.sizes.loss)
    if told and not drawn:
        found.append(Fault("metric of these rows", (), told))
    return [f"{layout_text(mesh, options)}: {each}" for each in apart]
