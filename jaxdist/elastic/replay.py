"""A run again, from its log, in one process: the same work in the logged order gives the same bits."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxdist.elastic.outer import make_outer
from jaxdist.elastic.rule import told
from jaxdist.elastic.server import Server
from jaxdist.errors import UserError


class Works(Protocol):
    """What a replay asks of a worker."""

    def work(self, flat: np.ndarray) -> Any:
        """A round from these parameters: its clock, loss, and what it moved."""


class Replayed(NamedTuple):
    """What a replay gives.

    - flat, version: the parameters at the end.
    - losses: how many were compared.
    - wrong: a line for each loss that has other bits than the logged one.
    """

    flat: np.ndarray
    version: int
    losses: int
    wrong: list[str]


def sha256_of(flat: np.ndarray) -> str:
    """The SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(flat)).hexdigest()


def made_with() -> dict[str, str]:
    """What the bits of a run depend on besides its configuration, and a log names."""
    return {"python": platform.python_version(), "jax": importlib.metadata.version("jax")}


def _other_loss(push: dict[str, Any], loss: float, version: int) -> str:
    where = f"{push['worker']}'s round {push['clock']} (in version {version})"
    return f"{where}: {repr(push['loss'])[:40]} is logged, and {loss} comes out"


def replay(events: Sequence[dict[str, Any]], first: np.ndarray, worker_of: Callable[[str], Works]) -> Replayed:
    """Do what a log says.

    Args:
        events: The lines of `read_log`.
        first: The parameters of version 0.
        worker_of: Makes a worker of this name, at its beginning.

    Raises `UserError` where the log contradicts itself.
    """
    start = events[0]
    if (first.size, str(first.dtype)) != (start["numbers"], start["dtype"]):
        found = f"{first.size:,} parameters in {first.dtype}"
        raise UserError(f"replay: the configuration has {found}, the log {start['numbers']:,} in {start['dtype']}")
    server = Server(0, make_outer(start["outer"], start["lr"], start["momentum"]), None)
    server.begin(first)
    wanted = {event["version"] for event in events if event["event"] == "restored"}
    kept = {0: (server.flat, server.slots)} if 0 in wanted else {}
    workers: dict[str, Works] = {}
    pulled: dict[str, np.ndarray] = {}
    losses, wrong = 0, list[str]()

    def moved(end: dict[str, Any]) -> Any:
        """What a worker did in the round that ends here."""
        name = end["worker"]
        if name not in pulled:
            raise UserError(f"replay: {name} ends round {end['clock']}, and has not pulled; the log is not whole")
        if name not in workers:
            workers[name] = worker_of(name)
        done = workers[name].work(pulled.pop(name))
        if done.clock != end["clock"]:
            raise UserError(f"replay: {name} ends round {end['clock']} after {done.clock - 1}; the log is not whole")
        return done

    for event in events:
        kind = event["event"]
        if kind == "pull":
            pulled[event["worker"]] = server.flat
        elif kind == "refused" and event["worker"] in pulled:
            moved(event)
        elif kind == "commit":
            for push in event["pushes"]:
                done = moved(push)
                losses += "loss" in push
                if told(done.loss) != push.get("loss", told(done.loss)):
                    wrong.append(_other_loss(push, done.loss, event["version"]))
                server.stage(push["worker"], done.moved)
            if server.commit([push["worker"] for push in event["pushes"]]) != event["version"]:
                raise UserError(
                    f"replay: version {event['version']} follows {server.version - 1}; the log is not whole"
                )
            if server.version in wanted:
                kept[server.version] = server.flat, server.slots
        elif kind == "restored":
            if event["version"] not in kept:
                raise UserError(f"replay: goes back to version {event['version']}, which was not made")
            server.flat, server.slots = kept[event["version"]]
            server.version, server.staged = event["version"], {}
    return Replayed(server.flat, server.version, losses, wrong)
