"""Training in Python: `fit` makes a run of a user's objects, whose steps the loop of `jaxdist.trainer.train` takes."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdist.build import Parts, skips_steps
from jaxdist.config.checks import check_packages
from jaxdist.config.load import settings_by_key
from jaxdist.config.rules.fields import check_argument, keys
from jaxdist.config.rules.precision import check_skips
from jaxdist.config.schema import Config
from jaxdist.config.wrong_calls import own_names
from jaxdist.data import Source
from jaxdist.data.own_batches import OwnBatches, Placing
from jaxdist.errors import UserError, nearest
from jaxdist.files.launcher_notes import not_joined
from jaxdist.init import ParameterSource, Rules, init_state, state_target
from jaxdist.mesh import BATCH_AXES, make_mesh
from jaxdist.model import ModelDef
from jaxdist.observe import read_metrics
from jaxdist.observe.environment import versions
from jaxdist.optim.ema import ema_of, ema_of_model_state, with_ema
from jaxdist.optim.update import check_optimizer
from jaxdist.parallel.modules.module_loss import ModuleLoss
from jaxdist.parallel.options import StepOptions, make_options
from jaxdist.parallel.program import check_axes
from jaxdist.parallel.schedule import UserLoss
from jaxdist.processes import anywhere, done_by_first
from jaxdist.runtime.cache import CacheHits
from jaxdist.runtime.exit_status import DONE, STOPPED
from jaxdist.runtime.run_folder import leave_stop_note
from jaxdist.runtime.start import fail_alone
from jaxdist.runtime.watch.replica_check import ReplicasDiffer
from jaxdist.runtime.watch.stop import StopSignal
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.specs import PyTree
from jaxdist.state import TrainState, shardings_of
from jaxdist.step import make_train_step
from jaxdist.trainer.evaluation import Ending, averaged, own_evaluation
from jaxdist.trainer.failures.same_program import facts_of_start, facts_of_step
from jaxdist.trainer.nonfinite import NonFinite
from jaxdist.trainer.resume import changed_layout, laid_out, show_changes
from jaxdist.trainer.run import RunPlan, TrainingRun, Work, make_outputs, restore_or_init, run_environment
from jaxdist.trainer.saving import all_saved, settle
from jaxdist.trainer.train import claim, loop, run_directory, time_limit

Callback = Callable[[int, Mapping[str, Any]], None]

# Keys of a configuration that `settings` may hold, beside those that are arguments.
SETTINGS = (
    "train.max_hours", "train.eval_every", "train.on_nonfinite", "train.loss_spike", "train.watchdog_s",
    "train.check_replicas_every", "checkpoint.every", "checkpoint.keep", "checkpoint.keep_every",
    "checkpoint.keep_best", "checkpoint.resume", "observe.console", "observe.log_every", "observe.tensorboard",
    "observe.mlflow", "data.prefetch",
)  # fmt: skip

# Keywords that others have for what `fit` takes in another way.
ELSEWHERE = {"epochs": "steps=, the number of the last step", "batch_size": "data, which gives whole batches"}


class FitResult(NamedTuple):
    """What `fit` returns.

    - state: the last one.
    - metrics: of the last step, with those of its evaluation; where no step was left to take, the numbers of
        metrics.jsonl. Numbers, and arrays where a model's `figures` are.
    - stopped: "" after the last step; "patience"; or why it can be taken up again: SIGINT, SIGTERM, train.max_hours.
    - ema: the moving average of the parameters; None without one. ema_model_state: that of the model_state.
    - run_dir: where it is kept.

    >>> import tempfile
    >>> loss = lambda params, batch, keys: (((batch * params - 1) ** 2).sum(), 8)
    >>> with tempfile.TemporaryDirectory() as run_dir:
    ...     done = jaxdist.fit(loss, optax.sgd(0.1), [np.ones(8)], steps=3, params=jnp.zeros(()), run_dir=run_dir)
    run ...
    >>> done.stopped, done.exit_status
    ('', 0)
    """

    state: TrainState
    metrics: dict[str, Any]
    stopped: str
    ema: PyTree
    run_dir: Path
    ema_model_state: PyTree = None

    @property
    def exit_status(self) -> int:
        """For `sys.exit`: 0 complete, 75 stopped and resumable."""
        return DONE if self.stopped in ("", "patience") else STOPPED


@own_names()
def fit(
    model: ModelDef | UserLoss,
    optimizer: optax.GradientTransformation,
    data: Any,
    *,
    steps: int,
    params: ParameterSource | None = None,
    model_state: PyTree = (),
    rules: Rules = (),
    mesh: Mesh | None = None,
    run_dir: str | Path | None = None,
    eval_data: Any = None,
    eval_loss: ModelDef | UserLoss | None = None,
    patience: int | None = None,
    ema: float | None = None,
    callbacks: Sequence[Callback] | Callback = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
    options: StepOptions | None = None,
    **keywords: Any,
) -> FitResult:
    """Train with the loop of `scripts/train.py`: checkpoints and exact resuming, metrics.jsonl, evaluation, the guard
    against steps that are not finite, signals. The whole of it: docs/own_loop.md. Raises `UserError`.

    model: a `ModelDef`; what `nnx_loss` or `linen_loss` gives; or your own loss_fn, with params, model_state and rules
        as for `init_state`.
    data: gives batches: a list, a generator, a DataLoader, a dataset; of each process its own rows. A run that is
        resumed needs a new generator, or a function that makes it.
    steps: the number of the last step.
    mesh: by default all devices, as `fsdp`.
    run_dir: is resumed where it holds a checkpoint; by default a new folder below runs/.
    eval_data, eval_loss: the batches of an evaluation, and a loss in place of model, which would keep its dropout; that
        of `nnx_loss`, and of `linen_loss(evaluation=)`, is in evaluation mode by itself.
    patience: ends the run after so many evaluations in a row without a lower loss.
    ema: the decay of a moving average of parameters and model_state, which is what is evaluated then.
    callbacks: functions (step, metrics), called for each step in order, one step late: no device waits for them.
    settings: keys of a configuration, such as {"train.eval_every": 10, "checkpoint.every": 20}; 50 and 100 otherwise.
    options, keywords: a `StepOptions`, or its fields: strategy="zero3", microbatches=4, seed=1.

    >>> import tempfile
    >>> x = np.eye(8, 4, dtype=np.float32)
    >>> loss = lambda params, batch, keys: (((batch @ params["w"] - 1) ** 2).sum(), batch.shape[0])
    >>> with tempfile.TemporaryDirectory() as run_dir:
    ...     done = jaxdist.fit(loss, optax.sgd(2.0), [x], steps=9, params={"w": jnp.zeros(4)}, run_dir=run_dir)
    run ...
    >>> int(done.state.step), done.metrics["loss"] < 0.51, done.stopped
    (9, True, '')
    """
    mesh = mesh or make_mesh(fsdp=-1)  # every strategy splits batches over fsdp, and the sharding ones shard over it
    _check((model, optimizer, mesh), keywords, params=params, run_dir=run_dir, evaluated=(eval_data, eval_loss))
    options, evaluated = make_options(options, keywords), eval_data is not None
    config, options = _settled(settings, steps, options, patience, evaluated=evaluated)
    optimizer = optimizer if ema is None else with_ema(optimizer, ema)
    source, layout = model if params is None else params, {"rules": rules, "model_state": model_state}
    plan = _plan(config, mesh, model, optimizer, options, state_target(source, optimizer, mesh, options, **layout))
    fresh = lambda: init_state(source, optimizer, mesh, options, **layout)  # noqa: E731
    eval_loss = eval_loss or getattr(model, "evaluation", None) or model
    told = tuple(callbacks) if isinstance(callbacks, Iterable) else (callbacks,)
    check_argument("callbacks", callbacks, all(map(callable, told)))
    given = _Given(data, eval_data, eval_loss, patience, told, averages=ema is not None)
    return _fit(plan, given, fresh, None if run_dir is None else str(run_dir))


class _Given(NamedTuple):
    """What `fit` was given beside what is in a `RunPlan`. averages: whether there is an ema."""

    data: Any
    eval_data: Any
    eval_loss: Any
    patience: int | None
    callbacks: tuple[Callback, ...]
    averages: bool

    def evaluated(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The parameters and the model_state to evaluate."""
        return averaged(state) if self.averages else (state.params, state.model_state)

    def ema(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The moving averages of parameters and model_state, laid out like them; None without one."""
        if not self.averages:
            return None, None
        found = ema_of(state.opt_state, state.params), ema_of_model_state(state.opt_state, state.model_state)
        return jax.device_put(found, shardings_of((state.params, state.model_state)))


def _check(
    parts: tuple[Any, Any, Mesh], keywords: Mapping[str, Any], *, params: Any, run_dir: Any, evaluated: tuple[Any, Any]
) -> None:
    """Raise `UserError` for likely mistakes. parts: (model, optimizer, mesh). evaluated: (eval_data, eval_loss)."""
    model, optimizer, mesh = parts
    if said := not_joined(os.environ, jax.process_count()):
        raise UserError(said)
    check_axes(model, mesh)
    check_optimizer(optimizer)
    known = [*(each.name for each in fields(StepOptions)), *inspect.signature(fit).parameters]
    for name, value in keywords.items():
        if name not in known:
            setting = next((key for key in SETTINGS if key.partition(".")[2] == name), None)
            near = nearest(name, known)
            hint = f"settings={{{setting!r}: ...}}" if setting else ELSEWHERE.get(name)
            hint = f"give {hint}" if hint else f"did you mean {near}={value!r:.40}?" if near else ""
            raise UserError(f"{name}: is no keyword of fit; {hint or 'allowed: ' + ', '.join(known)}")
    if isinstance(model, ModelDef | ModuleLoss) != (params is None):
        said = "None; a loss_fn of your own needs them" if params is None else "the model has its own; leave them out"
        raise UserError(f"params: {said}")
    if evaluated[0] is None and evaluated[1] is not None:
        raise UserError("eval_loss: needs eval_data, the batches to evaluate; give both, or none")
    if run_dir is not None and not str(run_dir):
        raise UserError("run_dir: is empty; give a folder, or None for a new one")


def _settled(
    settings: Mapping[str, Any], steps: int, options: StepOptions, patience: int | None, *, evaluated: bool
) -> tuple[Config, StepOptions]:
    """The configuration that the loop goes by, and the options of the step as it wants them."""
    config = Config()
    if not isinstance(settings, Mapping):
        raise UserError(f"settings: {settings!r}; allowed: a dict, such as {{'train.eval_every': 10}}; or leave it out")
    given: list[Any] = [steps, patience]
    steps, patience = [int(each) if isinstance(each, np.integer) else each for each in given]
    for dotted, value in settings.items():
        if dotted not in SETTINGS:
            near = nearest(str(dotted), SETTINGS)
            hint = f"; did you mean {near!r}?" if near else ""
            if isinstance(value, Mapping) and value:  # nested as in YAML
                hint = f"; give settings={{{f'{dotted}.{next(iter(value))}'!r}: ...}}"
            raise UserError(f"settings: {dotted!r} is none of fit's; allowed: {', '.join(SETTINGS)}{hint}")
    for dotted, value in {**settings, "train.steps": steps, "train.seed": options.seed}.items():
        name, _, key = dotted.partition(".")
        section = getattr(config, name)
        config = replace(config, **{name: replace(section, **{key: keys(type(section))[key].check(value, dotted)})})
    if not evaluated:
        config = replace(config, train=replace(config.train, eval_every=0))
    if patience is not None and (type(patience) is not int or patience < 1 or not config.train.eval_every):
        raise UserError(
            f"patience: {patience!r}; allowed: an int of 1 or more, with eval_data and train.eval_every; or None"
        )
    check_packages(config.observe)
    usual, rule = config.precision.max_consecutive_skips, options.precision.scale_rule
    own = usual if options.max_skips == StepOptions.max_skips else options.max_skips
    check_skips(own, usual, mode="none" if rule is None else "", on_nonfinite=config.train.on_nonfinite)
    return config, replace(options, max_skips=own if skips_steps(config, options.precision) else 0)


def _plan(config: Config, mesh: Mesh, model: Any, optimizer: Any, options: StepOptions, target: TrainState) -> RunPlan:
    """The plan of a run. It has no source."""
    step = make_train_step(model, optimizer, mesh, options)
    nothing = Source(np.arange(0), None, 0, {"name": "batches"})
    return RunPlan(config, mesh, nothing, Parts(model, optimizer, options, ("xla", None), target, step))


def _fit(plan: RunPlan, given: _Given, fresh: Callable[[], TrainState], run_dir: str | None) -> FitResult:
    """Train in a run directory, or in a new one, under the watch over the processes of the job."""
    watch = Watch(plan.config.train.watchdog_s)
    with StopSignal(signals=not hasattr(sys, "ps1")) as stop:  # in a notebook they are Python's own
        stop.join()
        with (
            fail_alone(),
            own_names(),
            watch.opened(facts_of_start(plan.config, versions())),
            ExitStack() as stack,
            watch.crumbs.failing(),
        ):
            folder = Path(done_by_first(lambda: str(run_directory(run_dir, "fit", make=True))))
            claimed = claim(folder, stack, watch, stop)
            run, work, ending = _begin(plan, given, fresh, folder, stack, watch)
            run.outputs.claim = claimed
            stack.callback(run.outputs.close_metrics)
            stop.limit = time_limit(plan, run.outputs.checkpoints, stop.started)
            run.outputs.console.header(_header(run))
            complete = True
            try:
                if not ending.is_over:
                    complete = loop(run, work, stop)[1]
            except (NonFinite, ReplicasDiffer) as error:
                settle(run.outputs)
                run.outputs.failed(str(error))
                raise
            watch.crumbs.enter("settle")
            if not all_saved(run.outputs):
                assert run.outputs.checkpoints.failed is not None
                raise run.outputs.checkpoints.failed
            watch.crumbs.enter("finish")
            if why := _why(run, ending, stop, complete=complete):
                run.outputs.console.line(why)
            run.outputs.console.line(f"run directory: {run.outputs.folder}")
            metrics = ending.metrics or (_recorded(run.outputs.folder) if complete else {})
            anywhere(False)  # all stay until the last is done, with watch and signal handlers
            watch.close()
    if not complete:
        leave_stop_note(os.environ)
    state, stopped = run.progress.state, stop.why if not complete else "patience" if ending.is_over else ""
    ema, carried = given.ema(state)
    return FitResult(state, metrics, stopped, ema, run.outputs.folder, carried)


def _recorded(folder: Path) -> dict[str, Any]:
    """The numbers of the last line of metrics.jsonl."""
    lines = read_metrics(folder / "metrics.jsonl")[-1:]
    return {name: value for line in lines for name, value in line.items() if name not in ("step", "arrays")}


def _begin(
    plan: RunPlan, given: _Given, fresh: Callable[[], TrainState], folder: Path, stack: ExitStack, watch: Watch
) -> tuple[TrainingRun, Work, Ending]:
    """The run, its work, and how it will end."""
    config, mesh, parts, cache = plan.config, plan.mesh, plan.parts, stack.enter_context(CacheHits())
    outputs = make_outputs(config, folder, stack, watch)
    watch.crumbs.enter("restore")
    progress = restore_or_init(config, parts.target, outputs, fresh, {"train": {"seed": config.train.seed}})
    if jax.process_index() == 0:
        resumed = progress.first_step if outputs.checkpoints.latest() is not None else None
        outputs.open_files(stack, resume_step=resumed, described=run_environment(mesh), observe=config.observe)
    ending = Ending(given.patience)
    ending.restore(progress.meta)
    watch.crumbs.enter("first batch")
    split = {axis: mesh.shape[axis] for axis in BATCH_AXES} | {"microbatches": parts.options.on(mesh).microbatches}
    batches, evaluate, rows = None, None, 0
    if progress.first_step < config.train.steps and not ending.is_over:
        first = progress.first_step + progress.passed
        batches = OwnBatches(
            given.data,
            Placing(plan.sharding, split, "data"),
            first=first,
            position=progress.meta.get("fit", {}).get("position"),
            keep=config.data.prefetch + 4,
        )
        batch = batches.batch(first)
        rows = len(jax.tree.leaves(batch)[0])
        if config.train.eval_every:
            evaluate = own_evaluation(plan, watch, given.eval_data, given.eval_loss, given.evaluated)
        if jax.process_count() > 1:
            watch.agree(facts_of_step(parts, mesh, batch))

    layout = laid_out(mesh, parts.options, rows)
    progress.changed |= changed_layout(progress.meta, layout)

    def record(step: int) -> dict[str, Any]:
        position = batches and batches.position(step + progress.passed)
        forced = {"forced": progress.forced} if progress.forced else {}
        settings = {"config": settings_by_key(config), "train": {"seed": config.train.seed}, "layout": layout}
        return {**settings, "batches_passed": progress.passed, "fit": {"position": position}, **ending.saved, **forced}

    run = TrainingRun(
        plan=plan, progress=progress, outputs=outputs, record=record, baselines={}, watch=watch, cache=cache
    )
    batch_of: Callable[[int], PyTree] = (lambda number: ()) if batches is None else batches.batch
    work = Work(
        batch=batch_of,
        per_step=(rows, "samples"),
        evaluate=evaluate,
        recorded=functools.partial(_tell, ending, given.callbacks),
        ends=ending,
        restored=ending.restore,
    )
    return run, work, ending


def _tell(ending: Ending, callbacks: Sequence[Callback], step: int, metrics: Mapping[str, Any]) -> None:
    """Call the user's functions, which may use devices."""
    ending.metrics = dict(metrics)
    with jax.transfer_guard("allow"):
        for callback in callbacks:
            callback(step, dict(metrics))


def _why(run: TrainingRun, ending: Ending, stop: StopSignal, *, complete: bool) -> str:
    """Why a run ends, as a line; empty after its last step."""
    step = int(jax.device_get(run.progress.state.step))
    if not complete:
        return f"stopped after step {step} by {stop.why}; the same call with run_dir={run.outputs.folder} goes on"
    if ending.is_over:
        return ending.why(step, "patience")
    return "" if ending.metrics else f"complete: step {step} was the last"


def _header(run: TrainingRun) -> dict[str, str]:
    """The rows of the header on the console, by name."""
    plan, progress = run.plan, run.progress
    rows = {"run": str(run.outputs.folder), "state": repr(progress.state), "step": repr(plan.parts.step)}
    if progress.first_step:
        changed = f", with {show_changes(progress.changed)}" if progress.changed else ""
        rows["resumed"] = f"after step {progress.first_step}{changed}"
    return rows
