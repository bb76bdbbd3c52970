"""The replay of a scheduled program, on programs short enough to be replayed by hand. The assumed rates make every
collective take 1 ms and every matrix product 0.6 ms."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.plan.compiled import replay as replays
from jaxdist.plan.compiled.hlo import compiled_collectives
from jaxdist.plan.compiled.instructions import InstructionCosts, group_size, nbytes, parse
from jaxdist.plan.compiled.replay import Overlap, Rates, overlap
from jaxdist.plan.compiled.sinks import sinks

GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"
SHARD, WHOLE = "f32[128,1024]{1,0}", "f32[1024,1024]{1,0}"
SENT = 128 * 1024 * 4 * 7
RATES = Rates(flops=2 * 1024**3 / 0.6e-3, memory=math.inf, network=SENT / 1e-3)
HEAD = "HloModule test, is_scheduled=true, num_partitions=8\n"


def computation(name: str, *lines: str, entry: bool = False) -> str:
    first = (
        "%p = (s32[], f32[128,1024]{1,0}, f32[1024,1024]{1,0}) parameter(0)",
        f"%w = {SHARD} get-tuple-element(%p), index=1",
        f"%x = {WHOLE} get-tuple-element(%p), index=2",
    )
    body = "\n".join(f"  {line}" for line in (*first, *lines))
    return f"{'ENTRY ' * entry}%{name} (p: (s32[], f32[], f32[])) -> f32[1024,1024] {{\n{body}\n}}\n\n"


def start(name: str, more: str = "") -> str:
    return f"%{name} = ({SHARD}, {WHOLE}) all-gather-start(%w), channel_id=1, {GROUPS}, dimensions={{0}}{more}"


def done(name: str) -> str:
    return f"%{name}.done = {WHOLE} all-gather-done(%{name})"


def dot(name: str) -> str:
    return f"%{name} = {WHOLE} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"


def loop(name: str, body: str, trips: int | None) -> str:
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips is not None else ""
    return f"%{name} = (s32[], {SHARD}, {WHOLE}) while(%p), condition=%c, body=%{body}{known}"


def check(found: Overlap, *, communication: float, stall: float, compute: float) -> None:
    """In milliseconds."""
    seconds = (found.communication, found.stall, found.compute)
    assert [1e3 * each for each in seconds] == pytest.approx([communication, stall, compute])


def test_a_collective_hides_behind_what_stands_between_start_and_done() -> None:
    body = computation("body", start("a"), dot("m"), done("a"))
    found = overlap(HEAD + body + computation("main", loop("l", "body", 10), entry=True), RATES)
    check(found, communication=10, stall=4, compute=6)
    assert found.hidden == pytest.approx(0.6) and found.wire_bytes == 10 * SENT and not found.synchronous_in_loops
    (each,) = found.travels
    assert (each.op, each.dtype, each.group_size, each.calls, each.loop) == ("all_gather", "f32", 8, 10, (10,))
    assert each.asynchronous and each.products == 1
    assert (each.needed, each.between, each.stall) == pytest.approx((1e-3, 0.6e-3, 0.4e-3))


def test_products_are_counted_in_every_round_and_those_of_copies_apart() -> None:
    one = 2.0 * 1024**3
    body = computation("body", start("a"), dot("m"), dot("m.remat2"), done("a"))
    text = HEAD + body + computation("main", loop("l", "body", 10), dot("fusion.remat.1"), dot("remat"), entry=True)
    found = overlap(text, RATES)
    assert (found.flops, found.flops_again, found.copies) == (22 * one, 11 * one, 2)
    assert found.seconds == pytest.approx(22 * 0.6e-3 + found.stall)


@pytest.mark.parametrize(
    "line",
    [
        f"%a = {WHOLE} all-gather(%w), {GROUPS}, dimensions={{0}}",
        start("a", ', backend_config={"collective_backend_config":{"is_sync":true}}'),
    ],
)
def test_what_everything_waits_for_hides_nothing(line: str) -> None:
    body = computation("body", line, dot("m"), done("a"))
    found = overlap(HEAD + body + computation("main", loop("l", "body", 3), entry=True), RATES)
    check(found, communication=3, stall=3, compute=1.8)
    assert found.hidden == pytest.approx(0) and len(found.synchronous_in_loops) == 1


def test_a_window_is_not_counted_for_two_collectives() -> None:
    text = computation("main", start("a"), start("b"), dot("m"), dot("n"), done("a"), done("b"), entry=True)
    found = overlap(HEAD + text, RATES)
    check(found, communication=2, stall=0.8, compute=1.2)
    assert [each.stall for each in found.travels] == pytest.approx([0, 0.8e-3])  # the first was there, the second not


def test_the_stream_is_shared_with_the_loop_that_a_collective_passes() -> None:
    body = computation("body", start("b"), dot("m"), dot("n"), done("b"))
    text = body + computation("main", start("a"), loop("l", "body", 2), done("a"), entry=True)
    # Round 1 starts while a is sent: b ends at 2.0, computation at 1.2. Round 2: 2.0 + 1.0 against 2.0 + 1.2.
    check(overlap(HEAD + text, RATES), communication=3, stall=0.8, compute=2.4)


def test_a_collective_without_a_done_is_waited_for_at_the_end() -> None:
    check(
        overlap(HEAD + computation("main", start("a"), dot("m"), entry=True), RATES),
        communication=1,
        stall=0.4,
        compute=0.6,
    )


def test_collectives_and_products_are_found_in_what_wraps_them() -> None:
    inner = (
        f"%sum (v: {WHOLE}) -> {SHARD} {{\n  %v = {WHOLE} parameter(0)\n"
        f"  ROOT %s = {SHARD} reduce-scatter(%v), {GROUPS}, dimensions={{0}}, to_apply=%add\n}}\n\n"
        f"%product (v: {WHOLE}) -> {WHOLE} {{\n  %v = {WHOLE} parameter(0)\n"
        f"  ROOT %d = {WHOLE} dot(%v, %v), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n}}\n\n"
    )
    for opcode in ("async", "fusion"):
        text = computation(
            "main",
            f"%a = (({WHOLE}), {SHARD}) {opcode}-start(%x), calls=%sum",
            f"%m = {WHOLE} fusion(%x), kind=kCustom, calls=%product",
            f"%b = {SHARD} {opcode}-done(%a)",
            entry=True,
        )
        found = overlap(HEAD + inner + text, RATES)
        assert [each.op for each in found.travels] == ["reduce_scatter"] and found.travels[0].asynchronous
        check(found, communication=1, stall=0.4, compute=0.6)
        compiled = compiled_collectives(HEAD + inner + text)
        assert sum(each.wire_bytes for each in compiled) == pytest.approx(found.wire_bytes)


def test_of_a_condition_the_branch_that_sends_most_runs() -> None:
    branches = computation("quiet", dot("m")) + computation("loud", start("a"), done("a"))
    choice = f"%c = {WHOLE} conditional(%w, %p, %p), branch_computations={{%quiet, %loud}}"
    found = overlap(HEAD + branches + computation("main", choice, entry=True), RATES)
    check(found, communication=1, stall=1, compute=0)


def test_a_loop_of_unknown_length_counts_once_and_is_named() -> None:
    body = computation("body", start("a"), dot("m"), done("a"))
    found = overlap(HEAD + body + computation("main", loop("l", "body", None), entry=True), RATES)
    assert found.unknown_loops == 1 and found.travels[0].calls == 1


def test_where_nothing_is_sent_all_is_hidden() -> None:
    found = overlap(HEAD + computation("main", dot("m"), entry=True), RATES)
    assert found.hidden == 1 and found.travels == [] and found.compute == pytest.approx(0.6e-3)


ORDERS = st.permutations(["start a", "done a", "start b", "done b", "dot m", "dot n"]).filter(
    lambda order: all(order.index(f"start {name}") < order.index(f"done {name}") for name in "ab")
)
MAKE = {"start": start, "done": done, "dot": dot}


@settings(deadline=None, max_examples=60)
@given(ORDERS, ORDERS, st.integers(1, 7), st.integers(1, 7))
def test_rounds_that_are_alike_are_multiplied(inner: list[str], outer: list[str], few: int, many: int) -> None:
    """The same as round after round."""

    def lines(order: list[str]) -> list[str]:
        return [MAKE[each.split()[0]](each.split()[1]) for each in order]

    around = lines(outer)
    around.insert(3, loop("l", "inner", few))
    text = HEAD + computation("inner", *lines(inner)) + computation("outer", *around)
    text += computation("main", start("z"), loop("k", "outer", many), done("z"), entry=True)
    quick, alike = overlap(text, RATES), replays._alike
    try:
        replays._alike = lambda one, other: False
        slow = overlap(text, RATES)
    finally:
        replays._alike = alike
    assert quick.communication == pytest.approx(1e-3 * (1 + many * (2 + 2 * few)))
    for name in ("communication", "stall", "compute", "hidden"):
        assert getattr(quick, name) == pytest.approx(getattr(slow, name), abs=1e-12), name
    for mine, other in zip(quick.travels, slow.travels, strict=True):
        assert mine.calls == other.calls and mine[8:11] == pytest.approx(other[8:11])
    assert [each.calls for each in quick.kernels] == [each.calls for each in slow.kernels]
    assert sum(each.seconds for each in quick.kernels) == pytest.approx(quick.compute)


@pytest.mark.parametrize("opcode", ["fusion", "fusion-start"])
def test_bytes_are_those_of_slices_where_only_slices_move(opcode: str) -> None:
    text = """HloModule test, is_scheduled=true

