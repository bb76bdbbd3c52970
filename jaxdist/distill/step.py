"""The step of a student: the teacher's program runs first, and what it says of each token is a leaf of the batch.

So it travels with the microbatches of every schedule. The state is the student's alone: the teacher's table joins it
for the length of a step, and checkpoints, evaluations and samples never see it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import optax

from jaxdist.distill.divergence import check_vocabularies
from jaxdist.distill.model import FROZEN, HIDDEN, TEACHER, Mixture, distilled, vocabulary_of
from jaxdist.distill.teacher import Teacher
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import AnyMesh, on_cpu
from jaxdist.model import ModelDef
from jaxdist.parallel.options import StepOptions
from jaxdist.specs import PyTree
from jaxdist.state import TrainState
from jaxdist.step import make_train_step
from jaxdist.train_step import Metrics, TrainStep


def make_distilled_step(
    student: ModelDef,
    teacher: Teacher | dict[str, jax.ShapeDtypeStruct],
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh,
    options: StepOptions,
    mixture: Mixture,
) -> TrainStep:
    """A train step, as `make_train_step` gives one for the student alone: for the same states and batches.

    teacher: a `Teacher`; or the leaves that batches have of its largest logits.

    Raises `UserError` for vocabularies of two sizes.
    """
    table: tuple[jax.ShapeDtypeStruct, ...] = ()
    if isinstance(teacher, Teacher):
        table = teacher.table
        own = vocabulary_of(student, "model.name: the student")
        check_vocabularies(own[0].shape[0], table[0].shape[0], key="distill.teacher")
        if options.grad_sync.deterministic:
            raise UserError(
                "distill.teacher: its program adds in an order that depends on the layout, and"
                " parallel.grad_sync.deterministic is true; allowed: false; or logits from distill.cache"
            )
    model = distilled(student, mixture, table)
    joint = replace(options, freeze=(*options.freeze, FROZEN)) if table else options
    inner = make_train_step(model, optimizer, mesh, joint)
    target = state_target(model, optimizer, mesh, joint)
    return TrainStep(lambda state: _Joined(inner, teacher, state, target), mesh, options)


class _Joined:
    """The step for one layout of the state, which `TrainStep` calls, lowers and traces.

    - inner: the step of the state with the teacher's table. target: that state as ShapeDtypeStructs with shardings.
    - own: the state without, by its structure.
    """

    def __init__(
        self, inner: TrainStep, teacher: Teacher | dict[str, jax.ShapeDtypeStruct], own: TrainState, target: TrainState
    ) -> None:
        self._teacher, self._target, self._structure = teacher, target, jax.tree.structure(own)
        self._table: PyTree = {}
        self._function = inner.jitted(self._with(own, self._shapes()))
        self._waits = on_cpu(target.step.sharding.mesh)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        teacher = self._teacher
        if isinstance(teacher, Teacher):
            if self._waits:  # two programs that communicate at once may leave each other without threads
                jax.block_until_ready(state.step)
            batch = {**batch, HIDDEN: teacher.features(teacher.params, batch)}
            if not self._table or next(iter(self._table.values())).is_deleted():  # a step that failed has used it up
                self._table = teacher.read_table(self._shapes())
        state, metrics = self._function(self._with(state, self._table), batch)
        self._table = state.params["head"].get(TEACHER, {})
        if "grads" in metrics:
            metrics["grads"] = _without(metrics["grads"])
        state = state._replace(params=_without(state.params))
        return jax.tree.unflatten(self._structure, jax.tree.leaves(state)), metrics

    def lower(self, state: TrainState, batch: PyTree) -> Any:
        """As `TrainStep.lower`."""
        return self._abstractly(self._function.lower, state, batch)

    def trace(self, state: TrainState, batch: PyTree) -> Any:
        """As `TrainStep.trace`."""
        return self._abstractly(self._function.trace, state, batch)

    def _abstractly(self, function: Callable[..., Any], state: TrainState, batch: PyTree) -> Any:
        said = self._teacher.leaf(batch) if isinstance(self._teacher, Teacher) else self._teacher
        return function(self._with(state, self._shapes()), {**said, **batch})

    def _shapes(self) -> PyTree:
        return self._target.params["head"].get(TEACHER, {})

    def _with(self, state: TrainState, table: PyTree) -> TrainState:
        """The state with the teacher's table among the parameters of the head.

        Other parts have no leaf for what is frozen: their leaves are the same, in the same order.
        """
        if not table:
            return state
        params = {**state.params, "head": {**state.params["head"], TEACHER: table}}
        others = jax.tree.leaves(state._replace(params=()))
        whole = jax.tree.unflatten(jax.tree.structure(self._target._replace(params=())), others)
        return whole._replace(params=params)  # type: ignore[no-any-return]


def _without(params: PyTree) -> PyTree:
    return {**params, "head": {name: unit for name, unit in params["head"].items() if name != TEACHER}}
