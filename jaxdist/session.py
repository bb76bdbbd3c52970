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
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxdist.assemble import assemble, attention_of, make_model
from jaxdist.checkpoint import Checkpoints
from jaxdist.compiled import TrainStep
from jaxdist.config import Config, GradSyncConfig, resolve_model, to_yaml, uneven
from jaxdist.data import Source, bigram_bits, load_source, trigram_bits
from jaxdist.errors import UserError
from jaxdist.guard import released
from jaxdist.init import init_state
from jaxdist.mesh import has_host_memory, make_mesh, sizes_of
from jaxdist.nn import ModelDef
from jaxdist.observe import Console, MetricsWriter, environment, write_environment
from jaxdist.parallel.program import in_precision
from jaxdist.parallel.strategy import Strategy, StrategyOptions, get_strategy
from jaxdist.parallel.sync import GradSync, order_of_work
from jaxdist.plan.footprint import held
from jaxdist.precision import Precision
from jaxdist.runtime.cache import CacheHits, cache_row
from jaxdist.runtime.compiler import settings
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import TrainState, specs_of_arrays

PyTree = Any
NO_IDENTITY = ("path", "val_path", "token_dtype", "prefetch", "mixture")  # of section data: the content is what counts
HOW = ("attention", "loss_chunk")  # keys of section model that say how it is computed, not what
MAY_CHANGE = ("loss_scale", "max_consecutive_skips")  # of section precision, on resuming


@dataclass
class Run:
    """Everything a run is made of. Only `state` changes, and by a rollback the fields that follow it: first_step, the
    step that the loop starts after; passed, the batches that were passed over so far; rollbacks, how many to which
    step."""

    config: Config
    folder: Path
    mesh: Mesh
    source: Source
    precision: Precision
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

    @property
    def sharding(self) -> NamedSharding:
        """Of every batch leaf."""
        return NamedSharding(self.mesh, BATCH_SPEC)


def forward_parts(run: Run) -> tuple[ModelDef, Mesh, PyTree, Strategy]:
    """What forward-only programs (`jaxdist.evaluate`) are made of: the model without dropout, in the run's layout."""
    strategy = get_strategy(run.config.parallel.strategy, StrategyOptions(run.precision))
    attention, _ = attention_of(run.config, run.precision, run.mesh)
    model = make_model(
        run.config, run.precision, stages=run.mesh.shape["pipe"], training=False, attention=attention
    )
    return in_precision(model, run.precision), run.mesh, specs_of_arrays(run.target.params), strategy


def identity(config: Config, source: Source) -> dict[str, Any]:
    """What must not change between a checkpoint and its resumption: it would be another experiment under the same
    name."""
    data = {key: value for key, value in asdict(config.data).items() if key not in NO_IDENTITY}
    data["mixture"] = [[part.name, part.samples] for part in source.parts]
    whole = {
        "model": {key: value for key, value in asdict(resolve_model(config.model)).items() if key not in HOW},
        "data": {**data, "dtype": source.train.dtype.name, "sha256": source.info["sha256"]},
        "precision": {key: value for key, value in asdict(config.precision).items() if key not in MAY_CHANGE},
        "optimizer": {"name": config.optimizer.name, "freeze": config.optimizer.freeze},
        "train": {"seed": config.train.seed},
        "parallel": {"chunks": config.parallel.chunks, "stages": uneven(config.parallel.stages)},
        "mesh": {"pipe": config.mesh.pipe} if config.parallel.chunks > 1 else {},  # both say in what order blocks rest
    }
    return json.loads(json.dumps(whole))  # as it will come back


def schedule_keys(config: Config) -> dict[str, Any]:
    """What may change on resuming, but is said: it bends the learning rate's curve."""
    optimizer = {f"optimizer.{key}": value for key, value in asdict(config.optimizer).items() if key != "freeze"}
    return {**optimizer, "train.steps": config.train.steps}


