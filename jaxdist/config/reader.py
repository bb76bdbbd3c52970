"""YAML file + dotted overrides -> a tree of frozen dataclasses, for any dataclasses whose fields carry a `Rule`.

A configuration file is taken as data and nothing else: the reader works on YAML's event stream, so that aliases, tags,
deep nesting and duplicate keys are refused before anything is built from them.
"""

import functools
import keyword
import logging
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import yaml

from jaxdist.config.entries import Entries, entries_in, owners, with_options
from jaxdist.config.rules.fields import UNEXPANDED, Key, all_keys, keys, show
from jaxdist.errors import UserError, nearest

_T = TypeVar("_T")
MAX_BYTES = 64 * 1024
MAX_DEPTH = 16
# YAML 1.2 numbers (1e-3 is one, 012 and 1:30 are none), and the booleans of YAML 1.1.
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_EXPONENT = r"[eE][-+]?[0-9]+"
_FLOAT = re.compile(
    rf"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)({_EXPONENT})?|[-+]?[0-9][0-9_]*{_EXPONENT}"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "null": None}
# What YAML does not count as printable text (a tab, a line feed and a carriage return are).
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")


class _Section(NamedTuple):
    """A section of a configuration, with the keys of the entries that it names.

    name: dotted, such as "parallel.grad_sync"; "" is the whole configuration.
    made: the dataclass that has all of these keys.
    """

    name: str
    made: type
    entries: Entries
    keys: dict[str, Key]
    sections: dict[str, "_Section"]

    def dotted(self, key: str) -> str:
        """The whole name of one of its keys."""
        return f"{self.name}.{key}" if self.name else key

    def everywhere(self) -> Iterator[str]:
        """The whole names of all keys in it and in its sections, in order."""
        for name in self.keys:
            yield from self.sections[name].everywhere() if name in self.sections else [self.dotted(name)]


def read_config(
    cls: type[_T],
    path: str | Path,
    overrides: Sequence[str],
    completed: Callable[[dict[str, Any], Mapping[str, str]], dict[str, Any]] = lambda given, on_top: {},
) -> _T:
    """A `cls` from the YAML file at `path` with each `section.key=value` on top, in order. Errors: `UserError`.

    completed: (the values that are given, not checked yet, but those of options of an entry on top; {the dotted name of
        each key on top: its text}) -> values below them, for what is not given.
    """
    text = _read_text(Path(path))
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path}: the top level is {show(tree)}; allowed: sections, that is {', '.join(keys(cls))}")
    # Which keys there are depends on the entries that are named, so these are found first, in keys that do not depend.
    given = _naming(cls, tree, overrides)
    parts = (each.partition("=") for each in overrides)
    below = completed(given, {key.strip(): text.strip() for key, _, text in parts})
    top = _section(cls, _merged(below, given))
    # Each layer is checked by itself first, so that a wrong line in the file is found even where an override hides it.
    layers = [_checked(top, top, layer) for layer in (below, tree, *(_override(top, each) for each in overrides))]
    made: _T = _build(top, functools.reduce(_merged, layers))
    return made


