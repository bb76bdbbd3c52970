"""Which checkpoints stay: the newest, every so manieth, the best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FEWEST = 2  # newest ones, whatever is asked for: one may be damaged


@dataclass(frozen=True)
class Retention:
    """A preservation policy of orbax. keep: of the newest; keep_every: 0, or steps divisible by it stay for good;
    keep_best: of the lowest evaluation loss, among the steps of `losses`, which saves fill in."""

    keep: int
    keep_every: int = 0
    keep_best: int = 0
    losses: dict[int, float] = field(default_factory=dict)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether each of these checkpoints, in the order of steps, stays."""
        steps = [info.step for info in checkpoints]
        kept = self.kept(steps)
        return [step in kept for step in steps]

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Those of `steps` that stay."""
        kept = set(sorted(steps)[-max(self.keep, FEWEST) :])
        if self.keep_every:
            kept |= {step for step in steps if step % self.keep_every == 0}
        judged = [step for step in steps if math.isfinite(self.losses.get(step, math.nan))]
        return kept | set(sorted(judged, key=lambda step: (self.losses[step], -step))[: self.keep_best])
