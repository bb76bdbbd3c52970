"""Replay of a compiled step's schedule: the share of its communication that is hidden behind computation.

Nothing runs on a device. The schedule is replayed with assumed rates on one compute stream and one communication
stream, loops as often as they run. A collective starts when both streams have come to it. Instructions after its
"-done" wait for its end. Communication time that no computation waits for is hidden. The share compares schedules.
Seconds are as good as the rates: products are not tuned ahead of time, the network's time is linear in bytes, and
neither stream slows the other.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jaxdist.plan.compiled.hlo import collectives_in
from jaxdist.plan.compiled.instructions import (
    HLO_OPS,
    Computation,
    Instruction,
    InstructionCosts,
    array_bytes,
    group_size,
    head_width,
    parse,
    sent_arrays,
)
from jaxdist.plan.traced.ledger import wire_bytes

WORTH_FLOPS = 1e8  # a matrix product below this is none: sums and scales written as products


class Rates(NamedTuple):
    """Assumed rates of a device.

    flops: a second, of matrix products in 16 bits, and in other types unless they have a rate of their own
    memory: bytes a second, read and written
    network: bytes a second that it sends in a collective
    latency: seconds that every collective takes besides
    attention: FLOPs a second of cuDNN's attention with heads of 64. With wider heads the rate is larger in proportion,
        up to that of other products: exponentials take the time, one for each score. None: as other products
    least: seconds that every kernel takes at least
    fp8, tf32: FLOPs a second of products in float8, and of those in float32. None: as others
    """

    flops: float
    memory: float
    network: float
    latency: float = 0.0
    attention: float | None = None
    least: float = 0.0
    fp8: float | None = None
    tf32: float | None = None

    def seconds(self, flops: float, nbytes: float, head: int = 0, dtype: str = "") -> float:
        """Of a kernel. head: the width of a head; 0: it is no attention. dtype: XLA's name of what it multiplies."""
        products = {"f8": self.fp8, "f3": self.tf32}.get(dtype[:2]) or self.flops
        if head and self.attention is not None:
            products = min(products, self.attention * head / 64)
        return max(flops / products, nbytes / self.memory, self.least)


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


class KernelTime(NamedTuple):
    """One instruction of the program that computes or moves data, replayed.

    kind: "product", "attention" or "memory"
    calls, seconds, nbytes, flops: of a step
    frame: the number of its `stack_frame_id`; 0 if it has none
    name: the op_name of its metadata
    """

    kind: str
    calls: int
    seconds: float
    nbytes: float
    flops: float
    frame: int
    name: str


class Overlap(NamedTuple):
    """The replay of a step.

    communication, stall, compute: seconds of a step, by the rates
    unknown_loops: loops whose length is not in the program; they count as one round
    flops: of the products that a device computes in a step
    flops_again: those of instructions that XLA has copied, to compute their results again instead of keeping them
    copies: how many such instructions the program has; none where memory suffices
    kernels: what a device computes or moves, in the order of the program
    """

    rates: Rates
    travels: list[Travel]
    communication: float
    stall: float
    compute: float
    unknown_loops: int
    flops: float
    flops_again: float
    copies: int
    kernels: list[KernelTime]

    @property
    def seconds(self) -> float:
        """Of a step: computation and waits."""
        return self.compute + self.stall

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
    for key in list(replay.flying):  # collectives without a done
        replay.wait(key)
    travels = []
    for key, each in replay.travels.items():
        calls, *sums = replay.totals[key].tolist()
        between, stall, products = (value / calls for value in sums)
        travels.append(each._replace(calls=round(calls), between=between, stall=stall, products=products))
    communication = sum(each.needed * each.calls for each in travels)
    stall = sum(each.stall * each.calls for each in travels)
    compute, flops, again = replay.done.tolist()
    copies = sum(_is_copy(name) for body in computations.values() for name in body)
    kernels = [replay.kernel(*key) for key in replay.calls]
    return Overlap(rates, travels, communication, stall, compute, len(replay.unknown), flops, again, copies, kernels)


def _is_copy(name: str) -> bool:
    """Whether XLA has made this instruction to compute another one's result again (its HloRematerialization)."""
    return re.search(r"\.remat\d*(\.|$)", name) is not None


