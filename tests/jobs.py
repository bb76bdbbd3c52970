"""Jobs of several Python processes on this machine, and waiting for what they do."""

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import child
import pytest

T = TypeVar("T")
Environ = dict[str, str]


def wait_until(
    seen: Callable[[], T],
    what: str = "",
    seconds: float = 10,
    *,
    over: Callable[[], bool] = lambda: False,
    logs: Callable[[], str] = str,
) -> T:
    """The first true value of `seen`, asked fifty times a second.

    Fails, with what `logs` gives, when the time is up, or when `over` says that it will not be seen any more.
    """
    deadline = time.monotonic() + seconds
    while True:
        late = time.monotonic() > deadline or over()  # before it looks: what came last is seen
        if value := seen():
            return value
        if late:
            pytest.fail(f"not seen in {seconds} s: {what}\n{logs()}")
        time.sleep(0.02)


def marked(mark: str, kind: str) -> list[str]:
    """The processes with a word in their environment or command line, this one's children or not. kind: the file of
    /proc, environ or cmdline."""
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{kind}"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(port: int, rank: int) -> Environ:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}


def by_jax(port: int, rank: int) -> Environ:
    return {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}


class Processes:
    """Python processes started together in one folder; whatever happens, none of them outlives the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def add(self, arguments: Sequence[str], environ: Environ, folder: Path | None = None) -> None:
        clean = {key: value for key, value in child.environment().items() if key not in torchrun(0, 0)}
        rank = len(self.running)
        with (self.folder / f"out{rank}").open("wb") as out, (self.folder / f"err{rank}").open("wb") as err:
            self.running.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=clean | child.QUICK | environ,
                    stdout=out,
                    stderr=err,
                    cwd=folder or self.folder,
                )
            )

    def out(self, rank: int) -> str:
        """Standard output, without what gloo prints there when it connects, from several threads at once: a number or
        the end of a line may come after another line."""
        text = (self.folder / f"out{rank}").read_text()
        return "\n".join(
            line for line in text.splitlines() if "peer ranks" not in line and not re.fullmatch(r"\d*", line)
        )

    def err(self, rank: int, *, notices: bool = False) -> str:
        """Standard error. notices: with the lines that a watch writes where nothing moves for 30 s, as on a machine
        that has much else to do."""
        text = (self.folder / f"err{rank}").read_text()
        return text if notices else re.sub(r"^no step for .*\n", "", text, flags=re.MULTILINE)

    def logs(self) -> str:
        return "\n".join(f"--- {i}\n{self.out(i)}\n{self.err(i, notices=True)}" for i in range(len(self.running)))

    def wait(self, seconds: float = 60) -> list[int]:
        """Exit statuses. Fails, with what they printed, when not all have ended in time."""
        self.until(lambda: all(process.poll() is not None for process in self.running), "the end", seconds, ended=True)
        return [process.returncode for process in self.running]

    def until(self, seen: Callable[[], bool], what: str, seconds: float = 120, *, ended: bool = False) -> None:
        """Fails, with what they printed, when it is not seen in time, or one of them ends before (unless it may)."""

        def logs() -> str:
            self.kill()
            return self.logs()

        over = lambda: not ended and any(process.poll() is not None for process in self.running)  # noqa: E731
        wait_until(seen, what, seconds, over=over, logs=logs)

    def wait_for_step(self, metrics: Path, step: int, seconds: float = 60) -> None:
        self.until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step, f"step {step}", seconds)

    def kill(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
