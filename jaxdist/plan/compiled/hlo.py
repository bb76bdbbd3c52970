"""The collectives of a compiled program, read from its HLO: an account that is independent of the jaxpr's.

It sees what the jaxpr cannot: what the compiler adds around the optimizer, and what it merges, splits or drops. It has
no names of axes, and on CPUs no bf16 (XLA:CPU widens it): what both accounts have is compared in elements.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxdist.plan.traced.ledger import Collective, Ledger, wire_bytes

OPS = {
    "all-reduce": "psum",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "collective-permute": "ppermute",
    "all-to-all": "all_to_all",
}
BITS = {"pred": 8, "s4": 4, "u4": 4}  # others say it: f32, bf16, s8, f8e4m3fn
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+)\w*\[([\d,]*)\]")
_CALLED = re.compile(r"(?:to_apply|calls|body|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')


class Compiled(NamedTuple):
    """One collective of the program. bytes_per_call, elements_per_call: the input on one device. calls: a run, loops
    multiplied out. wire_bytes: as in the ledger. added: by the compiler, outside the manual region. name: op_name of
    its metadata."""

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
    """One op, in the ledger and compiled. elements: what one device sends in a step, by the formula of `wire_bytes` for
    elements in place of bytes: the inputs' elements, weighed by the sizes of their groups. calls: how often the op runs
    in a step; a compiler may merge some without sending less."""

    ledger_elements: float
    compiled_elements: float
    ledger_calls: int
    compiled_calls: int

    @property
    def agrees(self) -> bool:
        """Whether as many elements are sent. The sums are of quotients, and rounded."""
        return math.isclose(self.ledger_elements, self.compiled_elements, rel_tol=1e-9)


def compare(ledger: Ledger, compiled: Sequence[Compiled]) -> dict[str, Comparison]:
    """By op, what the compiler has left of the ledger; its own additions, and groups of one device, are left out."""
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
    """From `compiled.as_text()`. A loop of unknown length counts once."""
    computations: dict[str, list[str]] = defaultdict(list)
    entry = current = ""
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.-]+) .*\{$", line)
        if head and not line.startswith(" "):
            current = head[2]
            entry = current if head[1] else entry
        elif line.startswith("}"):
            current = ""
        elif current:
            computations[current].append(line)
    return _visit(computations, entry, 1)


def _visit(computations: dict[str, list[str]], name: str, times: int) -> list[Compiled]:
    found: list[Compiled] = []
    for line in computations[name]:
        parsed = _LINE.match(line)
        if parsed is None:
            continue
        _, shape, opcode, rest = parsed.groups()
        op = OPS.get(opcode.removesuffix("-start"))
        if op is not None:
            found.append(_collective(op, shape, rest, times, asynchronous=opcode.endswith("-start")))
            continue
        trips = _TRIPS.search(rest)
        inner = times * int(trips[1]) if opcode == "while" and trips else times
        if opcode.removesuffix("-start") in ("while", "call", "conditional", "fusion", "async"):
            branches = [each.strip(" %") for group in _BRANCHES.findall(rest) for each in group.split(",")]
            inside = [_visit(computations, called, inner) for called in (*_CALLED.findall(rest), *branches)]
            if opcode == "conditional":  # the branch that sends most, as in the ledger: which one runs is not known
                inside = [max(inside, key=lambda branch: sum(each.wire_bytes for each in branch), default=[])]
            found += (each for branch in inside for each in branch)
    return found


def _collective(op: str, shape: str, rest: str, times: int, *, asynchronous: bool) -> Compiled:
    shapes = [(dtype, math.prod(int(dim) for dim in dims.split(",") if dim)) for dtype, dims in _SHAPE.findall(shape)]
    # The result of a -start holds the inputs as well, first; an all-reduce's or permute's are as large as its outputs.
    if asynchronous and op != "psum" and len(shapes) > 1:
        shapes = shapes[len(shapes) // 2 :] if op != "ppermute" else shapes[1:2]
    nbytes = sum(size * BITS.get(dtype, int(re.sub(r"\D", "", dtype) or 8)) // 8 for dtype, size in shapes)
    n = group_size(rest)
    operand, count = (
        {"all_gather": total // n, "reduce_scatter": total * n}.get(op, total)
        for total in (nbytes, sum(size for _, size in shapes))
    )
    name = re.search(r'op_name="([^"]*)"', rest)
    label = name[1] if name else ""
    return Compiled(
        op,
        n,
        shapes[0][0],
        operand,
        count,
        times,
        wire_bytes(op, operand, n) * times,
        added="shard_map" not in label and "shmap" not in label,
        name=label,
    )


def group_size(rest: str) -> int:
    """Devices of a group of a collective, from its attributes."""
    if (explicit := re.search(r"replica_groups=\{\{([\d,]+)\}", rest)) is not None:
        return len(explicit[1].split(","))
    if (iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)) is not None:
        return int(iota[2])
    if (named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest)) is not None:  # jax 0.12
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])  # 'fsdp':(4)2: two parts of an axis, 4 apart
        return math.prod(int(part) if part else sizes[axis] for axis, part in parts)
    pairs = re.findall(r"\{(\d+),(\d+)\}", (re.search(r"source_target_pairs=\{(.*?)\}\}", rest + "}}") or [""])[0])
    return max(1, len({rank for pair in pairs for rank in pair}))
