"""Rounds of messages of a traced program: which rank sends how many bytes to which, and which message waits for which.

They are read from the jaxpr, the very program that is compiled, so that 64 devices can be counted on a laptop. Scans
are unrolled and calls are followed. Bytes are those of the arrays that travel: bf16 as uint16 bits, int8 with scales.

The round of a message comes after the rounds of all messages that its data depend on. Independent messages share a
round as far as devices have ports. With `ports` = 1, the usual model (Hockney 1994), a device sends at most one message
and receives at most one in a round. More ports stand for more links of a device.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxdist.collectives.cost import Cost
from jaxdist.collectives.group import Pairs
from jaxdist.collectives.varying import to_varying
from jaxdist.errors import UserError
from jaxdist.jaxpr.axes import moving_axes
from jaxdist.jaxpr.walk import Scan, every_equation, inner_jaxprs, interpret, nbytes_of, opened, scan_of

LARGE_PART = 4  # exchanges between pairs count from one fourth of the bytes on


class Message(NamedTuple):
    """One message. Ranks are counted over all mesh axes together, in mesh order. call: the number of its ppermute."""

    source: int
    target: int
    nbytes: int
    call: int


Round = tuple[Message, ...]


def rounds_of(
    function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct, mesh: Mapping[str, int], ports: int = 1
) -> list[Round]:
    """The rounds of a function of arrays that is called inside `shard_map`.

    shapes: of the arguments on one device; they are typed varying over all axes
    mesh: {axis: size}, the slowest first

    Raises `UserError` as `read_rounds` does.
    """
    axes = tuple(mesh)
    abstract = AbstractMesh(tuple(mesh.values()), axes, axis_types=(AxisType.Auto,) * len(axes))
    n = math.prod(mesh.values())

    def region(*stacked: jax.Array) -> Any:
        results = function(*[x[0] for x in stacked])
        return jax.tree.map(lambda x: to_varying(x, axes)[None], results)

    everywhere = [jax.ShapeDtypeStruct((n, *shape.shape), shape.dtype) for shape in shapes]
    active = P(tuple(axis for axis in axes if mesh[axis] > 1) or None)
    run = jax.shard_map(region, mesh=abstract, in_specs=active, out_specs=active)
    return read_rounds(jax.make_jaxpr(run)(*everywhere), ports=ports)


def read_rounds(jaxpr: Any, *, ports: int = 1) -> list[Round]:
    """The rounds of a jaxpr with `shard_map` in it, as from `jax.make_jaxpr`.

    Raises `UserError` where they are not in the program: for a psum and other native collectives (the library chooses
    their messages), for a loop of unknown length, for a condition whose branches send different messages.
    """
    reader = _Reader(ports)
    reader.read(jaxpr, [0] * len(opened(jaxpr).invars), {})
    return [tuple(messages) for messages in reader.rounds]


def sent(rounds: Sequence[Round], n: int) -> list[int]:
    """Bytes that each of n ranks sends in all."""
    return _per_rank([(message.source, message.nbytes) for messages in rounds for message in messages], n)


def received(rounds: Sequence[Round], n: int) -> list[int]:
    """Bytes that each of n ranks receives in all."""
    return _per_rank([(message.target, message.nbytes) for messages in rounds for message in messages], n)


def has_swap(messages: Round) -> bool:
    """Whether two ranks send to each other in one ppermute."""
    ends = {(message.source, message.target, message.call) for message in messages}
    return any((target, source, call) in ends for source, target, call in ends)


def busiest_rank_bytes(messages: Round) -> int:
    """Most bytes that one rank sends or receives in this round."""
    n = 1 + max((max(message.source, message.target) for message in messages), default=0)
    return max(*sent([messages], n), *received([messages], n))


def counted(rounds: Sequence[Round], n: int, *, inner: int | None = None) -> Cost:
    """The cost of these rounds, counted, in bytes: to compare with the formula `Algorithm.cost(...)`.

    inner: how many ranks in a row are a fast neighbourhood; rounds without a message between two of these count as
        `inside`, and `swap` is about the others
    """
    near = [inner is not None and all(m.source // inner == m.target // inner for m in messages) for messages in rounds]
    serial = [busiest_rank_bytes(messages) for messages in rounds]
    far = [(messages, size) for messages, size, inside in zip(rounds, serial, near, strict=True) if not inside]
    swapped = sum(size for messages, size in far if has_swap(messages))
    return Cost(
        rounds=len(rounds),
        busiest=max(sent(rounds, n)),
        total=sum(sent(rounds, n)),
        serial=sum(serial),
        swap=swapped > 0 and LARGE_PART * swapped >= sum(size for _, size in far),
        inside_rounds=sum(near),
        inside=sum(size for size, inside in zip(serial, near, strict=True) if inside),
    )


def _per_rank(loads: Sequence[tuple[int, int]], n: int) -> list[int]:
    totals = [0] * n
    for rank, nbytes in loads:
        totals[rank] += nbytes
    return totals


def _everywhere(pairs: Pairs, over: Sequence[str], mesh: Mapping[str, int]) -> list[tuple[int, int]]:
    """Pairs of ranks along some axes -> pairs of ranks of the mesh, for all coordinates of the other axes."""
    ranks = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    ranks = np.moveaxis(ranks, [list(mesh).index(axis) for axis in over], range(len(over)))
    groups = ranks.reshape(math.prod(mesh[axis] for axis in over), -1).T.tolist()  # ranks that these axes connect
    return [(group[source], group[target]) for group in groups for source, target in pairs]


def _communicates(jaxpr: Any) -> bool:
    return any(moving_axes(site.equation) for site in every_equation(jaxpr))


class _Reader:
    """A walk in which each value is a time: the number of rounds after which a device has it."""

    def __init__(self, ports: int) -> None:
        self.ports = ports
        self.rounds: list[list[Message]] = []
        self.used: list[Counter[tuple[int, bool]]] = []  # of each round: messages by (rank, whether it sends)
        self.calls = 0

    def read(self, jaxpr: Any, times: Sequence[int], mesh: Mapping[str, int]) -> list[int]:
        """Times of the arguments -> times of the results."""

        def rule(equation: Any, times: list[int]) -> list[int]:
            return self.equation(equation, times, mesh)

        return interpret(jaxpr, [0] * len(opened(jaxpr).constvars), times, rule, lambda _: 0)

    def equation(self, equation: Any, times: list[int], mesh: Mapping[str, int]) -> list[int]:
        """The times of an equation's results."""
        name, subs = equation.primitive.name, inner_jaxprs(equation)
        together = [max(times, default=0)] * len(equation.outvars)
        if name == "ppermute":
            pairs = _everywhere(equation.params["perm"], moving_axes(equation), mesh)
            return [self.send(x.aval, pairs, time) for x, time in zip(equation.invars, times, strict=True)]
        if moving_axes(equation):
            raise UserError(f"{name}: its messages are the library's choice; choose an algorithm other than native")
        if not any(map(_communicates, subs)):
            return together
        if name == "scan":
            return self.scan(scan_of(equation), len(equation.outvars), times, mesh)
        if name == "cond":
            return self.branches(subs, times, mesh)
        if name == "while":
            raise UserError("while: its number of rounds is not in the program; give fori_loop bounds that are")
        if len(subs) != 1 or len(opened(subs[0]).invars) != len(times):
            raise UserError(f"{name}: communicates in a way that cannot be followed")
        return self.read(subs[0], times, dict(equation.params["mesh"].shape) if name == "shard_map" else mesh)

    def send(self, aval: Any, pairs: Pairs, time: int) -> int:
        """Add a ppermute to the first round from `time` on in which all its ranks have a port left."""
        ends = Counter((end, outwards) for pair in pairs for end, outwards in zip(pair, (True, False), strict=True))
        while time < len(self.rounds) and any(self.used[time][end] + ends[end] > self.ports for end in ends):
            time += 1
        if time == len(self.rounds):
            self.rounds.append([])
            self.used.append(Counter())
        self.rounds[time] += [Message(source, target, nbytes_of(aval), self.calls) for source, target in pairs]
        self.used[time] += ends
        self.calls += 1
        return time + 1

    def scan(self, scan: Scan, results: int, times: list[int], mesh: Mapping[str, int]) -> list[int]:
        """Times of the results of a scan, whose rounds are read one after the other."""
        constants, carry, rows = scan.split(times)
        latest = [0] * (results - scan.carried)
        for _ in range(scan.length):
            found = self.read(scan.body, [*constants, *carry, *rows], mesh)
            carry, latest = found[: scan.carried], list(map(max, latest, found[scan.carried :]))
        return [*carry, *latest]

    def branches(self, subs: Sequence[Any], times: list[int], mesh: Mapping[str, int]) -> list[int]:
        """The times of the results of a condition, whose branches must all send the same messages."""
        sent_by = []
        for sub in subs:
            alone = _Reader(self.ports)
            alone.read(sub, [0] * (len(times) - 1), mesh)
            sent_by.append(alone.rounds)
        if any(rounds != sent_by[0] for rounds in sent_by):
            raise UserError("cond: its branches communicate differently, and which one runs is not in the program")
        return self.read(subs[0], [max(time, times[0]) for time in times[1:]], mesh)
