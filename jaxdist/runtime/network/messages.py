"""The messages between the processes of a job: JSON objects, a line each, whose fields are checked as they arrive.

A channel has a list of shapes. A shape names the fields of one message and says what each may be. A message that has
the fields of none of them, no fewer and no more, is not read: who takes a message may rely on its fields.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

JsonObject = dict[str, Any]
Check = Callable[[Any], bool]
Shape = Mapping[str, Check]

_MOST = 2**53  # of a number


def string(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """A truth value."""
    return isinstance(value, bool)


def number(value: Any) -> bool:
    """A number that is finite and not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST


def whole(least: int = 0, most: int = _MOST) -> Check:
    """An integer within limits."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def one_of(*values: str) -> Check:
    """One of these strings."""
    return lambda value: isinstance(value, str) and value in values


def maybe(check: Check) -> Check:
    """What the check allows, or null."""
    return lambda value: value is None or check(value)


def row(*checks: Check) -> Check:
    """A list of as many values as there are checks."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(each) for check, each in zip(checks, value, strict=True))
    )


def many(check: Check) -> Check:
    """A list of any length."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def table(name: Check, check: Check) -> Check:
    """An object with any fields whose names and values pass."""
    return lambda value: isinstance(value, dict) and all(name(key) and check(each) for key, each in value.items())


def digits(value: Any) -> bool:
    """A number of a rank as the name of a field, where JSON allows strings only."""
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10


def exactly(shape: Shape) -> Check:
    """An object with exactly these fields."""
    return lambda value: isinstance(value, dict) and has_shape(value, [shape])


def write_line(message: JsonObject) -> bytes:
    """A message as a line, without its end."""
    return json.dumps(message).encode()


def read_line(line: bytes) -> JsonObject | None:
    """The JSON object in a line, or None where it holds none. A half of a surrogate pair, which could be neither
    printed nor written, becomes a question mark."""
    try:
        said = json.loads(line.decode())
        if b"\\u" in line:
            said = json.loads(json.dumps(said, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):  # brackets in brackets
        return None
    return said if isinstance(said, dict) else None


def has_shape(said: JsonObject, shapes: Sequence[Shape]) -> bool:
    """Whether a message has one of the shapes."""
    return any(
        said.keys() == shape.keys() and all(check(said[name]) for name, check in shape.items()) for shape in shapes
    )
