"""The layouts that a plan chooses among: overrides of a configuration, checked as any configuration is."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxdist import registry
from jaxdist.config.checks import check_config
from jaxdist.config.entries import ModelFacts, ScheduleFacts, StrategyFacts
from jaxdist.config.rules.pipeline import divisors
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.mesh import AXES
from jaxdist.plan.remedies import changed, typed

REMATS = ("none", "dots", "full")
MOST_MICROBATCHES = 64  # more hide hardly more of a bubble


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
        if values["parallel.schedule"] != "accumulate":
            words.append(values["parallel.schedule"])
        if (chunks := values.get("parallel.chunks", 1)) > 1:
            words.append(f"chunks={chunks}")
        if values["parallel.microbatches"] > 1:
            words.append(f"m{values['parallel.microbatches']}")
        if values["memory.remat"] != "none":
            words.append(f"remat={_shown(values['memory.remat'])}")
        if values.get("parallel.sequence_parallel"):
            words.append("sequence")
        if values.get("memory.offload.optimizer"):
            words.append("offload")
        if "precision.policy" in values:
            words.append(values["precision.policy"])
        return " ".join(words)

    def simplicity(self) -> tuple[int, ...]:
        """A key that sorts simple layouts first: few axes, no pipeline, a plain strategy, little recomputed."""
        values = self.values
        axes = [axis for axis in AXES if values.get(f"mesh.{axis}", 1) > 1]
        order = ["ddp", *(name for name in ("zero1", "zero2", "zero3"))]
        strategy = values["parallel.strategy"]
        return (
            int("pipe" in axes),
            len({*axes} - {"data", "fsdp"}),
            int(bool(values.get("memory.offload.optimizer"))),
            order.index(strategy) if strategy in order else len(order),
            len(axes),
            0 if values["memory.remat"] == "none" else 1 + (values["memory.remat"] == "full"),
            values["parallel.microbatches"],
        )


def _shown(value: Any) -> Any:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value


def splits(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """All sizes of these axes whose product is the number of devices."""
    if len(axes) == 1:
        yield {axes[0]: devices}
        return
    for size in divisors(devices):
        for rest in splits(devices // size, axes[1:]):
            yield {axes[0]: size, **rest}


def layouts(config: Config, devices: int, *, per_host: int, offload: bool = False) -> Iterator[Layout]:
    """The candidates of a configuration on that many devices, not checked.

    Left out is what another candidate beats in every figure: tensor parallelism between hosts; gpipe, which keeps more
    than 1F1B; zero strategies without fsdp or context; sizes of axes that no layer of the model uses.
    """
    facts, given = ModelFacts.of(config.model.name), config.mesh
    unused = _unused(config)
    axes = [axis for axis in AXES if axis not in unused]
    if facts.user_loss:
        axes = ["data", "fsdp"]
    remats: tuple[Any, ...] = tuple(dict.fromkeys((config.memory.remat, *REMATS)))
    sharded = [name for name in registry.names(StrategyFacts.folder) if StrategyFacts.of(name).sharded]
    batch = config.data.global_batch
    for sizes in splits(devices, axes):
        if sizes.get("tensor", 1) > per_host:
            continue
        rows = batch // max(1, sizes.get("data", 1) * sizes.get("fsdp", 1) * sizes.get("expert", 1))
        counts = [2**k for k in range(rows.bit_length()) if 2**k <= min(rows, MOST_MICROBATCHES)] or [1]
        shards = sizes.get("fsdp", 1) * sizes.get("context", 1)
        strategies = ["ddp"] if shards == 1 else [*(["ddp"] if sizes.get("fsdp", 1) == 1 else []), *sharded]
        for schedule, chunks in _schedules(config, sizes.get("pipe", 1)):
            for strategy, microbatches, remat in itertools.product(strategies, counts, remats):
                values = {f"mesh.{axis}": sizes.get(axis, 1) for axis in AXES}
                values |= {"parallel.strategy": strategy, "parallel.schedule": schedule}
                values |= {"parallel.microbatches": microbatches, "memory.remat": remat}
                values |= {"parallel.chunks": chunks} if chunks > 1 or config.parallel.chunks > 1 else {}
                values |= {"parallel.stages": ()} if config.parallel.stages and sizes.get("pipe", 1) != given.pipe else {}
                split = sizes.get("tensor", 1) > 1 and hasattr(config.model, "heads")
                if split or config.parallel.sequence_parallel:
                    values["parallel.sequence_parallel"] = split
                yield Layout(tuple(values.items()))
                if offload:
                    yield Layout((*values.items(), ("memory.offload.optimizer", True)))


def _unused(config: Config) -> set[str]:
    options = registry.options(ModelFacts.folder, config.model.name)
    if (by_model := getattr(options, "unused_axes", None)) is not None:
        return set(by_model(config.model))
    return set(getattr(options, "UNUSED_AXES", ("expert", "context")))


def _schedules(config: Config, stages: int) -> list[tuple[str, int]]:
    """(schedule, chunks) that are tried for a number of stages."""
    if stages == 1:
        one = config.parallel.schedule
        return [(one if ScheduleFacts.of(one).one_stage else "accumulate", 1)]
    found = [("one_f_one_b", 1), ("zero_bubble", 1)]
    layers = config.model.stacked or 0
    return found + [("interleaved", chunks) for chunks in (2, 4) if layers % (stages * chunks) == 0]


def checked(config: Config, layout: Layout) -> Config | str:
    """The configuration with a layout's values; or, where it is refused, the reason."""
    try:
        return check_config(changed(config, layout.values), planned=True)
    except UserError as error:
        return str(error)
