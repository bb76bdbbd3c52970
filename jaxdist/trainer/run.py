"""What a training run is made of: data, mesh, model, laid-out state and the run directory, built from a
configuration."""

import functools
import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxdist.build import assemble, make_model
from jaxdist.checkpoint import Checkpoints
from jaxdist.config.entries import ModelFacts, SourceFacts
from jaxdist.config.load import to_yaml
from jaxdist.config.schema import Config
from jaxdist.data import Source, batch_shapes, bigram_bits, load_source, trigram_bits
from jaxdist.errors import UserError
from jaxdist.init import init_state
from jaxdist.mesh import make_mesh, sizes_of
from jaxdist.nn import ModelDef
from jaxdist.observe import Console, MetricsWriter, environment, write_environment
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.program import in_precision
from jaxdist.parallel.strategy import Strategy
from jaxdist.precision.loss_scale import released
from jaxdist.runtime.cache import CacheHits
from jaxdist.runtime.compiler import settings
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.specs import BATCH_SPEC, PyTree
from jaxdist.state import TrainState, specs_of_arrays
from jaxdist.train_step import TrainStep
from jaxdist.trainer.failures.diagnose import make_diagnosis
from jaxdist.trainer.failures.same_program import facts_of_program
from jaxdist.trainer.resume import changed_settings, check_identity, identity, show_changes


@dataclass
class Run:
    """Everything a run is made of. Only `state` changes, and by a rollback the fields that follow it: first_step, the
    step that the loop starts after; passed, the batches that were passed over so far; rollbacks, how many to which
    step. changed: of the configuration, since the checkpoint that was resumed, key -> [before, now]. forced: what was
    changed by `checkpoint.resume=force`, now or before: {"step", "changed"}."""

    config: Config
    folder: Path
    mesh: Mesh
    source: Source
    options: StepOptions
    attention: tuple[str, str | None]
    model: ModelDef
    target: TrainState
    step: TrainStep
    state: TrainState
    first_step: int
    passed: int
    rollbacks: dict[int, int]
    max_skips: int
    diagnosis: Callable[[Mesh], Any]
    checkpoints: Checkpoints
    console: Console
    metrics: MetricsWriter | None  # None on processes other than 0
    baselines: dict[str, float]
    cache: CacheHits
    samples: MetricsWriter | None  # `observe.samples`
    changed: dict[str, list[Any]]
    forced: list[dict[str, Any]]
    watch: Watch

    @property
    def sharding(self) -> NamedSharding:
        """Of every batch leaf."""
        return NamedSharding(self.mesh, BATCH_SPEC)


def forward_parts(run: Run) -> tuple[ModelDef, Mesh, PyTree, Strategy]:
    """What forward-only programs (`jaxdist.trainer.forward`) are made of: the model without dropout, in the
    run's layout."""
    strategy = get_strategy(run.options)
    precision, stages = run.options.precision, run.mesh.shape["pipe"]
    model = make_model(run.config, precision, stages=stages, training=False, attention=run.attention[0])
    return in_precision(model, precision), run.mesh, specs_of_arrays(run.target.params), strategy


class Beginning(NamedTuple):
    """What a run goes on from. meta: the record of the checkpoint, {} without one. forced: what
    `checkpoint.resume=force` let pass, key -> [before, now]."""

    state: TrainState
    meta: dict[str, Any]
    forced: dict[str, list[Any]]


def restore_or_init(
    config: Config,
    folder: Path,
    checkpoints: Checkpoints,
    *,
    source: Source,
    target: TrainState,
    fresh: Callable[[], TrainState],
    say: Callable[[str], None],
) -> Beginning:
    """The state of the newest checkpoint that is not damaged, if the run directory has one and `checkpoint.resume`
    allows, else `fresh()`. say: gets a line for what is damaged."""
    latest = checkpoints.latest()
    if latest is not None and config.checkpoint.resume == "never":
        raise UserError(f"checkpoint.resume: 'never', but {folder} holds one of step {latest}; use another --run-dir")
    if latest is None and config.checkpoint.resume == "must":
        raise UserError(f"checkpoint.resume: 'must', but {folder} holds no checkpoint; check --run-dir, or use auto")
    latest = checkpoints.newest_intact(say)
    if latest is not None:
        if latest > config.train.steps:
            raise UserError(
                f"train.steps: {config.train.steps}, but {folder} is at step {latest}; allowed: {latest} or more"
            )
        meta, force = checkpoints.meta(latest), config.checkpoint.resume == "force"
        forced = check_identity(meta, identity(config, source), folder, force=force)
        state = checkpoints.restore(latest, target)
        return Beginning(state._replace(guard=released(state.guard)), meta, forced)
    return Beginning(fresh(), {}, {})


