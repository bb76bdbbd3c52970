"""The collectives of a compiled program, read from its HLO: a second account, independent of the ledger's.

It has what the jaxpr lacks: the collectives that the compiler adds around the optimizer, and those that it merges,
splits or drops. It lacks the names of axes, and on CPUs bf16, which XLA:CPU widens. So elements are compared.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxdist.plan.compiled.instructions import HLO_OPS, Computation, Instruction, array_bytes, arrays, group_size, parse
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
    """The collectives of a computation, and of those that it calls. times: how often it runs in a step."""
    found: list[Compiled] = []
    for own in computations.get(name, {}).values():
        if own.kind in HLO_OPS:
            found.append(_collective(own, times))
        elif own.kind in ("while", "call", "conditional", "fusion", "async"):
            inside = [collectives_in(computations, called, times * (own.trips or 1)) for called in own.runs]
            if own.kind == "conditional":  # which branch runs is not known: the one that sends most, as in the ledger
                inside = [max(inside, key=lambda branch: sum(each.wire_bytes for each in branch), default=[])]
            found += (each for branch in inside for each in branch)
    return found


def _collective(own: Instruction, times: int) -> Compiled:
    op, n, results = HLO_OPS[own.kind], group_size(own.rest), arrays(own.shape)
    # The result of a -start holds the inputs as well, first; an all-reduce's or permute's are as large as its outputs.
    if own.opcode.endswith("-start") and op != "psum" and len(results) > 1:
        results = results[len(results) // 2 :] if op != "ppermute" else results[1:2]
    operand, count = (
        {"all_gather": total // n, "reduce_scatter": total * n}.get(op, total)
        for total in (sum(map(array_bytes, results)), sum(math.prod(dims) for _, dims in results))
    )
    return Compiled(
        op=op,
        group_size=n,
        dtype=results[0][0],
        bytes_per_call=operand,
        elements_per_call=count,
        calls=times,
        wire_bytes=wire_bytes(op, operand, n) * times,
        added="shard_map" not in own.op_name and "shmap" not in own.op_name,
        name=own.op_name,
    )
