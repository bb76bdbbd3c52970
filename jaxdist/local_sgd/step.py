"""The step of replicas that train by themselves: an inner step, and the outer steps whose turn it is."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdist.config.rules.fields import check_section
from jaxdist.config.sections.local import LOCAL, LocalConfig, check_fragments
from jaxdist.errors import UserError
from jaxdist.init import init_state
from jaxdist.local_sgd.inner import make_inner_step
from jaxdist.local_sgd.outer import make_outer_step
from jaxdist.local_sgd.state import local_target, outer_optimizer, spread_out
from jaxdist.mesh import AnyMesh
from jaxdist.model import TAKEN, ModelDef
from jaxdist.parallel.options import StepOptions, make_options
from jaxdist.parallel.program import check_axes
from jaxdist.specs import PyTree
from jaxdist.state import TrainState
from jaxdist.train_step import Metrics, TrainStep


class OfOwnReplicas:
    """A metric of this process's replicas, which is read when it is needed. Nothing is exchanged for it.

    read: rows of arrays, one of each metric given -> a number or an array.
    """

    def __init__(self, read: Callable[..., Any], *metrics: jax.Array) -> None:
        self._read, self._metrics = read, metrics

    def copy_to_host_async(self) -> None:
        """Begin to copy, as `jax.Array.copy_to_host_async`."""
        for metric in self._metrics:
            for shard in metric.addressable_shards:
                shard.data.copy_to_host_async()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        def rows(metric: jax.Array) -> np.ndarray:
            parts = {shard.index[0].start or 0: shard.data for shard in metric.addressable_shards}
            return np.concatenate([np.asarray(parts[first]) for first in sorted(parts)])

        return np.asarray(self._read(*map(rows, self._metrics)), dtype)

    def __float__(self) -> float:
        return float(self.__array__())


def _mean(values: np.ndarray, weights: np.ndarray) -> Any:
    total = weights.sum()
    return (values * weights).sum() / total if total else values.mean()


def of_own_replicas(metrics: Metrics) -> Metrics:
    """The metrics of an inner step [R], as those of this process's replicas: their loss is the mean over tokens.

    Whether a step was skipped is left out: only at an outer step do all processes know the same of it.
    """
    reads: dict[str, Callable[..., Any]] = {"weight": np.sum, "grad_norm": np.mean, "loss_scale": np.min}
    found = {name: OfOwnReplicas(read, metrics[name]) for name, read in reads.items() if name in metrics}
    return {"loss": OfOwnReplicas(_mean, metrics["loss"], metrics["weight"]), **found}


def figures_of_own_replicas(metrics: Metrics) -> Metrics:
    """What a model tells of itself (`ModelDef.figures`), [R, ...], as means over this process's replicas."""
    mean = lambda rows: rows.mean(axis=0)  # noqa: E731
    return {name: OfOwnReplicas(mean, value) for name, value in metrics.items() if name not in TAKEN}


class LocalStep(TrainStep):
    """The step: `state, metrics = step(state, batch)`. The state is that of `init_local_state`.

    Traced, lowered and in a ledger it is the inner step. Metrics are those of this process's replicas; after an outer
    step those of all, with "round_loss" (the mean over the round) and "outer_norm" (of what the anchor was given). A
    model's figures are always means over this process's replicas.
    """

    def __init__(
        self,
        build: Callable[[TrainState], Any],
        outer: list[Callable[[TrainState], Any]],
        mesh: AnyMesh,
        options: StepOptions,
        local: LocalConfig,
        *,
        last: int | None,
    ) -> None:
        super().__init__(build, mesh, options)
        self.local, self._last, self._build_outer = local, last, outer
        self._outer: dict[int, Any] = {}
        self._known: tuple[Any, int] | None = None  # the step of the newest state, as an array and as a number

    def outer(self, index: int, state: TrainState) -> Any:
        """The `jax.jit` function of a fragment's outer step, for the layout of `state`: (state, metrics of
        `inner_metrics`) -> (state, metrics)."""
        if index not in self._outer:
            self._outer[index] = self._build_outer[index](state)
        return self._outer[index]

    def waits(self, number: int) -> bool:
        """Whether the call of step `number` returns only when it has finished: on CPU devices, with an outer step."""
        return self._on_cpu and bool(self.local.due(number, self._last))

    def inner_metrics(self, state: TrainState, batch: PyTree) -> Metrics:
        """The metrics of an inner step [R], as ShapeDtypeStructs."""
        found: Metrics = jax.eval_shape(self.jitted(state), state, batch)[1]
        return {name: leaf for name, leaf in found.items() if name != "own"}

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        self.jitted(state)  # refuses what is no state
        known = self._known is not None and state.step is self._known[0]
        number = (self._known[1] if known and self._known else int(jax.device_get(state.step))) + 1
        state, metrics = super().__call__(state, batch)
        shown, figures = of_own_replicas(metrics), figures_of_own_replicas(metrics)
        metrics = {name: value for name, value in metrics.items() if name not in figures}
        due = self.local.due(number, self._last)
        for index in due:
            if self.waits(number):  # two programs that communicate at once may leave each other without threads
                jax.block_until_ready(metrics)
            state, shown = self.outer(index, state)(state, metrics)
            if self.waits(number):
                jax.block_until_ready(shown)
        self._known = state.step, number
        return state, shown | figures


