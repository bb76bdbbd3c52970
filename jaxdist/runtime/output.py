"""Standard output and error that end no run: not where the disk is full, and not where their reader has gone."""

import contextlib
import io
import os
import re
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from jaxdist.config.resolve import only_cpus
from jaxdist.runtime.join.environment import find_job

READER_S = 1.0  # in which the reader of a pipe that is full must read, where writing does not wait for it


def nothing() -> None:
    """Do nothing."""


class LastingFile(io.RawIOBase):
    """A file of output that drops what cannot be written, and raises nothing.

    It counts the lines that are lost, as on a full disk, and says so as soon as it can be written again.

    descriptor: the file's; it stays open.
    gone: is called once, when the reader has gone, as in `... | head`.
    """

    def __init__(self, descriptor: int, gone: Callable[[], None] = nothing) -> None:
        self._gone, self._descriptor, self._lock = gone, descriptor, threading.RLock()
        self._lost, self._why = 0, ""  # lines since the last that was written, and what the system says
        self._torn = False  # whether the last line in the file is not whole

    def write(self, data: Any) -> int:
        """Write all of the data, as far as possible. Returns their length."""
        data = bytes(data)
        with self._lock:
            lines = f"{self._lost} lines of output were" if self._lost > 1 else "1 line of output was"
            before = b"\n" * self._torn + (f"{lines} lost: {self._why}\n".encode() if self._lost else b"")
            whole, sent = before + data, 0
            try:
                while sent < len(whole):
                    try:
                        sent += os.write(self._descriptor, whole[sent:])
                    except BlockingIOError:  # a pipe that another program has made so, and whose reader is slow
                        if not select.select([], [self._descriptor], [], READER_S)[1]:
                            raise
                self._lost, self._torn = 0, False
            except OSError as error:
                if sent:
                    self._torn = whole[sent - 1 : sent] != b"\n"
                self._lost = whole[max(sent, len(before)) :].count(b"\n") + self._lost * (sent < len(before))
                self._why = error.strerror or str(error)
                if isinstance(error, BrokenPipeError):
                    tell, self._gone = self._gone, nothing
                    tell()
        return len(data)

    def writable(self) -> bool:
        """True."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether this is a terminal."""
        return os.isatty(self._descriptor)


def _lasting(stream: TextIO | None, gone: Callable[[], None]) -> TextIO:
    """A stream to the same file that lasts; the same stream where it is no file of the system, as in a notebook."""
    if stream is None:  # closed, as by `>&-`
        return Path(os.devnull).open("w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        file = LastingFile(stream.fileno(), gone)
    except io.UnsupportedOperation:
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    buffer: Any = file if stream.write_through else io.BufferedWriter(file)  # as `python -u` and Python make them
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


GLOO_WORDS = r"\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : | "
_GLOO = re.compile(rf"({GLOO_WORDS})*".encode())


def without_gloo(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines without those that gloo prints when it connects. It prints word by word from several threads at once,
    so that a line of its words may be without a beginning, and a number or an empty line may follow."""
    after = False
    for line in lines:
        after = _GLOO.fullmatch(line.rstrip(b"\n")) is not None and (after or b"Gloo" in line or b"peer ranks" in line)
        if not after:
            yield line


@contextlib.contextmanager
def quiet_gloo() -> Iterator[None]:
    """A context in which gloo is not heard on standard output, to which it prints from C++, with no way to switch it
    off. What else is printed from C++ there passes; Python's own standard output goes on to the file it had."""
    sys.stdout.flush()
    file, (reading, writing), before = os.dup(1), os.pipe(), sys.stdout

    def forward() -> None:
        with os.fdopen(reading, "rb") as lines:
            for line in without_gloo(lines):
                with contextlib.suppress(OSError):  # a full disk, a reader that has gone
                    os.write(file, line)

    thread = threading.Thread(target=forward, name="quiet gloo", daemon=True)
    os.dup2(writing, 1)
    os.close(writing)
    thread.start()
    sys.stdout = os.fdopen(file, "w", encoding=before.encoding, errors=before.errors, buffering=1, closefd=False)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sys.stdout = before
        os.dup2(file, 1)  # closes the pipe, which ends the thread, unless a process that was started here has it, too
        thread.join(1)


def quiet_job(platform: str) -> contextlib.AbstractContextManager[None]:
    """`quiet_gloo` in a job on CPUs, which communicate by gloo. On GPUs nothing is changed: what NCCL prints just
    before a process aborts would be lost in the pipe. platform: of section devices."""
    on_cpus = platform == "cpu" or only_cpus(os.environ)
    return quiet_gloo() if on_cpus and find_job(os.environ) else contextlib.nullcontext()


@contextlib.contextmanager
def lasting_output(gone: Callable[[], None] = nothing) -> Iterator[None]:
    """A context in which standard output and error are `LastingFile`s, whoever writes: the console of a run and its
    bar, `print`, warnings, the loggers of libraries. gone: is called when nobody reads standard output any more."""
    before, within = (sys.stdout, sys.stderr), True
    lasting = _lasting(sys.stdout, lambda: gone() if within else None), _lasting(sys.stderr, nothing)
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        for stream in lasting:
            stream.flush()
        sys.stdout, sys.stderr = before
        within = False  # loggers may keep the streams
