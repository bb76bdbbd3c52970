"""A second process that does a part of the work of a search: tracing is Python, which runs on one core.

`python -m jaxdist.plan.search.worker` reads a function and its arguments from stdin, pickled, and writes the result to
stdout. What is traced there needs no devices.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any


class Worker:
    """A call of a function in another process.

    function: of a module, pure. It and its arguments must be picklable.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = pickle.dumps((function, arguments))
        paths = os.pathsep.join(path for path in sys.path if path)
        with tempfile.TemporaryFile() as given:  # no pipe, which a process that ends at once would break
            given.write(self.call)
            given.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=given,
                stdout=subprocess.PIPE,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
            )

    def result(self) -> Any:
        """What the function returns. If the process ended without a result, such as one that was killed for memory, the
        function is called here."""
        given, _ = self.process.communicate()
        if self.process.returncode == 0:
            return pickle.loads(given)
        function, arguments = pickle.loads(self.call)
        return function(*arguments)

    def stop(self) -> None:
        """End the process, if it is still there."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def main() -> None:
    """Do the work of a `Worker`."""
    function, arguments = pickle.load(sys.stdin.buffer)
    out, sys.stdout = sys.stdout, sys.stderr  # what is printed on the way is no result
    out.buffer.write(pickle.dumps(function(*arguments)))
    out.buffer.flush()


if __name__ == "__main__":
    main()
