"""Kill what a dead launcher has left: python -I -S reaper.py MARK.

Its input has a line "+PID" for each process group that begins and "-PID" for each that has ended. The input ends with
the launcher, however that ends; then every group that is left is killed, and every process that has MARK in its
environment, in whatever session it is. Ranks die with their launcher by themselves, but the processes that they have
started do not.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

MOST_ROUNDS = 100  # at most: a killed process may have started another one while the others were looked at


def reap(mark: bytes) -> int:
    """Wait until the launcher is gone, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(MOST_ROUNDS):
        if not (left := marked(mark)):
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return 0


def marked(mark: bytes) -> list[int]:
    """The processes of this user that have a variable in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    sys.exit(reap(os.fsencode(sys.argv[1])))