class _Replay:
    """The two streams. A collective is known by its key: (computation, start instruction).

    now: the time of the compute stream
    free: the time when the communication stream has sent everything
    done: seconds of computation so far, FLOPs of its products, and those of what XLA computes again
    flying: {key: when that collective ends}
    travels: {key: the collective}, without the figures that are in `totals`
    totals: {key: sums over its calls so far: calls, between, stall, products}
    costs: {(computation, instruction): (FLOPs, bytes, width of a head, seconds) of a computation}
    calls: {(computation, instruction): how often a computation has run}
    """

    def __init__(self, computations: dict[str, Computation], rates: Rates) -> None:
        self.computations, self.rates = computations, rates
        self.now = self.free = 0.0
        self.done = np.zeros(3)
        self.flying: dict[tuple[str, str], float] = {}
        self.travels: dict[tuple[str, str], Travel] = {}
        self.totals: dict[tuple[str, str], np.ndarray] = {}
        self.costs: dict[tuple[str, str], tuple[float, float, int, float]] = {}
        self.calls = Counter[tuple[str, str]]()
        self.unknown: set[str] = set()

    def run(self, name: str, loop: tuple[int, ...]) -> None:
        """Run a computation once, instruction after instruction. loop: the lengths of the loops around it."""
        body = self.computations[name]
        for own in body.values():
            if own.is_free or own.opcode.endswith("-update"):
                continue
            if own.opcode == "while":
                self.run_loop(own, loop)
            elif own.opcode == "conditional":
                self.run(max(own.branches, key=self.sent), loop)
            elif own.opcode.endswith("-done"):
                if own.operands and (name, own.operands[0]) in self.flying:
                    self.wait((name, own.operands[0]))
            elif (found := self.collective(name, own)) is not None:
                self.send((name, own.name), own, found, loop)
            elif own.opcode == "call" and (called := own.called("to_apply")) is not None:
                self.run(called, loop)
            else:
                self.work(name, own)

    def run_loop(self, own: Instruction, loop: tuple[int, ...]) -> None:
        """Run a loop, round after round, until two rounds in a row take the same times; the others are multiplied."""
        trips = own.trips or 1
        if own.trips is None:
            self.unknown.add(own.name)
        body, before = own.called("body"), None
        assert body is not None
        for i in range(trips):
            start, lag, done = self.now, max(0.0, self.free - self.now), self.done.copy()
            totals, calls = {key: total.copy() for key, total in self.totals.items()}, self.calls.copy()
            self.run(body, (*loop, trips))
            this = self.now - start, lag, max(0.0, self.free - self.now)
            if before is not None and _alike(before, this) and (rest := trips - i - 1):
                for key, total in self.totals.items():
                    total += rest * (total - totals.get(key, 0))
                for each, count in self.calls.items():
                    self.calls[each] += rest * (count - calls[each])
                self.done += (self.done - done) * rest
                self.now += this[0] * rest
                self.free += this[0] * rest
                return
            before = this

    def work(self, name: str, own: Instruction) -> None:
        """Run an instruction that computes or moves data on the device."""
        if (name, own.name) not in self.costs:
            costs, body = InstructionCosts(self.computations), self.computations[name]
            each = costs.flops(own, body), costs.bytes(own, body), head_width(own, body)
            self.costs[name, own.name] = *each, self.rates.seconds(*each, costs.multiplies(own, body))
        flops, _, _, seconds = self.costs[name, own.name]
        self.now += seconds
        self.calls[name, own.name] += 1
        self.done += (seconds, flops, flops * _is_copy(own.name))
        for key in self.flying:
            self.totals[key] += (0, seconds, 0, flops > WORTH_FLOPS)

    def kernel(self, name: str, instruction: str) -> KernelTime:
        """The `KernelTime` that an instruction of a computation is."""
        own, calls = self.computations[name][instruction], self.calls[name, instruction]
        flops, nbytes, head, seconds = self.costs[name, instruction]
        kind = "attention" if head else "product" if flops > WORTH_FLOPS else "memory"
        inside = self.computations.get(own.called() or "", {})  # of a fusion, which may itself have no metadata
        said = next((each for each in (own, *reversed(inside.values())) if each.frame), own)
        return KernelTime(kind, calls, calls * seconds, calls * nbytes, calls * flops, said.frame, said.op_name)

    def send(
        self, key: tuple[str, str], own: Instruction, found: tuple[Instruction, Computation], loop: tuple[int, ...]
    ) -> None:
        """Start a collective on the communication stream, and wait for its end if it is synchronous."""
        if key not in self.travels:
            self.travels[key], self.totals[key] = self.travel(own, *found, loop), np.zeros(4)
        each = self.travels[key]
        self.free = max(self.now, self.free) + each.needed
        self.totals[key] += (1, 0, 0, 0)
        self.flying[key] = self.free
        if not each.asynchronous:
            self.wait(key)

    def wait(self, key: tuple[str, str]) -> None:
        """Let the compute stream wait for the end of a collective."""
        stall = max(0.0, self.flying.pop(key) - self.now)
        self.now += stall
        self.totals[key] += (0, 0, stall, 0)

    def collective(self, name: str, own: Instruction) -> tuple[Instruction, Computation] | None:
        """The collective that an instruction of a computation is, or wraps, and the computation that it is in."""
        if own.kind in HLO_OPS:
            return own, self.computations[name]
        if own.kind in ("async", "fusion", "call"):
            inside = self.computations.get(own.called() or own.called("to_apply") or "", {})
            return next(((each, inside) for each in inside.values() if each.opcode in HLO_OPS), None)
        return None

    def travel(self, own: Instruction, collective: Instruction, inside: Computation, loop: tuple[int, ...]) -> Travel:
        """The `Travel` of a collective that has not been called yet. own: itself, or what wraps it."""
        op, n, given = HLO_OPS[collective.kind], group_size(collective.rest), sent_arrays(collective, inside)
        sent = wire_bytes(op, sum(map(array_bytes, given)), n)
        largest = max(given, key=lambda array: math.prod(array[1]))
        return Travel(
            op=op,
            dtype=largest[0],
            group_size=n,
            wire_bytes=sent,
            calls=0,
            loop=loop,
            asynchronous=own.opcode.endswith("-start") and '"is_sync":true' not in own.rest,
            needed=sent / self.rates.network + self.rates.latency,
            between=0.0,
            stall=0.0,
            products=0.0,
            name=collective.op_name or collective.name,
        )

    def sent(self, name: str) -> float:
        """Bytes that a branch of a condition sends."""
        return sum(each.wire_bytes for each in collectives_in(self.computations, name))


def _alike(one: Iterable[float], other: Iterable[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15) for a, b in zip(one, other, strict=True))


def by_loop(found: Overlap, worth: Callable[[Travel], bool] = lambda _: True) -> dict[tuple[int, ...], list[Travel]]:
    """The collectives by the loops around them, most stall first in each."""
    loops: dict[tuple[int, ...], list[Travel]] = {}
    for each in sorted(found.travels, key=lambda each: -each.stall * each.calls):
        if worth(each):
            loops.setdefault(each.loop, []).append(each)
    return loops
