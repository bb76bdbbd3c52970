"""Standard output on a full disk or without a reader: what is lost is said, and nothing ends of it but by a stop."""

import contextlib
import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import child
import pytest
from jobs import wait_until

from jaxdist.runtime import output
from jaxdist.runtime.output import LastingFile, without_gloo
from jaxdist.runtime.watch import stop as stopping
from jaxdist.runtime.watch.stop import StopSignal


class Disk:
    """A disk with room for so many bytes, in place of the system's `write`."""

    def __init__(self) -> None:
        self.content, self.room, self.error = b"", 1 << 20, errno.ENOSPC

    def write(self, _: int, data: bytes) -> int:
        taken = data[: self.room]
        if not taken:
            raise OSError(self.error, os.strerror(self.error))
        self.content, self.room = self.content + taken, self.room - len(taken)
        return len(taken)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(output, "os", SimpleNamespace(write=made.write))
    return made


def test_lost_lines_are_counted_and_said_later(disk: Disk) -> None:
    file = LastingFile(1)
    file.write(b"a\n")
    disk.room = 0
    assert file.write(b"b\nc\n") == 4
    file.write(b"d\n")
    disk.room = 1000
    file.write(b"e\n")
    file.write(b"f\n")
    assert disk.content == b"a\n3 lines of output were lost: No space left on device\ne\nf\n"


def test_a_line_that_was_torn_is_ended(disk: Disk) -> None:
    file = LastingFile(1)
    disk.room = 3
    file.write(b"long line\n")
    disk.room = 20  # not even for what is said of it
    file.write(b"next\n")
    disk.room = 1000
    file.write(b"last\n")
    begun = b"\n1 line of output was lost: No space left on device\n"
    said = b"\n2 lines of output were lost: No space left on device\n"
    assert disk.content == b"lon" + begun[:20] + said + b"last\n"


def test_what_is_no_whole_line_stays_as_it_is(disk: Disk) -> None:
    file = LastingFile(1)
    for piece in (b"step 1", b"\rstep 2", b"\n"):
        file.write(piece)
    assert disk.content == b"step 1\rstep 2\n"


def test_a_reader_that_has_gone_is_told_once() -> None:
    told, (reads, writes) = list[int](), os.pipe()
    os.close(reads)
    file = LastingFile(writes, lambda: told.append(1))
    for _ in range(3):
        assert file.write(b"a\n") == 2
    os.close(writes)
    assert file.write(b"a\n") == 2  # nor is anything else raised
    assert told == [1]


CHILD = """
import logging, sys, warnings
from jaxdist.runtime.output import lasting_output
with lasting_output():
    logging.basicConfig()
    for i in range(3):
        print("line", i)
        logging.error("logged")
        warnings.warn("warned")
    sys.stderr.write("no end of line")
    {more}
sys.exit({status})
"""


@pytest.mark.parametrize("status", [0, 75])
@pytest.mark.parametrize("options", [[], ["-u"]])
def test_no_stream_changes_the_exit_status(options: list[str], status: int) -> None:
    """Python flushes its streams at its end, and ends with 120 where that fails."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, *options, "-c", CHILD.format(status=status, more="print('x' * 100_000)")]
    for stream in (writes, os.open("/dev/full", os.O_WRONLY)):
        ended = subprocess.run(command, stdout=stream, stderr=stream, env=child.environment(), check=False)
        assert ended.returncode == status
        os.close(stream)


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Signals that are heeded here. What would end the process is kept in `left`, and the thread goes on."""
    left = list[str]()
    monkeypatch.setattr(StopSignal, "_leave", lambda self, text: left.append(text))
    monkeypatch.setattr(stopping, "SAME_S", 0.0)
    with StopSignal() as made:
        yield SimpleNamespace(signals=made, left=left)


def until_asked(signals: StopSignal, step: int) -> None:
    wait_until(lambda: signals.requested(step))


@pytest.mark.parametrize("first", ["reader", "signal"])
def test_a_reader_that_goes_with_ctrl_c_is_no_second_signal(stop: Any, first: str) -> None:
    """Ctrl-C ends `tee`, too: the checkpoint of `train.py | tee log` must be written all the same."""
    assert not stop.signals.requested(1)
    both = {"reader": stop.signals.reader_gone, "signal": lambda: signal.raise_signal(signal.SIGINT)}
    both.pop(first)()
    until_asked(stop.signals, 2)
    both.popitem()[1]()
    time.sleep(0.1)
    assert stop.left == []
    signal.raise_signal(signal.SIGINT)
    wait_until(lambda: stop.left)
    assert stop.left == ["ended at once by a second signal, SIGINT"]


@pytest.mark.filterwarnings("ignore")  # Python's, of a fork beside threads
def test_signals_of_a_forked_process_are_its_own(stop: Any) -> None:
    """A DataLoader ends its workers by SIGTERM, and Ctrl-C is sent to them too."""
    assert not stop.signals.requested(1)
    forking = multiprocessing.get_context("fork")
    begun = forking.Event()
    worker = forking.Process(target=lambda: (begun.set(), time.sleep(30)))
    worker.start()
    assert begun.wait(5) and worker.pid is not None
    os.kill(worker.pid, signal.SIGINT)
    worker.join(0.2)
    assert worker.is_alive()
    worker.terminate()
    worker.join(5)
    assert worker.exitcode == -signal.SIGTERM
    time.sleep(0.1)
    assert not stop.signals.requested(2) and stop.signals.why == ""
    signal.raise_signal(signal.SIGINT)
    until_asked(stop.signals, 3)


