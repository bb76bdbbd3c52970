"""The race: contenders take turns on one device, in one process, and must compute the same losses."""

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from harness.task import OtherModelError, Size, Task, flops_per_token, parameters
from jaxdist import registry
from jaxdist.errors import UserError
from jaxdist.plan.compiled.hardware import Gpu
from jaxdist.trainer.failures.out_of_memory import is_out_of_memory

WARM = 3  # bursts that are not counted: compiling, caches, clocks
FIRST = 2  # steps of the first burst, by which the peak is read: PyTorch makes its optimizer's state at the end of one
# Relative; (first loss, last loss, first norm of the gradient). bf16 rounds each value to 8 bits; contenders round in
# other places, and the difference grows with the steps.
TOLERANCES = {"fp32": (1e-5, 1e-3, 1e-3), "bf16": (2e-3, 2e-2, 5e-2)}


BESIDE = " beside the others"


class Result(NamedTuple):
    """seconds: of a step, one a burst. losses, norms: of each step, from the first. setup_s: until the first steps were
    done, compiling included. failed: why there is nothing else, or ""."""

    name: str
    seconds: list[float]
    losses: list[float]
    norms: list[float]
    about: dict[str, Any]
    setup_s: float
    predicted_bytes: int | None
    peak_bytes: int | None
    failed: str = ""


class _Racer:
    """A contender under way."""

    def __init__(self, name: str, task: Task) -> None:
        begun = time.perf_counter()
        make = registry.load("harness.contenders", name, key="--contenders")
        self.name, self.contender, self.done = name, make(task), 0
        self.seconds: list[float] = []
        self.outcomes: list[tuple[Any, Any]] = []
        self.burst(FIRST)
        self.peak, self.setup_s = self.contender.peak(), time.perf_counter() - begun

    def burst(self, steps: int) -> None:
        """So many steps, without waiting in between; the seconds of one are kept."""
        begun = time.perf_counter()
        for _ in range(steps):
            self.outcomes.append(self.contender.step(self.done))
            self.done += 1
        self.contender.wait()
        self.seconds.append((time.perf_counter() - begun) / steps)

    def result(self) -> Result:
        """So far, without the warm-up."""
        losses, norms = ([float(one) for one in column] for column in zip(*self.outcomes, strict=True))
        contender = self.contender
        return Result(
            self.name, self.seconds[WARM:], losses, norms, contender.about, self.setup_s, contender.predicted, self.peak
        )


def is_failure(why: str) -> bool:
    """Whether this is why a contender has failed, and not why it could not be measured here."""
    return bool(why) and not why.startswith(("not installed", "left out", "out of memory"))


def _failed(name: str, why: str) -> Result:
    return Result(name, [], [], [], {}, 0.0, None, None, why)


def race(task: Task, names: Sequence[str], **options: Any) -> tuple[list[Result], dict[str, float]]:
    """(all of them, of which one has no seconds if it failed; `ratios`). Those that found no memory beside the others
    run again, with the first alone. options: as `heat` has them."""
    results = heat(task, names, **options)
    found = ratios(results)
    for i, result in enumerate(results):
        if result.failed.endswith(BESIDE):
            release()
            first, again = heat(task, [results[0].name, result.name], **options)
            if not (first.failed or again.failed):
                results[i], found = again, found | ratios([first, again])
    return results, found


def release() -> None:
    """The memory of contenders that are gone. PyTorch keeps compiled functions, with what they hold, and freed memory;
    jax cannot have either."""
    torch = sys.modules.get("torch")  # where a contender has imported it
    if torch is not None:
        torch.compiler.reset()
    gc.collect()
    if torch is not None:
        torch.cuda.empty_cache()


