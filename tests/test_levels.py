"""Which cases run everyday, which are slow, and that CI's shares of the slow ones are all of them."""

import itertools
from collections import Counter
from typing import Any

import pytest
from levels import in_share, levels, others_slow

CASES = [*itertools.product("abc", (1, 2), (True, False))]


def level(param: Any) -> str:
    return param.marks[0].name if param.marks else "everyday"


def test_every_case_has_a_level_and_none_is_lost() -> None:
    params = levels(CASES, everyday=5, slow=4, common=2)
    assert [param.values for param in params] == CASES
    assert Counter(map(level, params)) == {"everyday": 3, "slow": 2, "exhaustive": 7}
    slow = [param.values for param in params if level(param) != "exhaustive"]
    assert all({case[i] for case in slow} == {case[i] for case in CASES} for i in range(3)), "a value that never runs"


def test_the_named_cases_run_everyday() -> None:
    params = others_slow(["ddp", "zero1", "zero3"], "zero1")
    assert [(param.values, level(param)) for param in params] == [
        (("ddp",), "slow"),
        (("zero1",), "everyday"),
        (("zero3",), "slow"),
    ]
    with pytest.raises(AssertionError, match="is none of them"):
        others_slow(["ddp"], "zero4")


@pytest.mark.parametrize("shares", [1, 4, 6])
def test_shares_together_are_all_slow_tests_once(shares: int) -> None:
    names = [f"tests/nn/test_a.py::test_b[{i}]" for i in range(600)]
    found = Counter(name for i in range(shares) for name in names if in_share(name, f"{i + 1}/{shares}"))
    assert found == dict.fromkeys(names, 1)
    sizes = [sum(in_share(name, f"{i + 1}/{shares}") for name in names) for i in range(shares)]
    assert max(sizes) < 1.3 * len(names) / shares


@pytest.mark.parametrize("share", ["0/4", "5/4"])
def test_a_share_that_is_not_there(share: str) -> None:
    with pytest.raises(AssertionError):
        in_share("a", share)
