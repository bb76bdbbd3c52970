"""Exit statuses and signals that processes, launcher and watch agree on."""

import signal

from jaxdist.errors import RunStopped, UserError

DONE, FAILED = 0, 1
WRONG = 2  # a mistake of the user: the same command would fail again
STOPPED = 75  # stopped, and the same command resumes
# Signals that ask a run to stop: Ctrl-C, a scheduler, a terminal that closes, `sbatch --signal=USR1@...`.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAME_S = 1.0  # launchers, schedulers and terminals may send one signal twice


def status_of(error: BaseException) -> int:
    """The exit status of a process that ends with this exception."""
    return WRONG if isinstance(error, UserError) else STOPPED if isinstance(error, RunStopped) else FAILED
