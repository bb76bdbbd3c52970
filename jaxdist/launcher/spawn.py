"""A job started from Python: `spawn(fn, 4)`, in place of the launcher of `scripts/launch.py`."""

import multiprocessing
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from jaxdist.launcher.exec_rank import die_with_parent
from jaxdist.launcher.note_signals import noted_signals
from jaxdist.launcher.ranks import POLL_S, HostPlace
from jaxdist.launcher.supervisor import rank_environ
from jaxdist.runtime.exit_status import SAME_S
from jaxdist.runtime.network.addresses import free_port
from jaxdist.runtime.network.job_token import TOKEN, new_token

GRACE_S = 5.0  # for the others to end after SIGTERM, where one has failed
MESSAGE = 15_000  # last characters of a traceback: so many fit into a pipe that nobody reads yet


class SpawnError(RuntimeError):
    """The process `rank` has failed. The message holds its traceback, or its exit status.

    >>> try:
    ...     jaxdist.spawn(int, 1, args=("no base",))
    ... except jaxdist.SpawnError as error:
    ...     print(error.rank, str(error).splitlines()[-1])
    0 TypeError: ...
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


def _run(
    fn: Callable[..., Any],
    rank: int,
    args: tuple[Any, ...],
    environ: Mapping[str, str],
    report: connection.Connection,
    parent: int,
) -> None:
    """Call `fn` in a new process, and send the traceback if it fails."""
    die_with_parent(parent)
    os.environ.clear()
    os.environ.update(environ)
    try:
        fn(rank, *args)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            with suppress(OSError):  # the parent has gone
                report.send_bytes(traceback.format_exc()[-MESSAGE:].encode())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # a normal exit would wait for the other processes, and they for this one


def spawn(fn: Callable[..., Any], nprocs: int, *, args: tuple[Any, ...] = ()) -> None:
    """Call `fn(rank, *args)` in `nprocs` new processes of this host, as one job, and wait until all have returned.

    Each finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, so that
    `jaxdist.runtime.start` joins them. `fn` and `args` reach them as `multiprocessing` sends them, by the method
    "spawn": `fn` is a function at the top level of a module that can be imported, and a script that calls this does so
    under `if __name__ == "__main__"`. Raises `SpawnError`, with rank and traceback, for the first process that fails,
    after ending the others.

    A signal that asks to stop, such as Ctrl-C or SIGTERM, is passed on as SIGTERM, and takes effect here when all
    processes have ended: they may save meanwhile. A second one kills them. They die with this process.

    >>> jaxdist.spawn(print, 2, args=("is my rank",))  # in place of print: your function, which trains
    """
    if nprocs < 1:
        raise ValueError(f"nprocs is {nprocs}; allowed: 1 or more")
    context = multiprocessing.get_context("spawn")
    place, token = HostPlace(0, 1, 0, nprocs, "127.0.0.1", free_port(), secrets.token_hex(8)), new_token()
    processes: list[BaseProcess] = []
    reports: list[connection.Connection] = []
    signals: list[int] = []
    try:
        with noted_signals(signals, SAME_S):
            for rank in range(nprocs):
                environ = rank_environ(place, local=rank, procs=nprocs, attempt=1, run_dir=None) | {TOKEN: token}
                ours, theirs = context.Pipe(duplex=False)
                reports.append(ours)
                given = (fn, rank, args, environ, theirs, os.getpid())
                started = context.Process(target=_run, args=given, name=f"rank {rank}")
                started.start()
                processes.append(started)
                theirs.close()
            _wait(processes, reports, signals)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(0.0 if len(signals) > 1 else GRACE_S)
            process.kill()
            process.join()
        for report in reports:
            report.close()
    if signals:
        signal.raise_signal(signals[0])


def _wait(processes: list[BaseProcess], reports: list[connection.Connection], signals: list[int]) -> None:
    """Wait until all processes have ended, or a second signal has come. Raises `SpawnError` for the first that fails
    without a signal."""
    running, told = {process.sentinel: rank for rank, process in enumerate(processes)}, False
    while running and len(signals) < 2:
        if signals and not told:
            told = True
            for rank in running.values():
                processes[rank].terminate()
        for sentinel in connection.wait(list(running), POLL_S):
            assert isinstance(sentinel, int)
            rank = running.pop(sentinel)
            processes[rank].join()
            status = processes[rank].exitcode
            if not status or signals:
                continue
            said = ""
            with suppress(EOFError):  # it was killed
                said = reports[rank].recv_bytes().decode()
            raise SpawnError(rank, f"rank {rank} failed (exit status {status})" + (f":\n\n{said}" if said else ""))
