"""The watchdog of a job: a thread in each process that ends all of them when one is lost, stuck or failed, and says
which.

JAX's collectives wait for a lost rank for minutes, for a stuck one for ever, and its service aborts without a name. The
threads have connections of their own (`channel`). Rank 0 hears from all and judges them (`blame`); the others judge
rank 0. docs/watchdog.md says what is seen, after how long, and what is not.
"""

import contextlib
import ctypes
import errno
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdist.errors import UserError
from jaxdist.files.regular import LINK, open_new
from jaxdist.processes import Place, place
from jaxdist.runtime.exit_status import status_of
from jaxdist.runtime.network.connection import tell
from jaxdist.runtime.network.messages import JsonObject
from jaxdist.runtime.watch import blame as judge
from jaxdist.runtime.watch.blame import Beat, Blame, Failure, beat_of
from jaxdist.runtime.watch.channel import CONNECT_S, Channel
from jaxdist.runtime.watch.progress import Breadcrumbs, Pace

TURN_S = 0.2  # the longest wait of the thread for messages
GATHER_S = 0.5  # one loss brings about others: wait so long, to name the first
DOUBT_S = 2.0  # where there are only symptoms, a rank that is behind or silent for this long is their cause
LEAVE_S = 3.0  # rank 0 ends last, because JAX aborts the others when it ends; it waits for them for this long
ANSWER_S = 6.0  # a failed rank waits this long to hear whether it is to blame
# While nothing moves, a line says where the ranks are, so often; where steps take long, after so many of them.
UNMOVED_S, UNMOVED_STEPS = 30.0, 3.0
FRAMES = 4  # of the main thread's stack, on the console
STACKS = "stacks"  # folder of the run directory


