"""End what a dead launcher has left: python -I -S reaper.py, told "+PID" and "-PID" of process groups line by line.

The input ends with the launcher, however that ends. Then every group that was not taken back is killed: ranks die with
their launcher by themselves, but not what they have started.
"""

import contextlib
import os
import signal
import sys


def main() -> int:
    """Returns when the launcher is gone."""
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
    sys.exit(main())
