"""The collectives of a compiled program, read from its HLO: a second account, independent of the ledger's.

It has what the jaxpr lacks: the collectives that the compiler adds around the optimizer, and those that it merges,
splits or drops. It lacks the names of axes, and on CPUs bf16, which XLA:CPU widens. So elements are compared.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxdist.errors import UserError
from jaxdist.plan.compiled.instructions import (
    HLO_OPS,
    UNCOUNTED,
    Computation,
    Instruction,
    array_bytes,
    group_size,
    parse,
    sent_arrays,
)
from jaxdist.plan.traced.ledger import Collective, Ledger, wire_bytes


class Compiled(NamedTuple):
    """One collective of a compiled program.

    bytes_per_call, elements_per_call: of the input on one device
    calls: in a step, loops multiplied out
    wire_bytes: as in the ledger
    added: whether the compiler added it, outside the manual region
    name: the op_name of its metadata
    """

    op: str
    group_size: int
    dtype: str
    bytes_per_call: int
    elements_per_call: int
    calls: int
    wire_bytes: float
    added: bool
    name: str


class Comparison(NamedTuple):
    """One op, in the ledger and in the compiled program.

    elements: what one device sends in a step, by `wire_bytes` of elements in place of bytes
    calls: how often the op runs in a step; a compiler may merge some of them and send as much
    """

    ledger_elements: float
    compiled_elements: float
    ledger_calls: int
    compiled_calls: int

    @property
    def agrees(self) -> bool:
        """Whether both send as many elements, but for rounding: these are sums of quotients."""
        return math.isclose(self.ledger_elements, self.compiled_elements, rel_tol=1e-9)


def compare(ledger: Ledger, compiled: Sequence[Compiled]) -> dict[str, Comparison]:
    """{op: the ledger beside the compiled program}, without what the compiler added and without groups of one."""
    inside = [each for each in compiled if not each.added and each.group_size > 1]

    def of(op: str, some: Iterable[Collective | Compiled]) -> tuple[float, int]:
        # HLO does not say which branches are taken: both accounts take them all.
        mine = [(each, each.at_most if isinstance(each, Collective) else each.calls) for each in some if each.op == op]
        sent = sum(wire_bytes(op, each.elements_per_call, each.group_size) * calls for each, calls in mine)
        return sent, sum(calls for _, calls in mine)

    found = {}
    for op in dict.fromkeys([each.op for each in ledger.collectives] + [each.op for each in inside]):
        (planned, calls), (left, calls_left) = of(op, ledger.collectives), of(op, inside)
        found[op] = Comparison(planned, left, calls, calls_left)
    return found


def compiled_collectives(text: str) -> list[Compiled]:
    """The collectives of `compiled.as_text()`, in program order. A loop of unknown length counts once."""
    return collectives_in(*parse(text))


def collectives_in(computations: dict[str, Computation], name: str, times: int = 1) -> list[Compiled]:
    """The collectives of a computation, and of those that it calls. times: how often it runs in a step.

    Raises `UserError` for what sends data between devices and is not counted here.
    """
    found: list[Compiled] = []
    inside = computations.get(name, {})
    for own in inside.values():
        if own.kind in HLO_OPS:
            found.append(_collective(own, inside, times))
        elif own.kind in UNCOUNTED and "is_host_transfer=true" not in own.rest:
            raise UserError(
                f"compiled program: {own.name} is a {own.opcode} between devices, whose bytes are not counted; allowed:"
                f" {', '.join(HLO_OPS)}; leave out the compiler flag that makes such (devices.xla.flags)"
            )
        elif own.kind in ("while", "call", "conditional", "fusion", "async"):
            called = [collectives_in(computations, each, times * (own.trips or 1)) for each in own.runs]
            if own.kind == "conditional":  # which branch runs is not known: the one that sends most, as in the ledger
                called = [max(called, key=lambda branch: sum(each.wire_bytes for each in branch), default=[])]
            found += (each for branch in called for each in branch)
    return found


def _collective(own: Instruction, inside: Computation, times: int) -> Compiled:
    op, n, sent = HLO_OPS[own.kind], group_size(own.rest), sent_arrays(own, inside)
    nbytes = sum(map(array_bytes, sent))
    return Compiled(
        op=op,
        group_size=n,
        dtype=sent[0][0],
        bytes_per_call=nbytes,
        elements_per_call=sum(math.prod(dims) for _, dims in sent),
        calls=times,
        wire_bytes=wire_bytes(op, nbytes, n) * times,
        added="shard_map" not in own.op_name and "shmap" not in own.op_name,
        name=own.op_name,
    )
