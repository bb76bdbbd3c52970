"""Remedies for too little memory: changes of a configuration, with what each saves and costs, by compiling them."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxdist.build import Parts, assemble, mesh_of_config
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.jaxpr.walk import equations, names_at
from jaxdist.optim.muon import OPTIMIZER
from jaxdist.plan.changes import Candidate, candidates, pairs
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.compiled.memory import Footprint, batch_of, compile_step, footprint_of
from jaxdist.plan.search.choose import step_seconds
from jaxdist.plan.search.cluster import PlanCluster, gpu_cluster
from jaxdist.plan.traced.flops import flops_of
from jaxdist.plan.traced.ledger import ledger
from jaxdist.plan.traced.program import traced_program
from jaxdist.precision.policy import precision_of

_PAIRED = 4  # of the changes that save most, each two are tried together


class StepCost(NamedTuple):
    """The cost of a step on one device.

    flops: of the matrix products of the forward and backward pass, as traced
    wire_bytes: what it sends, by the ledger
    seconds: predicted; None where they were not
    """

    memory: Footprint
    flops: float
    wire_bytes: float
    seconds: float | None = None


class Remedy(NamedTuple):
    """A change of a configuration, or two together.

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


def cost_of(config: Config) -> StepCost:
    """Compile the step of a configuration for the devices that this process has."""
    mesh = mesh_of_config(config)
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


def remedies(config: Config, *, cluster: PlanCluster | None = None, progress: Callable[[str], None]) -> Table:
    """Compile the step as it is, with each change, and with each two of the changes that save most, for the devices of
    this process: as many as the mesh has.

    cluster: the devices whose seconds are predicted; None: none are
    progress: called with a line of text before each compilation
    """
    known = Known()

    def cost(other: Config) -> StepCost:
        return cost_of(other)._replace(seconds=cluster and step_seconds(other, cluster, known))

    def compiled(those: Sequence[Candidate], what: str) -> list[Remedy]:
        found = [Remedy(each.name, each.overrides, None, each.refused) for each in those if each.refused]
        wanted = [(each.name, each.overrides, each.config) for each in those if each.config is not None]
        for i, (name, overrides, other) in enumerate(wanted, start=1):
            progress(f"compiling {what} {i}/{len(wanted)}: {' '.join(overrides)}")
            try:
                _check_available(config, other)
                found.append(Remedy(name, overrides, cost(other)))
            except UserError as error:  # what is only seen when the parts are put together
                found.append(Remedy(name, overrides, None, str(error)))
        return found

    progress("compiling the step as it is")
    table = Table(cost(config), [])
    found = compiled(candidates(config), "change")
    saving = [each for each in found if each.cost is not None and table.saved(each) > 0]
    best = sorted(saving, key=table.saved, reverse=True)[:_PAIRED]
    found += compiled(pairs(config, [each.name for each in best]), "pair")
    return table._replace(remedies=sorted(found, key=lambda each: each.cost.memory.peak if each.cost else math.inf))


def assumed_cluster(config: Config, gpu: str) -> PlanCluster:
    """As many of these GPUs as a configuration's mesh has, eight to a host where that divides. Raises `UserError`."""
    devices = config.mesh.devices
    per_host = math.gcd(devices, 8) if devices > 8 else devices
    precision = precision_of(config.precision)
    return gpu_cluster(gpu, precision, hosts=devices // per_host, per_host=per_host, link=None, inside=None)


def remedies_to_json(table: Table) -> dict[str, Any]:
    """The table as JSON: {"now": cost, "remedies": [{"name", "overrides", "saves", "cost", "refused"}]}.

    A cost has "peak", "flops", "wire_bytes", "seconds" and the fields of `Footprint`, in bytes and FLOPs of a device.
    """

    def cost(each: StepCost) -> dict[str, Any]:
        sizes = {"peak": each.memory.peak, **each.memory._asdict()}
        return sizes | {"flops": each.flops, "wire_bytes": each.wire_bytes, "seconds": each.seconds}

    entries = []
    for each in table.remedies:
        figures = {"saves": table.saved(each), "cost": cost(each.cost)} if each.cost else {"saves": None, "cost": None}
        entries.append(each._asdict() | figures)
    return {"now": cost(table.now), "remedies": entries}
