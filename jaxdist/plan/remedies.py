"""Remedies for too little memory: changes of a configuration, with what each saves and costs, by compiling them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import jax

from jaxdist.build import Parts, assemble
from jaxdist.config.checks import check_config
from jaxdist.config.entries import StrategyFacts
from jaxdist.config.rules.remat import MODES
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.jaxpr.walk import equations, names_at
from jaxdist.mesh import make_mesh
from jaxdist.optim.muon import OPTIMIZER
from jaxdist.plan.compiled.memory import Footprint, batch_of, compile_step, footprint_of
from jaxdist.plan.traced.flops import flops_of
from jaxdist.plan.traced.ledger import ledger
from jaxdist.plan.traced.program import traced_program


class StepCost(NamedTuple):
    """The cost of a step on one device.

    flops: of the matrix products of the forward and backward pass, as traced
    wire_bytes: what it sends, by the ledger
    """

    memory: Footprint
    flops: float
    wire_bytes: float


class Remedy(NamedTuple):
    """A change of a configuration.

    overrides: the arguments of the command line
    cost: of the step with the change; None if it was refused
    refused: why
    """

    name: str
    overrides: tuple[str, ...]
    cost: StepCost | None
    refused: str = ""


class Table(NamedTuple):
    """The cost of a step as it is, and its remedies: the one that saves most first, the refused ones last."""

    now: StepCost
    remedies: list[Remedy]

    def saved(self, remedy: Remedy) -> int:
        """Bytes of a device's memory that a remedy saves; negative if it takes more."""
        assert remedy.cost is not None, f"{remedy.name} was refused"
        return self.now.memory.peak - remedy.cost.memory.peak


Overrides = Mapping[str, Any]  # {dotted key: value}; empty if the change does not apply


def _always(overrides: Overrides, _: Config) -> Overrides:
    return overrides


def _loss_chunk(config: Config) -> Overrides:
    if "loss_chunk" not in vars(config.model):
        return {}
    mesh, asked = config.mesh, config.model.loss_chunk
    tokens = config.data.global_batch * config.data.seq_len // (mesh.data * mesh.fsdp * config.parallel.microbatches)
    chunk = asked // 2 if asked else max(128, tokens // 8 // 128 * 128)  # what matrix units like
    return {"model.loss_chunk": chunk} if 0 < chunk < tokens else {}


def _next_stage(config: Config) -> Overrides:
    mesh, facts = config.mesh, StrategyFacts.of(config.parallel.strategy)
    if not facts.next or mesh.data * mesh.fsdp == 1:
        return {}
    # zero splits over fsdp: without such an axis, take the replicas.
    over = {"mesh.data": 1, "mesh.fsdp": mesh.data} if mesh.fsdp == 1 else {}
    return {"parallel.strategy": facts.next, **over}


def _no_replicas(config: Config) -> Overrides:
    mesh = config.mesh
    sharded = StrategyFacts.of(config.parallel.strategy).sharded and mesh.data > 1
    return {"mesh.data": 1, "mesh.fsdp": mesh.data * mesh.fsdp} if sharded else {}


