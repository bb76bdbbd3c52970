"""The choice of checkpoints that stay: the newest, every n-th step, the best. And the removal of the others."""

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxdist.checkpoint.checksums import TEMPORARY
from jaxdist.errors import UserError
from jaxdist.files.regular import open_new

PROBE = "probe"  # name of a folder that is made to see whether one can be
FEWEST = 2  # of the newest, even if the user asks for fewer: one may be damaged


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of saves, on process 0. No save may be under way; what cannot go now goes later."""
    for path in folder.glob(f"*{TEMPORARY}*") if jax.process_index() == 0 else ():
        if re.fullmatch(rf"([0-9]+|{PROBE}){re.escape(TEMPORARY)}(-[a-z0-9]+)?", path.name):
            shutil.rmtree(path, ignore_errors=True)


def no_room(folder: Path) -> OSError | None:
    """Why process 0 cannot write into a folder, as far as a small file tells; None on the others."""
    if jax.process_index() != 0:
        return None
    probe = folder / f"{PROBE}{TEMPORARY}"
    try:
        probe.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_new(probe / "file"), "wb") as file:
            file.write(bytes(4096))
    except OSError as error:
        return error
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    return None


def best_first(losses: Mapping[int, float]) -> list[int]:
    """Steps by their evaluation loss, the least first; of equal ones the later. Those without one are left out."""
    judged = [step for step, loss in losses.items() if math.isfinite(loss)]
    return sorted(judged, key=lambda step: (losses[step], -step))


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    keep: int  # how many of the newest checkpoints stay
    keep_every: int = 0  # steps divisible by it stay for good; 0 for none
    keep_best: int = 0  # how many with the lowest evaluation loss stay
    losses: dict[int, float] = field(default_factory=dict)  # the evaluation losses by step. Saves fill it in

    def __post_init__(self) -> None:
        for name, least in (("keep", 1), ("keep_every", 0), ("keep_best", 0)):
            if type(value := getattr(self, name)) is bool or not hasattr(value, "__index__") or value < least:
                raise UserError(f"{name}: {value!r:.60}; allowed: an integer >= {least}")

    def remove_old(self, folder: Path) -> list[OSError]:
        """Remove the checkpoints of a run that do not stay. Returns why some could not be removed.

        Each is renamed before it is removed, so that half of one never bears the name of a step. What a kill leaves of
        it goes at the next start, with the other temporary folders.
        """
        try:
            names = [path.name for path in folder.iterdir()]
        except OSError as error:
            return [error]
        steps = [int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)]
        failures = []
        for step in sorted(set(steps) - self.kept(steps)):
            going = folder / f"{step}{TEMPORARY}-removed"
            try:
                (folder / str(step)).rename(going)
                shutil.rmtree(going)
            except OSError as error:
                failures.append(error)
        return failures

    def kept(self, steps: Sequence[int]) -> set[int]:
        """The steps that stay."""
        kept = set(sorted(steps)[-max(self.keep, FEWEST) :])
        if self.keep_every:
            kept |= {step for step in steps if step % self.keep_every == 0}
        return kept | set(best_first({step: self.losses.get(step, math.nan) for step in steps})[: self.keep_best])