def note(folder: Path, console: Console, record: dict[str, Any]) -> None:
    """Add a line to incidents.jsonl, on process 0. Where that fails, as on a full disk, the console says so."""
    if jax.process_index() != 0:
        return
    try:
        with (folder / "incidents.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        console.line(f"incidents.jsonl: {error.strerror}; not written: {json.dumps(record)}")


def report_damage(folder: Path, console: Console, line: str) -> None:
    """Say on the console and in incidents.jsonl what is wrong with a checkpoint."""
    console.line(f"warning: {line}")
    note(folder, console, {"what": line, "action": "another checkpoint" if "damaged" in line else "none"})


def report_forced(folder: Path, console: Console, step: int, changed: dict[str, list[Any]]) -> None:
    """Say on the console and in incidents.jsonl that the run is another one from here on."""
    line = f"checkpoint.resume=force: goes on after step {step} as another run: {show_changes(changed)}"
    console.line(f"warning: {line}")
    note(folder, console, {"step": step, "what": line, "action": "forced", "changed": changed})


def check_vocabulary(config: Config, source: Source) -> None:
    """Raise `UserError` when the data holds ids that the model has no row for."""
    if config.model.vocab is not None and source.vocab > config.model.vocab:
        raise UserError(
            f"model.vocab: {config.model.vocab} is too small for {source.info['path']!r}, whose ids need {source.vocab}"
        )


def check_leaves(config: Config, source: Source) -> None:
    """Raise `UserError` when samples are not what the model takes. What one of somebody else's takes is not known."""
    first, wanted = source.first, batch_shapes(1, 1)
    if isinstance(first, np.ndarray) or not ModelFacts.of(config.model.name).ids_only:
        return
    if source.vocab and wanted.keys() <= first.leaves.keys() and first.leaves["inputs"].dtype.kind in "iu":
        return
    raise UserError(
        f"data.source: {source.info['name']!r} gives {', '.join(first.leaves)}, and model.name"
        f" {config.model.name!r} takes {', '.join(sorted(wanted))} of a vocabulary; allowed:"
        f" {', '.join(SourceFacts.with_fact(ids=True))}; or a model of your own, by a dotted path"
    )


def packed(config: Config, source: Source) -> Source:
    """The source with document starts only where `data.packing` wants them. Raises `UserError` if it has none."""
    if source.parts:
        return source._replace(parts=tuple(part._replace(source=packed(config, part.source)) for part in source.parts))
    if config.data.packing == "none":
        return source._replace(documents=None)
    if source.documents is None:
        raise UserError(
            f"data.packing: {config.data.packing!r} needs document starts, and source"
            f" {source.info['name']} gives none; allowed: none; or data.source=tokens"
        )
    return source


def build(config: Config, folder: Path, stack: ExitStack, watch: Watch) -> Run:
    """Load the data, lay out the state, write what is known before the first step."""
    lead, cache = jax.process_index() == 0, stack.enter_context(CacheHits())
    mesh = make_mesh(**asdict(config.mesh))
    parts = assemble(config, mesh)
    keeping = {key: getattr(config.checkpoint, key) for key in ("keep", "keep_every", "keep_best")}
    checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", **keeping, order=parts.order))
    checkpoints.look_ahead()  # while the data is read
    source = load_source(config.data)
    check_vocabulary(config, source)
    check_leaves(config, source)
    source = packed(config, source)
    if jax.process_count() > 1:
        watch.agree(facts_of_program(config, parts, mesh, source))
    watch.crumbs.enter("restore")
    console = stack.enter_context(
        Console(config.train.steps, mode=config.observe.console, log_every=config.observe.log_every, enabled=lead)
    )
    diagnosis = functools.partial(make_diagnosis, parts.model, numbers=parts.order.tolist(), options=parts.options)
    fresh = functools.partial(init_state, parts.model, parts.optimizer, mesh, parts.options)
    begun = restore_or_init(
        config,
        folder,
        checkpoints,
        source=source,
        target=parts.target,
        fresh=fresh,
        say=functools.partial(report_damage, folder, console),
    )
    first_step = int(jax.device_get(begun.state.step))
    forced = begun.meta.get("forced", [])
    if begun.forced:
        forced = [*forced, {"step": first_step, "changed": begun.forced}]
        report_forced(folder, console, first_step, begun.forced)
    metrics = samples = None
    if lead:
        resumed = first_step if checkpoints.latest() is not None else None
        metrics = stack.enter_context(MetricsWriter(folder / "metrics.jsonl", resume_step=resumed))
        if config.observe.samples:
            samples = stack.enter_context(MetricsWriter(folder / "samples.jsonl", resume_step=resumed))
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        write_environment(folder / "env.json", {**run_environment(mesh), "data": source.info})
    baselines = ngram_baselines(source) if lead else {}
    return Run(
        config,
        folder,
        mesh,
        source,
        parts.options,
        parts.attention,
        parts.model,
        parts.target,
        parts.step,
        begun.state,
        first_step,
        begun.meta.get("batches_passed", 0),
        {},
        parts.options.max_skips,
        diagnosis,
        checkpoints,
        console,
        metrics,
        baselines,
        cache,
        samples,
        changed_settings(begun.meta, config),
        forced,
        watch,
    )


def ngram_baselines(source: Source) -> dict[str, float]:
    """Bits per token of counting models on the held-out text; empty for mixtures, samples, too large vocabularies."""
    if source.parts or not isinstance(source.train, np.ndarray) or not isinstance(source.held_out, np.ndarray):
        return {}
    bits = {
        "bigram": bigram_bits(source.train, source.held_out, source.vocab),
        "trigram": trigram_bits(source.train, source.held_out, source.vocab),
    }
    return {name: value for name, value in bits.items() if not math.isnan(value)}


def run_environment(mesh: Mesh) -> dict[str, Any]:
    """What env.json says."""
    kinds = [device.device_kind for device in mesh.devices.flat]
    described = environment(process_count=jax.process_count(), devices=kinds, mesh=sizes_of(mesh), command=sys.argv)
    return {**described, "compiler": settings()}