@pytest.mark.filterwarnings("ignore")  # Python's, of a fork beside threads
def test_a_program_that_a_run_starts_heeds_ctrl_c(stop: Any) -> None:
    del stop
    done = subprocess.run(["sh", "-c", "kill -INT $$"], preexec_fn=lambda: None, check=False)
    assert done.returncode == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nothing_stays_of_a_run_that_is_over() -> None:
    with StopSignal() as made:
        pass
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    done = subprocess.run(["sh", "-c", "kill -TERM $$"], preexec_fn=lambda: None, check=False)
    assert done.returncode == -signal.SIGTERM


def test_without_a_reader_before_the_first_step(stop: Any) -> None:
    stop.signals.reader_gone()
    wait_until(lambda: stop.left)
    assert stop.left == ["ended by a closed standard output before the first step"]


@pytest.mark.parametrize("steps", [(), ("3", "12", "20.orbax-checkpoint-tmp"), None])
def test_what_is_said_of_checkpoints_is_true(
    steps: tuple[str, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """None: a disk that does not answer."""
    ended = list[int]()
    monkeypatch.setattr(stopping, "_LEAVE_S", 0.1)
    monkeypatch.setattr(stopping, "os", SimpleNamespace(**vars(os) | {"_exit": ended.append}))
    if steps is None:
        monkeypatch.setattr(stopping, "latest_step", lambda _: time.sleep(1) or 3)
    for name in steps or ():
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    stop = StopSignal()
    stop.folder, stop._asked, stop._first_signal = lambda: tmp_path, 1.0, 1.0
    stop._leave("ended at once by a second signal, SIGTERM")
    assert ended == [75]
    said = {
        (): "there is no checkpoint yet: the same command begins again",
        None: f"the same command with --run-dir {tmp_path} goes on from its newest checkpoint, if there is one",
    }.get(steps, f"the same command with --run-dir {tmp_path} goes on from the checkpoint of step 12")
    assert capfd.readouterr().err == f"ended at once by a second signal, SIGTERM; {said}\n"


GLOO = b"[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"


@pytest.mark.parametrize(
    ("printed", "passed"),
    [
        (GLOO + b"a line\n" + GLOO, b"a line\n"),
        (b"[Gloo] Rank [Gloo] Rank 10 is connected to 3 is connected to 3 peer ranks. \n3\n\n" + b"7\n", b""),
        (b"7\n\n" + GLOO, b"7\n\n"),
        (b"[Gloo] Rank 1: connection refused\n", b"[Gloo] Rank 1: connection refused\n"),
    ],
)
def test_lines_of_gloo(printed: bytes, passed: bytes) -> None:
    assert b"".join(without_gloo(printed.splitlines(keepends=True))) == passed


def test_quiet_gloo_lets_pass_what_else_is_printed() -> None:
    """From C, from a child process, and from Python, which writes to the file itself and loses nothing at os._exit."""
    code = (
        "import os, sys\nfrom jaxdist.runtime.output import quiet_gloo\n"
        f"with quiet_gloo():\n    os.write(1, {GLOO!r} + b'of C\\n')\n"
        "    os.system('echo of a child')\n    print('of Python')\n"
        "print('after')\nwith quiet_gloo():\n    print('last')\n    os._exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=child.environment(), capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines[:3]) == ["of C", "of Python", "of a child"] and lines[3:] == ["after", "last"]


def test_gloo_is_quiet_in_jobs_on_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, what NCCL prints before a process aborts must not be lost in a pipe."""
    for name, text in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(output, "quiet_gloo", lambda: contextlib.nullcontext("quiet"))
    for gpus, platform, quiet in ((False, "auto", "quiet"), (True, "cpu", "quiet"), (True, "auto", None)):
        monkeypatch.setattr(output, "only_cpus", lambda environ, gpus=gpus: not gpus)
        with output.quiet_job(platform) as found:
            assert found == quiet
    monkeypatch.setenv("WORLD_SIZE", "1")
    with output.quiet_job("cpu") as found:
        assert found is None


def test_a_second_signal_ends_a_run_whose_output_nobody_reads() -> None:
    code = (
        "import os, signal, sys, time\nfrom jaxdist.runtime.watch import stop\nstop.SAME_S = stop._LEAVE_S = 0.2\n"
        "with stop.StopSignal() as asked:\n    asked._begun = 1\n    signal.raise_signal(signal.SIGTERM)\n"
        "    while not asked.why:\n        time.sleep(0.01)\n    time.sleep(0.3)\n    os.set_blocking(2, False)\n"
        "    while True:\n        try:\n            os.write(2, b'x' * 4096)\n        except BlockingIOError:\n"
        "            break\n    os.set_blocking(2, True)\n    signal.raise_signal(signal.SIGTERM)\n    time.sleep(20)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], env=child.environment(), stderr=subprocess.PIPE)
    assert run.stderr is not None
    try:
        assert run.wait(15) == 75
    finally:
        run.kill()
        run.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_other_signals_that_ask_to_stop(number: signal.Signals) -> None:
    """Of a terminal that closes, and of a scheduler; but not under nohup, or where a program has its own handler."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopSignal() as asked:
            asked._begun = 1
            signal.raise_signal(number)
            wait_until(lambda: asked.why == number.name, "the request")
        assert signal.getsignal(number) is signal.SIG_DFL
        for own in (signal.SIG_IGN, lambda *_: None):
            signal.signal(number, own)
            with StopSignal() as asked:
                assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_all_lines() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    line, found = b"x" * 4096 + b"\n", list[bytes]()

    def read() -> None:
        with os.fdopen(reading, "rb") as file:
            time.sleep(0.1)
            found.extend(file)

    reader = threading.Thread(target=read)
    reader.start()
    file = LastingFile(writing)
    for _ in range(100):
        file.write(line)
    os.close(writing)
    reader.join()
    assert found == [line] * 100
