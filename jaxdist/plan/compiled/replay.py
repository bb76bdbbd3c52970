"""Replay of a compiled step's schedule: the share of its communication that is hidden behind computation.

Nothing runs on a device. The schedule is replayed with assumed rates on one compute stream and one communication
stream, loops as often as they run. A collective starts when both streams have come to it. Instructions after its
"-done" wait for its end. Communication time that no computation waits for is hidden. The share compares schedules. It
does not predict seconds: products are not tuned ahead of time, the network's time is linear in bytes, and neither
stream slows the other.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxdist.plan.compiled.instructions import (
    FREE,
    HLO_OPS,
    Computation,
    Instruction,
    InstructionCosts,
    arrays,
    group_size,
    nbytes,
    parse,
)
from jaxdist.plan.traced.ledger import wire_bytes

WORTH_FLOPS = 1e8  # a matrix product below this is none: sums and scales written as products


class Rates(NamedTuple):
    """Assumed rates of a device.

    flops: a second, of matrix products
    memory: bytes a second, read and written
    network: bytes a second that it sends in a collective
    latency: seconds that every collective takes besides
    """

    flops: float
    memory: float
    network: float
    latency: float = 0.0


class Travel(NamedTuple):
    """One collective of the program, replayed.

    wire_bytes: what one device sends in one call
    calls: in a step
    loop: lengths of the loops around it, the outermost first; () outside of loops
    asynchronous: whether its start and its done are two instructions
    needed: seconds of a call, by the rates
    between: seconds of computation between start and done, the mean of the calls
    stall: seconds that computation waits for it, the mean of the calls
    products: matrix products between start and done, the mean of the calls
    name: the op_name of its metadata
    """

    op: str
    dtype: str
    group_size: int
    wire_bytes: float
    calls: int
    loop: tuple[int, ...]
    asynchronous: bool
    needed: float
    between: float
    stall: float
    products: float
    name: str


class Overlap(NamedTuple):
    """The replay of a step.

    communication, stall, compute: seconds of a step, by the rates
    unknown_loops: loops whose length is not in the program; they count as one round
    """

    rates: Rates
    travels: list[Travel]
    communication: float
    stall: float
    compute: float
    unknown_loops: int

    @property
    def hidden(self) -> float:
        """Share of the communication time that no computation waits for; 1 where nothing is sent."""
        return 1 - self.stall / self.communication if self.communication else 1.0

    @property
    def synchronous_in_loops(self) -> list[Travel]:
        """Collectives in loops whose start and done are one instruction: all computation waits for them."""
        return [each for each in self.travels if each.loop and not each.asynchronous]

    @property
    def wire_bytes(self) -> float:
        """What one device sends in a step."""
        return sum(each.wire_bytes * each.calls for each in self.travels)


def overlap(text: str, rates: Rates) -> Overlap:
    """Replay `compiled.as_text()`, which must be scheduled, as it is for GPUs."""
    computations, entry = parse(text)
    replay = _Replay(computations, rates)
    replay.run(entry, ())
    replay.settle()
    travels = [
        Travel(
            each.op,
            each.dtype,
            each.group_size,
            each.wire_bytes,
            round(total.calls),
            each.loop,
            each.asynchronous,
            each.needed,
            total.between / total.calls,
            total.stall / total.calls,
            total.products / total.calls,
            each.name,
        )
        for each, total in zip(replay.met.values(), replay.totals.values(), strict=True)
    ]
    communication = sum(each.needed * each.calls for each in travels)
    stall = sum(each.stall * each.calls for each in travels)
    return Overlap(rates, travels, communication, stall, replay.compute, len(replay.unknown))


class _Met(NamedTuple):
    """A collective instruction."""

    op: str
    dtype: str
    group_size: int
    wire_bytes: float
    loop: tuple[int, ...]
    asynchronous: bool
    needed: float
    name: str


class _Total(NamedTuple):
    """Sums over the calls of a collective."""

    calls: float = 0.0
    between: float = 0.0
    stall: float = 0.0
    products: float = 0.0

    def plus(self, *more: float, times: float = 1) -> "_Total":
        return _Total(*(mine + times * other for mine, other in zip(self, more, strict=True)))


class _Replay:
    """The two streams.

    now: the time of the compute stream
    free: the time when the communication stream has sent everything
    compute: seconds of computation so far
    flying: {(computation, start instruction): when that collective ends}
    met, totals: the collectives so far, and their sums over calls
    """

    def __init__(self, computations: dict[str, Computation], rates: Rates) -> None:
        self.computations, self.rates, self.costs = computations, rates, InstructionCosts(computations)
        self.now = self.free = self.compute = 0.0
        self.flying: dict[tuple[str, str], float] = {}
        self.met: dict[tuple[str, str], _Met] = {}
        self.totals: dict[tuple[str, str], _Total] = {}
        self.unknown: set[str] = set()
        self._cost: dict[tuple[str, str], tuple[float, float]] = {}

    def run(self, name: str, loop: tuple[int, ...]) -> None:
        """Run a computation once, instruction after instruction."""
        body = self.computations[name]
        for own in body.values():
            if own.opcode in FREE or own.opcode.endswith("-update"):
                continue
            if own.opcode == "while":
                self._loop(own, loop)
            elif own.opcode == "conditional":
                self.run(max(own.branches, key=lambda branch: self._sent(branch)), loop)
            elif own.opcode.endswith("-done"):
                if own.operands and (name, own.operands[0]) in self.flying:
                    self._await((name, own.operands[0]))
            elif (real := self._collective(own, body)) is not None:
                self._send((name, own.name), own, real, loop)
            elif own.opcode == "call" and (called := own.called("to_apply")) is not None:
                self.run(called, loop)
            else:
                self._work(name, own, body)

    def settle(self) -> None:
        """Wait for the collectives without a done."""
        for key in list(self.flying):
            self._await(key)

    def _loop(self, own: Instruction, loop: tuple[int, ...]) -> None:
        """Run a loop, round after round, until two rounds in a row take the same times; the others are multiplied."""
        trips = own.trips or 1
        if own.trips is None:
            self.unknown.add(own.name)
        body, before = own.called("body"), None
        assert body is not None
        for i in range(trips):
            start, lag, totals, compute = self.now, max(0.0, self.free - self.now), dict(self.totals), self.compute
            self.run(body, (*loop, trips))
            this = self.now - start, lag, max(0.0, self.free - self.now)
            if before is not None and _alike(before, this) and (rest := trips - i - 1):
                for key, total in self.totals.items():
                    was = totals.get(key, _Total())
                    self.totals[key] = total.plus(*(a - b for a, b in zip(total, was, strict=True)), times=rest)
                self.compute += (self.compute - compute) * rest
                self.now += this[0] * rest
                self.free += this[0] * rest
                return
            before = this

    def _work(self, name: str, own: Instruction, body: Computation) -> None:
        if (name, own.name) not in self._cost:
            flops = self.costs.flops(own, body)
            seconds = max(flops / self.rates.flops, self.costs.bytes(own, body) / self.rates.memory)
            self._cost[name, own.name] = flops, seconds
        flops, seconds = self._cost[name, own.name]
        self.now += seconds
        self.compute += seconds
        for key in self.flying:
            self.totals[key] = self.totals[key].plus(0, seconds, 0, flops > WORTH_FLOPS)

    def _send(self, key: tuple[str, str], own: Instruction, real: Instruction, loop: tuple[int, ...]) -> None:
        if key not in self.met:
            self.met[key], self.totals[key] = self._meet(key[0], own, real, loop), _Total()
        needed = self.met[key].needed
        self.free = max(self.now, self.free) + needed
        self.totals[key] = self.totals[key].plus(1, 0, 0, 0)
        self.flying[key] = self.free
        if not self.met[key].asynchronous:
            self._await(key)

    def _await(self, key: tuple[str, str]) -> None:
        stall = max(0.0, self.flying.pop(key) - self.now)
        self.now += stall
        self.totals[key] = self.totals[key].plus(0, 0, stall, 0)

    def _collective(self, own: Instruction, body: Computation) -> Instruction | None:
        """The collective that an instruction is, or wraps."""
        if own.opcode.removesuffix("-start") in HLO_OPS:
            return own
        if own.opcode.removesuffix("-start") in ("async", "fusion", "call"):
            inside = self.computations.get(own.called() or own.called("to_apply") or "", {})
            return next((each for each in inside.values() if each.opcode in HLO_OPS), None)
        return None

    def _meet(self, where: str, own: Instruction, real: Instruction, loop: tuple[int, ...]) -> _Met:
        body = self.computations[where]
        op, n = HLO_OPS[real.opcode.removesuffix("-start")], group_size(real.rest)
        shapes = [body[each].shape for each in own.operands if each in body]
        sent = wire_bytes(op, sum(map(nbytes, shapes)), n)
        largest = max((array for shape in shapes for array in arrays(shape)), key=lambda array: math.prod(array[1]))
        apart = own.opcode.endswith("-start") and '"is_sync":true' not in own.rest
        needed = sent / self.rates.network + self.rates.latency
        return _Met(op, largest[0], n, sent, loop, apart, needed, real.op_name or real.name)

    def _sent(self, name: str) -> float:
        """Bytes that a branch of a condition sends. The branch that sends most is replayed."""
        body, total = self.computations[name], 0.0
        for own in body.values():
            if (real := self._collective(own, body)) is not None:
                total += self._meet(name, own, real, ()).wire_bytes
            elif own.opcode in ("while", "call", "conditional"):
                inside = own.branches or [own.called("body") or own.called("to_apply") or name]
                total += max(map(self._sent, inside)) * (own.trips or 1)
        return total


def _alike(one: Iterable[float], other: Iterable[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15) for a, b in zip(one, other, strict=True))


def by_loop(found: Overlap, worth: Callable[[Travel], bool] = lambda _: True) -> dict[tuple[int, ...], list[Travel]]:
    """The collectives by the loops around them, most stall first in each."""
    loops: dict[tuple[int, ...], list[Travel]] = {}
    for each in sorted(found.travels, key=lambda each: -each.stall * each.calls):
        if worth(each):
            loops.setdefault(each.loop, []).append(each)
    return loops
