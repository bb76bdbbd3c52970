"""Where the time of a compiled step goes, by source lines."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jaxdist.plan.compiled.replay import KernelTime
from jaxdist.plan.traced.origin import phase_of

_SECTION = re.compile(r"^([A-Z]\w+)$")  # FileNames, FunctionNames, FileLocations, StackFrames
_FILE = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
_STACK_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)")
_HERE = Path(__file__).parents[3]


class TimeSink(NamedTuple):
    """The kernels of one source line, of one kind, in one phase of a step.

    line: "jaxdist/nn/mlp.py:27"; "" where the program does not say
    kind: "product", "attention" or "memory", as of `KernelTime`
    phase: "forward", "backward", "recompute" or "once a step"
    calls, seconds, nbytes: of a step
    """

    line: str
    kind: str
    phase: str
    calls: int
    seconds: float
    nbytes: float


def sinks(kernels: Iterable[KernelTime], text: str) -> list[TimeSink]:
    """The kernels of a replay by source lines, those that take longest first. text: `compiled.as_text()`.

    XLA fuses operations of several lines into one kernel, which counts for the line of its result.
    """
    lines = source_lines(text)
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for each in kernels:
        total = sums[lines.get(each.frame, ""), each.kind, phase_of(each.name)]
        for i, value in enumerate((each.calls, each.seconds, each.nbytes)):
            total[i] += value
    found = [TimeSink(*key, round(calls), seconds, nbytes) for key, (calls, seconds, nbytes) in sums.items()]
    return sorted(found, key=lambda each: -each.seconds)


def source_lines(text: str) -> dict[int, str]:
    """{`stack_frame_id`: "file:line"} of the tables at the top of an HLO text (jax 0.12); {} where there are none."""
    files, locations, frames = dict[str, str](), dict[str, str](), dict[int, str]()
    section = ""
    for line in text.splitlines():
        if (head := _SECTION.match(line)) is not None:
            section = head[1]
        elif section == "FileNames" and (found := _FILE.match(line)) is not None:
            files[found[1]] = _short(found[2])
        elif section == "FileLocations" and (found := _LOCATION.match(line)) is not None:
            locations[found[1]] = f"{files.get(found[2], '')}:{found[3]}"
        elif section == "StackFrames" and (found := _STACK_FRAME.match(line)) is not None:
            frames[int(found[1])] = locations.get(found[2], "")
        elif section == "StackFrames" and line.strip():
            break  # the computations
    return frames


def _short(path: str) -> str:
    """A path without the folder that packages are installed in."""
    packages = path.rpartition("/site-packages/")[2]
    return packages if packages != path else path.removeprefix(f"{_HERE}/")
