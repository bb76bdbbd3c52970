"""The exceptions for mistakes that a user can mend, and for a stop. Invariants of jaxdist itself are asserts."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


class UserError(ValueError):
    """A mistake in a configuration, a command line or a call.

    The message is one line: the key or argument, its value, what is allowed, and how to mend it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class RunStopped(Exception):
    """The end of a run that the same command can take up again: no mistake, and no failure of its own. One line."""


def reports_mistakes(command: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Decorate a command, which returns an exit status: a `UserError` in it is printed to standard error as one line,
    without a traceback, and the status is 2."""

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run
