"""The exceptions for mistakes that a user can mend, on command lines too, and for a stop. Invariants are asserts."""

import argparse
import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, ParamSpec

Arguments = ParamSpec("Arguments")
_OTHER_NAMES = {  # what people call it elsewhere -> what it is called here
    "adam": "adamw", "dp": "data", "tp": "tensor", "mp": "tensor", "pp": "pipe", "sp": "sequence_parallel",
    "batch_size": "global_batch", "learning_rate": "lr", "n_layers": "layers", "num_layers": "layers",
    "n_heads": "heads", "num_heads": "heads", "d_model": "width", "hidden_size": "width", "vocab_size": "vocab",
    "max_steps": "steps", "fsdp": "zero3", "hsdp": "zero3", "cuda": "gpu",
    "bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "half": "fp16", "1f1b": "one_f_one_b",
    **dict.fromkeys((
        "accumulation_steps", "accum_steps", "accumulate", "accumulate_grad_batches", "grad_accum", "grad_accum_steps",
        "gradient_accumulation", "gradient_accumulation_steps", "num_microbatches", "micro_batches"), "microbatches"),
}  # fmt: skip


class UserError(ValueError):
    """A mistake in a configuration, a command line or a call.

    The message is one line: the key or argument, its value, what is allowed, and how to mend it.

    >>> jaxdist.make_mesh(dp=8)
    Traceback (most recent call last):
    jaxdist.errors.UserError: mesh.dp: is no axis; allowed: pipe, data, fsdp, ...; did you mean data=8?
    """

    def __init__(self, message: str) -> None:
        # Files of others, which messages quote, may hold what cannot be printed.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split())))


class CommandParser(argparse.ArgumentParser):
    """A parser of command lines whose errors are a `UserError`: the argument, what is allowed, and `--help`."""

    def error(self, message: str) -> NoReturn:
        """Raise the error, for mistakes that this parser or its user finds."""
        if "; allowed: " in message:  # the type of an option has said it
            raise UserError(message.removeprefix("argument "))
        usage = self.format_usage().removeprefix("usage: ").strip()
        raise UserError(f"{message}; allowed: {usage}; {self.prog} --help says more")


class RunStopped(Exception):
    """The end of a run that the same command can take up again: no mistake, and no failure of its own. One line."""


def reports_mistakes(command: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Decorate a command. A `UserError` in it is one line on standard error, without a traceback, and status 2."""

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.55) -> str | None:
    """The known name that `word` was probably meant to be, or None. Ignores case and knows other programs' names."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower.get(_OTHER_NAMES.get(word.lower(), ""), by_lower[near[0]] if near else None)


def first_of(words: Sequence[str], most: int, between: str = ", ") -> str:
    """Such as "a, b and 3 more": at most `most` words of a message, and how many there are besides."""
    return between.join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
