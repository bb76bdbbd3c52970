"""The parser of HLO text: computations, and their instructions in the order of their schedule.

The costs of single instructions are here as well: FLOPs of matrix products, and bytes read and written.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# Names of collectives in HLO -> in the ledger.
HLO_OPS = {
    "all-reduce": "psum",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "collective-permute": "ppermute",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",  # how much is sent, only the data say: at most the whole input counts
    "collective-broadcast": "pbroadcast",
}
UNCOUNTED = frozenset({"send", "recv"})  # of XLA's own passes that cut collectives to pieces
BITS = {"pred": 8, "s4": 4, "u4": 4}  # the names of other types have them: f32, bf16, s8, f8e4m3fn

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)(\(.*)$")  # name, shape, opcode, the rest
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_ARRAY = re.compile(r"\b(pred|bf16|c64|c128|[suf]\d+)(\w*)\[([\d,]*)\]")
_RUNS = re.compile(r"(?:to_apply|calls|body|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_INDEX = re.compile(r"/\*.*?\*/")
# Instructions that take no time: what is there before, other names for it, and constraints on the order of others.
_GIVEN = frozenset({"parameter", "constant", "partition-id", "replica-id"})
_VIEWS = frozenset({"tuple", "get-tuple-element", "bitcast"})
_ORDER = frozenset({"after-all", "opt-barrier", "add-dependency"})
FREE = _GIVEN | _VIEWS | _ORDER
MOVES = frozenset({"bitcast", "reshape", "copy", "convert"})
_ATTENTION = "fmha"  # in the names of cuDNN's kernels
UPDATE = "dynamic-update-slice"
READS = frozenset({"dynamic-slice", "slice", "gather"})
HloArray = tuple[str, tuple[int, ...]]  # dtype, dims


class Instruction(NamedTuple):
    """One instruction of a computation.

    shape: of the result, as text: "f32[8,16]{1,0}"
    operands: names of instructions in the same computation
    rest: the text behind the operands: attributes, metadata, backend_config
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def kind(self) -> str:
        """The opcode; for the start of an asynchronous operation, the opcode of the operation."""
        return self.opcode.removesuffix("-start")

    @property
    def is_free(self) -> bool:
        """Whether it takes no time: a view, an order, or memory that is only set aside."""
        return self.opcode in FREE or 'custom_call_target="AllocateBuffer"' in self.rest

    def called(self, key: str = "calls") -> str | None:
        """The computation that an attribute names: calls, to_apply, body, ..."""
        found = re.search(rf"\b{key}=%?([\w.-]+)", self.rest)
        return None if found is None else found[1]

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional."""
        named = [each.strip(" %") for group in _BRANCHES.findall(self.rest) for each in group.split(",")]
        return named or [each for key in ("true_computation", "false_computation") if (each := self.called(key))]

    @property
    def runs(self) -> list[str]:
        """All computations that it runs."""
        return list(dict.fromkeys([*_RUNS.findall(self.rest), *self.branches]))

    @property
    def trips(self) -> int | None:
        """The rounds of a while, if the program says how many."""
        found = _TRIPS.search(self.rest) if self.opcode == "while" else None
        return None if found is None else int(found[1])

    @property
    def op_name(self) -> str:
        """The named scopes that it was traced under; "" if it has no metadata."""
        found = _OP_NAME.search(self.rest)
        return "" if found is None else found[1]

    @property
    def frame(self) -> int:
        """The number of the frame that it was traced in, see `source_lines`; 0 if it has none."""
        found = _FRAME.search(self.rest)
        return 0 if found is None else int(found[1])


Computation = dict[str, Instruction]


def arrays(shape: str) -> list[HloArray]:
    """The arrays in a shape, tuples flattened."""
    found = _ARRAY.findall(shape)
    return [(kind + more, tuple(int(dim) for dim in dims.split(",") if dim)) for kind, more, dims in found]


def array_bytes(array: HloArray) -> int:
    """Bytes of one array."""
    dtype, dims = array
    return math.prod(dims) * (BITS[dtype] if dtype in BITS else int(re.findall(r"\d+", dtype)[0])) // 8


def nbytes(shape: str) -> int:
    """Bytes of a shape, tuples summed."""
    return sum(map(array_bytes, arrays(shape)))


def sent_arrays(own: Instruction, inside: Computation) -> list[HloArray]:
    """The arrays that a device gives to a collective: its operands, however its result is arranged.

    inside: the computation that it is in
    """
    # Behind the input of a ragged-all-to-all stand the array that it writes to, offsets and sizes.
    given = own.operands[:1] if own.kind == "ragged-all-to-all" else own.operands
    return [array for each in given for array in arrays(inside[each].shape)]


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


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """(computations by name, name of the entry) of `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head and " = " not in line.partition("(")[0]:
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(_INDEX.sub("", line))):
            name, shape, opcode, rest = found.groups()
            end = _closing(rest)
            operands = tuple(re.findall(r"%([\w.-]+)", rest[:end]))
            current[name] = Instruction(name, shape, opcode, operands, rest[end + 1 :])
    return computations, entry


def _closing(text: str) -> int:
    """Where the parenthesis closes that a text begins with."""
    depth = 0
    for place in re.finditer(r"[()]", text):
        depth += 1 if place[0] == "(" else -1
        if not depth:
            return place.start()
    return len(text) - 1


class InstructionCosts:
    """FLOPs and bytes of instructions on one device, from their shapes alone."""

    def __init__(self, computations: dict[str, Computation]) -> None:
        self.computations = computations

    def flops(self, own: Instruction, inside: Computation) -> float:
        """FLOPs of the matrix products in an instruction and in what it calls. Other FLOPs are bound by memory."""
        if own.opcode == "dot":
            return _dot_flops(own, inside)
        if own.opcode == "convolution":
            return _convolution_flops(own, inside)
        if own.opcode == "custom-call":
            return _custom_call_flops(own, inside)
        body = self.computations.get(own.called() or "", {})
        return sum((self.flops(each, body) for each in body.values()), 0.0)

    def multiplies(self, own: Instruction, inside: Computation) -> str:
        """The type that an instruction multiplies in, which is the first operand's of its first matrix product: "bf16";
        "" without one."""
        if own.opcode in ("dot", "convolution") or (own.opcode == "custom-call" and _custom_call_flops(own, inside)):
            given = [arrays(inside[each].shape)[0][0] for each in own.operands[:1] if each in inside]
            return given[0] if given else ""
        body = self.computations.get(own.called() or "", {})
        return next((found for each in body.values() if (found := self.multiplies(each, body))), "")

    def bytes(self, own: Instruction, inside: Computation) -> float:
        """Bytes read and written in memory. Where a fusion only reads or updates a slice, the slice counts."""
        body = self.computations.get(own.called() or "")
        if own.kind != "fusion" or body is None:
            return nbytes(own.shape) + sum(nbytes(inside[each].shape) for each in own.operands if each in inside)
        return _written(body) + sum(_read_of_parameters(body))


def _written(body: Computation) -> int:
    """Bytes that a fusion writes: its results, or the slices of them that it updates in place."""
    root = list(body.values())[-1]
    written = 0
    for name in root.operands if root.opcode == "tuple" else (root.name,):
        each = body[name]
        while each.opcode in MOVES and each.operands:
            each = body[each.operands[0]]
        if each.opcode != UPDATE:
            written += nbytes(body[name].shape)
        while each.opcode == UPDATE:
            written += nbytes(body[each.operands[1]].shape)
            each = body[each.operands[0]]
    return written


def _read_of_parameters(body: Computation) -> Iterator[int]:
    """Bytes that a fusion reads of each of its operands."""
    source: dict[str, str] = {}  # {an instruction that only moves another: the other}
    users: dict[str, list[Instruction]] = {}
    for each in body.values():
        if each.opcode in MOVES and each.operands:
            source[each.name] = source.get(each.operands[0], each.operands[0])
            continue
        for operand in each.operands:
            users.setdefault(source.get(operand, operand), []).append(each)

    def read(own: Instruction) -> int:
        """Bytes of an array of which users may read a slice, or a slice of a slice."""
        mine, whole = users.get(own.name, []), nbytes(own.shape)
        first = [user for user in mine if source.get(user.operands[0], user.operands[0]) == own.name]
        if not mine or len(first) != len(mine):
            return whole
        if own.opcode == "parameter" and all(user.opcode == UPDATE for user in first):
            return 0
        return min(whole, sum(map(read, first))) if all(user.opcode in READS for user in first) else whole

    return (read(each) for each in body.values() if each.opcode == "parameter")


def _dot_flops(own: Instruction, inside: Computation) -> float:
    left = arrays(inside[own.operands[0]].shape)[0][1] if own.operands and own.operands[0] in inside else ()
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", own.rest)
    contracted = [left[int(dim)] for dim in found[1].split(",") if dim] if found and left else []
    return 2.0 * math.prod(arrays(own.shape)[0][1]) * math.prod(contracted)


def _convolution_flops(own: Instruction, inside: Computation, what: str = "Forward") -> float:
    """FLOPs of a convolution: for each element of its forward pass's output, those of the kernel of one channel.

    what: "Forward", "BackwardInput" or "BackwardFilter", of cuDNN's calls, which name their arrays as that pass does.
    """
    labels = re.search(r"dim_labels=\w+_(\w+)->", own.rest)
    if labels is None or not all(each in inside for each in own.operands[:2]):
        return 0.0
    first, second = (arrays(inside[each].shape)[0][1] for each in own.operands[:2])
    result = arrays(own.shape)[0][1]
    kernel, output = {"BackwardInput": (second, first), "BackwardFilter": (result, second)}.get(what, (second, result))
    return 2.0 * math.prod(output) * math.prod(kernel) / kernel[labels[1].index("o")]


def head_width(own: Instruction, inside: Computation) -> int:
    """The width of a head, if the instruction is cuDNN's attention; else 0."""
    if own.opcode != "custom-call" or f'custom_call_target="__cudnn${_ATTENTION}' not in own.rest:
        return 0
    return arrays(inside[own.operands[0]].shape)[0][1][-1]  # queries [B, S, heads, width]


def _custom_call_flops(own: Instruction, inside: Computation) -> float:
    """FLOPs of cuDNN's attention and convolutions, and of cuBLAS's products; 0 for other custom calls."""
    found = re.search(r'custom_call_target="([^"]+)"', own.rest)
    target = found[1] if found else ""
    shapes = [arrays(inside[each].shape)[0][1] for each in own.operands[:2] if each in inside]
    if _ATTENTION in target:  # queries [B, S, heads, width]: two products forward, five backward; half, if causal
        forward = 4.0 * math.prod(shapes[0]) * shapes[0][1] * (0.5 if "CAUSAL" in own.rest else 1.0)
        return forward * (2.5 if "Backward" in target else 1.0)
    if (
        conv := re.match(r"__cudnn\$conv(?:BiasActivation)?(Forward|BackwardInput|BackwardFilter)", target)
    ) is not None:
        return _convolution_flops(own, inside, conv[1])
    if "gemm" in target or "matmul" in target:  # [m, k] x [k, n] -> [m, n]: the root of the product of sizes is m k n
        named = re.search(r'"lhs_batch_dimensions":\[([\d",]*)\]', own.rest)  # these are in all three sizes
        batch = math.prod(shapes[0][int(dim)] for dim in re.findall(r"\d+", named[1])) if named and shapes else 1
        return 2.0 * math.sqrt(math.prod(map(math.prod, shapes)) * math.prod(arrays(own.shape)[0][1]) / max(1, batch))
    return 0.0