def check_has_blocks(model: Any) -> ModelDef:
    """The model. Raises `UserError` for a loss in place of a model."""
    if not isinstance(model, ModelDef):
        raise UserError(
            f"{LOCAL}.every: is for models with blocks, and the model is a loss of its own; allowed: 0; or a ModelDef,"
            " as of gpt, bert, vit or jaxdist.model_def"
        )
    return model


def check_trains_apart(local: Any) -> LocalConfig:
    """The section. Raises `UserError` for what is none, for wrong keys, and where replicas would never meet."""
    if not isinstance(local, LocalConfig):
        raise UserError(f"local: is a {type(local).__name__}; allowed: a LocalConfig; give LocalConfig(every=10)")
    check_section(local, LOCAL)
    local.check()
    if not local.on:
        raise UserError("local.every: 0, by which replicas never meet; allowed: an integer >= 1; give every=10")
    return local


def init_local_state(
    source: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    local: LocalConfig,
    options: StepOptions | None = None,
    *,
    outer: optax.GradientTransformation | None = None,
    **keywords: Any,
) -> TrainState:
    """The state at step 0 of replicas that train by themselves. All start alike; its parameters are their anchor.

    - source: a `ModelDef`, or a pytree of parameters that exist already.
    - options, keywords: as of `init_state`. local, outer: as of `make_local_step`.
    """
    outer, options = outer or outer_optimizer(check_trains_apart(local)), make_options(options, keywords)
    one = init_state(source, optimizer, mesh, options)
    target = local_target(one, outer, local, frozen=options.freeze)
    return spread_out(one, target, outer, local, frozen=options.freeze)


def make_local_step(
    model: ModelDef,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh,
    local: LocalConfig,
    options: StepOptions | None = None,
    *,
    outer: optax.GradientTransformation | None = None,
    last: int | None = None,
    **keywords: Any,
) -> LocalStep:
    """The step of replicas that train by themselves, each a coordinate of the mesh axis data.

    - local: how, as section `parallel.local` of a configuration.
    - options, keywords: as of `make_train_step`.
    - outer: an optax optimizer in place of that of `local`.
    - last: the step after which an outer step ends the run.

    >>> mesh, tx, local = jaxdist.make_mesh(data=2), optax.sgd(0.1), LocalConfig(every=10)
    >>> model = gpt(jaxdist.Config().model.replace(layers=1, width=8, heads=2, vocab=16), max_length=8)
    >>> make_local_step(model, tx, mesh, local)
    TrainStep(strategy='ddp', mesh: data=2, schedule='accumulate', microbatches=1, precision='fp32', not compiled yet)
    """
    check_axes(check_has_blocks(model), mesh)
    check_trains_apart(local)
    check_fragments(local.fragments, model.layers)
    options = make_options(options, keywords).on(mesh)
    outer = outer or outer_optimizer(local)
    steps = [make_outer_step(outer, mesh, options, local, index=index) for index in range(local.fragments)]
    return LocalStep(make_inner_step(model, optimizer, mesh, options), steps, mesh, options, local, last=last)
