"""The exception for mistakes that a user can mend. Invariants of jaxdist itself are asserts."""


class UserError(ValueError):
    """A mistake in a configuration, a command line or a call.

    The message is one line: the key or argument, its value, what is allowed, and how to mend it. Command-line programs
    print it to standard error and exit with status 2, without a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
