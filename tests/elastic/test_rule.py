"""Bounded staleness, patience, joins and replays: 200 simulated runs with kills, stops and joins."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from elastic_toy import SIZE, Toy

from jaxdist.elastic.outer import RULES, Outer
from jaxdist.elastic.replay import Works, replay
from jaxdist.elastic.rule import BoundedStaleness
from jaxdist.elastic.server import Server, bounds
from jaxdist.elastic.worker import Done

PATIENCE, ROUND = 3.0, 1.0


@dataclass
class Simulated:
    """A run in simulated time. At random times a worker is killed, stopped, woken, or begins, and the servers are put
    back."""

    seed: int
    bound: int
    parts: int
    events: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0
    stood_still: float = 0.0  # the longest time without a commit while a push was waiting

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.rule = BoundedStaleness(bound=self.bound, patience=PATIENCE, log=self.events.append)
        self.outer = Outer(self.dice.choice(list(RULES)), 0.7, 0.5)
        self.servers = [Server(k, self.outer, None) for k in range(self.parts)]
        self.first = np.arange(SIZE, dtype=np.float32)
        for server, (begin, end) in zip(self.servers, bounds(SIZE, self.parts), strict=True):
            server.begin(self.first[begin:end])
        self.toys: dict[str, Toy] = {}
        self.ends: dict[str, float] = {}  # of the round that each is in
        self.stopped: set[str] = set()
        self.given: dict[str, np.ndarray] = {}
        self.idle: list[str] = []
        self.unlucky: set[str] = set()  # who has been stopped: each is once
        self.moved_at = 0.0
        self.saved: dict[int, list[tuple[np.ndarray, Any]]] = {}
        self.save()

    def save(self) -> None:
        self.saved[self.rule.version] = [(server.flat, server.slots) for server in self.servers]

    def flat(self) -> np.ndarray:
        return np.concatenate([server.read() for server in self.servers])

    def begin(self) -> None:
        name = f"w{len(self.toys)}"
        self.toys[name], self.ends[name] = Toy(name), float("inf")
        self.idle.append(name)

    def pull(self, name: str) -> None:
        self.rule.pull(name, self.now)
        self.given[name] = self.flat()
        self.ends[name] = self.now + ROUND * self.dice.choice((0.1, 0.3, 1.0))

    def disturb(self) -> None:
        alive = sorted(self.ends)
        kind = self.dice.choice(("kill", "stop", "wake", "begin", "begin", "restore"))
        if kind == "kill" and alive:
            name = self.dice.choice(alive)
            del self.ends[name]
            self.stopped.discard(name)
            self.idle = [other for other in self.idle if other != name]
            if self.dice.random() < 0.5:  # Ray sees it at once; of a host without power nobody hears
                self.rule.lose(name, "killed")
        elif kind == "stop" and (lucky := [name for name in alive if name not in self.unlucky]):
            name = self.dice.choice(lucky)
            self.stopped.add(name)
            self.unlucky.add(name)
        elif kind == "wake" and self.stopped:
            self.stopped.discard(min(self.stopped))
        elif kind == "begin" and len(alive) < 6:
            self.begin()
        elif kind == "restore":
            self.restore()

    def restore(self) -> None:
        version = self.dice.choice([v for v in self.saved if v >= self.rule.version - 1])
        waiting = list(self.rule.waiting)
        self.rule.restore(version)
        for server, (flat, slots) in zip(self.servers, self.saved[version], strict=True):
            server.flat, server.slots, server.version, server.staged = flat, slots, version, {}
        self.saved = {v: s for v, s in self.saved.items() if v <= version}
        self.idle += [name for name in waiting if name in self.ends]

    def end_round(self, name: str) -> None:
        toy = self.toys[name]
        done = toy.work(self.given[name])
        if self.rule.push(name, done.clock, done.loss, self.now):
            for server, (begin, end) in zip(self.servers, bounds(SIZE, self.parts), strict=True):
                assert server.stage(name, done.moved[begin:end]) == ""
        else:
            self.idle.append(name)
        self.ends[name] = float("inf")

    def step(self, quiet: float) -> None:
        self.now += 0.05
        if self.dice.random() < quiet:
            self.disturb()
        for name in [name for name in self.ends if name not in self.stopped]:
            self.rule.hear(name, self.now)
        if not self.rule.waiting:
            self.moved_at = self.now
        for name in [n for n, end in self.ends.items() if end <= self.now and n not in self.stopped]:
            self.end_round(name)
        self.rule.lose_silent(self.now)
        while group := self.rule.commit():
            for server in self.servers:
                assert server.commit([push.worker for push in group]) == self.rule.version
            self.save()
            self.stood_still, self.moved_at = max(self.stood_still, self.now - self.moved_at), self.now
            self.idle += [push.worker for push in group if push.worker in self.ends]
        for name in [name for name in self.idle if name not in self.stopped and self.rule.may_pull()]:
            self.idle.remove(name)
            self.pull(name)

    def run(self, pushes: int) -> None:
        for _ in range(self.dice.randrange(1, 5)):
            self.begin()
        for _ in range(4000):
            if self.rule.pushes >= pushes:
                return
            if not [name for name in self.ends if name not in self.stopped]:
                self.begin()
            self.step(0.05)
        raise AssertionError(f"stands still at version {self.rule.version} after {self.now:.0f} s")


def pushes_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [push for event in events if event["event"] == "commit" for push in event["pushes"]]


def replayed(run: Simulated, make: Any = Toy) -> Any:
    start = {"event": "start", "numbers": SIZE, "dtype": "float32", "servers": run.parts, **run.outer._asdict()}
    start |= {"outer": start.pop("name")}
    workers: dict[str, Works] = {}
    return replay([start, *run.events], run.first, lambda name: workers.setdefault(name, make(name)))


@pytest.mark.parametrize("part", range(4))
def test_no_push_is_staler_than_the_bound_in_200_runs_with_kills_stops_and_joins(part: int) -> None:
    """Beside it: none stands still for longer than patience and one round, and each log gives the same bits again."""
    seen: set[int] = set()
    kinds: set[str] = set()
    longest = 0.0
    for seed in range(part, 200, 4):
        bound = seed % 5
        run = Simulated(seed, bound, parts=1 + seed % 3)
        run.run(pushes=30)
        stale = [push["staleness"] for push in pushes_of(run.events)]
        assert len(stale) >= 30 and max(stale) <= bound, seed
        assert run.stood_still < PATIENCE + ROUND + 0.1, (seed, run.stood_still)  # the simulation's steps are 0.05
        longest = max(longest, run.stood_still)
        again = replayed(run)
        assert again.version == run.rule.version and again.flat.tobytes() == run.flat().tobytes(), seed
        assert again.losses and not again.wrong
        seen |= set(stale)
        kinds |= {event["event"] for event in run.events}
    assert longest > PATIENCE  # the simulation does what it is there for
    assert seen == {0, 1, 2, 3, 4} and kinds == {"join", "pull", "commit", "lost", "refused", "restored"}


def test_a_replay_sees_work_that_differs() -> None:
    class Other(Toy):
        def work(self, flat: np.ndarray) -> Done:
            done = super().work(flat)
            return done._replace(moved=np.nextafter(done.moved, np.float32(9))) if done.clock == 2 else done

    run = Simulated(3, 2, parts=2)
    run.run(pushes=30)
    assert replayed(run).flat.tobytes() == run.flat().tobytes()
    assert replayed(run, Other).flat.tobytes() != run.flat().tobytes()


def quiet(bound: int, workers: int) -> tuple[BoundedStaleness, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    rule = BoundedStaleness(bound=bound, patience=10, log=events.append)
    for worker in range(workers):
        rule.pull(f"w{worker}", 0.0)
    return rule, events


def test_bound_0_is_synchronous() -> None:
    """All push together, and their mean is one version."""
    rule, _ = quiet(0, 3)
    for name in ("w2", "w0"):
        rule.push(name, 0, 1.0, 1.0)
        assert rule.commit() == []
    rule.push("w1", 0, 1.0, 1.0)
    assert [push.worker for push in rule.commit()] == ["w2", "w0", "w1"]
    assert rule.version == 1 and rule.commit() == []


def test_a_push_waits_for_the_one_that_it_would_make_too_stale() -> None:
    rule, _ = quiet(1, 3)
    rule.push("w0", 0, 1.0, 1.0)
    assert [push.worker for push in rule.commit()] == ["w0"]  # w1 and w2 are 1 stale now
    rule.pull("w0", 1.0)
    rule.push("w0", 1, 1.0, 2.0)
    assert rule.commit() == []
    rule.push("w1", 0, 1.0, 3.0)
    assert rule.commit() == []  # w2 is still at work
    rule.hear("w0", 13.0)
    rule.hear("w1", 13.0)
    assert rule.lose_silent(13.0) == ["w2"]
    assert [push.worker for push in rule.commit()] == ["w0", "w1"]  # alone, w0 would make w1 too stale
    assert rule.commit() == [] and rule.version == 2


def test_a_lost_worker_must_pull_before_it_pushes() -> None:
    rule, events = quiet(4, 2)
    rule.lose("w0", "silent")
    rule.hear("w0", 5.0)
    assert not rule.push("w0", 0, 1.0, 5.0) and events[-1]["reason"] == "lost"
    assert rule.pull("w0", 6.0) == 0
    assert events[-2] == {"event": "join", "worker": "w0", "version": 0}
    assert rule.push("w0", 1, 1.0, 7.0) and len(rule.commit()) == 1


def test_the_rules_are_those_of_optax() -> None:
    import optax

    first = np.linspace(-1, 1, SIZE).astype(np.float32)
    for name, momentum, nesterov in (("sgd", 0.0, False), ("momentum", 0.9, False), ("nesterov", 0.9, True)):
        theirs = optax.sgd(0.7, momentum or None, nesterov=nesterov)
        outer, flat = Outer(name, 0.7, 0.9), first
        slots, other, state = outer.slots(first), first, theirs.init(first)
        for seed in range(3):
            moved = np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)
            flat, slots = outer.apply(flat, slots, moved)
            updates, state = theirs.update(moved, state, other)
            other = np.asarray(optax.apply_updates(other, updates))
        np.testing.assert_allclose(flat, other, rtol=1e-6)
