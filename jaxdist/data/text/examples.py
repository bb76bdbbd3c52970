"""Examples for fine-tuning: a conversation, a prompt and its completion, or a text, from lines of JSON or from rows.

Files may be anybody's: what is no example is refused in one line, which names the file and the line.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config.json_reader import parse_json
from jaxdist.data.source import readable
from jaxdist.data.text.template import Conversation
from jaxdist.errors import UserError

LINE_BYTES = 16 << 20
KINDS = ("messages", "prompt", "text")  # by the key that each has
_ALLOWED = "messages, or prompt and completion, or text"


class Example(NamedTuple):
    """One example, as text.

    - where: the place where it was found, for messages.
    - kind: of `KINDS`.
    - pieces: (prompt, completion), or (text,); () of a conversation.
    - conversation: None of others.
    """

    where: str
    kind: str
    pieces: tuple[str, ...] = ()
    conversation: Conversation | None = None

    @property
    def content(self) -> bytes:
        """What decides whether it is held out: the example alone, not its place."""
        inside = [self.conversation.messages, self.conversation.tools] if self.conversation else list(self.pieces)
        return json.dumps([self.kind, *inside], sort_keys=True).encode()


def jsonl_examples(files: Iterable[Path], *, key: str) -> Iterator[Example]:
    """The examples in the lines of files. Blank lines are left out. Raises `UserError`."""
    for file in files:
        with readable(key, file), file.open("rb") as stream:
            number = 0
            while line := stream.readline(LINE_BYTES + 1):
                number += 1
                where = f"{file}, line {number}"
                if len(line) > LINE_BYTES:
                    raise UserError(f"{key}: {where}: is longer than {LINE_BYTES} bytes; allowed: one example a line")
                if line.strip():
                    yield example_of(_record(line, where, key), where, key=key)


def _record(line: bytes, where: str, key: str) -> Any:
    try:
        return parse_json(line.removeprefix(b"\xef\xbb\xbf"), any_number=True)
    except ValueError as error:
        raise UserError(f"{key}: {where}: is no line of JSON ({_short(error)}); mend it, or leave it out") from error


def _short(error: ValueError) -> str:
    return " ".join(str(error).split())[:200]


def example_of(record: Any, where: str, *, key: str) -> Example:
    """The example in an object of JSON, or in a row of a table. Keys with null are not there, and others are not read.

    Raises `UserError` for what holds none or two, or for fields of another type.
    """

    def refuse(wrong: str, allowed: str) -> UserError:
        return UserError(f"{key}: {where}: {wrong}; allowed: {allowed}")

    if not isinstance(record, dict):
        raise refuse(f"holds {type(record).__name__}", f"an object with {_ALLOWED}")
    found = [kind for kind in KINDS if record.get(kind) is not None]
    if len(found) != 1:
        held = ", ".join(f"{name!r}{' (null)' * (record[name] is None)}" for name in record)[:200] or "nothing"
        raise refuse(f"holds {' and '.join(found)}" if found else f"holds {held}", f"one of {_ALLOWED}")
    (kind,) = found
    if kind == "messages":
        messages = _messages(record["messages"], refuse)
        return Example(where, kind, conversation=Conversation(where, messages, record.get("tools")))
    names = ("prompt", "completion") if kind == "prompt" else ("text",)
    for name in names:
        if not isinstance(record.get(name), str):
            raise refuse(f"{name} is {type(record.get(name)).__name__}", f"{_ALLOWED}, as text (str)")
    return Example(where, kind, tuple(record[name] for name in names))


def _messages(value: Any, refuse: Any) -> Sequence[dict[str, Any]]:
    """The messages of a conversation, without keys that hold null, as chat templates expect it."""
    if not isinstance(value, list) or not value:
        raise refuse(f"messages is {'empty' if value == [] else type(value).__name__}", "a list of messages")
    found = []
    for i, each in enumerate(value, start=1):
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            raise refuse(f"message {i} has no role", '{"role": "user", "content": "..."}')
        kept = {name: inner for name, inner in each.items() if inner is not None}
        if not isinstance(kept.get("content", ""), str | list) or not kept.keys() - {"role"}:
            raise refuse(f"message {i} has no content", '{"role": "user", "content": "..."}')
        found.append(kept)
    if all(each["role"] != "assistant" for each in found):
        roles = ", ".join(dict.fromkeys(each["role"] for each in found))[:200]
        raise refuse(f"the messages are of {roles}", "some of assistant: they are what is learned")
    return found
