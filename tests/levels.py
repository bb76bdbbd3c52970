"""How often the cases of a parametrised test run: everyday, in slow runs (CI's), or in exhaustive ones."""

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest


def levels(cases: Iterable[Any], *, everyday: int = 0, slow: int = 1, common: int | None = None) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: every so manieth case runs everyday (0: none), every so manieth of the
    others in slow runs, and with them the first that holds a value which none of these does (unless fewer than `common`
    cases hold it, `slow` if left out); the rest in exhaustive ones."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    values = [{(i, str(value)) for i, value in enumerate(case)} for case in cases]
    common = {
        value for value, count in Counter(value for own in values for value in own).items() if count >= (common or slow)
    }
    often = {i for i in range(len(cases)) if everyday and i % everyday == 0}
    chosen = often | {i for i in range(len(cases)) if i % slow == 0}
    seen = {value for i in chosen for value in values[i]}
    params = []
    for i, case in enumerate(cases):
        if i not in chosen and values[i] & common - seen:
            chosen.add(i)
            seen |= values[i]
        marks = [] if i in often else [pytest.mark.slow if i in chosen else pytest.mark.exhaustive]
        params.append(pytest.param(*((case,) if hasattr(case, "_fields") else case), marks=marks))
    return params


def others_slow(cases: Iterable[Any], *everyday: Any) -> list[Any]:
    """Parameters of which these run everyday, and the others in slow runs."""
    cases = list(cases)
    assert all(case in cases for case in everyday), "a case that is run everyday is none of them"
    params = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [[] if case in everyday else [pytest.mark.slow] for case in cases]
    return [pytest.param(*each, marks=own) for each, own in zip(params, marks, strict=True)]


def in_share(name: str, share: str) -> bool:
    """Whether a slow test is in a share of them, "2/6" for the second sixth. By its name: others do not move it."""
    number, shares = map(int, share.split("/"))
    assert 1 <= number <= shares, share
    return zlib.crc32(name.encode()) % shares == number - 1
