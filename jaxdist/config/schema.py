"""The configuration: frozen dataclasses, one a section, read from YAML with `section.key=value` overrides on top.

Each field carries its one-line description and its allowed values; the checks and docs/config.md both come from there.
`reader.py` reads YAML into them; `rules/fields.py` checks one value, and `checks.py` with `rules/` several keys
together. Nothing here imports jax.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from jaxdist.config.entries import Entries, Section, named, with_options
from jaxdist.config.rules.fields import parse_mixture, section, setting
from jaxdist.config.rules.remat import AUTO, MODES, NAMES
from jaxdist.config.rules.transformer import CONTEXT_FORMS
from jaxdist.config.sections.distill import DistillConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.init import InitConfig
from jaxdist.config.sections.local import LocalConfig
from jaxdist.config.sections.observe import ObserveConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.config.sections.precision import PrecisionConfig

_NONE: Any = None
_ONE: Any = 1


@dataclass(frozen=True)
class ModelConfig(Section):
    """The model."""

    name: str = setting("gpt", "the model", folder="jaxdist.models")
    from_: str | None = setting(
        None,
        "a Hugging Face folder or a run directory: its architecture, in place of the keys that are not given; the run's"
        " own configuration has all keys and no folder",
        how=True,
    )

    # jaxdist reads these of every model. The values here are those of a model without such keys.
    layers = vocab = loss_chunk = _NONE
    scan_blocks = _ONE

    if TYPE_CHECKING:

        def __init__(self, name: str = "gpt", **keys: Any) -> None: ...

    def resolved(self) -> Self:
        """The section with its defaults filled in, where they depend on other keys.

        A `Config` holds the section as it was given. A key left at null so follows the others when these are changed.
        """
        return self

    def idle(self) -> tuple[str, ...]:
        """Patterns of keys that change nothing in this model, `resolved`."""
        return ()

    @property
    def stacked(self) -> Any:
        """The number of blocks that are stacked, which stages of a pipeline share; None: it is not known."""
        return self.layers

    def describe(self) -> str:
        """The model in a few words."""
        return self.name


@dataclass(frozen=True)
class DataConfig(Section):
    """The data and how it is cut into batches."""

    source: str = setting("text", "where the data comes from", folder="jaxdist.data.sources")
    path: str = setting(
        "stdlib", "a file or folder; text: also stdlib (Python's own sources); iterable: a dotted path", how=True
    )
    mixture: tuple[str, ...] = setting(
        (),
        "sources mixed by weights in place of source and path, each 'NAME WEIGHT SOURCE PATH': [web 0.7 tokens ids]",
        how=True,
    )
    seq_len: int = setting(128, "positions of a training sequence", at_least=1)
    global_batch: int = setting(32, "sequences of one optimizer step, over all devices and microbatches", at_least=1)
    held_out: float = setting(0.05, "fraction of the data kept for evaluation", above=0, at_most=0.5)
    val_path: str | None = setting(
        None,
        "what is held out, as path is (not for text); null: val.bin beside train.bin (tokens), or a part of path",
        how=True,
    )
    token_dtype: str | None = setting(
        None,
        "type of the ids in files; null: as manifest.json says, else uint16 (tokens), or text (arrayrecord)",
        choices=("uint8", "uint16", "uint32"),
        how=True,
    )
    packing: str = setting(
        "none", "documents: the first token of a document is no target (not for text)", choices=("none", "documents")
    )
    documents: str = setting(
        "mask",
        "with packing, what a token sees before its document. mask: nothing, and positions begin again; join: all",
        choices=("mask", "join"),
    )
    prefetch: int = setting(2, "batches that are made ahead while the devices compute", at_least=1, how=True)

    if TYPE_CHECKING:

        def __init__(self, source: str = "text", path: str = "stdlib", **keys: Any) -> None: ...

    @property
    def apart(self) -> bool:
        """Whether the documents of a row are kept apart in attention."""
        return self.packing != "none" and self.documents == "mask"

    @classmethod
    def named_entries(cls, given: Mapping[str, Any]) -> Entries:
        """The source, or those of a mixture."""
        (entry,) = named(DataConfig, given)
        parts = parse_mixture(given.get("mixture", ()))
        return tuple(entry._replace(name=part.source) for part in parts) or (entry,)

    def parts(self) -> tuple["DataConfig", ...]:
        """The section as each part of a mixture sees it; nothing without one."""
        said = parse_mixture(self.mixture)
        return tuple(self._only({"mixture": (), "source": part.source, "path": part.path}) for part in said)

    def _only(self, given: Mapping[str, Any]) -> "DataConfig":
        """The section with these values, and without keys of entries that it does not name any more."""
        keys = [each.name for each in fields(with_options(DataConfig, DataConfig.named_entries(given)))]
        return DataConfig(**{key: getattr(self, key) for key in keys} | {**given})


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes, slowest link first. 1 is off; -1, on one axis at most, is the rest of the devices."""

    pipe: int = setting(1, "pipeline stages", at_least=1, also=-1)
    data: int = setting(1, "replicas that divide the batch", at_least=1, also=-1)
    fsdp: int = setting(1, "devices that divide the batch and, in zero strategies, the parameters", at_least=1, also=-1)
    expert: int = setting(
        1, "devices that divide the batch, the experts and, in zero strategies, what these share", at_least=1, also=-1
    )
    context: int = setting(1, "devices that divide the sequence", at_least=1, also=-1)
    tensor: int = setting(1, "devices that divide each layer", at_least=1, also=-1)

    @property
    def shards(self) -> int:
        """The devices that ZeRO splits parameters over: the product of `specs.SHARD_AXES`, with its sizes known."""
        return self.fsdp * self.expert * self.context

    @property
    def batch_shards(self) -> int:
        """The parts into which a batch is split: the product of `mesh.BATCH_AXES`, with its sizes known."""
        return self.data * self.fsdp * self.expert

    @property
    def devices(self) -> int:
        """The devices of the mesh, with its sizes known."""
        return math.prod(vars(self).values())