def record(config: Config, source: Source, *, passed: int = 0) -> dict[str, Any]:
    """What is saved beside a state. passed: batches that were passed over."""
    return identity(config, source) | {"schedule": schedule_keys(config), "batches_passed": passed}


def schedule_changes(run: "Run") -> str:
    """Text such as ", with optimizer.lr 0.02 (was 0.01)" for what differs from the checkpoint's run, else nothing."""
    before, now = run.checkpoints.meta(run.first_step)["schedule"], schedule_keys(run.config)
    changed = [f"{key} {now[key]} (was {before[key]})" for key in now if before.get(key, now[key]) != now[key]]
    return ", with " + ", ".join(changed) if changed else ""


def check_identity(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise `UserError` naming the first key that differs."""
    # Older versions had no other.
    older: dict[str, dict[str, Any]] = {
        "parallel": {"chunks": 1, "stages": []}, "data": {"packing": "none", "mixture": []}
    }  # fmt: skip
    if saved.get("data", {}).get("source") == "tokens" and "token_dtype" in saved["data"]:
        older["data"]["dtype"] = saved["data"]["token_dtype"]
    saved = saved | {section: values | saved.get(section, {}) for section, values in older.items()}
    for section in now:
        for key, value in now[section].items():
            before = saved.get(section, {}).get(key, value)  # an older version did not know the key
            if before != value:
                raise UserError(
                    f"{section}.{key}: {value!r}, but the run in {folder} was started with {before!r}; set it back, or "
                    "start another run with --run-dir"
                )


def restore_or_init(
    config: Config,
    folder: Path,
    checkpoints: Checkpoints,
    *,
    source: Source,
    target: TrainState,
    fresh: Callable[[], TrainState],
    say: Callable[[str], None],
) -> TrainState:
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
        check_identity(checkpoints.meta(latest), identity(config, source), folder)
        state = checkpoints.restore(latest, target)
        return state._replace(guard=released(state.guard))
    return fresh()


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


def check_vocabulary(config: Config, source: Source) -> None:
    """Raise `UserError` when the data holds ids that the model has no row for."""
    if source.vocab > config.model.vocab:
        raise UserError(
            f"model.vocab: {config.model.vocab} is too small for {source.info['path']!r}, whose ids need {source.vocab}"
        )


def packed(config: Config, source: Source) -> Source:
    """The source with document starts only where `data.packing` wants them. Raises `UserError` if it has none."""
    if source.parts:
        return source._replace(parts=tuple(part._replace(source=packed(config, part.source)) for part in source.parts))
    if config.data.packing == "none":
        return source._replace(documents=None)
    if source.documents is None:
        raise UserError(f"data.packing: {config.data.packing!r} needs document starts, and source"
                        f" {source.info['name']} gives none; allowed: none; or data.source=tokens")  # fmt: skip
    return source


def build(config: Config, folder: Path, stack: ExitStack) -> Run:
    """Load the data, lay out the state, write what is known before the first step."""
    lead, cache = jax.process_index() == 0, stack.enter_context(CacheHits())
    source = load_source(config.data)
    check_vocabulary(config, source)
    source = packed(config, source)
    mesh = make_mesh(**asdict(config.mesh))
    parts = assemble(config, mesh)
    keeping = {key: getattr(config.checkpoint, key) for key in ("keep", "keep_every", "keep_best")}
    checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", **keeping))
    console = stack.enter_context(
        Console(config.train.steps, mode=config.observe.console, log_every=config.observe.log_every, enabled=lead)
    )
    fresh = functools.partial(
        init_state, parts.model, parts.optimizer, mesh, **parts.layout, seed=config.train.seed
    )
    state = restore_or_init(
        config, folder, checkpoints, source=source, target=parts.target, fresh=fresh,
        say=functools.partial(report_damage, folder, console),
    )  # fmt: skip
    first_step = int(jax.device_get(state.step))
    metrics = None
    if lead:
        resumed = first_step if checkpoints.latest() is not None else None
        metrics = stack.enter_context(MetricsWriter(folder / "metrics.jsonl", resume_step=resumed))
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        write_environment(folder / "env.json", {**run_environment(mesh), "data": source.info})
    baselines = ngram_baselines(source) if lead else {}
    passed = checkpoints.meta(first_step).get("batches_passed", 0) if first_step else 0
    return Run(
        config, folder, mesh, source, parts.precision, parts.model, parts.target, parts.step, state, first_step,
        passed, {}, parts.max_skips, parts.diagnosis, checkpoints, console, metrics, baselines, cache,
    )  # fmt: skip


def ngram_baselines(source: Source) -> dict[str, float]:
    """Bits per token of counting models on the held-out text; empty for mixtures, and for vocabularies too large."""
    if source.parts:
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


def plural(word: str, count: int) -> str:
    """The English plural of a noun in -s, -h or anything else: processes, microbatches, devices."""
    return word if count == 1 else word + ("es" if word.endswith(("s", "h")) else "s")


def describe_sync(sync: GradSyncConfig) -> str:
    """Such as "ring" or "ring (int8)" or "ordered (8 virtual shards)"."""
    if sync.deterministic:
        return f"ordered ({sync.virtual_shards} virtual shards)"
    return sync.algorithm + (f" ({sync.wire_dtype})" if sync.wire_dtype else "")


def describe(run: Run) -> dict[str, str]:
    """The header on the console: what runs."""
    config, info = run.config, run.source.info
    model, parallel = resolve_model(config.model), config.parallel
    sync = GradSync(**asdict(parallel.grad_sync))
    schedule, microbatches = order_of_work(sync, run.mesh, parallel.schedule, parallel.microbatches)
    sizes = " ".join(f"{axis}={size}" for axis, size in sizes_of(run.mesh).items() if size > 1) or "one device"
    device = run.mesh.devices.flat[0]
    kind = "simulated CPU" if device.platform == "cpu" else device.device_kind
    near, far = held(run.target) / 2**20, held(run.target, on_host=True) / 2**20
    rows = {
        "run": str(run.folder),
        "model": f"{model.name} ({model.style}): {model.layers} blocks, width {model.width}, {model.heads} heads, "
        f"{run.model.parameters:,} parameters",
        "data": f"{info['name']}: {info['train']:,} {info['unit']} to train on in {info['files']} files, "
        f"{info['held_out']:,} held out in {info['held_out_files']} files, sha256 {info['sha256'][:16]}",
        "mesh": f"{sizes} ({run.mesh.size} {kind} {plural('device', run.mesh.size)}, "
        f"{jax.process_count()} {plural('process', jax.process_count())})",
        "parallel": f"{parallel.strategy}, {schedule}, {microbatches} {plural('microbatch', microbatches)}, "
        f"{describe_sync(parallel.grad_sync)} reductions, {config.precision.policy}",
        "state": f"{near:.2f} MiB a device (parameters and optimizer)"
        + (f", {far:.2f} MiB a device in host memory" if far else ""),
    }
    if "." not in model.name:
        kernel, why = attention_of(config, run.precision, run.mesh)
        rows["attention"] = kernel + (f", because {why}" if why else "")
    if config.memory.offload.optimizer and (device.platform == "cpu" or not has_host_memory(run.mesh)):
        rows["offload"] = f"without effect: {kind} devices have no host memory beside their own"
    if cache := cache_row(config.devices.compilation_cache, jax.default_backend(), run.cache.count):
        rows["cache"] = cache
    if run.baselines:
        marks = ", ".join(f"{name} {bits:.3f}" for name, bits in run.baselines.items())
        rows["to beat"] = f"{marks} bits per {info['unit'].removesuffix('s')} on the held-out text"
    if run.first_step:
        rows["resumed"] = f"after step {run.first_step}{schedule_changes(run)}"
    return rows
