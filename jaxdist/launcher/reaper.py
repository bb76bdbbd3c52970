"""Kill the process groups that a dead launcher has left: python -I -S reaper.py.

Its input has a line "+PID" for each group that begins and "-PID" for each that has ended. The input ends with the
launcher, however that ends; then every group that is left is killed. Ranks die with their launcher by themselves, but
the processes that they have started do not.
"""

import contextlib
import os
import signal
import sys


def reap() -> int:
    """Wait until the launcher is gone, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(reap())