def _tensor(config: Config) -> Overrides:
    mesh = config.mesh
    for axis in ("data", "fsdp"):  # on as many devices; replicas first, which save nothing
        if (size := getattr(mesh, axis)) % 2 == 0:
            return {f"mesh.{axis}": size // 2, "mesh.tensor": 2 * mesh.tensor}
    raise UserError(f"neither mesh.data {mesh.data} nor mesh.fsdp {mesh.fsdp} is even, to give its half")


REMEDIES: tuple[tuple[str, Callable[[Config], Overrides]], ...] = (
    ("twice the microbatches", lambda config: {"parallel.microbatches": 2 * config.parallel.microbatches}),
    *((f"remat {mode}", functools.partial(_always, {"memory.remat": mode})) for mode in MODES if mode != "none"),
    ("logits in chunks", _loss_chunk),
    ("the next ZeRO stage", _next_stage),
    ("shards instead of replicas", _no_replicas),
    ("twice the tensor axis", _tensor),
    ("optimizer state in host memory", functools.partial(_always, {"memory.offload.optimizer": True})),
)


def changed(config: Config, overrides: Overrides) -> Config:
    """The configuration with these values; not checked."""

    def put(section: Any, keys: Sequence[str], value: Any) -> Any:
        inner = value if len(keys) == 1 else put(getattr(section, keys[0]), keys[1:], value)
        return replace(section, **{keys[0]: inner})

    for dotted, value in overrides.items():
        config = put(config, dotted.split("."), value)
    return config


def typed(key: str, value: Any) -> str:
    """An override as it is typed on the command line: "memory.offload.optimizer=true"."""
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def cost_of(config: Config) -> StepCost:
    """Compile the step of a configuration for the devices that this process has."""
    mesh = make_mesh(**asdict(config.mesh), devices=jax.devices())
    parts, batch = assemble(config, mesh), batch_of(config, mesh)
    memory = footprint_of(compile_step(parts, batch), config, parts)
    if memory is None:
        raise UserError(f"remedies: the compiler of {mesh.devices.flat[0].platform} does not say what memory it takes")
    return StepCost(memory, flops_of_passes(parts, batch), ledger(parts.step, parts.target, batch).wire_bytes)


def flops_of_passes(parts: Parts, batch: Any) -> float:
    """FLOPs of forward and backward pass: of the manual region, whose shapes are those of one device."""
    jaxpr = traced_program(parts.step, parts.target, batch)
    regions = [each for each in equations(jaxpr) if each.primitive.name == "shard_map"]
    return sum(flops_of(each.params["jaxpr"]) for each in regions if OPTIMIZER not in names_at("", each))


def _check_available(config: Config, other: Config) -> None:
    """Raise `UserError` for a remedy that these devices would run as another: see `parallel.blocks.remat.available`."""
    offloads = other.memory.remat == "offload" != config.memory.remat
    if offloads and jax.devices()[0].platform == "cpu":
        raise UserError("simulated devices have no host memory, and run it as memory.remat=full")


class Candidate(NamedTuple):
    """A change that may be compiled: a remedy before its cost is known.

    config: the configuration with the change; None where there is none
    refused: why there is none; "" where nothing would change: `in_use`, or it does not apply
    """

    name: str
    overrides: tuple[str, ...]
    config: Config | None
    refused: str = ""

    @property
    def in_use(self) -> bool:
        """Whether the configuration has these values already."""
        return self.config is None and not self.refused and bool(self.overrides)


def candidates(config: Config) -> list[Candidate]:
    """All remedies, without compiling anything."""
    found = []
    for name, change in REMEDIES:
        overrides: tuple[str, ...] = ()
        try:
            values = change(config)
            overrides = tuple(typed(key, value) for key, value in values.items())
            other = changed(config, values)
            found.append(Candidate(name, overrides, None if other == config else check_config(other, planned=True)))
        except UserError as error:
            found.append(Candidate(name, overrides, None, str(error)))
    return found


def remedies(config: Config, *, progress: Callable[[str], None]) -> Table:
    """Compile the step as it is and with each change, for the devices of this process: as many as the mesh has.

    progress: called with a line of text before each compilation
    """
    known = candidates(config)
    found = [Remedy(each.name, each.overrides, None, each.refused) for each in known if each.refused]
    wanted = [(each.name, each.overrides, each.config) for each in known if each.config is not None]
    progress(f"compiling 1/{len(wanted) + 1}: as it is")
    now = cost_of(config)
    for i, (name, overrides, other) in enumerate(wanted, start=2):
        progress(f"compiling {i}/{len(wanted) + 1}: {' '.join(overrides)}")
        try:
            _check_available(config, other)
            found.append(Remedy(name, overrides, cost_of(other)))
        except UserError as error:  # what is only seen when the parts are put together
            found.append(Remedy(name, overrides, None, str(error)))
    return Table(now, sorted(found, key=lambda each: each.cost.memory.peak if each.cost else float("inf")))


def remedies_to_json(table: Table) -> dict[str, Any]:
    """The table as JSON: {"now": cost, "remedies": [{"name", "overrides", "saves", "cost", "refused"}]}.

    A cost has "peak", "flops", "wire_bytes" and the fields of `Footprint`, in bytes and FLOPs of a device.
    """

    def cost(each: StepCost) -> dict[str, Any]:
        sizes = {"peak": each.memory.peak, **each.memory._asdict()}
        return sizes | {"flops": each.flops, "wire_bytes": each.wire_bytes}

    entries = []
    for each in table.remedies:
        figures = {"saves": table.saved(each), "cost": cost(each.cost)} if each.cost else {"saves": None, "cost": None}
        entries.append(each._asdict() | figures)
    return {"now": cost(table.now), "remedies": entries}
