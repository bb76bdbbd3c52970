"""Changes of a configuration that usually save memory of a device: which there are, and which of them are allowed."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdist.config.checks import check_config
from jaxdist.config.entries import StrategyFacts
from jaxdist.config.load import with_settings
from jaxdist.config.rules.remat import MODES
from jaxdist.config.schema import Config
from jaxdist.errors import UserError

Overrides = Mapping[str, Any]  # {dotted key: value}; empty if the change does not apply


def _loss_chunk(config: Config) -> Overrides:
    if "loss_chunk" not in vars(config.model):
        return {}
    mesh, asked = config.mesh, config.model.loss_chunk
    devices = mesh.data * mesh.fsdp * mesh.expert * mesh.context  # those that have tokens of their own
    tokens = config.data.global_batch * config.data.seq_len // (devices * config.parallel.microbatches)
    chunk = asked // 2 if asked else max(128, tokens // 8 // 128 * 128)  # what matrix units like
    return {"model.loss_chunk": chunk} if 0 < chunk < tokens else {}


def _next_stage(config: Config) -> Overrides:
    mesh, facts = config.mesh, StrategyFacts.of(config.parallel.strategy)
    if not facts.next or mesh.data * mesh.shards == 1:
        return {}
    # zero splits over fsdp, too: without such an axis, take the replicas.
    over = {"mesh.data": 1, "mesh.fsdp": mesh.data} if mesh.fsdp == 1 and mesh.data > 1 else {}
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
    *((f"remat {mode}", lambda _, mode=mode: {"memory.remat": mode}) for mode in MODES if mode != "none"),
    ("logits in chunks", _loss_chunk),
    ("the next ZeRO stage", _next_stage),
    ("shards instead of replicas", _no_replicas),
    ("twice the tensor axis", _tensor),
    ("optimizer state in host memory", lambda _: {"memory.offload.optimizer": True}),
)


def changed(config: Config, overrides: Overrides) -> Config:
    """The configuration with these values; not checked."""
    found: Config = with_settings(config, overrides)
    return found


def typed(key: str, value: Any) -> str:
    """An override as it is typed on the command line: "memory.offload.optimizer=true"."""
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


class Candidate(NamedTuple):
    """One change or several together: a remedy before its cost is known.

    values: {dotted key: value}
    config: the configuration with them; None where there is none
    refused: why there is none; "" where nothing would change: `in_use`, or it does not apply
    """

    name: str
    values: Overrides
    config: Config | None
    refused: str = ""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The arguments of the command line."""
        return tuple(typed(key, value) for key, value in self.values.items())

    @property
    def in_use(self) -> bool:
        """Whether the configuration has these values already."""
        return self.config is None and not self.refused and bool(self.values)


def candidate(config: Config, *names: str) -> Candidate:
    """The remedies of these names, one after the other. Those of one candidate change different keys."""
    known, name, values, other = dict(REMEDIES), " + ".join(names), dict[str, Any](), config
    try:
        for each in names:
            more = known[each](other)
            assert not values.keys() & more.keys(), f"{name} change the same key"
            values, other = values | dict(more), changed(other, more)
        return Candidate(name, values, None if other == config else check_config(other, planned=True))
    except UserError as error:
        return Candidate(name, values, None, str(error))


def candidates(config: Config) -> list[Candidate]:
    """All remedies, each alone, without compiling anything."""
    return [candidate(config, name) for name, _ in REMEDIES]


def pairs(config: Config, names: Sequence[str]) -> list[Candidate]:
    """Two of these remedies together, each two that change different keys."""
    found = list[Candidate]()
    for one, other in itertools.combinations([name for name, _ in REMEDIES if name in names], 2):
        first = candidate(config, one)
        assert first.config is not None, f"{one} is refused, or changes nothing"
        more = dict(REMEDIES)[other](first.config)  # empty, if the first leaves nothing for it to do
        if more and not first.values.keys() & more.keys():
            found.append(candidate(config, one, other))
    return found
