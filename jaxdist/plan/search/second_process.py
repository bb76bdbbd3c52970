"""A second process that does a part of the work of a search: tracing is Python, which runs on one core.

`python -m jaxdist.plan.search.second_process FD` gets a function and its arguments from the connection with this file
descriptor, and sends the result back. (multiprocessing's own processes run the main program again, up to its guard.)
"""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jaxdist.errors import UserError


class SecondProcess:
    """A call of a function in another process, which has no devices but CPUs.

    function: of a module, pure.
    arguments: a few kB: what does not go into the buffer of a pipe waits for seconds, until the process has started.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments
        self.here, there = multiprocessing.Pipe()
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(there.fileno())],
            pass_fds=[there.fileno()],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
            process_group=0,  # Ctrl-C is for this process, which ends the other one
        )
        there.close()
        with contextlib.suppress(ConnectionError):  # it has ended, and `result` sees that
            self.here.send((function, arguments))

    def result(self) -> Any:
        """What the function returns; its `UserError` is raised here. If the process ended without a result, such as one
        that was killed for memory, the function is called here."""
        try:
            result, error = self.here.recv()
        except (EOFError, ConnectionError):
            return self.function(*self.arguments)
        if error is not None:
            raise UserError(error)
        return result

    def stop(self) -> None:
        """End the process, if it is still there."""
        self.here.close()
        self.process.kill()
        self.process.wait()


def _serve(connection: Connection) -> None:
    """The work of the process."""
    function, arguments = connection.recv()
    threading.Thread(target=_end_with_the_first, args=(connection,), daemon=True).start()
    try:
        result, error = function(*arguments), None
    except UserError as mistake:
        result, error = None, str(mistake)
    connection.send((result, error))


def _end_with_the_first(connection: Connection) -> None:
    """End this process when the first one has ended, however it did."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
