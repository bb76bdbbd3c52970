"""The exceptions for mistakes that a user can mend, on command lines too, and for a stop. Invariants are asserts."""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec

Arguments = ParamSpec("Arguments")


class UserError(ValueError):
    """A mistake in a configuration, a command line or a call.

    The message is one line: the key or argument, its value, what is allowed, and how to mend it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class CommandParser(argparse.ArgumentParser):
    """A parser of command lines whose errors are a `UserError`: the argument, what is allowed, and `--help`."""

    def error(self, message: str) -> NoReturn:
        """Raise the error, for mistakes that this parser or its user finds."""
        usage = self.format_usage().removeprefix("usage: ").strip()
        raise UserError(f"{message}; allowed: {usage}; {self.prog} --help says more")


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
