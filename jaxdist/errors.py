"""Errors that are the user's to mend. Invariants of jaxdist itself are asserts, not exceptions of this kind."""


class UserError(ValueError):
    """A mistake in a configuration, a command line or a call.

    The message is one line that names the key or argument, its value, what is allowed and how to mend it. Command-line
    programs print it to standard error and exit with status 2, without a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
