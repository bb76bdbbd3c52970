"""Collectives in HLO text: the forms in which XLA prints them, and what a device gives to each."""

import pytest

from jaxdist.errors import UserError
from jaxdist.plan.compiled.hlo import Compiled, compiled_collectives
from jaxdist.plan.compiled.replay import Rates, overlap

PAIRS = "source_target_pairs={{0,1},{1,0}}"
GROUPS = "replica_groups={{0,1}}"
# All inputs that the cases read, 8,000 and 4,000 bytes of f32 among them.
GIVEN = """
  %a = f32[2000]{0} parameter(0)
  %b = f32[1000]{0} parameter(1)
  %z = c64[500]{0} parameter(2)
  %w = c128[500]{0} parameter(3)
  %e = f8e4m3fn[600]{0} parameter(4)
  %m = f8e5m2[200]{0} parameter(5)
  %n = s4[600]{0:E(4)} parameter(6)
  %t = pred[600]{0} parameter(7)
  %i = s32[2]{0} parameter(8)
"""
A, B = "f32[2000]{0}", "f32[1000]{0}"


def program(*lines: str, wrapped: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule test, is_scheduled=true\n\n{wrapped}ENTRY %main (a: f32[2000]) -> f32[2000] {{{GIVEN}{body}\n}}\n"
    )


def only(text: str) -> Compiled:
    (each,) = compiled_collectives(text)
    return each


@pytest.mark.parametrize(
    ("line", "op", "nbytes", "elements"),
    [
        (f"(({A}, {B}), ({A}, {B}), u32[], u32[]) collective-permute-start(%a, %b), {PAIRS}", "ppermute", 12000, 3000),
        (f"({A}, {A}, u32[], u32[]) collective-permute-start(%a), {PAIRS}", "ppermute", 8000, 2000),
        (f"({A}, {B}) collective-permute(%a, %b), {PAIRS}", "ppermute", 12000, 3000),
        (f"({A}, {B}) all-reduce-start(%a, %b), {GROUPS}, to_apply=%add", "psum", 12000, 3000),
        (f"({B}, {A}) all-gather-start(%b), {GROUPS}, dimensions={{0}}", "all_gather", 4000, 1000),
        (f"(({B}, {A}), ({A}, f32[4000])) all-gather-start(%b, %a), {GROUPS}", "all_gather", 12000, 3000),
        (f"(({A}), {B}, u32[]) reduce-scatter-start(%a), {GROUPS}, to_apply=%add", "reduce_scatter", 8000, 2000),
        (f"(({A}, {B}), ({A}, {B}), s32[]) all-to-all-start(%a, %b), {GROUPS}", "all_to_all", 12000, 3000),
        (f"({A}, {B}) all-to-all(%a, %b), {GROUPS}", "all_to_all", 12000, 3000),
        (f"{A} collective-broadcast(%a), {GROUPS}", "pbroadcast", 8000, 2000),
        (f"{B} ragged-all-to-all(%a, %b, %i, %i, %i, %i), {GROUPS}", "ragged_all_to_all", 8000, 2000),
        (f"c64[500]{{0}} all-reduce(%z), {GROUPS}, to_apply=%add", "psum", 4000, 500),
        (f"(c64[500]{{0}}, c128[500]{{0}}) all-reduce(%z, %w), {GROUPS}, to_apply=%add", "psum", 12000, 1000),
        (f"(f8e4m3fn[1200], f8e5m2[400]) all-gather(%e, %m), {GROUPS}", "all_gather", 800, 800),
        (f"s4[1200]{{0:E(4)}} all-gather(%n), {GROUPS}", "all_gather", 300, 600),
        (f"pred[1200] all-gather(%t), {GROUPS}", "all_gather", 600, 600),
    ],
)
def test_what_a_device_gives_counts(line: str, op: str, nbytes: int, elements: int) -> None:
    """Whatever is in the result beside the outputs: inputs, contexts. The replay counts the same."""
    text = program(f"%r = {line}")
    each = only(text)
    assert (each.op, each.group_size) == (op, 2)
    assert (each.bytes_per_call, each.elements_per_call) == (nbytes, elements)
    assert overlap(text, Rates(1, 1, 1)).wire_bytes == each.wire_bytes > 0


def test_a_wrapped_collective_counts_once() -> None:
    wrapped = (
        f"%inner (p: {A}, q: {B}) -> ({A}, {B}) {{\n  %p = {A} parameter(0)\n  %q = {B} parameter(1)\n"
        f"  ROOT %s = ({A}, {B}) all-to-all(%p, %q), {GROUPS}\n}}\n\n"
    )
    start = f"%r = (({A}, {B}), ({A}, {B}), u32[]) async-start(%a, %b), calls=%inner"
    done = f"%d = ({A}, {B}) async-done(%r), calls=%inner"
    each = only(program(start, wrapped=wrapped))
    assert (each.op, each.bytes_per_call, each.calls) == ("all_to_all", 12000, 1)
    assert overlap(program(start, done, wrapped=wrapped), Rates(1, 1, 1)).wire_bytes == each.wire_bytes


def test_what_is_not_counted_is_refused_by_name() -> None:
    sent = "%go.1 = (f32[2000]{0}, u32[], token[]) send(%a, %k), channel_id=1"
    with pytest.raises(UserError, match="^compiled program: go.1 is a send between devices") as error:
        compiled_collectives(program("%k = token[] after-all()", sent))
    assert "\n" not in str(error.value)
    assert compiled_collectives(program(f"{sent}, is_host_transfer=true")) == []


def test_of_two_branches_the_one_that_sends_most_counts() -> None:
    text = """
ENTRY %main (p: f32[8]) -> f32[8] {
  ROOT %c = f32[8] conditional(%i, %a, %b), branch_computations={%little, %much}
}
%little (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %r = f32[8] all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}
%much (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  %g = f32[16] all-gather(%p), replica_groups={{0,1}}, dimensions={0}
  ROOT %r = f32[8] all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}
"""
    found = compiled_collectives(text)
    assert [(each.op, each.elements_per_call, each.bytes_per_call) for each in found] == [
        ("all_gather", 8, 32),
        ("psum", 8, 32),
    ]
