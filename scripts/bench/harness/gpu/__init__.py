"""The parts of scripts/bench/gpu_suite.py: functions (tiny) that yield what they have found so far, as JSON."""

from collections.abc import Callable, Iterator
from typing import Any

from harness.gpu.agreement import agree, kernels, same_bits, tiles
from harness.gpu.rates import rates
from harness.gpu.runs import facts, larger, profile, race, runs, steps

PARTS: dict[str, Callable[[bool], Iterator[Any]]] = {
    part.__name__: part for part in (facts, runs, agree, kernels, tiles, same_bits, rates, steps, larger, race, profile)
}
