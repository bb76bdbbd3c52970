"""Renders chat templates, in a process of its own: a template is somebody's program, which may loop for ever or make
a text without end. The process ends where it takes too much time or memory. It imports no jax.

Standard input has JSON lines: the template and the limits first, then batches of conversations, each after a line with
their number.
Standard output answers each with a line. `jaxdist.data.text.template` is the other side.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any, NamedTuple
from uuid import uuid4

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxdist.config.json_reader import parse_document


class Rendered(NamedTuple):
    """A conversation as text. spans: where the assistant's turns begin and end, in characters."""

    text: str
    spans: list[tuple[int, int]]


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what a template says is the assistant's. It is put between marks that
    no text has."""

    tags: Any = frozenset({"generation"})

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        environment.extend(mark=f"<{uuid4().hex}>", has_generation=False)

    def parse(self, parser: Any) -> nodes.Node:
        """The block as a call of `_marked`."""
        line = next(parser.stream).lineno
        environment: Any = self.environment
        environment.has_generation = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        environment: Any = self.environment
        mark = environment.mark
        return f"{mark}{caller()}{mark}"


class _Names(Namespace):
    """A namespace whose names begin with no underscore: no way to Python's own attributes."""

    def __init__(*args: Any, **given: Any) -> None:
        self, values = args[0], dict(*args[1:], **given)
        for name in values:
            _checked(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_checked(name), value)


def _checked(name: Any) -> Any:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} begins with an underscore")
    return name


class ChatTemplate:
    """A compiled template, which sees what transformers gives it.

    - special: special tokens by name, such as "eos_token".
    - day: what `strftime_now` says is today: the same text each day.
    - most: characters of a conversation as text.
    """

    def __init__(self, template: str, special: dict[str, str], day: date, most: int) -> None:
        extensions = [_Generation, loopcontrols]
        self._environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": day.strftime,
            "namespace": _Names,
        }
        self._template, self._special = self._environment.from_string(template), special
        self._most = most

    def render(self, messages: Sequence[Any], tools: Any, *, prompt: bool) -> str:
        """The text of messages. prompt: with what comes before an answer of the assistant."""
        pieces, size = [], 0
        values = self._special | {"messages": messages, "tools": tools, "documents": None}
        for piece in self._template.generate(**values, add_generation_prompt=prompt):
            pieces.append(piece)
            size += len(piece)
            if size > self._most:
                raise TemplateError(f"it gives more than {self._most} characters")
        return "".join(pieces)

    def conversation(self, messages: Sequence[Any], tools: Any) -> Rendered:
        """The text of a conversation. The assistant's turns are where the template says so by {% generation %}, or else
        where the text grows by each of them. Raises `TemplateError` where it does not grow by them."""
        whole = self.render(messages, tools, prompt=False)
        if self._environment.has_generation:
            return _between_marks(whole, self._environment.mark)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:i], tools, prompt=True)
                after = whole if i + 1 == len(messages) else self.render(messages[: i + 1], tools, prompt=False)
                if not (whole.startswith(after) and after.startswith(before)):
                    raise TemplateError(
                        f"it changes what comes before message {i + 1} or in it when more messages follow, so that the"
                        " assistant's turns cannot be found; put them into {% generation %} ... {% endgeneration %} in"
                        " a template of your own (data.chat_template), or set data.completion_only=false"
                    )
                spans.append((len(before), len(after)))
        return Rendered(whole, spans)

    def text(self, messages: Sequence[Any], tools: Any) -> Rendered:
        """The text of a conversation, of which all counts."""
        whole = self.render(messages, tools, prompt=False).replace(self._environment.mark, "")
        return Rendered(whole, [(0, len(whole))])


def _between_marks(text: str, mark: str) -> Rendered:
    pieces = text.split(mark)
    spans, at = [], 0
    for i, piece in enumerate(pieces):
        if i % 2:
            spans.append((at, at + len(piece)))
        at += len(piece)
    return Rendered("".join(pieces), spans)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _answers(template: ChatTemplate, requests: Sequence[bytes], seconds: float) -> Iterator[dict[str, Any]]:
    for line in requests:
        request = parse_document(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor; its signal ends the process
        found = (template.conversation if request["spans"] else template.text)(request["messages"], request["tools"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        yield {"text": found.text, "spans": found.spans}


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Answer until the input ends. The first conversation that cannot be rendered ends it too."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both; the other side ends this one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = sys.stdin.buffer
    given = parse_document(lines.readline())
    memory, seconds = given["memory"], given["seconds"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        day = date.fromisoformat(given["day"])
        template = ChatTemplate(given["template"], given["special"], day, given["characters"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say({})
        while count := lines.readline():
            for answer in _answers(template, [lines.readline() for _ in range(int(count))], seconds):
                _say(answer)
    except MemoryError:
        _say({"error": f"it needs more than {memory >> 20} MiB of memory"})
    except Exception as error:  # whatever the template's program does
        _say({"error": f"{str(error) or type(error).__name__}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
