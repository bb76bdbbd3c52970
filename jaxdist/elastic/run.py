"""An elastic run on Ray: servers and workers are actors, and one program decides the order (`jaxdist.elastic.rule`).

Parameters and pushes go from actor to actor as Ray's objects; this program holds references to them only. All calls of
a server come from here, so that all K servers see them in one order: what is read between two commits is one version.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.elastic.cluster import load_ray
from jaxdist.elastic.log import Log, progress_line
from jaxdist.elastic.replay import made_with, sha256_of
from jaxdist.elastic.rule import BoundedStaleness, told
from jaxdist.elastic.run_directory import SERVERS_NAME, Settings, begin, first_line, pushes_in, staleness_in
from jaxdist.elastic.server import Server, bounds
from jaxdist.elastic.worker import Worker
from jaxdist.errors import RunStopped, UserError
from jaxdist.runtime.run_claim import RunClaim
from jaxdist.runtime.run_folder import ELASTIC_LOG

_TURN_S = 0.05  # between two looks at who is silent
SAY_S = 10.0  # between two lines about progress
BEATS = 4  # signs of life within the patience
_RESTARTS = 5  # of servers; of workers between two commits, besides as many as there are


class Result(NamedTuple):
    """The parameters at the end, their version, their loss on held-out data (None: there is none), and how many pushes
    had which staleness."""

    flat: np.ndarray
    version: int
    loss: float | None
    staleness: dict[int, int]


class ElasticRun:
    """One run, from its actors' start to the last commit.

    Args:
        settings: As above.
        text: The configuration as YAML.
        folder: The run directory. Servers save below it, so on a cluster all hosts must see it.
        log: Is told every event.
        before: The log of this run so far, where an earlier program has begun it.
        say: Gets lines for the console.
        worker: The class of workers, with the methods of `Worker`.
        options: Of Ray's actors, {"server": {...}, "worker": {...}}, such as resources that place them on hosts.
    """

    def __init__(
        self,
        settings: Settings,
        text: str,
        folder: Path,
        log: Callable[[dict[str, Any]], None],
        before: Sequence[dict[str, Any]],
        say: Callable[[str], None],
        worker: type = Worker,
        options: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.ray, self.settings, self.text, self.folder = load_ray(), settings, text, folder
        self.log, self.say, self._worker, self._options = log, say, worker, options or {}
        self.rule = BoundedStaleness(bound=settings.bound, patience=settings.patience, log=self._told)
        self.staleness = staleness_in(before)
        self.rule.made = pushes_in(before)
        errors = self.ray.exceptions
        self._deaths = errors.RayActorError, errors.OutOfMemoryError  # the second: killed by Ray's memory monitor
        self._group: Any = None  # of Ray: the CPUs that servers keep, also while one that has died comes back
        self._resumed = bool(before)
        self._number = 1 + max((int(e["worker"][1:]) for e in before if "worker" in e), default=-1)  # names are new
        self.workers: dict[str, Any] = {}
        self.servers: list[Any] = []
        self.pending: dict[Any, tuple[str, Any]] = {}  # reference -> what is to be done when it is there
        self.staging: dict[str, tuple[int, float, list[str]]] = {}  # clock, loss, and what servers have answered
        self.idle: list[str] = []
        self._beaten: dict[str, float] = {}
        self._open = False  # the first workers are ready
        self._asked = False  # a worker is asked for the first parameters
        self._restarts = self._failed = 0
        self._began, self._said = time.monotonic(), -math.inf  # when the run began, and when it last told of progress

    def _told(self, event: dict[str, Any]) -> None:
        self.staleness.update(staleness_in([event]))
        self.log(event)
        now = time.monotonic()
        if event["event"] == "commit" and now - self._said > SAY_S:
            self._said = now
            self.say(progress_line(event, self.rule.pushes, self.settings.rounds))

    # Actors

    def start_server(self, index: int) -> Any:
        """An actor that holds a part, in its place of those that are reserved for servers."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = {"num_cpus": 1, "scheduling_strategy": place} | self._options.get("server", {})
        actor = self.ray.remote(Server).options(**options)
        return actor.remote(index, self.settings.outer, str(self.folder / SERVERS_NAME))

    def _reserve(self) -> None:
        """Reserve the servers' CPUs before workers start: those may be more than there is place for (`least`)."""
        from ray.util import placement_group

        needs: dict[str, Any] = {"num_cpus": 1, "resources": {}} | self._options.get("server", {})
        bundle = {"CPU": needs["num_cpus"], **needs["resources"]}
        self._group = placement_group([bundle] * self.settings.servers)
        self.ray.get(self._group.ready())

    def start_worker(self) -> None:
        """An actor that trains. Two threads: one works, one gives signs of life."""
        name = f"w{self._number}"
        self._number += 1
        needs = {"num_cpus": 1, "max_concurrency": 2, "num_gpus": self.settings.gpus}
        actor = self.ray.remote(self._worker).options(**needs | self._options.get("worker", {}))
        self.workers[name] = actor.remote(name, self.text, self.settings.period)
        self.pending[self.workers[name].first.remote()] = "first", name

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all servers; references to what they return."""
        return [getattr(server, method).remote(*arguments) for server in self.servers]

    # The run

    def run(self) -> Result:
        """Work until `rounds` pushes have been committed. Raises `UserError` where the configuration is wrong."""
        from ray.util import remove_placement_group

        errors = self.ray.exceptions
        try:
            self._reserve()
            for _ in range(self.settings.workers):
                self.start_worker()
            while True:
                while self.rule.pushes < self.settings.rounds or not self.servers:
                    self.turn()
                try:
                    return self._end()
                except errors.RayActorError as error:
                    self._lost_actor(error, None)
                except errors.OutOfMemoryError:
                    self._restore()
        except errors.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            if isinstance(error.cause, OSError):  # of a server's save
                raise RunStopped(f"elastic: {error.cause}") from error
            raise
        finally:
            for actor in [*self.workers.values(), *self.servers]:
                self.ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)

    def turn(self) -> None:
        """Take in what has come, say who is lost, commit what may go, and give work to who has none."""
        ready, _ = self.ray.wait(list(self.pending), num_returns=len(self.pending), timeout=0)
        if not ready:
            ready, _ = self.ray.wait(list(self.pending), num_returns=1, timeout=_TURN_S)
        now = time.monotonic()
        for reference in ready:
            if reference in self.pending:  # the loss of a server clears some
                self._take(reference, *self.pending.pop(reference), now)
        self._beat(now)
        for name in self.rule.lose_silent(now):
            self.say(f"{name} has been silent for {self.settings.patience:g} s, and holds up nobody any more")
        # One at a time: servers save what they commit, so that one that dies has lost one version at most.
        if not any(kind == "commit" for kind, _ in self.pending.values()) and (group := self.rule.commit()):
            names, self._failed = [push.worker for push in group], 0
            for reference in self.call("commit", names):
                self.pending[reference] = "commit", names
            self.idle += [name for name in names if name in self.workers]
        if not self._open and self.servers and len(self.idle) >= self.settings.least:
            self._open = True
            ready_s = f"{now - self._began:.0f} s after the start"
            self.say(f"ready      {len(self.idle)} of {self.settings.workers} workers, {ready_s}")
        while self._open and self.idle and self.rule.may_pull() and self.rule.pushes < self.settings.rounds:
            self._give_work(self.idle.pop(0))

    def _give_work(self, name: str) -> None:
        self.rule.pull(name, time.monotonic())  # not when this turn began: servers may have started in it
        method = self.workers[name].work_in_parts.options(num_returns=1 + len(self.servers))
        done, *moved = method.remote(*self.call("read"))
        self.pending[done] = "work", (name, moved)

    def _beat(self, now: float) -> None:
        for name in self.rule.seen:
            if name in self.workers and now - self._beaten.get(name, -1e9) > self.settings.patience / BEATS:
                self._beaten[name] = now
                self.pending[self.workers[name].beat.remote()] = "beat", name

    def _take(self, reference: Any, kind: str, about: Any, now: float) -> None:
        """Something has come, or failed."""
        errors, who = self.ray.exceptions, about[0] if isinstance(about, tuple) else about
        try:
            value = self.ray.get(reference)
        except errors.RayActorError as error:  # also of a task whose arguments a dead actor should have made
            self._lost_actor(error, who if kind == "work" else None)
        except (errors.ObjectLostError, errors.OwnerDiedError):  # with its host
            self.lose(who, "host")
        except errors.OutOfMemoryError as error:
            if kind in ("stage", "commit"):
                self._restore()
            else:
                self.lose(who, "memory", str(error))
        else:
            getattr(self, f"_on_{kind}")(about, value, now)

    def _on_beat(self, name: str, value: None, now: float) -> None:
        self.rule.hear(name, now)

    def _on_commit(self, names: list[str], version: int, now: float) -> None:
        assert version <= self.rule.version, (version, self.rule.version)

    def _on_first(self, name: str, value: None, now: float) -> None:
        if self.servers or self._asked:
            self.idle.append(name)
        else:
            self._asked = True
            self.pending[self.workers[name].numbers.remote()] = "numbers", name

    def _on_numbers(self, name: str, flat: np.ndarray, now: float) -> None:
        self._begin(flat)
        self.idle.append(name)

    def _on_work(self, about: tuple[str, list[Any]], done: tuple[int, float], now: float) -> None:
        name, moved = about
        self.rule.hear(name, now)
        if name not in self.rule.bases:
            self._arrived(name, *done, fault="", now=now)
            return
        self.staging[name] = *done, []
        for server, part in zip(self.servers, moved, strict=True):
            self.pending[server.stage.remote(name, part)] = "stage", name

    def _on_stage(self, name: str, fault: str, now: float) -> None:
        clock, loss, answers = self.staging[name]
        answers.append(fault)
        if len(answers) == len(self.servers):
            del self.staging[name]
            self._arrived(name, clock, loss, fault=next(filter(None, answers), ""), now=now)

    def _arrived(self, name: str, clock: int, loss: float, *, fault: str, now: float) -> None:
        """All servers have a push, or it is not taken."""
        if not self.rule.push(name, clock, loss, now, fault=fault):
            self.call("drop", name)
            if name in self.workers:
                self.idle.append(name)

    # Losses

    def lose(self, name: str, reason: str, said: str = "") -> None:
        """A worker is gone for good, and another one takes its place."""
        if self.workers.pop(name, None) is None:
            return
        self.say(f"{name} is lost ({reason}); another one starts")
        self.rule.lose(name, reason)
        self.idle = [other for other in self.idle if other != name]
        if name not in self.rule.waiting:
            self.staging.pop(name, None)
            for reference in [r for r, (kind, who) in self.pending.items() if kind == "stage" and who == name]:
                del self.pending[reference]
            if self.servers:
                self.call("drop", name)
        self._asked = bool(self.servers)
        self._failed += 1
        if self._failed > _RESTARTS + self.settings.workers:
            last = next((line for line in reversed(said.splitlines()) if line.strip()), reason).strip()
            last = last.partition(" Worker exit type:")[0]  # what follows are possible causes
            raise RunStopped(
                f"elastic: {self._failed} workers have died, and nobody has pushed meanwhile: {last[-300:]}"
            )
        self.start_worker()

    def _lost_actor(self, error: Any, worker: str | None) -> None:
        """Find out who has died: a worker, or a server."""
        gone = error.actor_id
        name = next((n for n, actor in self.workers.items() if actor._actor_id.hex() == gone), None)
        if name is not None:
            self.lose(name, "died", str(error))
        elif any(server._actor_id.hex() == gone for server in self.servers):
            self._restore()
        if worker is not None and worker in self.workers and worker not in self.idle:
            self.rule.bases.pop(worker, None)
            self.idle.append(worker)  # its work has not begun: the parameters were not there

    def _alive(self, server: Any) -> bool:
        try:
            self.ray.get(server.saved.remote())
        except self._deaths:
            return False
        return True

    def _restore(self) -> None:
        """Servers that have died come back, and all of them go to the newest version that all have saved."""
        self._restarts += 1
        if self._restarts > _RESTARTS:
            raise RunStopped(f"elastic: servers have died {self._restarts} times; see {self.folder}")
        self.servers = [s if self._alive(s) else self.start_server(k) for k, s in enumerate(self.servers)]
        try:
            version = self._newest()
            self.ray.get(self.call("restore", version))
        except self._deaths:  # another one
            self._restore()
            return
        self.say(f"a server has died; all are back at version {version} of {self.rule.version}")
        held = [*self.rule.waiting, *self.staging]
        for reference in [r for r, (kind, _) in self.pending.items() if kind in ("stage", "commit")]:
            del self.pending[reference]
        self.rule.restore(version)
        for name in self.rule.seen:  # nobody was asked meanwhile
            self.rule.hear(name, time.monotonic())
        for name, (clock, loss, _) in self.staging.items():
            self.rule.push(name, clock, loss, time.monotonic(), fault="undone")
        self.staging = {}
        self.idle += [name for name in held if name in self.workers and name not in self.idle]

    def _newest(self) -> int:
        """The newest version that the log has and all servers have saved in full."""
        common = set.intersection({0, *self.rule.made}, *self.ray.get(self.call("intact")))
        if not common:
            raise RunStopped(f"elastic: {self.folder / SERVERS_NAME} holds no version that all servers have saved")
        return max(common)

    def _begin(self, flat: np.ndarray) -> None:
        """The first parameters are there: start the servers, at version 0 or where an earlier program has left them."""
        self.servers = [self.start_server(k) for k in range(self.settings.servers)]
        if self._resumed:
            version = self._newest()
            self.ray.get(self.call("restore", version))
            self.rule.version = version
            self.rule.restore(version)
            self.say(f"resumed    at version {version}, after {self.rule.pushes} rounds")
            return
        cuts = bounds(flat.size, self.settings.servers)
        self.ray.get([server.begin.remote(flat[a:b]) for server, (a, b) in zip(self.servers, cuts, strict=True)])
        self.log(first_line(self.settings) | {"numbers": flat.size, "dtype": str(flat.dtype), **made_with()})

    def _end(self) -> Result:
        """The parameters of the last version, and their loss, by a worker that has nothing to do."""
        self.ray.get([reference for reference, (kind, _) in self.pending.items() if kind == "commit"])  # it is saved
        parts = self.call("read")
        flat, loss = np.concatenate(self.ray.get(parts)), None
        if self.idle:
            loss = self.ray.get(self.workers[self.idle[0]].evaluate.remote(*parts))
        self.log({"event": "end", "version": self.rule.version, "sha256": sha256_of(flat), "loss": told(loss)})
        return Result(flat, self.rule.version, loss, dict(self.staleness))


def run_elastic(
    settings: Settings,
    text: str,
    claim: RunClaim,
    before: Sequence[dict[str, Any]],
    say: Callable[[str], None],
    *,
    worker: type = Worker,
    options: dict[str, dict[str, Any]] | None = None,
    disturb: Callable[["ElasticRun", dict[str, Any]], None] | None = None,
) -> Result:
    """Run in a cluster that this program has joined (`cluster.cluster`). The run directory gets config.yaml, the log,
    and what servers save; where it has them already, the run goes on.

    Args:
        settings, text, before, say, worker, options: As of `ElasticRun`. `run_directory.check_directory` has held them
            against the run directory.
        claim: Of this program on the run directory.
        disturb: Is given the run and every event, for tests that kill.
    """
    folder = claim.follow()
    if not before:
        begin(text, folder)
    with Log(folder / ELASTIC_LOG, time.monotonic) as log:
        run = ElasticRun(settings, text, folder.resolve(), log, before, say, worker, options)

        def both(event: dict[str, Any]) -> None:
            log(event)
            if disturb is not None:
                disturb(run, event)

        run.log = both
        return run.run()
