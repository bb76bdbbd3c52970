"""The layouts that a plan chooses among: overrides of a configuration, checked as any configuration is."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxdist import registry
from jaxdist.build import builder_of, takes_option
from jaxdist.config.checks import axes_without_layers, check_config, prefetches
from jaxdist.config.entries import ScheduleFacts, StrategyFacts
from jaxdist.config.rules.pipeline import divisors
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.mesh import AXES, BATCH_AXES
from jaxdist.plan.calibration.file import REMATS
from jaxdist.plan.changes import changed, typed
from jaxdist.specs import SHARD_AXES

MOST_MICROBATCHES = 64  # of a pipeline: more hide hardly more of a bubble
LONG_SEQUENCE = 16384  # positions from which on activations of one sequence may be split


class Layout(NamedTuple):
    """A candidate: the values that make it differ from the configuration that is planned."""

    overrides: tuple[tuple[str, Any], ...]

    @property
    def values(self) -> dict[str, Any]:
        """{dotted key: value}."""
        return dict(self.overrides)

    def arguments(self) -> list[str]:
        """The overrides as they are typed on the command line."""
        return [typed(key, _shown(value)) for key, value in self.overrides]

    def name(self) -> str:
        """In a few words: "fsdp=8 tensor=2 zero3 m2 remat=full"."""
        values = self.values
        sizes = [f"{axis}={values[f'mesh.{axis}']}" for axis in AXES if values.get(f"mesh.{axis}", 1) > 1]
        words = [*sizes, values["parallel.strategy"]]
        if not ScheduleFacts.of(values["parallel.schedule"]).one_stage:
            words.append(values["parallel.schedule"])
        if (chunks := values.get("parallel.chunks", 1)) > 1:
            words.append(f"chunks={chunks}")
        if values["parallel.microbatches"] > 1:
            words.append(f"m{values['parallel.microbatches']}")
        if values["memory.remat"] != "none":
            words.append(f"remat={_shown(values['memory.remat'])}")
        if values.get("parallel.sequence_parallel"):
            words.append("sequence")
        if values.get("parallel.batch_split", 1) > 1:
            words.append("halves")
        if values.get("memory.offload.optimizer"):
            words.append("offload")
        if "precision.policy" in values:
            words.append(values["precision.policy"])
        return " ".join(words)

    def simplicity(self) -> tuple[int, ...]:
        """A key that sorts simple layouts first: few axes, no pipeline, a plain strategy, little recomputed."""
        values = self.values
        axes = [axis for axis in AXES if values.get(f"mesh.{axis}", 1) > 1]
        order = ["ddp", "zero1", "zero2", "zero3"]
        strategy = values["parallel.strategy"]
        return (
            int("pipe" in axes),
            len({*axes} - {"data", "fsdp"}),
            int(bool(values.get("memory.offload.optimizer"))),
            order.index(strategy) if strategy in order else len(order),
            len(axes),
            0 if values["memory.remat"] == "none" else 1 + (values["memory.remat"] == "full"),
            values["parallel.microbatches"],
            values.get("parallel.batch_split", 1),
        )


def _shown(value: Any) -> Any:
    if value is None:
        return "null"
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value


def axis_splits(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """All sizes of these axes whose product is the number of devices."""
    if len(axes) == 1:
        yield {axes[0]: devices}
        return
    for size in divisors(devices):
        for rest in axis_splits(devices // size, axes[1:]):
            yield {axes[0]: size, **rest}


def layouts(
    config: Config, devices: int, *, per_host: int, layers: int | None = None, halves: bool = False
) -> Iterator[list[Layout]]:
    """The candidates of a configuration on that many devices, not checked: in families that differ in what they keep.

    A family has the same mesh, strategy and schedule. Its members differ in the optimizer's state in host memory, in
    what is computed again, and in microbatches: in this order, each takes less memory the further it goes.

    layers: blocks of the model, which stages share; None: as the configuration says.
    halves: whether `parallel.batch_split: 2` is tried, as where collectives can run beside computation.

    Left out is what another candidate beats in every figure: tensor parallelism between hosts; gpipe, which keeps more
    than 1F1B; zero strategies without shards; `context` above what a batch with fewer sequences than devices needs,
    unless sequences are long.
    """
    sharded = [name for name in registry.names(StrategyFacts.folder) if StrategyFacts.of(name).sharded]
    needed = devices // math.gcd(devices, config.data.global_batch)
    longest = devices if config.data.seq_len >= LONG_SEQUENCE else max(needed, config.mesh.context)
    layers = config.model.stacked if layers is None else layers
    without, splits = axes_without_layers(config), takes_option(builder_of(config), "sequence_parallel")
    for sizes in axis_splits(devices, [axis for axis in AXES if axis not in without]):
        if sizes.get("tensor", 1) > per_host or sizes.get("context", 1) > longest:
            continue
        shards = math.prod(sizes.get(axis, 1) for axis in SHARD_AXES)
        strategies = ["ddp"] if shards == 1 else [*(["ddp"] if sizes.get("fsdp", 1) == 1 else []), *sharded]
        for strategy, (schedule, chunks) in itertools.product(
            strategies, _schedules(config, sizes.get("pipe", 1), layers)
        ):
            values: dict[str, Any] = {f"mesh.{axis}": sizes.get(axis, 1) for axis in AXES}
            values |= {"parallel.strategy": strategy, "parallel.schedule": schedule, "parallel.chunks": chunks}
            values |= {"parallel.prefetch": None}  # where it can be, on GPUs
            values |= {"parallel.stages": config.parallel.stages if sizes.get("pipe", 1) == config.mesh.pipe else ()}
            values |= {"parallel.sequence_parallel": splits and sizes.get("tensor", 1) > 1}
            yield _members(config, values, sizes, halves=halves)


def _members(config: Config, values: dict[str, Any], sizes: dict[str, int], *, halves: bool) -> list[Layout]:
    """The members of a family."""
    remats = tuple(dict.fromkeys((*REMATS, config.memory.remat)))
    rows = config.data.global_batch // math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)
    pipeline = not ScheduleFacts.of(values["parallel.schedule"]).one_stage
    counts = microbatch_counts(rows, pipeline=pipeline)
    # zero3 prefetches, which excludes halves; halves beat prefetching where blocks are unrolled too (docs/plan.md).
    ahead = StrategyFacts.of(values["parallel.strategy"]).regathers
    splits = halves and values["parallel.sequence_parallel"] and not (ahead or pipeline or _keeps_whole(config))
    parts = [(count, 1) for count in counts] + [(count, 2) for count in counts if splits and rows // count % 2 == 0]
    each = itertools.product((config.memory.offload.optimizer, True), remats, sorted(parts))
    return [
        Layout(
            (
                *values.items(),
                ("parallel.microbatches", count),
                ("parallel.batch_split", split),
                ("memory.remat", remat),
                ("memory.offload.optimizer", offload),
            )
        )
        for offload, remat, (count, split) in dict.fromkeys(each)
    ]


def _keeps_whole(config: Config) -> bool:
    """Whether something that is set excludes `parallel.batch_split: 2`, or hides the same collectives."""
    return config.parallel.grad_sync.deterministic or config.parallel.collective_matmul


def microbatch_counts(rows: int, *, pipeline: bool) -> list[int]:
    """The numbers of microbatches that are tried for so many sequences of a device: powers of two. One stage takes as
    many as it needs to fit, down to one sequence at a time."""
    most = min(rows, MOST_MICROBATCHES) if pipeline else rows
    counts = [2**k for k in range(rows.bit_length()) if 2**k <= most] or [1]
    return counts if pipeline else sorted({*counts, max(1, rows)})


def _schedules(config: Config, stages: int, layers: int) -> list[tuple[str, int]]:
    """(schedule, chunks) that are tried for a number of stages."""
    if stages == 1:
        one = config.parallel.schedule
        return [(one if ScheduleFacts.of(one).one_stage else Config().parallel.schedule, 1)]
    found = [("one_f_one_b", 1), ("zero_bubble", 1)]
    return found + [("interleaved", chunks) for chunks in (2, 4) if layers % (stages * chunks) == 0]


def layout_of(config: Config) -> Layout:
    """The layout that a configuration has."""
    values: dict[str, Any] = {f"mesh.{axis}": getattr(config.mesh, axis) for axis in AXES}
    keys = ("strategy", "schedule", "chunks", "stages", "prefetch", "sequence_parallel", "microbatches", "batch_split")
    for key in keys:
        values[f"parallel.{key}"] = getattr(config.parallel, key)
    values["memory.remat"] = config.memory.remat
    values["memory.offload.optimizer"] = config.memory.offload.optimizer
    return Layout(tuple(values.items()))


def kind_of_layout(layout: Layout) -> tuple[object, ...]:
    """What kind of layout it is: the axes that are on, and the strategy."""
    values = layout.values
    return (*(axis for axis in AXES if values.get(f"mesh.{axis}", 1) > 1), values["parallel.strategy"])


def checked(config: Config, layout: Layout, *, gpu: bool) -> Config | str:
    """The configuration with a layout's values; or, where it is refused, the reason.

    gpu: whether it is for GPUs, where `parallel.prefetch: null` may mean 1.
    """
    try:
        found = check_config(changed(config, layout.values), planned=True)
    except UserError as error:
        return str(error)
    return with_prefetch(found, gpu=gpu)


def with_prefetch(config: Config, *, gpu: bool) -> Config:
    """The configuration with `parallel.prefetch` as a run has it that leaves it open. gpu: whether on GPUs."""
    return changed(config, {"parallel.prefetch": int(prefetches(config, gpu=gpu))})
