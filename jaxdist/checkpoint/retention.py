"""The choice of checkpoints that stay: the newest, every n-th step, the best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FEWEST = 2  # of the newest, even if the user asks for fewer: one may be damaged


@dataclass(frozen=True)
class Retention:
    """A preservation policy of orbax."""

    keep: int  # how many of the newest checkpoints stay
    keep_every: int = 0  # steps divisible by it stay for good; 0 for none
    keep_best: int = 0  # how many with the lowest evaluation loss stay
    losses: dict[int, float] = field(default_factory=dict)  # the evaluation losses by step. Saves fill it in

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether each of these checkpoints stays. They come in the order of steps."""
        steps = [info.step for info in checkpoints]
        kept = self.kept(steps)
        return [step in kept for step in steps]

    def kept(self, steps: Sequence[int]) -> set[int]:
        """The steps that stay."""
        kept = set(sorted(steps)[-max(self.keep, FEWEST) :])
        if self.keep_every:
            kept |= {step for step in steps if step % self.keep_every == 0}
        judged = [step for step in steps if math.isfinite(self.losses.get(step, math.nan))]
        return kept | set(sorted(judged, key=lambda step: (self.losses[step], -step))[: self.keep_best])
