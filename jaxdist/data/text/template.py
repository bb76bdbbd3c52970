"""Chat templates: conversations as text, rendered by a process of its own (`jaxdist.data.text.render_worker`)."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxdist.config.json_reader import parse_document
from jaxdist.errors import UserError

OLDEST_JINJA = (3, 1, 6)  # older ones have ways out of the sandbox
SECONDS = 5  # of the processor, for one conversation
MEMORY_BYTES = 2 << 30  # of the process
CHARACTERS = 16 << 20  # of a conversation as text
_WORKER = Path(__file__).with_name("render_worker.py")


class Conversation(NamedTuple):
    """Messages, each {"role": ..., "content": ...}.

    - where: the place where they are, for messages of errors.
    - tools: what the template is told of tools.
    """

    where: str
    messages: Sequence[dict[str, Any]]
    tools: Any = None


class Renderer:
    """Renders conversations by a chat template, within limits on time, memory and size. A context manager.

    - key: the configuration key or option that messages name.
    - special: special tokens by name. day: what the template is told is today, such as "2024-07-26".
    - spans: whether the assistant's turns are looked for. Otherwise all of the text counts.

    Entering it raises `UserError` where the template cannot be compiled; making it, where jinja2 is not installed.
    """

    def __init__(self, template: str, *, key: str, special: dict[str, str], day: str, spans: bool) -> None:
        _check_jinja(key)
        self._key, self._spans = key, spans
        path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        limits = {"seconds": SECONDS, "memory": MEMORY_BYTES, "characters": CHARACTERS}
        self._given = {"template": template, "special": special, "day": day, **limits}

    def __enter__(self) -> Self:
        try:
            self._send([self._given])
            self._answer("compiling it")
        except UserError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._from.close()
        with suppress(BrokenPipeError):  # it had ended before it read all
            self._to.close()

    def render(self, conversations: Sequence[Conversation]) -> list[tuple[str, list[tuple[int, int]]]]:
        """The texts of conversations, and of each where the parts that count begin and end, in characters.

        Raises `UserError` for one that the template cannot render.
        """
        asked = [{"messages": each.messages, "tools": each.tools, "spans": self._spans} for each in conversations]
        self._send([len(asked), *asked])  # which the process reads whole, before it answers
        answers = [self._answer(each.where) for each in conversations]
        return [(each["text"], [(begin, end) for begin, end in each["spans"]]) for each in answers]

    def _send(self, values: Sequence[Any]) -> None:
        with suppress(BrokenPipeError):  # it has ended: `_answer` says why
            self._to.write("".join(json.dumps(value) + "\n" for value in values).encode())
            self._to.flush()

    def _answer(self, where: str) -> dict[str, Any]:
        line = self._from.readline()
        if not line.endswith(b"\n"):
            status = self._process.wait()
            said = (
                f"took more than {SECONDS} s of the processor" if status == -signal.SIGPROF else f"ended with {status}"
            )
            raise UserError(f"{self._key}: the chat template failed at {where}: it {said}; mend it, or give another")
        found = parse_document(line)
        if "error" in found:
            said = " ".join(found["error"].split())[:400]
            raise UserError(f"{self._key}: the chat template failed at {where}: {said}")
        return found


def _check_jinja(key: str) -> None:
    try:
        found = importlib.metadata.version("jinja2")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"{key}: a chat template needs the package jinja2, which is not installed; pip install 'jaxdist[hf]'"
        ) from error
    if tuple(int(each) for each in found.split(".")[:3] if each.isdecimal()) < OLDEST_JINJA:
        raise UserError(f"{key}: jinja2 {found} is too old for templates of others; pip install 'jaxdist[hf]'")