def read_overrides(cls: Any, tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The values of `section.key=value`s as a tree, each checked by its key. Errors: `UserError`.

    tree: of what they override, where entries are named.
    """
    top = _section(cls, _naming(cls, tree, overrides))
    return functools.reduce(_merged, [_checked(top, top, _override(top, each)) for each in overrides], {})


def _naming(cls: Any, tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tree with those overrides on top whose keys do not depend on entries: these name the entries."""
    common, usual = dict(all_keys(cls)), _section(cls, {})
    naming = [_override(usual, each) for each in overrides if each.partition("=")[0].strip() in common]
    return functools.reduce(_merged, naming, tree)


def field_of(key: str) -> str:
    """The name of the field that holds a key: `from` is a word of Python, so its field is `from_`."""
    return f"{key}_" if keyword.iskeyword(key) else key


def key_names(cls: Any) -> list[str]:
    """The whole names of all keys, those of the default entries among them, in order."""
    return list(_section(cls, {}).everywhere())


def _section(cls: Any, given: Mapping[str, Any], name: str = "") -> _Section:
    """The section `cls` with the keys of the entries that `given` names, a tree of values that are not checked yet."""
    prefix = f"{name}." if name else ""
    common = {each: key for each, key in keys(cls).items() if each in given and not key.nested}
    entries = entries_in(cls, {each: key.check(given[each], prefix + each) for each, key in common.items()})
    made = with_options(cls, entries)
    found = _Section(name, made, entries, keys(made), {})
    for inner, key in found.keys.items():
        if key.nested:
            inside = given.get(inner)
            found.sections[inner] = _section(key.kind, inside if isinstance(inside, dict) else {}, prefix + inner)
    return found


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two trees as one: sections are merged, and keys of `above` win."""
    both = {name for name in below.keys() & above.keys() if isinstance(below[name], dict)}
    return below | above | {name: _merged(below[name], above[name]) for name in both if isinstance(above[name], dict)}


class Dumper(yaml.SafeDumper):
    """Quotes each text that `parse_yaml` would take for something else, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _checked(top: _Section, section: _Section, tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of a section with values in their keys' types and shorthands written out. Keys not given stay away.

    top: the whole configuration, for hints.
    """
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in section.keys and _without_effect(section, name, value):
            continue
        key = section.keys.get(name) or _unknown(top, section, name, value)
        if not key.nested:
            out[name] = key.check(value, section.dotted(name))
            continue
        if isinstance(value, str) and key.shorthand is not None:
            value = {key.shorthand: value}
        if not isinstance(value, dict):
            raise UserError(_not_a_section(section.sections[name], key.shorthand, value))
        out[name] = _checked(top, section.sections[name], value)
    return out


def _without_effect(section: _Section, name: str, value: Any) -> bool:
    """Whether a key belongs to another entry of jaxdist than those of this section. Older versions had such keys beside
    all entries and wrote them into files: for one release a value other than the default gets a line in the log."""
    found = owners(section.entries, name) if all(entry.shipped for entry in section.entries) else {}
    if found and value not in found.values():
        here = ", ".join(dict.fromkeys(section.dotted(f"{entry.key}={entry.name}") for entry in section.entries))
        belongs = " or ".join(map(section.dotted, found))
        text = "%s: %s has no effect with %s; write it with %s, or leave it out: the next release refuses it"
        logging.getLogger(__name__).warning(text, section.dotted(name), show(value), here, belongs)
    return bool(found)


def _bare(name: str) -> str:
    """The name of a key as it goes into a message: escaped and shortened like a value, but not quoted."""
    return show(name).strip("'\"") or "''"


def _build(section: _Section, tree: dict[str, Any]) -> Any:
    """The dataclass of a section, from its checked tree."""
    whole = tree | {name: _build(each, tree.get(name, {})) for name, each in section.sections.items()}
    return section.made(**{field_of(name): value for name, value in whole.items()})


def _not_a_section(section: _Section, shorthand: str | None, value: Any) -> str:
    example = shorthand or next(iter(section.keys))
    given = "nothing (null)" if value is None else show(value)
    text = f"{section.name}: {given} is given where a section belongs; allowed: settings such as {section.name}."
    text += f"{example}={show(section.keys[example].default)}; keys of {section.name}: {', '.join(section.keys)}"
    if isinstance(value, str) and re.match(r"\w+:", value):
        text += "; in YAML a space follows the colon"
    return text + ("; remove a section that sets nothing" if value is None else "")


def _unknown(top: _Section, section: _Section, name: str, value: Any) -> NoReturn:
    """Raise the `UserError` for a key that the section does not have."""
    near = _near_keys(top, section, name)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    if not section.name and name in top.everywhere():
        hint = f"; write it as a section: {name.replace('.', ': {', 1)}: ...}}"
    if belongs := owners(section.entries, name):
        hint = "; it is a key of " + " and of ".join(f"{section.name}.{entry}" for entry in belongs)
    what, of = ("key", f"keys of {section.name}") if section.name else ("section", "sections")
    if section.entries:
        of += f" ({', '.join(f'{entry.key}={entry.name}' for entry in section.entries)})"
    given = "a section" if isinstance(value, dict) else f"value {show(value)}"
    raise UserError(f"{_bare(section.dotted(name))}: unknown {what} ({given}){hint}; {of}: {', '.join(section.keys)}")


def _near_keys(top: _Section, section: _Section, name: str) -> list[str]:
    """Dotted names that an unknown key was probably meant to be: a name from another section counts if it is exact."""
    everywhere = list(top.everywhere())
    leaves = {each.rpartition(".")[2] for each in everywhere}
    beside = nearest(name, section.keys, cutoff=0.7)
    other = None if beside else nearest(name, leaves, cutoff=0.95)
    if not beside and not other:
        beside = nearest(name, section.keys)
        other = nearest(name, leaves, cutoff=0.7) if not beside and not section.name else None
    if other:
        found = [each for each in everywhere if each.endswith("." + other)]
        # Of optimizer.lr and parallel.local.outer.lr the first is meant.
        return [each for each in found if each.count(".") < 3] or found
    return [section.dotted(beside)] if beside else []


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text made of mappings, lists and scalars; None if it is empty. Errors: `UserError`."""
    bad = _CONTROL.search(text)
    if bad is not None:
        line = text.count("\n", 0, bad.start()) + 1
        column = bad.start() - text.rfind("\n", 0, bad.start())
        at = f"{where}: line {line}, column {column}"
        raise UserError(f"{at}: control character U+{ord(bad[0]):04X}; allowed: text")
    try:
        return _document(yaml.parse(text, Loader=yaml.SafeLoader), where)
    except yaml.MarkedYAMLError as error:
        hint = "; indent with spaces, not tabs" if "'\\t'" in str(error.problem) else ""
        hint = "; put text that begins with * in quotes" if "alias" in str(error.context) else hint
        mark = error.problem_mark
        if mark is not None and text[max(0, mark.index - 1) :].startswith("${"):
            hint = UNEXPANDED
        text = ", ".join(part for part in (error.context, error.problem) if part)
        raise UserError(f"{_at(where, mark or error.context_mark)}: not YAML: {text}{hint}") from None
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML lets errors of its int() and chr() through
        raise UserError(f"{where}: not YAML: {error}") from None


def _at(where: str, mark: Any) -> str:
    return f"{where}: line {mark.line + 1}, column {mark.column + 1}" if mark is not None else where


def _document(events: Iterator[Any], where: str) -> Any:
    value = None
    documents = 0
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise UserError(
                    f"{_at(where, event.start_mark)}: a second document starts; allowed: one (no other ---)"
                )
            value = _value(next(events), events, where, ())
    return value


def _value(event: Any, events: Iterator[Any], where: str, parts: tuple[str, ...]) -> Any:
    """The value that starts with `event`, taking its events. `parts`: the keys that lead to it. Depth is bounded."""
    at = _at(where, event.start_mark) + (f": {'.'.join(parts)}" if parts else "")
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise UserError(f"{at}: &anchor and *alias ({event.anchor}) are not allowed; write the value out, or quote it")
    if event.tag is not None:
        raise UserError(f"{at}: the tag {show(event.tag)} is not allowed; remove it, or quote the text")
    if len(parts) > MAX_DEPTH:
        raise UserError(f"{_at(where, event.start_mark)}: nested more than {MAX_DEPTH} deep; allowed: keys in sections")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, at)
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            items.append(_value(item, events, where, (*parts, "-")))
        return items
    mapping: dict[str, Any] = {}
    while not isinstance(item := next(events), yaml.MappingEndEvent):
        name = _key(item, where, parts)
        if name in mapping:
            dotted = ".".join((*parts, name))
            raise UserError(f"{_at(where, item.start_mark)}: {_bare(dotted)}: given a second time; allowed: once")
        mapping[name] = _value(next(events), events, where, (*parts, _bare(name)))
    return mapping


def _key(event: Any, where: str, parts: tuple[str, ...]) -> str:
    at = _at(where, event.start_mark) + (f": in {'.'.join(parts)}" if parts else "")
    if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
        raise UserError(f"{at}: a key is a list, a mapping, or has a tag or an anchor; allowed: a plain word")
    return event.value


def _scalar(event: Any, at: str) -> Any:
    text = event.value
    if event.style is not None:  # quoted, or a block of text
        return text
    if text in ("", "~"):
        return None
    if text.lower() in _WORDS and text in (text.lower(), text.title(), text.upper()):
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        if len(text) > 1000:  # Python refuses to read such integers
            raise UserError(f"{at}: an integer of {len(text)} digits; allowed: integers below 2147483648")
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _read_text(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        # A pipe or a device could block or never end, so only regular files are opened.
        data = None
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(_missing(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--config {show(str(path))}: cannot be read ({reason}); allowed: a YAML file") from None
    if data is None:
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise UserError(f"--config {path}: {what}; allowed: a YAML file")
    if len(data) > MAX_BYTES:
        raise UserError(f"{path}: larger than {MAX_BYTES} bytes; allowed: a configuration of at most that size")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte offset {error.start} (0x{data[error.start]:02x})"
        raise UserError(f"{path}: not UTF-8 at {where}; allowed: UTF-8 text; save the file as UTF-8") from None
    if not any(line.split("#")[0].strip() not in ("", "---", "...") for line in text.splitlines()):
        raise UserError(f"{path}: empty, or comments only; allowed: one section or more, such as train: {{steps: 100}}")
    return text


def _missing(path: Path) -> str:
    """The message for a file that is not there, with the file beside it that has the nearest name."""
    beside = sorted(each.name for each in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    near = nearest(path.name, beside)
    hint = f"; did you mean {path.parent / near}?" if near else ""
    return f"--config {path}: no such file (seen from {Path.cwd()}); allowed: an existing YAML file{hint}"


def _override(top: _Section, text: str) -> dict[str, Any]:
    """`section.key=value` as a tree. A key for text takes the value as it stands unless it begins with a quote."""
    bad = _CONTROL.search(text)
    if bad is not None:
        raise UserError(f"override {show(text)}: holds the character U+{ord(bad[0]):04X}; allowed: section.key=value")
    if len(text) > MAX_BYTES:
        raise UserError(f"override {show(text)}: {len(text)} characters; allowed: at most {MAX_BYTES}")
    dotted, equals, raw = text.partition("=")
    *sections, last = parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"override {show(text)}: allowed: section.key=value, such as train.steps=100")
    section = top
    for part in sections:
        if part in section.keys and part not in section.sections:
            owner = section.dotted(part)
            raise UserError(f"{dotted.strip()}: unknown key (value {show(raw)}); {owner} is one value, not a section")
        section = section.sections.get(part) or _unknown(top, section, part, raw)
    if last not in section.keys and owners(section.entries, last):
        if _without_effect(section, last, parse_yaml(raw, dotted)):
            return {}
    key = section.keys.get(last) or _unknown(top, section, last, raw)
    value = _override_value(key, raw, dotted.strip())
    for part in reversed(parts):
        value = {part: value}
    return value


def _override_value(key: Key, raw: str, dotted: str) -> Any:
    if key.optional and raw.strip() in ("", "~", "null"):
        return None
    quoted = ("'", '"', "[") if key.rule.listed else ("'", '"')
    boolean = key.rule.switch and isinstance(_WORDS.get(raw.strip().lower()), bool)
    if key.kind is str and not raw.lstrip().startswith(quoted) and not boolean:
        return raw
    return parse_yaml(raw, f"{dotted}={show(raw)}")
