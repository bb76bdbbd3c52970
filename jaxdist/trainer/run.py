"""A training run: its plan (configuration, devices, data, program), its progress, and its outputs.

`build` makes the three from a configuration and a run directory. The other modules of this folder take what they need.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxdist.build import Parts, assemble, mesh_of_config
from jaxdist.checkpoint import Checkpoints
from jaxdist.config.load import to_yaml
from jaxdist.config.schema import Config
from jaxdist.config.sections.observe import ObserveConfig
from jaxdist.data import Ids, Source, bigram_bits, trigram_bits
from jaxdist.errors import UserError
from jaxdist.files.regular import open_to_append, replace_file
from jaxdist.files.user_path import user_path
from jaxdist.mesh import sizes_of
from jaxdist.observe import Console, MetricsWriter, environment, redact_settings, write_environment
from jaxdist.observe.report.read import PLAN_FILE
from jaxdist.observe.sinks import Sinks, make_sinks
from jaxdist.plan.compiled.memory import held_bytes
from jaxdist.precision.loss_scale import released
from jaxdist.runtime.cache import CacheHits
from jaxdist.runtime.compiler import settings
from jaxdist.runtime.run_claim import RunClaim
from jaxdist.runtime.run_folder import ELASTIC_LOG
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.specs import BATCH_SPEC, PyTree
from jaxdist.state import TrainState
from jaxdist.trainer.batches.load import load_data
from jaxdist.trainer.failures.same_program import facts_of_program
from jaxdist.trainer.first_state import Origin, first_state
from jaxdist.trainer.resume import changed_settings, check_identity, check_replicas, identity, record, show_changes

Sampler = Callable[[PyTree], str]  # parameters -> text


class RunPlan(NamedTuple):
    """What trains. It does not change during a run."""

    config: Config
    mesh: Mesh
    source: Source
    parts: Parts

    @property
    def sharding(self) -> NamedSharding:
        """The layout of every leaf of a batch."""
        return NamedSharding(self.mesh, BATCH_SPEC)


@dataclass(kw_only=True)
class Progress:
    """How far a run has come. `state` changes with each step, the other fields with a rollback only.

    - first_step: the step that the loop starts after.
    - passed: the number of batches that rollbacks have skipped.
    - rollbacks: {step of a checkpoint: how often the run went back to it}.
    - changed: settings that differ from the checkpoint that was resumed, {key: [before, now]}.
    - forced: the changes of a run's identity that `checkpoint.resume=force` let pass, each {"step", "changed"}.
    - meta: the record of the checkpoint that was resumed; {} in a new run.
    """

    state: TrainState
    first_step: int
    passed: int = 0
    rollbacks: dict[int, int] = field(default_factory=dict)
    changed: dict[str, list[Any]] = field(default_factory=dict)
    forced: list[dict[str, Any]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Outputs:
    """Where a run writes: the console and the run directory. metrics, samples (`observe.samples`) and the claim on the
    directory are those of process 0; they are None on the others, where sinks is empty."""

    folder: Path
    console: Console
    checkpoints: Checkpoints
    metrics: MetricsWriter | None = None
    samples: MetricsWriter | None = None
    claim: RunClaim | None = None
    sinks: Sinks = field(default_factory=Sinks)

    def note(self, record: dict[str, Any]) -> None:
        """Add a line to incidents.jsonl, on process 0. Where that fails, as on a full disk, the console says so."""
        if jax.process_index() != 0:
            return
        try:
            folder = self.folder if self.claim is None else self.claim.follow()
            with os.fdopen(open_to_append(folder / "incidents.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            self.console.line(f"incidents.jsonl: {error.strerror}; not written: {json.dumps(record)}")

    def warn(self, record: dict[str, Any]) -> None:
        """Say what is in the record under "what" on the console, as a warning, and add it to incidents.jsonl."""
        self.console.line(f"warning: {record['what']}")
        self.note(record)

    def report_damage(self, line: str) -> None:
        """Warn about a damaged checkpoint, or one without checksums."""
        self.warn({"what": line, "action": "another checkpoint" if "damaged" in line else "none"})

    def open_files(
        self,
        stack: ExitStack,
        *,
        resume_step: int | None,
        described: Mapping[str, Any],
        observe: ObserveConfig,
        config: str = "",
    ) -> None:
        """Write env.json (described) and config.yaml, then open the files of metrics: they are cut last, once it is
        known that the run can write. Raises `UserError` where it cannot. Then open the sinks of metrics."""

        def opened(name: str) -> MetricsWriter:
            say = lambda line: self.warn({"what": line, "action": "went on"})  # noqa: E731
            return stack.enter_context(MetricsWriter(self.folder / name, resume_step=resume_step, say=say))

        if (self.folder / ELASTIC_LOG).exists():
            raise UserError(f"--run-dir: {self.folder} is the folder of an elastic run; allowed: a new folder")
        try:
            if problem := self.checkpoints.no_room():
                raise problem
            if config:
                replace_file(self.folder / "config.yaml", config.encode())
            write_environment(self.folder / "env.json", described)
            if observe.plan is not None and resume_step is None:  # one that goes on keeps the plan that it began with
                replace_file(self.folder / PLAN_FILE, user_path(observe.plan, key="observe.plan").read_bytes())
            self.metrics = opened("metrics.jsonl")
            self.samples = opened("samples.jsonl") if observe.samples else None
        except OSError as error:
            what = f"--run-dir: {str(error.filename or self.folder)!r} cannot be written: {error.strerror}"
            raise UserError(f"{what}; mend it, or give another folder") from error
        self.sinks = stack.enter_context(make_sinks(observe, self.warn).open(self.folder, config, resume_step or 0))

    def failed(self, why: str) -> None:
        """Say, on the console and to the sinks, that the run has failed."""
        self.sinks.run_failed = True
        self.console.line(f"failed: {why}")

    def close_metrics(self) -> None:
        """Close metrics.jsonl. A full disk is said, and does not end the run."""
        try:
            if self.metrics is not None:
                self.metrics.close()
        except OSError as error:
            self.console.line(f"warning: metrics.jsonl: {error.strerror}; the last lines are not in it")


@dataclass(kw_only=True)
class TrainingRun:
    """A run that is ready for its first step.

    - record: the number of a step -> what is saved beside its state.
    - baselines: bits per token of counting models, by name.
    - sample: makes the text that the run prints at its end; None: it prints none.
    """

    plan: RunPlan
    progress: Progress
    outputs: Outputs
    record: Callable[[int], dict[str, Any]]
    baselines: dict[str, float]
    watch: Watch
    cache: CacheHits
    sample: Sampler | None = None


def _no_end(evaluation: Mapping[str, float]) -> bool:
    return False


def _not_restored(meta: Mapping[str, Any]) -> None:
    pass


def _not_told(step: int, metrics: Mapping[str, Any]) -> None:
    pass


@dataclass(kw_only=True)
class Work:
    """What the steps of a run take and give: all that differs between a configuration and `jaxdist.fit`.

    - batch: the number of a batch, from 0 -> the global batch. Called in rising order, but after a failed step.
    - per_step: (the tokens or samples of a step, "tokens" or "samples").
    - rates: the learning rate of each step; None: it is not known.
    - evaluate: state -> metrics, "eval/loss" among them; None: never.
    - recorded: is told the number and the metrics of each step, one step late.
    - ends: evaluation -> whether the run is complete with it.
    - restored: is told the record of the checkpoint that a rollback went back to.
    """

    batch: Callable[[int], PyTree]
    per_step: tuple[int, str]
    rates: np.ndarray | None = None
    evaluate: Callable[[TrainState], dict[str, float]] | None = None
    recorded: Callable[[int, Mapping[str, Any]], None] = _not_told
    ends: Callable[[Mapping[str, float]], bool] = _no_end
    restored: Callable[[Mapping[str, Any]], None] = _not_restored


def build(
    config: Config, folder: Path, stack: ExitStack, watch: Watch, sampler_of: Callable[[RunPlan], Sampler | None]
) -> TrainingRun:
    """Load the data, lay out the state, and write what is known before the first step. What must be closed is entered
    into `stack`.

    sampler_of: raises `UserError` where the model cannot be sampled from. Nothing is written then.
    """
    cache = stack.enter_context(CacheHits())
    mesh = mesh_of_config(config)
    parts = assemble(config, mesh)
    outputs = make_outputs(config, folder, stack, watch)  # which reads, while the data is read
    plan = RunPlan(config, mesh, load_data(config), parts)
    sample = sampler_of(plan)
    if jax.process_count() > 1:
        watch.agree(facts_of_program(config, parts, mesh, plan.source))
    watch.crumbs.enter("restore")
    origin: Origin = {}

    def fresh() -> TrainState:
        state, found = first_state(config, parts, mesh, outputs.console.line)
        origin.update(found)
        return state

    teacher, own = None, identity(config, plan.source)
    if parts.teaching is not None:
        teacher = parts.teaching.begin(own, outputs.console.line)
        own = identity(config, plan.source, teacher)
    progress = restore_or_init(config, parts.target, outputs, fresh, own, parts.replicas)
    origin = origin or progress.meta.get("init", {})
    lead, baselines = jax.process_index() == 0, dict[str, float]()
    if lead:
        resumed = progress.first_step if outputs.checkpoints.latest() is not None else None
        baselines = ngram_baselines(plan.source)
        described = {
            **run_environment(mesh),
            "data": redact_settings(plan.source.info),
            "baselines": baselines,
            "state_bytes": held_bytes(progress.state),
        }
        outputs.open_files(
            stack,
            resume_step=resumed,
            described=described,
            config=to_yaml(config, redact_settings),
            observe=config.observe,
        )
    return TrainingRun(
        plan=plan,
        progress=progress,
        outputs=outputs,
        record=lambda step: (
            record(config, plan.source, teacher, passed=progress.passed, forced=progress.forced) | {"init": origin}
        ),
        baselines=baselines,
        watch=watch,
        cache=cache,
        sample=sample,
    )


def make_outputs(config: Config, folder: Path, stack: ExitStack, watch: Watch) -> Outputs:
    """The outputs of a run, without those that are written; the newest checkpoint is verified meanwhile."""
    keeping = {key: getattr(config.checkpoint, key) for key in ("keep", "keep_every", "keep_best")}
    made = Checkpoints(folder / "checkpoints", **keeping, entered=watch.crumbs.save_enters)
    checkpoints = stack.enter_context(made)
    checkpoints.look_ahead()
    lead, observe = jax.process_index() == 0, config.observe
    console = Console(config.train.steps, mode=observe.console, log_every=observe.log_every, enabled=lead)
    return Outputs(folder=folder, console=stack.enter_context(console), checkpoints=checkpoints)


def restore_or_init(
    config: Config,
    target: TrainState,
    outputs: Outputs,
    fresh: Callable[[], TrainState],
    identity: dict[str, Any],
    replicas: Any = None,
) -> Progress:
    """The progress of the newest intact checkpoint if the run directory has one, otherwise a new state.

    - target: the state as ShapeDtypeStructs with shardings. fresh: makes one at step 0.
    - identity: as of `jaxdist.trainer.resume.identity`. replicas: as of `Parts`.

    Raises `UserError` where `checkpoint.resume` or the run's identity does not allow it.
    """
    checkpoints, folder = outputs.checkpoints, outputs.folder
    resume, latest = config.checkpoint.resume, checkpoints.latest()
    if latest is not None and resume == "never":
        raise UserError(f"checkpoint.resume: 'never', but {folder} holds one of step {latest}; use another --run-dir")
    if latest is None and resume == "must":
        raise UserError(f"checkpoint.resume: 'must', but {folder} holds no checkpoint; check --run-dir, or use auto")
    latest = checkpoints.newest_intact(outputs.report_damage)
    if latest is None:
        state = fresh()
        return Progress(state=state, first_step=int(jax.device_get(state.step)))  # waits: a failure belongs here
    if latest > config.train.steps:
        raise UserError(
            f"train.steps: {config.train.steps}, but {folder} is at step {latest}; allowed: {latest} or more"
        )
    meta = checkpoints.meta(latest)
    changed = changed_settings(meta, config)
    let_pass = check_identity(meta, identity, folder, force=resume == "force", changed=changed)
    check_replicas(meta, config, folder)
    if replicas is None:
        state = checkpoints.restore(latest, target)
    else:
        state = replicas.restore(checkpoints, latest, outputs.console.line)
    step, forced = int(jax.device_get(state.step)), meta.get("forced", [])
    if let_pass:
        forced = [*forced, {"step": step, "changed": let_pass}]
        what = f"checkpoint.resume=force: goes on after step {step} as another run: {show_changes(let_pass)}"
        outputs.warn({"step": step, "what": what, "action": "forced", "changed": let_pass})
    return Progress(
        state=state._replace(guard=released(state.guard)),
        first_step=step,
        passed=meta.get("batches_passed", 0),
        changed=changed,
        forced=forced,
        meta=meta,
    )


def ngram_baselines(source: Source) -> dict[str, float]:
    """Bits per token of counting models on the held-out text; empty for mixtures, samples, too large vocabularies."""
    if source.parts or not isinstance(source.train, Ids) or not isinstance(source.held_out, Ids):
        return {}
    models = {"bigram": bigram_bits, "trigram": trigram_bits}
    bits = {name: count(source.train, source.held_out, source.vocab) for name, count in models.items()}
    return {name: value for name, value in bits.items() if not math.isnan(value)}


def run_environment(mesh: Mesh) -> dict[str, Any]:
    """The content of env.json."""
    kinds = [device.device_kind for device in mesh.devices.flat]
    described = environment(process_count=jax.process_count(), devices=kinds, mesh=sizes_of(mesh), command=sys.argv)
    return {**described, "compiler": settings()}
