"""JSON from elsewhere, as data within limits: its size, its depth, its numbers, each key once. Imports no jax."""

import codecs
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

JSON_BYTES = 16 << 20  # of a file
JSON_DEPTH = 32  # of lists and objects inside each other
_TOO_DEEP = f"lists and objects are nested more than {JSON_DEPTH} deep"
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # what "\\ud800" alone gives can be neither shown nor written


def parse_json(text: str | bytes, *, any_number: bool = False) -> Any:
    """The value of a JSON text. Raises `ValueError`, in one line, for what is not UTF-8 or not JSON, a key that comes
    twice in an object, and nesting of more than `JSON_DEPTH`.

    any_number: takes NaN, infinities, 1e400 and integers of up to 4300 digits, where nobody looks at numbers. They are
        refused otherwise, because arithmetic with them fails later and far from the file.
    """
    numbers: dict[str, Any] = {"parse_constant": _refused, "parse_float": _float, "parse_int": _int}
    if isinstance(text, bytes):
        text = text.decode()
    try:
        found = json.loads(text, object_pairs_hook=_object, **({} if any_number else numbers))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_inside(found)
    return found


def parse_document(line: bytes) -> Any:
    """The value of a line of a corpus, of which only the text is used: what else it holds may be any JSON. Raises
    `ValueError`."""
    try:
        return json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def read_json_file(path: Path, *, any_number: bool = False) -> Any:
    """The value in a JSON file: `parse_json`. Raises `ValueError`, also above `JSON_BYTES`, and `OSError`."""
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")  # opening a pipe would wait
    with path.open("rb") as file:
        content = file.read(JSON_BYTES + 1)
    if len(content) > JSON_BYTES:
        raise ValueError(f"larger than {JSON_BYTES} bytes")
    return parse_json(content, any_number=any_number)


def log_record(text: bytes, *, mark: str, lists: str, arrays: str) -> dict[str, Any]:
    """A line of a log: an object of numbers. Raises `ValueError`.

    mark: ends a key with a text, which says what the null under the key before it is.
    lists: the key of a list of texts.
    arrays: the key of an object of arrays: lists of numbers and nulls, or of such lists that are alike.
    """
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    for key, value in found.items():
        if key.endswith(mark):
            right = isinstance(value, str)
        elif key == lists:
            right = isinstance(value, list) and all(isinstance(each, str) for each in value)
        elif key == arrays:
            right = isinstance(value, dict) and all(map(_shape, value.values()))
        else:
            right = type(value) in (int, float) or (value is None and key + mark in found)
        if not right:
            raise ValueError(f"{key[:80]!r} is of type {type(value).__name__}")
    return found


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of an array, () of a number or null, None of anything else."""
    if not isinstance(value, list):
        return () if value is None or type(value) in (int, float) else None
    shapes = {_shape(each) for each in value}
    shape = shapes.pop() if shapes else ()
    return None if shapes or shape is None else (len(value), *shape)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name[:80]!r} comes twice")
    return found


def _refused(text: str) -> Any:
    raise ValueError(f"{text[:80]} is not a number that JSON has")


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text)


def _int(text: str) -> int:
    value = int(text) if len(text) <= 20 else 2**64  # 20 characters hold every integer of 64 bits
    return value if -(2**63) <= value < 2**64 else _refused(text)


def _check_inside(value: Any) -> None:
    """Raise `ValueError` for what is nested too deep, and for halves of a surrogate pair. By levels: depth costs no
    stack."""
    level = [value]
    for _ in range(JSON_DEPTH + 1):
        if any(isinstance(each, str) and not each.isascii() and _HALF_A_PAIR.search(each) for each in level):
            raise ValueError("half of a surrogate pair is no text")
        inside = [each for each in level if isinstance(each, dict | list)]
        if not inside:
            return
        names = [name for each in inside if isinstance(each, dict) for name in each]
        level = [*names, *(inner for each in inside for inner in (each.values() if isinstance(each, dict) else each))]
    raise ValueError(_TOO_DEEP)