%fused (a: f32[24,64], b: f32[24,64], i: s32[]) -> f32[24,64] {
  %a = f32[24,64]{1,0} parameter(0)
  %b = f32[24,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %row = f32[1,64]{1,0} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={1,64}
  ROOT %put = f32[24,64]{1,0} dynamic-update-slice(%a, %row, %i, %i)
}

ENTRY %main (a: f32[24,64], b: f32[24,64], i: s32[]) -> f32[24,64] {
  %a = f32[24,64]{1,0} parameter(0)
  %b = f32[24,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[24,64]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
""".replace("{1,0} fusion(", f"{{1,0}} {opcode}(")
    computations, entry = parse(text)
    body = computations[entry]
    assert InstructionCosts(computations).bytes(body["f"], body) == 64 * 4 + 64 * 4 + 4  # written, read, the index
    assert nbytes("(bf16[4,2]{1,0}, /*index=1*/pred[8], f8e4m3fn[3])") == 16 + 8 + 3


def test_groups_over_parts_of_an_axis() -> None:
    mesh = "replica_groups=mesh['data'=4,'fsdp'=8] {'data','fsdp':(2)4}"
    assert group_size(mesh) == 16 and group_size("replica_groups=mesh['data'=4,'fsdp'=8] {'fsdp'}") == 8


def test_flops_of_attention_and_of_cublas() -> None:
    text = """HloModule test

ENTRY %main (q: bf16[2,128,4,64], a: bf16[32,64], b: bf16[64,16]) -> bf16[32,16] {
  %q = bf16[2,128,4,64]{3,2,1,0} parameter(0)
  %a = bf16[32,64]{1,0} parameter(1)
  %b = bf16[64,16]{1,0} parameter(2)
  %f = (bf16[2,128,4,64]{3,2,1,0}, u8[0]) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %g = bf16[32,16]{1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm"
}
"""
    computations, entry = parse(text)
    body, costs = computations[entry], InstructionCosts(computations)
    assert costs.flops(body["f"], body) == 2 * (2.0 * 2 * 4 * 128 * 128 * 64)
    assert costs.flops(body["g"], body) == 2.0 * 32 * 64 * 16


def test_flops_of_convolutions_and_of_batched_products() -> None:
    """Of cuDNN's three passes, which name their arrays as the forward pass does, and as XLA has them before."""
    text = """HloModule test

ENTRY %main (x: bf16[8,16,16,4], k: bf16[3,3,4,32], y: bf16[8,16,16,32], q: f32[9,8,64], w: f32[9,64,16]) -> f32[] {
  %x = bf16[8,16,16,4]{3,2,1,0} parameter(0)
  %k = bf16[3,3,4,32]{3,2,1,0} parameter(1)
  %y = bf16[8,16,16,32]{3,2,1,0} parameter(2)
  %q = f32[9,8,64]{2,1,0} parameter(3)
  %w = f32[9,64,16]{2,1,0} parameter(4)
  %plain = bf16[8,16,16,32]{3,2,1,0} convolution(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
  %f = (bf16[8,16,16,32]{3,2,1,0}, u8[0]) custom-call(%x, %k), CONVForward"
  %i = (bf16[8,16,16,4]{3,2,1,0}, u8[0]) custom-call(%y, %k), CONVBackwardInput"
  %g = (bf16[3,3,4,32]{3,2,1,0}, u8[0]) custom-call(%x, %y), CONVBackwardFilter"
  %b = (f32[9,8,16]{2,1,0}, s8[64]{0}) custom-call(%q, %w), custom_call_target="__cublas$gemm", BATCHED
  ROOT %r = f32[] constant(0)
}
"""
    text = text.replace("CONV", 'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$conv')
    text = text.replace("BATCHED", 'backend_config={"dims":{"lhs_batch_dimensions":["0"]}}')
    computations, entry = parse(text)
    body, costs = computations[entry], InstructionCosts(computations)
    assert [costs.flops(body[name], body) for name in ("plain", "f", "i", "g")] == [2.0 * 8 * 16 * 16 * 32 * 9 * 4] * 4
    assert costs.flops(body["b"], body) == pytest.approx(2.0 * 9 * 8 * 64 * 16)
    assert costs.multiplies(body["plain"], body) == costs.multiplies(body["g"], body) == "bf16"


def test_of_a_slice_of_a_slice_the_smaller_is_read() -> None:
    """A block's queries, keys and values in a stack of all blocks', of which a kernel reads the values."""
    text = """HloModule test, is_scheduled=true

%fused (a: f32[24,8,3,64], i: s32[]) -> f32[8,64] {
  %a = f32[24,8,3,64]{3,2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,8,3,64]{3,2,1,0} dynamic-slice(%a, %i, %i, %i, %i), dynamic_slice_sizes={1,8,3,64}
  %one = f32[8,3,64]{2,1,0} bitcast(%row)
  %values = f32[8,1,64]{2,1,0} slice(%one), slice={[0:8], [2:3], [0:64]}
  ROOT %out = f32[8,64]{1,0} bitcast(%values)
}

ENTRY %main (a: f32[24,8,3,64], i: s32[]) -> f32[8,64] {
  %a = f32[24,8,3,64]{3,2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = f32[8,64]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused
}
"""
    computations, entry = parse(text)
    moved = 2 * 8 * 64 * 4 + 4  # the values in and out, and the index
    assert InstructionCosts(computations).bytes(computations[entry]["f"], computations[entry]) == moved


def test_memory_that_is_only_set_aside_takes_no_time() -> None:
    aside = f'%e = {WHOLE} custom-call(), custom_call_target="AllocateBuffer"'
    found = overlap(HEAD + computation("main", aside, dot("m"), entry=True), Rates(RATES.flops, 1.0, 1.0))
    assert [each.kind for each in found.kernels] == ["product"]


def test_rates_of_attention_and_of_small_kernels() -> None:
    """Attention with heads of 64 has a rate of its own; with heads of 128 twice that, at most that of products."""
    line = (
        "%a = (bf16[2,8,64,{0}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="
        '"__cudnn$fmhaSoftmax"'
    )

    def seconds(head: int, rates: Rates) -> float:
        q = f"%q = bf16[2,64,8,{head}]{{3,2,1,0}} parameter(1)"
        found = overlap(HEAD + computation("main", q, line.format(head), entry=True), rates)
        assert [each.kind for each in found.kernels] == ["attention"]
        return found.compute

    of_64 = 4 * 2 * 64 * 8 * 64 * 64
    rates = Rates(flops=1.5, memory=math.inf, network=1.0, attention=1.0)
    assert seconds(64, rates) == of_64
    assert seconds(128, rates) == pytest.approx(2 * of_64 / 1.5)
    assert seconds(64, rates._replace(attention=None)) == pytest.approx(of_64 / 1.5)
    assert seconds(64, rates._replace(least=1e9)) == 1e9


@pytest.mark.parametrize(
    ("dtypes", "rate"), [(("f8e4m3fn", "f8e5m2"), 4.0), (("f32", "f32"), 1.0), (("bf16", "bf16"), 2.0)]
)
@pytest.mark.parametrize("fused", [False, True])
def test_rates_of_products_go_by_what_they_multiply(dtypes: tuple[str, str], rate: float, fused: bool) -> None:
    left, right = (f"{dtype}[64,64]{{1,0}}" for dtype in dtypes)
    given = [f"%a = {left} parameter(0)", f"%b = {right} parameter(1)"]
    product = "%p = bf16[64,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = computation("main", *given, product, entry=True)
    if fused:
        call = "%f = bf16[64,64]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused"
        text = computation("fused", *given, product) + computation("main", *given, call, entry=True)
    rates = Rates(flops=2.0, memory=math.inf, network=1.0, fp8=4.0, tf32=1.0)
    assert overlap(HEAD + text, rates).compute == 2 * 64**3 / rate
    assert overlap(HEAD + text, Rates(flops=2.0, memory=math.inf, network=1.0)).compute == 2 * 64**3 / 2


TABLES = """HloModule test, is_scheduled=true

FileNames
1 "/somewhere/lib/python3.12/site-packages/optax/clip.py"
2 "{here}/jaxdist/nn/mlp.py"

FunctionNames
1 "clip"
2 "gelu"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}}
2 {{file_name_id=2 function_name_id=2 line=19 end_line=20 column=1 end_column=9}}

StackFrames
1 {{file_location_id=2 parent_frame_id=1}}
2 {{file_location_id=1 parent_frame_id=1}}

"""


def test_sinks_are_summed_by_source_line_and_phase() -> None:
    def product(name: str, scopes: str, frame: int) -> str:
        return f'{dot(name)}, metadata={{op_name="{scopes}" stack_frame_id={frame}}}'

    body = computation("body", product("m", "jit(step)/jvp(blocks)/mlp/mul", 1), product("n", "jit(step)/x", 2))
    last = product("o", "jit(step)/transpose(jvp(blocks))/mlp/mul", 1)
    text = TABLES.format(here=Path(__file__).parents[2]) + body
    text += computation("main", loop("l", "body", 4), last, dot("p"), entry=True)
    found = sinks(overlap(text, RATES).kernels, text)
    assert sorted([(each.line, each.phase, each.calls) for each in found], key=lambda each: -each[2]) == [
        ("jaxdist/nn/mlp.py:19", "forward", 4),
        ("optax/clip.py:7", "once a step", 4),
        ("", "once a step", 1),
        ("jaxdist/nn/mlp.py:19", "backward", 1),
    ]
    assert sum(each.seconds for each in found) == pytest.approx(10 * 0.6e-3)
