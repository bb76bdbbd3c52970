"""Collectives among groups of ranks: side by side, interleaved, turned round, and with ranks that are in no group."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_cases import (
    NAMES,
    OPERATIONS,
    Call,
    Groups,
    check_exact,
    draw,
    everyday_calls,
    has,
    on_every_device,
    values,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from levels import levels, others_slow

from jaxdist.collectives import (
    all_reduce,
    all_reduce_with_feedback,
    broadcast,
    reduce_scatter,
    send_recv,
    stacked_specs,
)
from jaxdist.errors import UserError

INTERLEAVED: Groups = ((0, 2), (1, 3))
HALVES: Groups = ((0, 1, 2), (3, 4, 5))
WITHOUT_SOME: Groups = ((4, 1, 3), (7, 0, 6))  # ranks 2 and 5 are in none, and the order is none
EVERYDAY = [(4, INTERLEAVED), (6, HALVES), (8, WITHOUT_SOME)]
SLOW = [
    (4, ((0, 1), (2, 3))),
    (4, ((0, 3), (1, 2))),
    (4, ((3, 2, 1, 0),)),
    (6, ((0, 1), (2, 3), (4, 5))),
    (6, ((0, 2, 4), (5, 3, 1))),
    (6, ((5, 4, 3, 2, 1, 0),)),
    (8, ((0, 1), (2, 3), (4, 5), (6, 7))),
    (8, ((0, 1, 2, 3), (4, 5, 6, 7))),
    (8, ((0, 2, 4, 6), (7, 5, 3, 1))),
    (8, ((6, 1, 4, 3, 2, 5, 0),)),
    (8, ((3,), (5,))),
    (4, ((1, 2),)),
]


def complete(devices: int, groups: Groups) -> bool:
    return sum(map(len, groups)) == devices


def cases(chosen: list[tuple[int, Groups]]) -> list[Any]:
    """With every algorithm, but native only where it can."""
    return [(name, *case) for case in chosen for name in NAMES if name != "native" or complete(*case)]


@pytest.mark.parametrize(("name", "devices", "groups"), levels(cases(EVERYDAY), everyday=11, slow=2), ids=str)
def test_every_operation_is_exact_in_groups(name: str, devices: int, groups: Groups) -> None:
    check_exact(everyday_calls(name, len(groups[0]), devices=devices), algorithm=name, groups=groups, data=devices)


@pytest.mark.parametrize(("name", "devices", "groups"), levels(cases(SLOW), slow=6), ids=str)
def test_every_operation_is_exact_in_more_groups(name: str, devices: int, groups: Groups) -> None:
    check_exact(everyday_calls(name, len(groups[0]), devices=devices), algorithm=name, groups=groups, data=devices)


@pytest.mark.parametrize("name", others_slow(NAMES, *NAMES[::3]))
def test_a_reversed_group_counts_backwards(name: str) -> None:
    """Sums do not depend on the order, but what is cut or gathered does."""
    choice, groups = random.Random(name), ((3, 2, 1, 0),)
    moves = [operation for operation in OPERATIONS if operation != "all_reduce" and has(name, operation)]
    calls = [draw(choice, operation, "sum", 7, 4, devices=4) for operation in moves]
    check_exact(calls, algorithm=name, groups=groups, data=2, fsdp=2)


@pytest.mark.parametrize(("devices", "groups"), EVERYDAY, ids=str)
def test_send_recv_in_groups(devices: int, groups: Groups) -> None:
    x = values((devices, 5), jnp.bfloat16, 0)
    pairs = [1, -1, [(0, 1)], []]
    check_exact([Call("send_recv", x, {"pairs": each}) for each in pairs], algorithm="", groups=groups, data=devices)


def test_native_in_groups_that_leave_ranks_out_is_refused() -> None:
    for operation in (all_reduce, reduce_scatter):
        with pytest.raises(UserError, match="groups=.*native needs groups that cover.*use algorithm='ring'") as error:
            on_every_device(lambda x, f=operation: f(x, "data", groups=((0, 1),)), np.zeros((4, 2)), data=4)
        assert "\n" not in str(error.value)


def test_groups_across_two_axes_and_with_int8() -> None:
    groups = ((0, 2, 4), (1, 3, 5))
    x = np.random.default_rng(0).standard_normal((6, 100)).astype(np.float32)

    def function(x: Any) -> Any:
        result, lost = all_reduce_with_feedback(x, jnp.zeros_like(x), ("data", "fsdp"), groups=groups)
        return result, lost

    result, lost = on_every_device(function, x, data=3, fsdp=2)
    for group in groups:
        ranks = list(group)
        assert len({result[rank].tobytes() for rank in ranks}) == 1
        np.testing.assert_allclose(result[ranks[0]] + lost[ranks].sum(0), x[ranks].sum(0), atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((), "at least one group"),
        (((0, 1), (2,)), "all of the same size"),
        ([0, 1], "give at least one group, a list of ranks"),
        (2, "give at least one group, a list of ranks"),
        (["01", "23"], "give at least one group, a list of ranks"),
        (((),), "at least one group"),
        (((0, 1), (1, 2)), "each rank from 0 to 3 may be in one group, once"),
        (((0, 0),), "each rank from 0 to 3 may be in one group, once"),
        (((0, 4),), "each rank from 0 to 3 may be in one group, once"),
        (((-1, 0),), "each rank from 0 to 3 may be in one group, once"),
    ],
    ids=str,
)
def test_wrong_groups_are_named_in_one_line(groups: Any, message: str) -> None:
    for function in (all_reduce, lambda x, axis, **kind: send_recv(x, axis, 1, **kind)):
        with pytest.raises(UserError, match=f"groups=.*{message}") as error:
            on_every_device(lambda x, f=function: f(x, "data", groups=groups), np.zeros((4, 2)), data=4)
        assert "\n" not in str(error.value)


def test_the_ranks_of_a_group_divide_what_it_cuts() -> None:
    with pytest.raises(UserError, match="not divisible by groups of 2"):
        on_every_device(lambda x: reduce_scatter(x, "data", groups=INTERLEAVED), np.zeros((4, 3)), data=4)
    with pytest.raises(UserError, match="ranks 0 to 1 of the group"):
        on_every_device(lambda x: broadcast(x, "data", root=2, groups=INTERLEAVED), np.zeros((4, 3)), data=4)


def test_specs_of_stacked_values_need_the_axes_of_jaxdist() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with pytest.raises(UserError, match=r"^mesh: Auto axes x; allowed: what jaxdist.make_mesh makes"):
        stacked_specs(P(), mesh)
