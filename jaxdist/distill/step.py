"""The step of a student: the teacher's program runs first, and what it says of each token is a leaf of the batch.

So it travels with the microbatches of every schedule. The state is the student's alone: the teacher's table joins it
for the length of a step, and checkpoints, evaluations and samples never see it.
"""

from dataclasses import replace
from typing import Any, NamedTuple

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


class Joint(NamedTuple):
    """The step of the student's state with the teacher's table in it, of batches with what the teacher says.

    - model: the student, whose loss has the teacher's part.
    - target: that state as ShapeDtypeStructs with shardings. options: the table is frozen.
    - teacher: a `Teacher`; or the leaves that batches have of its largest logits.
    """

    model: ModelDef
    step: TrainStep
    target: TrainState
    options: StepOptions
    teacher: Teacher | dict[str, jax.ShapeDtypeStruct]

    def with_leaves(self, batch: PyTree) -> PyTree:
        """The shapes of a batch with those that the teacher adds to it."""
        said = self.teacher.leaf(batch) if isinstance(self.teacher, Teacher) else self.teacher
        return {**said, **batch}

    @property
    def table(self) -> PyTree:
        """The teacher's table in `target`; {} if batches have its logits."""
        return self.target.params["head"].get(TEACHER, {})


def join(
    student: ModelDef,
    teacher: Teacher | dict[str, jax.ShapeDtypeStruct],
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh,
    options: StepOptions,
    mixture: Mixture,
) -> Joint:
    """The step of student and teacher. Raises `UserError` for vocabularies of two sizes, and in deterministic mode."""
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
    options = replace(options, freeze=(*options.freeze, FROZEN)) if table else options
    step = make_train_step(model, optimizer, mesh, options)
    return Joint(model, step, state_target(model, optimizer, mesh, options), options, teacher)


def of_student(joint: Joint, mesh: AnyMesh, options: StepOptions) -> TrainStep:
    """The step for the student's own state."""
    return TrainStep(lambda state: _Joined(joint, state), mesh, options)


class _Joined:
    """The step for one layout of the student's state, which `TrainStep` calls, lowers and traces."""

    def __init__(self, joint: Joint, own: TrainState) -> None:
        self._joint, self._structure = joint, jax.tree.structure(own)
        self._table: PyTree = {}
        self._function = joint.step.jitted(self._with(own, joint.table))
        self._waits = on_cpu(joint.target.step.sharding.mesh)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        teacher = self._joint.teacher
        if isinstance(teacher, Teacher):
            if self._waits:  # two programs that communicate at once may leave each other without threads
                jax.block_until_ready(state.step)
            if not self._table or next(iter(self._table.values())).is_deleted():  # a step that failed has used it up
                self._table = jax.block_until_ready(teacher.read_table(self._joint.table))
            batch = {**batch, HIDDEN: teacher.features(teacher.params, batch)}
        state, metrics = self._function(self._with(state, self._table), batch)
        self._table = state.params["head"].get(TEACHER, {})
        if "grads" in metrics:
            metrics["grads"] = _without(metrics["grads"])
        state = state._replace(params=_without(state.params))
        return jax.tree.unflatten(self._structure, jax.tree.leaves(state)), metrics

    def lower(self, state: TrainState, batch: PyTree) -> Any:
        """As `TrainStep.lower`."""
        return self._function.lower(self._with(state, self._joint.table), self._joint.with_leaves(batch))

    def trace(self, state: TrainState, batch: PyTree) -> Any:
        """As `TrainStep.trace`."""
        return self._function.trace(self._with(state, self._joint.table), self._joint.with_leaves(batch))

    def _with(self, state: TrainState, table: PyTree) -> TrainState:
        """The state with the teacher's table among the parameters of the head.

        Other parts have no leaf for what is frozen: their leaves are the same, in the same order.
        """
        if not table:
            return state
        params = {**state.params, "head": {**state.params["head"], TEACHER: table}}
        others = jax.tree.leaves(state._replace(params=()))
        whole = jax.tree.unflatten(jax.tree.structure(self._joint.target._replace(params=())), others)
        return whole._replace(params=params)


def _without(params: PyTree) -> PyTree:
    return {**params, "head": {name: unit for name, unit in params["head"].items() if name != TEACHER}}