@dataclass(frozen=True)
class ParallelConfig:
    """How parameters and gradients are sharded, and in what order microbatches run."""

    strategy: str = setting("ddp", "how parameters and gradients are sharded", folder="jaxdist.parallel.strategies")
    schedule: str = setting("accumulate", "order of the microbatches", folder="jaxdist.parallel.schedules")
    microbatches: int = setting(1, "parts of the batch that are computed one after the other", at_least=1)
    chunks: int = setting(1, "interleaved: parts of a stage's blocks, from as many places of the model", at_least=1)
    stages: tuple[int, ...] = setting(
        (),
        "blocks of each stage, [7, 8, 8, 7]; with chunks of each chunk, in the model's order; []: equally many",
        at_least=1,
    )
    min_shard_bytes: int = setting(
        32768, "parameters smaller than this, per block, are split neither by zero nor over pipe", at_least=0
    )
    reshard_after_forward: bool = setting(True, "zero3: false keeps gathered parameters until the backward pass")
    prefetch: int | None = setting(
        None,
        "1: gather each block while the one before it computes, reduce it while the next does; null: so under"
        " zero3 on GPUs, where nothing that is set excludes it",
        at_least=0,
        at_most=1,
    )
    sequence_parallel: bool = setting(
        False, "between layers split over tensor, each of its devices has a part of the positions: docs/memory.md"
    )
    collective_matmul: bool = setting(
        False, "with sequence_parallel: layers split over tensor send in pieces while they multiply: docs/compiler.md"
    )
    batch_split: int = setting(
        1,
        "2: the sequences of a device go through each block in halves, and what one half sends travels while the other"
        " multiplies; best with sequence_parallel and model.scan_blocks=0: docs/compiler.md",
        at_least=1,
        at_most=2,
    )
    context: str = setting(
        "auto",
        "how attention goes over the mesh axis context; auto: all_to_all where it divides the key/value heads, else"
        " ring: docs/long_context.md",
        choices=("auto", *CONTEXT_FORMS),
    )
    pipeline_cond: bool = setting(True, "false: stages compute and discard what is not their work; the same gradients")
    grad_sync: GradSync = section(GradSync, "how gradients are reduced")
    local: LocalConfig = section(LocalConfig, "replicas that train by themselves", shorthand="every")


@dataclass(frozen=True)
class OffloadConfig:
    """What is stored in host memory instead of on the devices."""

    optimizer: bool = setting(False, "the optimizer state, which is fetched for each update and put back")
    activations: bool = setting(False, "inputs of blocks until the backward pass: the same as memory.remat=offload")


@dataclass(frozen=True)
class MemoryConfig:
    """What is computed again instead of kept, and what is stored in host memory: docs/memory.md."""

    remat: str | tuple[str, ...] = setting(
        AUTO,
        "what the backward pass computes again, of each block; a list: all but these values; auto: on one GPU"
        " none where that fits; on GPUs else dots where that fits, else full; elsewhere none",
        choices=(AUTO, *MODES),
        listed=NAMES,
    )
    offload: OffloadConfig = section(OffloadConfig, "what is stored in host memory")


@dataclass(frozen=True)
class EarlyStopConfig:
    """An end before `train.steps`: docs/watching.md."""

    patience: int | None = setting(
        None,
        "evaluations in a row without a lower eval/loss after which the run is complete; null: it takes all steps",
        at_least=1,
    )
    min_delta: float = setting(0.0, "how much lower than the lowest so far an eval/loss must be to count", at_least=0)


