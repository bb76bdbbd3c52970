"""The costs that algorithms state, against the messages counted in their traced programs: equal, without tolerance."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from levels import levels, others_slow

from jaxdist import collectives, registry
from jaxdist.collectives import Cost, Link, get_algorithm, make_link
from jaxdist.collectives.algorithms import balanced_fusion, master_worker, ring, tree
from jaxdist.collectives.algorithms.auto import choose
from jaxdist.collectives.compression import SCALE_BLOCK, encoded_bytes
from jaxdist.collectives.cost import NOTHING
from jaxdist.collectives.group import Group
from jaxdist.errors import UserError
from jaxdist.plan.traced.rounds import Round, counted, has_swap, received, rounds_of, sent

NAMES = [name for name in registry.names("jaxdist.collectives.algorithms") if name != "native"]  # the library's own
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter")
CASES = [(name, op) for name in NAMES for op in OPERATIONS if getattr(get_algorithm(name), op) is not None]
CUT = ("reduce_scatter", "all_to_all", "scatter")  # their input must be divisible by n
SIZES = (0, 1, 7, 1000, 65537, 1 << 20)
PORTS = {"bidirectional_ring": 2}  # it is made for devices with two links


def messages(
    name: str, operation: str, size: int, *sizes: int, dtype: Any = jnp.float32, axis: Any = None, **options: Any
) -> list[Round]:
    """Rounds of one call on an input of `size` elements, over all axes of a mesh of these sizes unless told."""
    mesh = dict(zip(("data", "fsdp"), sizes, strict=False))
    function = getattr(collectives, operation)
    return rounds_of(
        lambda x: function(x, axis or tuple(mesh), algorithm=name, **options),
        jax.ShapeDtypeStruct((size,), dtype),
        mesh=mesh,
        ports=PORTS.get(name, 1),
    )


def whole(operation: str, size: int, n: int) -> int:
    return -(-size // n) * n if operation in CUT else size


def stated(name: str, operation: str, size: int, itemsize: int, *sizes: int, link: Link | None = None) -> Cost:
    """`Algorithm.cost` in bytes; for auto that of what it chooses for values of this size."""
    group = replace(Group.of(*sizes), link=link)
    if group.n == 1:
        return NOTHING
    if name == "auto":
        name = choose(operation, size, itemsize, group)
    return get_algorithm(name).cost(operation, size, group).scaled(itemsize)


def check(
    name: str, operation: str, size: int, *sizes: int, dtype: Any = jnp.float32, link: Link | None = None
) -> None:
    n, itemsize = math.prod(sizes), jnp.dtype(dtype).itemsize
    size = whole(operation, size, n)
    want = stated(name, operation, size, itemsize, *sizes, link=link)
    options = {} if link is None else {"link": link}
    rounds = messages(name, operation, size, *sizes, dtype=dtype, **options)
    got = counted(rounds, n, inner=Group.of(*sizes).inner if want.inside else None)
    if not want.total:  # of no bytes no part is large, and none is inside
        want, got = (cost._replace(swap=False, inside_rounds=0) for cost in (want, got))
    assert got == want, (size, dtype)


@pytest.mark.parametrize(
    ("name", "operation", "n"), levels(((*case, n) for case in CASES for n in range(1, 9)), everyday=3)
)
def test_costs_are_exact(name: str, operation: str, n: int) -> None:
    check(name, operation, 1000 if n % 2 else 7, n)


@pytest.mark.parametrize(("name", "operation"), others_slow(CASES, *CASES[::3]))
def test_costs_are_exact_in_pieces_and_other_types(name: str, operation: str) -> None:
    check(name, operation, 65537, 5)
    check(name, operation, 1, 8, dtype=jnp.bfloat16)
    check(name, operation, 1 << 20, 8, dtype=jnp.int8)


@pytest.mark.parametrize(
    ("name", "operation", "n"), levels(((*case, n) for case in CASES for n in (*range(1, 10), 12, 16)), slow=4)
)
def test_costs_are_exact_everywhere(name: str, operation: str, n: int) -> None:
    for size in SIZES:
        check(name, operation, size, n, dtype=(jnp.float32, jnp.bfloat16, jnp.int8)[n % 3])


@pytest.mark.parametrize(("name", "operation"), levels(CASES, slow=3))
def test_costs_are_exact_on_64_devices(name: str, operation: str) -> None:
    for size in (7, 65537):
        check(name, operation, size, 64)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2), (3, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_costs_over_two_axes(operation: str, sizes: tuple[int, int]) -> None:
    for name in ("two_level", "ring", "auto"):
        check(name, operation, 1000, *sizes)
    check("two_level", operation, 1, *sizes)


def test_an_axis_of_one_device_changes_nothing() -> None:
    for name in ("two_level", "ring"):
        want = messages(name, "all_reduce", 1000, 4)
        assert messages(name, "all_reduce", 1000, 4, 1) == messages(name, "all_reduce", 1000, 1, 4) == want


@pytest.mark.parametrize("groups", [((0, 2, 4, 6), (7, 5, 3, 1)), ((5, 1, 3),)], ids=str)
@pytest.mark.parametrize(("name", "operation"), CASES)
def test_groups_cost_each_what_one_costs(name: str, operation: str, groups: Sequence[Sequence[int]]) -> None:
    n, members = len(groups[0]), {rank for group in groups for rank in group}
    size = whole(operation, 1000, n)
    rounds = messages(name, operation, size, 8, groups=groups)
    got, want = counted(rounds, 8), stated(name, operation, size, 4, n)
    assert (got.rounds, got.busiest, got.serial) == (want.rounds, want.busiest, want.serial)
    assert got.total == len(groups) * want.total
    group_of = {rank: group for group in groups for rank in group}
    for message in (message for messages in rounds for message in messages):
        assert {message.source, message.target} <= members
        assert group_of[message.source] == group_of[message.target]


@pytest.mark.parametrize(("axis", "n", "copies"), [("data", 2, 3), ("fsdp", 3, 2)])
def test_one_axis_of_two_costs_as_often_as_the_other_is_long(axis: str, n: int, copies: int) -> None:
    got = counted(messages("ring", "all_reduce", 1000, 2, 3, axis=axis), 6)
    want = stated("ring", "all_reduce", 1000, 4, n)
    assert got == want._replace(total=copies * want.total)


def test_the_public_cost_is_in_bytes() -> None:
    got = collectives.cost("all_reduce", 4000, 2, 4, algorithm="two_level")
    assert got == counted(messages("two_level", "all_reduce", 1000, 2, 4), 8, inner=4)
    assert collectives.cost("all_reduce", 2000, 8, itemsize=2) == counted(
        messages("ring", "all_reduce", 1000, 8, dtype=jnp.bfloat16), 8
    )
    assert collectives.cost("all_reduce", 4000, 1) == NOTHING
    for part, whole in ((3, 4), (10, 12)):  # a part of an element is sent as one
        assert collectives.cost("all_reduce", part, 4) == collectives.cost("all_reduce", whole, 4)
    with pytest.raises(UserError, match=r"^cost: 1\.5 bytes on \(2,\) devices; allowed: bytes >= 0"):
        collectives.cost("all_reduce", 1.5, 2)  # type: ignore[arg-type]


# What the books say, with P = n devices and N bytes.


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_ring_is_optimal_in_bytes(n: int) -> None:
    size = 1000 * n
    for name, ports in (("ring", 1), ("bidirectional_ring", 2)):
        rounds = messages(name, "all_reduce", size, n)
        assert len(rounds) == 2 * (n - 1)
        assert sent(rounds, n) == received(rounds, n) == [2 * (n - 1) * 4 * size // n] * n
        assert all(len({message.call for message in messages}) == ports for messages in rounds)
    one_port = rounds_of(
        lambda x: collectives.all_reduce(x, "data", algorithm="bidirectional_ring"),
        jax.ShapeDtypeStruct((size,), jnp.float32),
        mesh={"data": n},
    )
    assert len(one_port) == 4 * (n - 1)
    assert ring.traffic(4 * size, n) == sent(messages("ring", "all_reduce", size, n), n)[0]


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_halving_doubling_has_few_rounds_and_few_bytes(levels: int) -> None:
    n = 2**levels
    rounds = messages("halving_doubling", "all_reduce", 1000 * n, n)
    assert len(rounds) == 2 * levels
    assert sent(rounds, n) == [2 * (n - 1) * 4000] * n
    assert len(messages("ordered", "all_reduce", 1000 * n, n)) in (levels, 2 * levels)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16])
def test_tree_takes_logarithmically_many_rounds(n: int) -> None:
    levels = math.ceil(math.log2(n))
    assert len(messages("tree", "all_reduce", 1000, n)) == 2 * levels
    there, back = (counted(messages("tree", op, 1000, n), n) for op in ("reduce", "broadcast"))
    assert there.serial == back.serial == levels * 4000
    # The textbook's log2(P) N is one way, exact for powers of two; otherwise a whole level is more than its part.
    if n == 2**levels:
        assert there.serial == tree.traffic(4000, n)
    else:
        assert tree.traffic(4000, n) < there.serial < tree.traffic(4000, n) + 4000


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_master_is_the_bottleneck(n: int) -> None:
    rounds = messages("master_worker", "all_reduce", 1000, n)
    assert sent(rounds, n) == received(rounds, n) == [(n - 1) * 4000] + [4000] * (n - 1)
    assert sent(rounds, n)[0] == master_worker.traffic(4000, n)
    assert len(rounds) == 2 * (n - 1)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [0, 1, 7, 1000, 65537])
def test_balanced_fusion_is_balanced(n: int, size: int) -> None:
    rounds = messages("balanced_fusion", "all_reduce", size, n)
    assert len(set(sent(rounds, n))) == len(set(received(rounds, n))) == 1
    assert sent(rounds, n)[0] == 2 * (n - 1) * -(-size // n) * 4


@pytest.mark.parametrize("n", [*range(2, 18), 31, 32, 33, 40])
def test_double_tree_sends_one_message_a_round_and_twice_the_data(n: int) -> None:
    rounds = messages("double_tree", "all_reduce", 1000, n)
    for messages_ in rounds:
        assert len({message.source for message in messages_}) == len(messages_)
        assert len({message.target for message in messages_}) == len(messages_)
        assert len({message.call for message in messages_}) == 1
    assert max(sent(rounds, n)) <= 2 * 4000
    assert len(rounds) <= 2 * 2 * math.ceil(math.log2(n))


@pytest.mark.slow
@pytest.mark.parametrize("n", range(2, 41))
def test_double_tree_everywhere(n: int) -> None:
    test_double_tree_sends_one_message_a_round_and_twice_the_data(n)
    rounds = messages("double_tree", "all_reduce", 1 << 18, n)
    assert max(sent(rounds, n)) <= 2 << 20
    assert counted(rounds, n) == stated("double_tree", "all_reduce", 1 << 18, 4, n)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2), (3, 2), (2, 3)], ids=str)
def test_two_level_sends_little_between_neighbourhoods(sizes: tuple[int, int]) -> None:
    (outer, inner), size = sizes, 12000
    rounds = messages("two_level", "all_reduce", size, outer, inner)
    far = [tuple(m for m in messages if m.source // inner != m.target // inner) for messages in rounds]
    assert sent(far, outer * inner) == [2 * (outer - 1) * 4 * size // (outer * inner)] * outer * inner
    assert not any(has_swap(messages) for messages in far)
    flat = messages("ring", "all_reduce", size, outer, inner)
    between = [tuple(m for m in messages if m.source // inner != m.target // inner) for messages in flat]
    assert max(sent(between, outer * inner)) > max(sent(far, outer * inner))
    assert not any(map(has_swap, flat))


@pytest.mark.parametrize("size", SIZES)
def test_devices_take_turns_on_a_link_that_they_share(size: int) -> None:
    """In the four rounds between neighbourhoods one device of each sends to the other side, never both, and the other
    hands its neighbour something."""
    link = make_link("200mbit")
    check("two_level", "all_reduce", size, 2, 2, link=link)
    rounds = messages("two_level", "all_reduce", size, 2, 2, link=link)
    far = [[m for m in each if m.source // 2 != m.target // 2] for each in rounds]
    assert [{m.source % 2 for m in each} for each in far] == [set(), {0}, {1}, {0}, {1}, set()]
    assert [len(each) for each in rounds] == [4] * 6
    assert not any(has_swap(each) for each, between in zip(rounds, far, strict=True) if between)
    alone = messages("two_level", "all_reduce", size, 2, 2)  # each device has a link of its own
    assert sent(alone, 4) == sent(rounds, 4) and len(alone) == 4


def test_exchanges_between_pairs_are_in_the_costs() -> None:
    """What runs at half speed over gloo: counted in the permutations, and flagged."""
    flags = {name: [stated(name, "all_reduce", 9000, 4, n).swap for n in (2, 3, 4, 5, 8)] for name in NAMES}
    for name in NAMES:
        for n, flag in zip((2, 3, 4, 5, 8), flags[name], strict=True):
            inner = Group.of(n).inner if name == "two_level" and n in (4, 8) else None
            assert counted(messages(name, "all_reduce", 9000, n), n, inner=inner).swap == flag, (name, n)
    assert flags["ring"] == flags["bidirectional_ring"] == flags["double_tree"] == [True, False, False, False, False]
    assert flags["halving_doubling"] == [True, False, True, False, True]
    assert flags["balanced_fusion"] == [True, False, True, False, False]
    assert flags["ordered"] == [True, False, True, False, True]
    assert not any(flags["tree"]) and not any(flags["master_worker"])


# Formats on the wire.


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "auto"])  # which chooses by the bytes
def test_bf16_on_the_wire_halves_the_bytes(name: str, operation: str) -> None:
    full, half = (counted(messages(name, operation, 1000, 8, wire_dtype=wire), 8) for wire in (None, "bfloat16"))
    assert half == full.scaled(0.5)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", ["ring", "balanced_fusion"])
def test_int8_on_the_wire_is_a_byte_and_the_scales(name: str, n: int) -> None:
    for size in (1, 1000):
        of_parts = n * encoded_bytes(-(-size // n))  # as if the encoded parts were the array
        got = counted(messages(name, "all_reduce", size, n, wire_dtype="int8"), n)
        assert got == stated(name, "all_reduce", of_parts, 1, n)
    size = 3 * n * SCALE_BLOCK
    plain = counted(messages(name, "all_reduce", size, n, dtype=jnp.int8), n)
    for operation, part in (("all_reduce", 1.0), ("reduce_scatter", 0.5)):
        got = counted(messages(name, operation, size, n, wire_dtype="int8"), n)
        assert got.busiest == part * plain.busiest * (SCALE_BLOCK + 4) / SCALE_BLOCK
    with_feedback = rounds_of(
        lambda x, lost: collectives.all_reduce_with_feedback(x, lost, "data", algorithm=name),
        *[jax.ShapeDtypeStruct((size,), jnp.float32)] * 2,
        mesh={"data": n},
    )
    assert with_feedback == messages(name, "all_reduce", size, n, wire_dtype="int8")


# Time.


@pytest.mark.parametrize("link", ["local", "infiniband", "200mbit"])
def test_auto_runs_and_costs_what_it_chooses(link: str) -> None:
    for size in (10, 1000, 1 << 20):
        for n in (3, 4, 8):
            got = counted(messages("auto", "all_reduce", size, n, link=make_link(link)), n)
            want = stated("auto", "all_reduce", size, 4, n, link=make_link(link))
            assert (got.rounds, got.busiest, got.serial) == (want.rounds, want.busiest, want.serial)
    group = Group.of(8)
    for operation in OPERATIONS:
        chosen = get_algorithm(choose(operation, 800, 4, group))
        assert get_algorithm("auto").cost(operation, 800, group) == chosen.cost(operation, 800, group)


def test_seconds_by_hand() -> None:
    link = Link(latency_s=1e-3, bytes_per_s=1e6, swap_factor=2.0)
    ring4 = collectives.cost("all_reduce", 4000, 4)
    assert (ring4.rounds, ring4.serial) == (6, 6000)
    assert ring4.seconds(link) == pytest.approx(6 * 1e-3 + 6000 / 1e6, rel=1e-12)
    swapped = collectives.cost("all_reduce", 4000, 4, algorithm="halving_doubling")
    assert swapped.seconds(link) == pytest.approx(4 * 1e-3 + 2 * 6000 / 1e6, rel=1e-12)
    # Two neighbourhoods of four: 2 x 3 rounds of N/4 inside, 2 rounds of N/8 between them.
    levels = collectives.cost("all_reduce", 8000, 2, 4, algorithm="two_level")
    assert levels == Cost(8, 14000, 8 * 14000, 14000, False, 6, 12000)
    fast = Link(latency_s=1e-6, bytes_per_s=1e9)
    assert levels.seconds(link, fast) == pytest.approx(2e-3 + 2000 / 1e6 + 6e-6 + 12000 / 1e9, rel=1e-12)
    assert levels.seconds(link) == pytest.approx(8e-3 + 14000 / 1e6, rel=1e-12)


def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    off_by_one = balanced_fusion.balanced_fusion._replace(
        cost=lambda operation, size, group: ring.cost(operation, size + 8, group)
    )
    monkeypatch.setattr(balanced_fusion, "balanced_fusion", off_by_one)
    with pytest.raises(AssertionError):
        check("balanced_fusion", "all_reduce", 1000, 8)
