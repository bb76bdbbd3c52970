"""Become a rank of a launcher: python -I -S exec_rank.py LAUNCHER_PID CPUS COMMAND ...

The rank dies with its launcher (PR_SET_PDEATHSIG, which `exec` keeps) and runs on CPUS, as in "0,1,2", or on all where
that is "". This is a program of its own because a launcher with threads must not run Python between fork and exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, on Linux. Ends it where that is so already. parent: its number."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was dead before the line above
        os._exit(1)


def become_rank(launcher: int, cpus: str, command: list[str]) -> int:
    """Run the command in place of this program. Returns only if that fails: 2."""
    die_with_parent(launcher)
    if cpus:
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]!r} cannot be run: {error.strerror}; give a program after --", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(become_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
