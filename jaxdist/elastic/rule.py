"""Bounded staleness: which pushes of which workers are applied, together or one by one, and who waits for whom.

This is all that decides the order of an elastic run. It holds no arrays, reads no clock and knows nothing of Ray, so
that 200 runs with workers that are killed, stopped and started are simulated in a second.

A worker pulls the parameters (version v, its base), works, and pushes what it moved them by. A commit applies pushes
and makes one version. The staleness of a push is the number of versions made since its pull: version - base. It is
never more than the bound, because a commit that would make the work of another one staler than that waits for it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

Event = dict[str, Any]


class Push(NamedTuple):
    """What a worker has done: its number (clock) and base, and the mean loss."""

    worker: str
    clock: int
    base: int
    loss: float


def told(loss: float | None) -> float | None:
    """A loss as the log has it: JSON has no number that is not finite."""
    return loss if loss is not None and math.isfinite(loss) else None


class BoundedStaleness:
    """The state of a run, and what happens to it. Every change is told to `log`, in order.

    - A commit may go if no worker that is still at work would be staler than `bound` after it. It takes the push that
      has waited longest, and all waiting ones that would be too stale after it: these count as one version, by the mean
      of what they moved. With bound 0 all workers push together: that is synchronous training.
    - A worker that is silent for `patience` seconds is lost: it holds up nobody, and a push of it is refused until it
      has pulled again.
    - Anybody may pull at any time, and so join. With bound 0 they wait for the version that is under way, or else
      newcomers could hold it up for ever.

    Where nobody is at work any more, a commit may always go: no bound makes a run stand still. While a push waits, the
    time without a commit is less than `patience` and one round.

    Args:
        bound: The largest staleness, 0 or more.
        patience: Seconds.
        log: Is told every event, {"event": ..., ...}.
        version: The version to begin with.
    """

    def __init__(self, *, bound: int, patience: float, log: Callable[[Event], None], version: int = 0) -> None:
        assert bound >= 0 and patience > 0
        self.bound, self.patience, self.version = bound, patience, version
        self.made: dict[int, int] = {}  # version -> pushes in it
        self._log = log
        self.bases: dict[str, int] = {}  # of those at work, and of those whose push waits
        self.waiting: dict[str, Push] = {}  # in the order in which they came
        self.seen: dict[str, float] = {}

    @property
    def pushes(self) -> int:
        """The pushes that the present version is made of."""
        return sum(self.made.values())

    def hear(self, worker: str, now: float) -> None:
        """A sign of life. That of a lost worker does not take it back: a pull does."""
        if worker in self.seen:
            self.seen[worker] = now

    def may_pull(self) -> bool:
        """Whether somebody who begins now holds up no push that waits already."""
        return self.bound > 0 or not self.waiting

    def pull(self, worker: str, now: float) -> int:
        """A worker gets the parameters of this version."""
        assert worker not in self.bases and self.may_pull(), f"{worker} is at work, or has to wait"
        if worker not in self.seen:
            self._log({"event": "join", "worker": worker, "version": self.version})
        self.seen[worker], self.bases[worker] = now, self.version
        self._log({"event": "pull", "worker": worker, "version": self.version})
        return self.version

    def push(self, worker: str, clock: int, loss: float, now: float, *, fault: str = "") -> bool:
        """A worker's push has arrived. Returns whether it is taken. fault: why it is not, in any case."""
        self.hear(worker, now)
        if fault or worker not in self.bases:
            base = self.bases.pop(worker, None)
            reason = fault or ("undone" if worker in self.seen else "lost")
            self._log({"event": "refused", "worker": worker, "clock": clock, "base": base, "reason": reason})
            return False
        assert worker not in self.waiting, f"{worker} has pushed already"
        self.waiting[worker] = Push(worker, clock, self.bases[worker], loss)
        return True

    def lose(self, worker: str, reason: str) -> None:
        """A worker is gone. A push of it that waits already stays: it is there in full."""
        if self.seen.pop(worker, None) is not None:
            self._log({"event": "lost", "worker": worker, "version": self.version, "reason": reason})
        if worker not in self.waiting:
            self.bases.pop(worker, None)

    def lose_silent(self, now: float) -> list[str]:
        """Those who have been silent for too long are lost. Returns them."""
        late = [name for name, when in self.seen.items() if now - when > self.patience]
        for name in late:
            self.lose(name, "silent")
        return late

    def commit(self) -> list[Push]:
        """The pushes that make the next version; [] if none may go yet. To be called until then."""
        after = self.version + 1
        if not self.waiting or any(
            after - base > self.bound for name, base in self.bases.items() if name not in self.waiting
        ):
            return []
        oldest = next(iter(self.waiting))
        group = [push for name, push in self.waiting.items() if name == oldest or after - push.base > self.bound]
        for push in group:
            del self.waiting[push.worker], self.bases[push.worker]
        lines = [push._asdict() | {"loss": told(push.loss), "staleness": self.version - push.base} for push in group]
        self.version, self.made[after] = after, len(group)
        self._log({"event": "commit", "version": after, "pushes": lines})
        return group

    def restore(self, version: int) -> None:
        """The servers are back at an earlier version. Pushes that wait are gone, and work that is based on a later
        version is refused when it comes."""
        assert version <= self.version
        self.version, self.made = version, {v: count for v, count in self.made.items() if v <= version}
        for worker in [name for name, base in self.bases.items() if name in self.waiting or base > version]:
            del self.bases[worker]
        undone, self.waiting = self.waiting, {}
        self._log({"event": "restored", "version": version})
        for push in undone.values():
            self._log(
                {"event": "refused", "worker": push.worker, "clock": push.clock, "base": push.base, "reason": "undone"}
            )
