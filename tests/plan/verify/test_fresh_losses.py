"""Losses of somebody who did not know the rules of `jaxdist verify`: 10 wrong ones and 10 right ones that look wrong.

They were written before the checker saw them (2026-11-27), and it was not changed for them (docs/verify.md).
"""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import jaxdist
from jaxdist.plan.verify.findings import Verification

HERE = Path(__file__).parent
WRONG = {  # the cause that is found first; lines that may be named beside the one in the file's second comment
    "wrong_01": ("order dependence", {32}),  # the scan that the shifted rows go into
    "wrong_02": ("batch statistics", {19, 20, 21}),  # sums of the same helper
    "wrong_03": ("order dependence", set()),
    "wrong_04": ("one key for all samples", set()),
    "wrong_05": ("penalty in each call", set()),
    "wrong_06": ("batch statistics", {23, 25, 26}),
    "wrong_07": ("randomness without keys", {11, 18, 19}),
    "wrong_08": ("batch statistics", set()),
    "wrong_09": ("sort or top-k over the batch", set()),
    "wrong_10": ("batch statistics", set()),
}
RIGHT = sorted(path.stem for path in (HERE / "fresh_right").glob("right_*.py"))


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verified(path: Path) -> Verification:
    module = loaded(path)
    return jaxdist.verify(module.loss_fn, *module.example(), jaxdist.make_mesh(data=2, fsdp=2), strategy="zero3")


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_line(name: str) -> None:
    path, (cause, near) = HERE / "fresh_wrong" / f"{name}.py", WRONG[name]
    found = verified(path)
    fault = int(re.findall(r"# fault at line (\d+):", path.read_text(encoding="utf-8"))[0])
    first = found.findings[0]
    assert first.cause == cause, str(found)
    assert {int(where.rpartition(":")[2]) for where in first.where} <= {fault, *near}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_what_is_right(name: str) -> None:
    found = verified(HERE / "fresh_right" / f"{name}.py")
    assert found.clean, str(found)


def test_there_are_ten_of_each() -> None:
    assert len(WRONG) == len(RIGHT) == 10
