"""Checks the answer to a lesson's exercise: python docs/course/check.py 4 322.5

No answer stands here: each is calculated by the functions of its lesson. Only these are loaded; no lesson is run.
"""

import argparse
import ast
import math
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
Rules = dict[str, Any]


class Exercise(NamedTuple):
    """An exercise: its answer, what a likely mistake gives (a hint for each), and a hint for all others."""

    answer: Callable[[Rules], Any]
    slips: dict[str, Callable[[Rules], Any]]
    hint: str


LAYOUTS = {"ddp": (70, 2.0), "zero1": (52, 2.0), "zero2": (44, 4.5), "zero3": (21, 6.0), "tensor": (38, 9.0)}
GRADIENTS_MB, HUGE_BYTES, BLOCK_MIB = 172, 632e6 * 2, 8 * 2048 * 4096 * 2 / 2**20
OVERFLOWS = [False] * 3 + [True] * 4000


def fewest_microbatches(rules: Rules) -> int:
    """The smallest m with a bubble of at most a tenth on 4 stages."""
    return next(m for m in range(1, 1000) if rules["bubble"](4, m) <= 0.1 + 1e-12)


EXERCISES = {
    1: Exercise(
        lambda rules: rules["state_bytes"](7e9) / 1e9,
        {
            "these are the parameters alone": lambda rules: 7 * 4,
            "gradients are missing, or one of the two numbers that Adam remembers": lambda rules: 7 * 12,
        },
        "how many bytes has each parameter, with its gradient and its two memories?",
    ),
    2: Exercise(
        lambda rules: rules["group"](0, 3),
        {"this is the group along tensor": lambda rules: rules["group"](1, 3)},
        "look at the printed mesh: along data is a column. Give four numbers",
    ),
    3: Exercise(
        lambda rules: rules["master_receives"](8, 86 * 2),
        {
            "the master sends nothing to itself": lambda rules: 8 * 86 * 2,
            "half precision has 2 bytes a number": lambda rules: rules["master_receives"](8, 86 * 4),
            "this is from one device; there are 7 others": lambda rules: 86 * 2,
        },
        "from how many devices does it receive all gradients, and how large are these?",
    ),
    4: Exercise(
        lambda rules: rules["ring_bytes"](16, GRADIENTS_MB),
        {
            "this is the reduce_scatter; an all_gather follows": lambda rules: (
                rules["ring_bytes"](16, GRADIENTS_MB) / 2
            ),
            "close: this is the limit for very many devices": lambda rules: 2 * GRADIENTS_MB,
            "this is what a master receives": lambda rules: 15 * GRADIENTS_MB,
        },
        "in how many rounds does a device send a chunk, and how large is a chunk?",
    ),
    5: Exercise(
        lambda rules: rules["scale_after"](65536.0, OVERFLOWS),
        {
            "3 overflows halve it three times": lambda rules: rules["scale_after"](65536.0, OVERFLOWS[2:]),
            "it doubles again after 2,000 good steps": lambda rules: rules["scale_after"](65536.0, OVERFLOWS[:3]),
            "4,000 good steps double it twice": lambda rules: rules["scale_after"](65536.0, OVERFLOWS[:2003]),
        },
        "halve it for each overflow, double it for each 2,000 good steps",
    ),
    6: Exercise(
        lambda rules: 7 * rules["bytes_per_parameter"](2, 8),
        {
            f"this is ZeRO-{stage}": lambda rules, stage=stage: 7 * rules["bytes_per_parameter"](stage, 8)
            for stage in (0, 1, 3)
        },
        "which of parameters (4 bytes), gradients (4) and optimizer state (8) are divided by 8?",
    ),
    7: Exercise(
        lambda rules: rules["tensor_bytes"](BLOCK_MIB, 4, 4),
        {
            "a transformer block has two pairs of layers": lambda rules: rules["tensor_bytes"](BLOCK_MIB, 4, 2),
            "a ring sends less than the array for each all_reduce, twice": lambda rules: 4 * BLOCK_MIB,
            "this is one all_reduce": lambda rules: rules["tensor_bytes"](BLOCK_MIB, 4, 1),
        },
        "how large are the activations, how many psums are there, and what does a ring of 4 send for each?",
    ),
    8: Exercise(
        fewest_microbatches,
        {"with so many it is just above 10 %": lambda rules: fewest_microbatches(rules) - 1},
        "solve 3 / (m + 3) = 0.1",
    ),
    9: Exercise(
        lambda rules: rules["ring_seconds"](HUGE_BYTES, 4, 25),
        {
            "8 bits are one byte": lambda rules: rules["ring_seconds"](HUGE_BYTES, 4, 25 * 8),
            "this is the limit of many hosts": lambda rules: 2 * HUGE_BYTES / 3.125e9,
            "this is the time of sending the array once": lambda rules: HUGE_BYTES / 3.125e9,
        },
        "bytes sent by a ring of 4, divided by bytes a second; 25 Gbit/s are 3.125 GB/s",
    ),
    10: Exercise(
        lambda rules: rules["cheapest"](LAYOUTS, 48),
        {
            "it does not fit: its peak is above 48": lambda rules: min(LAYOUTS, key=lambda name: LAYOUTS[name][1]),
            "it fits, but sends more than another that fits": lambda rules: min(LAYOUTS, key=LAYOUTS.__getitem__),
        },
        "strike out what does not fit, then take the one that sends least. Give its name",
    ),
}


def lesson_file(number: int) -> Path:
    """The file of a lesson."""
    (path,) = HERE.glob(f"{number:02}_*.py")
    return path


def rules_of(number: int) -> Rules:
    """The functions of a lesson by name. They are defined; nothing of the lesson is run."""
    source = lesson_file(number).read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rules.py"
        copy.write_text("\n\n".join(map(ast.unparse, functions)), encoding="utf-8")
        return runpy.run_path(str(copy), {"math": math, "np": np})


def same(given: str, value: Any) -> bool:
    """Whether a text gives this value: a name, a number (to 1 %; whole numbers exactly), or numbers in any order."""
    if isinstance(value, str):
        return given.strip().lower() == value
    try:
        numbers = [float(each) for each in re.findall(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", _plain(given, value))]
    except ValueError:
        return False
    if isinstance(value, list):
        return sorted(numbers) == sorted(map(float, value))
    near = 0.0 if isinstance(value, int) else 0.01
    return len(numbers) == 1 and math.isclose(numbers[0], value, rel_tol=near)


def _plain(given: str, value: Any) -> str:
    return given.lower().replace(",", " " if isinstance(value, list) else "")


def verdict(number: int, given: str) -> tuple[bool, str]:
    """Whether an answer is right, and what to say."""
    exercise, rules = EXERCISES[number], rules_of(number)
    if same(given, exercise.answer(rules)):
        return True, "right"
    for hint, slip in exercise.slips.items():
        if same(given, slip(rules)):
            return False, f"not yet: {hint}"
    return False, f"not yet: {exercise.hint}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the verdict; 0 if the answer is right, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lesson", type=int, choices=sorted(EXERCISES), help="the number of the lesson")
    parser.add_argument("answer", nargs="+", help="a number, several numbers, or a name, as the exercise asks")
    arguments = parser.parse_args(argv)
    right, text = verdict(arguments.lesson, " ".join(arguments.answer))
    print(text)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