class Watch:
    """The watchdog of one process. Outside of a job of several it only says where the process is while nothing moves.
    set_s: `train.watchdog_s`."""

    def __init__(self, set_s: float | None = None) -> None:
        self.crumbs = Breadcrumbs(self._paced)
        self.folder: Path | None = None  # the run directory, once it is known
        self._set_s, self._here = set_s, Place(0, 1)
        self._thread: threading.Thread | None = None
        self._outbox: queue.SimpleQueue[JsonObject] = queue.SimpleQueue()
        # The main thread waits for `_agreed`, the facts are compared, and for `_answer`, this rank may raise its own
        # exception. The watching thread waits for `_reported`, the verdict is printed.
        self._agreed, self._answer, self._reported = threading.Event(), threading.Event(), threading.Event()
        self._difference: str | None = None  # in the facts of the ranks
        self._number = 0  # how often this rank has been asked to agree
        self._beats: dict[int, tuple[Beat, float]] = {}  # the last report of each rank, and when it came
        self._heard: dict[int, float] = {}  # when a rank has last said anything
        self._failures: dict[int, Failure] = {}
        self._gone: list[tuple[int, float]] = []  # ranks whose connections have ended, and when, in this order
        self._bye: set[int] = set()  # ranks that have ended well: they may go and be silent
        self._gathered: dict[tuple[str, int], dict[int, Any]] = {}  # see `_gather`
        self._verdict: Blame | None = None
        self._begun = self._turned = self._said = 0.0  # when: the watch, the last turn, the last report of this rank
        self._noticed = 0.0  # when it was last said where the ranks are
        self._left = threading.Event()  # a process without a job needs its notices no more

    @contextlib.contextmanager
    def opened(self, facts: Mapping[str, Any]) -> Iterator[None]:
        """A context in which the job that this process has joined is watched, and exceptions are told to the other
        ranks. Raises `UserError` unless all ranks come with the same facts."""
        self._here = place()
        if self._here.processes > 1:
            self._channel = Channel(self._here)
            self._turned = self._begun = time.monotonic()
            self._heard = {} if self._here.rank == 0 else {0: self._begun}  # rank 0 hears the others once they connect
            self._catch_aborts()
            self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._thread.start()
        else:
            threading.Thread(target=self._look_on, name="watch", daemon=True).start()
        with self.reporting():
            self.agree(facts)
            yield

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """A context in which an exception is told to the other ranks, and raised again when they have heard it. Where
        the loss of another rank has caused it, the process ends here instead, and says so."""
        try:
            yield
        except BaseException as error:
            self._left.set()
            if self._thread is not None and self._difference is not None:
                self.close()  # all ranks raise the same one
            elif self._thread is not None:
                first = (str(error).strip().splitlines() or [""])[0][:300]
                self._fail(f"{type(error).__name__}: {first}", status_of(error), error)
            raise

    def _fail(self, text: str, status: int, error: BaseException | None) -> None:
        """Tell the other ranks that this one fails, and wait for the verdict. Where that blames another rank, the watch
        ends this process meanwhile."""
        symptom = error is None or judge.is_symptom(error)
        self._outbox.put({"failed": text, "status": status, "symptom": symptom})
        self._answer.wait(ANSWER_S)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise `UserError` on every rank unless all of them come with the same facts."""
        if self._thread is None:
            return
        self._number += 1
        self._agreed.clear()
        self._outbox.put({"facts": dict(facts), "number": self._number})
        self._agreed.wait()
        if self._difference is not None:
            raise UserError(self._difference)

    def close(self) -> None:
        """End the watch: all is done."""
        self._left.set()
        if self._thread is not None and self._thread.is_alive():
            self._outbox.put({"bye": True})
            self._thread.join(LEAVE_S)
            if self._difference is None:
                self._libc.signal(signal.SIGABRT, self._before)
        self._thread = None

    def _paced(self, pace: Pace) -> None:
        if self._thread is not None:
            self._outbox.put({"pace": pace.step, "seconds": pace.seconds})

    def _catch_aborts(self) -> None:
        """Hold up a thread that aborts the process, as JAX's does a tenth of a second after rank 0 is gone, until the
        watch has named the lost rank."""

        def handler(_: int) -> None:
            self._fail("the runtime aborted the process (SIGABRT)", 1, None)
            time.sleep(DOUBT_S)  # if another thread is ending the process, let it

        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)  # kept: the system calls it
        self._libc = ctypes.CDLL(None)
        self._libc.signal.restype, self._libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        self._before = self._libc.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

    # What follows runs in the watching thread.

    def _watch(self) -> None:
        try:
            while self._here.rank not in self._bye:
                self._turn()
            if self._difference is None:
                self._channel.close()
            else:  # the others end by themselves, and their connections with them
                self._wait_for_others(set())
        except BaseException:  # without its watch a rank looks dead to the others, so it must end
            traceback.print_exc()
            os._exit(1)

    def _look_on(self) -> None:
        """The watching thread of a process without a job."""
        while not self._left.wait(TURN_S):
            now = time.monotonic()
            self._notice({0: beat_of(self.crumbs, now)}, now)

    def _turn(self) -> None:
        """One round of the watching thread: hear the others, send what is to be said, judge."""
        news = self._channel.poll(TURN_S)
        now = time.monotonic()
        if now - self._turned > DOUBT_S:  # this process was stopped, and reads only now what the others said
            self._heard = dict.fromkeys(self._heard, now)
        self._turned = now
        for rank, message in news:
            self._hear(rank, message, now)
        for rank in self._channel.connected:
            self._heard.setdefault(rank, now)
        self._beats[self._here.rank] = (beat_of(self.crumbs, now), now)
        with contextlib.suppress(queue.Empty):
            while True:
                self._tell(self._outbox.get_nowait(), now)
        if now - self._said > min(1.0, self._silence / 10):
            self._said = now
            self._tell({"beat": list(self._beats[self._here.rank][0])}, now)
        if self._verdict is None:
            beats = {rank: beat.older(now - at) for rank, (beat, at) in self._beats.items() if rank not in self._bye}
            if self._here.rank == 0:
                self._notice(beats, now)
            self._verdict = self._judge(beats, now)
            if self._verdict is not None:
                self._end(self._verdict)

    def _tell(self, message: JsonObject, now: float) -> None:
        """Send a message to rank 0. Rank 0 itself sends reports and farewells to all, and hears the rest itself."""
        if self._here.rank != 0:
            self._channel.send(0, message)
            if "failed" in message:
                self._hear(self._here.rank, message, now)
        elif "beat" in message or "bye" in message:
            self._channel.broadcast(message)
        else:
            self._hear(0, message, now)
        if "bye" in message:
            self._bye.add(self._here.rank)

    def _hear(self, rank: int, message: JsonObject | None, now: float) -> None:
        """Take in a message of a rank. None: its connection has ended."""
        self._heard[rank] = now
        if message is None:
            if rank not in self._bye:
                self._gone.append((rank, now))
        elif "beat" in message:
            self._beats[rank] = (Beat(*message["beat"]), now)
        elif "failed" in message:
            self._failures[rank] = Failure(message["failed"], message["status"], message["symptom"], now)
        elif "facts" in message:
            facts = self._gather("facts", message["number"], rank, message["facts"])
            if facts is not None:
                self._difference = judge.difference(facts)
                self._channel.broadcast({"agreed": self._difference})
                self._agreed.set()
        elif "agreed" in message:
            self._difference = message["agreed"]
            self._agreed.set()
        elif "pace" in message:
            paces = self._gather("pace", message["pace"], rank, Pace(message["pace"], message["seconds"]))
            if paces is not None and (line := judge.slow(paces)):
                tell(line)
        elif "verdict" in message and self._verdict is None:
            kind, ranks, text, status = message["verdict"]
            self._verdict = Blame(kind, tuple(ranks), text, status)
            self._end(self._verdict)
        elif "bye" in message:
            self._bye.add(rank)

    def _gather(self, kind: str, number: int, rank: int, said: Any) -> dict[int, Any] | None:
        """On rank 0: what the ranks have said of one kind and number, once all of them have; None before."""
        known = self._gathered.setdefault((kind, number), {})
        known[rank] = said
        return self._gathered.pop((kind, number)) if len(known) == self._here.processes else None

    @property
    def _silence(self) -> float:
        """Seconds without a message after which a process is not running: its thread sends some however long a step
        is."""
        return judge.limit_of(self._set_s, 0.0)

    def _notice(self, beats: dict[int, Beat], now: float) -> None:
        """Say now and then where the ranks are, while nothing moves: compiling, the first batch and the first save have
        no limit, and others have long ones."""
        unmoved = min((beat.age for beat in beats.values()), default=0.0)
        pause = max(UNMOVED_S, UNMOVED_STEPS * self.crumbs.median_step)
        if min(unmoved, now - self._noticed) >= pause:
            self._noticed = now
            tell(judge.quiet(beats, unmoved))

    def _judge(self, beats: dict[int, Beat], now: float) -> Blame | None:
        """The blame where the job must end now: for a loss, a silent rank, or one without progress."""
        lost = self._judge_losses(beats, now)
        if lost is not None:
            return lost
        for rank, at in self._heard.items():
            if rank not in self._bye | {self._here.rank} and now - at > self._silence:
                return judge.silent(beats, rank, now - at)
        if self._here.rank != 0:
            return None
        missing = set(range(1, self._here.processes)) - self._channel.connected - self._bye
        # A missing rank that was heard once has hung up: that is judged as a loss, above.
        if missing and now - self._begun > CONNECT_S and not missing & set(self._heard):
            text = f"has joined, but not connected to the watch of rank 0 in {CONNECT_S:.0f} s"
            return Blame("gone", (min(missing),), f"gone: rank {min(missing)} {text}", 75)
        late = judge.behind(beats, judge.limit_of(self._set_s, self.crumbs.median_step)) if beats else ()
        quiet = {rank: now - self._heard[rank] for rank in late if rank != 0}
        mute = max(quiet, key=lambda rank: quiet[rank], default=0)
        if quiet and quiet[mute] > DOUBT_S:  # a process that is stopped says nothing of being stuck
            return judge.silent(beats, mute, quiet[mute])
        return judge.stuck(beats, late) if late else None

    def _judge_losses(self, beats: dict[int, Beat], now: float) -> Blame | None:
        """The blame where processes have ended or failed. The cause is to be named, not its symptoms in other ranks."""
        roots = {rank: each for rank, each in self._failures.items() if not each.symptom}
        times = [each.at for each in self._failures.values()] + [at for _, at in self._gone]
        if not times:
            return None
        waited, here = now - min(times), self._here.rank
        everybody = len(self._failures) + len(self._gone) == self._here.processes
        if here != 0:  # this process has a connection to rank 0 only
            if self._gone:
                return judge.gone(beats, [0])
            quiet = now - self._heard[0]
            return judge.silent(beats, 0, quiet) if quiet > DOUBT_S and not roots else None
        if waited < GATHER_S and not everybody:
            return None
        if self._gone and all(self._gone[0][1] < each.at for each in roots.values()):
            return judge.gone(beats, [rank for rank, _ in self._gone])
        if roots:
            return judge.failed(self._failures)
        if waited < DOUBT_S and not everybody:
            return None
        for rank, at in self._heard.items():
            if rank != here and rank not in self._bye and now - at > DOUBT_S:
                return judge.silent(beats, rank, now - at)
        late = judge.behind(beats, DOUBT_S)
        if late and not set(late) & set(self._failures):
            first = next(iter(self._failures))
            return judge.stuck(beats, late, f"; rank {first} failed of it: {self._failures[first].text}")
        return judge.failed(self._failures)

    def _end(self, verdict: Blame) -> None:
        """Tell the verdict to all ranks and on the console, then end this process. A rank that has failed only raises
        its own exception."""
        if self._here.rank == 0:
            self._channel.broadcast({"verdict": list(verdict)})
        else:
            self._channel.send(0, {"verdict": list(verdict)})  # rank 0 may have been stopped, and go on later
        blamed = self._here.rank in verdict.ranks
        if verdict.kind == "failed" and blamed:
            self._wait_for_others(set())
            self._answer.set()
            return
        # A file system or console that hangs must not keep the process.
        threading.Thread(target=self._report, args=(verdict,), daemon=True).start()
        self._reported.wait(LEAVE_S)
        self._wait_for_others(set(verdict.ranks))
        os._exit(verdict.status)

    def _report(self, verdict: Blame) -> None:
        lines = [verdict.text]
        if verdict.kind != "failed":
            lines.append(f"  rank {self._here.rank} is at {top_of_main_thread()}")
        tell(*lines)
        if verdict.kind != "failed" and self.folder is not None:
            path = self.folder / STACKS / f"rank{self._here.rank}.txt"
            try:
                path.parent.mkdir(exist_ok=True)
                if path.parent.is_symlink():
                    raise OSError(errno.ELOOP, LINK)
                with os.fdopen(open_new(path), "w", encoding="utf-8") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                tell(f"  stacks of rank {self._here.rank}: {path}")
            except OSError as error:
                tell(f"  stacks not written: {error.strerror}")
        self._reported.set()

    def _wait_for_others(self, but: set[int]) -> None:
        """On rank 0: wait until the connections of the others have ended, or for `LEAVE_S`."""
        deadline = time.monotonic() + LEAVE_S
        while self._here.rank == 0 and self._channel.connected - but and time.monotonic() < deadline:
            for rank, message in self._channel.poll(0.05):
                if message is not None and "bye" in message:
                    self._bye.add(rank)


def top_of_main_thread() -> str:
    """The innermost frames of the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)[: -FRAMES - 1 : -1] if frame is not None else []
    return " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames) or "its end"