@dataclass(frozen=True)
class TrainConfig:
    """The run."""

    steps: int = setting(200, "optimizer steps", at_least=1)
    max_hours: float | None = setting(
        None, "hours from the start of the process in which the run saves and stops, resumable; null: no limit", above=0
    )
    seed: int = setting(0, "seed of initialisation, data order and dropout", at_least=0)
    eval_every: int = setting(50, "steps between evaluations; 0: never", at_least=0)
    eval_batches: int = setting(8, "batches of one evaluation", at_least=1)
    on_nonfinite: str = setting(
        "stop",
        "a loss or gradient that is not finite: stop; skip the step; rollback: go on from the last checkpoint, "
        "past the batches since",
        choices=("stop", "skip", "rollback"),
    )
    loss_spike: float = setting(
        0.0,
        "a loss above this many times the median of the last 64, if all are above 0, counts as not finite; 0: off",
        at_least=0,
    )
    watchdog_s: float | None = setting(
        None,
        "several processes: seconds without progress after which a rank counts as stuck; 0: for ever; null: 60, "
        "or 10 median steps if these are longer",
        at_least=0,
    )
    check_replicas_every: int = setting(
        0,
        "steps between comparisons of the state's copies on different devices, made before saves too; 0: never",
        at_least=0,
    )
    ema: float | None = setting(
        None,
        "decay of a moving average of the parameters, such as 0.999, which evaluations and the sample at the end use;"
        " null: none",
        above=0,
        below=1,
    )
    early_stop: EarlyStopConfig = section(EarlyStopConfig, "an end before train.steps")
    sample_tokens: int = setting(200, "tokens of the text sampled at the end; 0: none", at_least=0)
    sample_prompt: str = setting("import ", "what the sampled text begins with")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints and resuming."""

    every: int = setting(100, "steps between checkpoints; 0: only at the end", at_least=0)
    keep: int = setting(3, "newest checkpoints that are kept; two at least, as one may be damaged", at_least=1)
    keep_every: int = setting(0, "checkpoints of steps divisible by this are kept for good; 0: none", at_least=0)
    keep_best: int = setting(0, "checkpoints of the lowest evaluation losses that are kept besides", at_least=0)
    resume: str = setting(
        "auto",
        "auto: resume if there is a checkpoint; must: fail without one; force: also with another model, data, "
        "seed ..., where that can work",
        choices=("auto", "must", "never", "force"),
    )


@dataclass(frozen=True)
class XlaConfig:
    """Settings of the compiler: docs/compiler.md. `devices.xla: plain` is short for `{preset: plain}`."""

    preset: str = setting(
        "fast",
        "fast: chosen from schedules compiled for this kind of device; plain: the compiler as it comes",
        choices=("fast", "plain"),
    )
    flags: tuple[str, ...] = setting((), "more flags, [--xla_name=value]; XLA_FLAGS of the environment wins over them")


@dataclass(frozen=True)
class DevicesConfig:
    """The devices."""

    platform: str = setting("auto", "auto: GPUs if jax has them, else the CPU", choices=("auto", "cpu", "gpu"))
    simulated: int = setting(
        8,
        "simulated CPU devices of each process; with fit: shrink a job's processes share those of the mesh, if their"
        " number divides it; ignored on GPUs",
        at_least=1,
        at_most=512,
    )
    fit: str = setting(
        "exact", "a mesh too large for the GPUs: exact refuses it, shrink reduces it", choices=("exact", "shrink")
    )
    xla: XlaConfig = section(XlaConfig, "settings of the compiler", shorthand="preset")
    compilation_cache: str | bool = setting(
        True,
        "where compiled programs of GPUs are kept; true: a folder of your own under ~/.cache; a folder: this one",
        switch=True,
    )


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run: one field a section, whose keys docs/config.md lists.

    `load_config` reads it from YAML and checks the keys against each other; made in Python, as here, it is not checked.
    It is frozen: `dataclasses.replace` gives one with other values.

    >>> config = jaxdist.Config()
    >>> config.parallel.strategy, config.optimizer.name
    ('ddp', 'adamw')
    >>> dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=8)).mesh.fsdp
    8
    """

    model: ModelConfig = section(ModelConfig, "the model")
    data: DataConfig = section(DataConfig, "the data and its batches")
    mesh: MeshConfig = section(MeshConfig, "the mesh axes")
    parallel: ParallelConfig = section(ParallelConfig, "strategy, schedule, gradient reduction")
    init: InitConfig = section(InitConfig, "the parameters that a new run starts with", shorthand="from")
    precision: PrecisionConfig = section(PrecisionConfig, "number types", shorthand="policy")
    memory: MemoryConfig = section(MemoryConfig, "recomputation, host memory")
    optimizer: OptimizerConfig = section(OptimizerConfig, "the optimizer")
    distill: DistillConfig = section(DistillConfig, "a teacher")
    train: TrainConfig = section(TrainConfig, "the run")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "checkpoints")
    devices: DevicesConfig = section(DevicesConfig, "devices")
    observe: ObserveConfig = section(ObserveConfig, "console and report")