def heat(
    task: Task, names: Sequence[str], *, steps: int, burst: int, left_s: Callable[[], float], say: Callable[[str], None]
) -> list[Result]:
    """In turns of `burst` steps, until each has `steps` bursts that count or no time is left: every contender then has
    equally many. One that finds no memory, or is not installed, has failed, and comes last."""
    racers: list[_Racer] = []
    failed: list[Result] = []
    for name in names:
        slowest = max((racer.setup_s for racer in racers), default=0.0)
        if left_s() < slowest:
            failed.append(_failed(name, f"skipped: {left_s():.0f} s left of --limit-s"))
            continue
        try:
            racers.append(_Racer(name, task))
        except ImportError as error:
            failed.append(_failed(name, f"not installed: {error}"))
        except OtherModelError as error:
            failed.append(_failed(name, f"left out: {error}"))
        except Exception as error:  # is in the result, and in the exit status: the others are measured all the same
            beside = BESIDE if racers else ""
            full = is_out_of_memory(error) or "out of memory" in str(error).lower()  # in the words of PyTorch
            why = f"out of memory{beside}" if full else f"{type(error).__name__}: {error}"
            failed.append(_failed(name, why))
        else:
            say(f"{name}: first steps after {racers[-1].setup_s:.0f} s")
    for i in range(WARM - 1 + steps):
        begun = time.perf_counter()
        for racer in _rotated(racers, i):
            racer.burst(burst)
        if i >= WARM and left_s() < 2 * (time.perf_counter() - begun):
            say(f"stopped after {i + 2 - WARM} of {steps} rounds: {left_s():.0f} s left of --limit-s")
            break
    return [racer.result() for racer in racers] + failed


def _rotated(racers: list[_Racer], i: int) -> list[_Racer]:
    """Each goes first in its turn: what one leaves behind (heat, caches) is not always for the same."""
    start = i % max(len(racers), 1)
    return racers[start:] + racers[:start]


def check_equal(results: Sequence[Result], precision: str) -> None:
    """Raise `UserError` where a contender's losses or gradients are not those of the first: it would be another
    computation that was timed."""
    raced = [result for result in results if not result.failed]
    first, last, norm = TOLERANCES[precision]
    for result in raced[1:]:
        steps = min(len(result.losses), len(raced[0].losses)) - 1
        pairs = (
            ("first loss", result.losses[0], raced[0].losses[0], first),
            (f"loss of step {steps}", result.losses[steps], raced[0].losses[steps], last),
            ("first gradient's norm", result.norms[0], raced[0].norms[0], norm),
        )
        for what, got, want, tolerance in pairs:
            if not math.isclose(got, want, rel_tol=tolerance):
                raise UserError(
                    f"{result.name}: {what} {got:.6f}, {raced[0].name} has {want:.6f}; allowed in"
                    f" {precision}: a difference of {tolerance:g}, relative"
                )


def summary(result: Result, size: Size, gpu: Gpu | None) -> dict[str, Any]:
    """What is printed and written of a result. gpu: what MFU is a share of; None: it is left out."""
    if result.failed:
        return {"name": result.name, "failed": result.failed}
    seconds = statistics.median(result.seconds)
    rate = size.tokens / seconds
    return {
        "name": result.name,
        "step_s": seconds,
        "tokens_per_s": rate,
        "mfu": None if gpu is None else rate * flops_per_token(size) / gpu.bf16,
        "bursts": len(result.seconds),
        "fastest_s": min(result.seconds),
        "slowest_s": max(result.seconds),
        "peak_bytes": result.peak_bytes,
        "predicted_bytes": result.predicted_bytes,
        "setup_s": result.setup_s,
        "first_loss": result.losses[0],
        "last_loss": result.losses[-1],
        "steps": len(result.losses),
        "first_norm": result.norms[0],
        **result.about,
    }


def ratios(results: Sequence[Result]) -> dict[str, float]:
    """Speed of the first contender over each other's: the median over rounds of the ratio of two neighbouring
    measurements, which what disturbs both leaves alone."""
    raced = [result for result in results if not result.failed]
    return {
        other.name: statistics.median(b / a for a, b in zip(raced[0].seconds, other.seconds, strict=True))
        for other in raced[1:]
    }


def describe(size: Size) -> dict[str, Any]:
    """Of the task, for the record."""
    model = size.model
    return {
        "parameters": parameters(size),
        "layers": model.layers,
        "width": model.width,
        "heads": model.heads,
        "vocab": model.vocab,
        "rows": size.rows,
        "length": size.length,
        "flops_per_token": flops_per_token(size),
    }
