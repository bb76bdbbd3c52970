"""YAML file + dotted overrides -> a tree of frozen dataclasses, for any dataclasses whose fields carry a `Rule`.

A configuration file is taken as data and nothing else: the reader works on YAML's event stream, so that aliases, tags,
deep nesting and duplicate keys are refused before anything is built from them.
"""

import functools
import logging
import re
import stat
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, make_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jaxdist.config.entries import Entries, owners, shaped
from jaxdist.config.rules.fields import Key, all_keys, keys, nearest, show
from jaxdist.errors import UserError

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


def read_config(cls: type[_T], path: str | Path, overrides: Sequence[str]) -> _T:
    """A `cls` from the YAML file at `path` with each `section.key=value` on top, in order. Errors: `UserError`."""
    text = _read_text(Path(path))
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path}: the top level is {show(tree)}; allowed: sections, that is {', '.join(keys(cls))}")
    shape = _shape(cls, [tree, *(_override(cls, each) for each in overrides if _key_of(each) in dict(all_keys(cls)))])
    layers = [tree, *(_override(shape, each) for each in overrides)]
    # Each layer is checked by itself first, so that a wrong line in the file is found even where an override hides it.
    layers = [_checked(shape, shape, layer) for layer in layers]
    made: Any = _build(shape, functools.reduce(_merged, layers))
    return cls(**{each.name: getattr(made, each.name) for each in fields(cls)})  # type: ignore[arg-type]


def _key_of(override: str) -> str:
    return override.partition("=")[0].strip()


def _shape(cls: type, layers: list[dict[str, Any]]) -> type:
    """The dataclass `cls` with the keys of all entries that these layers name."""
    given: dict[str, Any] = functools.reduce(_merged, [_common(cls, layer) for layer in layers])
    made, entries = shaped(cls, given)
    return make_dataclass(cls.__name__, [], bases=(made,), frozen=True, namespace={"entries": entries})


def _common(cls: type, tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Of a tree the keys that sections have whatever entries they name, checked."""
    out: dict[str, Any] = {}
    for name, key in keys(cls).items():
        if key.nested and isinstance(tree.get(name), dict):
            out[name] = _common(key.kind, tree[name], f"{prefix}{name}.")
        elif name in tree and not key.nested:
            out[name] = key.check(tree[name], prefix + name)
    return out


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, where keys of `above` win; sections are merged."""
    sections = {
        name: _merged(below[name], value) for name, value in above.items() if isinstance(value, dict) and name in below
    }
    return below | above | sections


class _Dumper(yaml.SafeDumper):
    """Quotes each text that `parse_yaml` would take for something else, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def dump_yaml(config: Any) -> str:
    """A dataclass of this kind as YAML text that `read_config` turns into an equal one."""
    return yaml.dump(asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _checked(top: type, cls: type, tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The checked tree with values in their keys' types and shorthands written out. Keys not given stay away.

    `cls` is the section that `tree` holds, `prefix` its dotted name with a dot, `top` the whole (for hints).
    """
    known = keys(cls)
    out: dict[str, Any] = {}
    for name, value in tree.items():
        dotted = prefix + name
        if name not in known and _without_effect(_entries(top, prefix.rstrip(".")), dotted, value):
            continue
        key = known.get(name) or _unknown(top, cls, dotted, value)
        if key.nested and isinstance(value, str) and key.shorthand is not None:
            value = {key.shorthand: value}
        if key.nested and not isinstance(value, dict):
            raise UserError(_not_a_section(dotted, key, value))
        if key.nested:
            out[name] = _checked(top, key.kind, value, dotted + ".")
        else:
            out[name] = key.check(value, dotted)
    return out


def _entries(top: Any, section: str) -> Entries:
    """The entries that a section names."""
    found: Entries = top.entries.get(section, ())
    return found


def _without_effect(entries: Entries, dotted: str, value: Any) -> bool:
    """Whether a key belongs to another entry of jaxdist than these. Older versions had such keys beside all entries and
    wrote them into files: for one release a value other than the default gets a line in the log."""
    section, _, name = dotted.rpartition(".")
    found = owners(entries, name) if all(entry.shipped for entry in entries) else {}
    if found and value not in found.values():
        here = ", ".join(f"{section}.{entry.key}={entry.name}" for entry in entries)
        belongs = " or ".join(f"{section}.{entry}" for entry in found)
        text = "%s: %s has no effect with %s; write it with %s, or leave it out: the next release refuses it"
        logging.getLogger(__name__).warning(text, dotted, show(value), here, belongs)
    return bool(found)


def _bare(name: str) -> str:
    """The name of a key as it goes into a message: escaped and shortened like a value, but not quoted."""
    return show(name).strip("'\"") or "''"


def _build(cls: type[_T], tree: dict[str, Any]) -> _T:
    nested = {name: key.kind for name, key in keys(cls).items() if key.nested}

    def built(name: str, value: Any) -> Any:
        if name in nested:
            return _build(nested[name], value)
        return tuple(value) if isinstance(value, list) else value

    return cls(**{name: built(name, value) for name, value in tree.items()})


def _not_a_section(dotted: str, key: Key, value: Any) -> str:
    known = keys(key.kind)
    example = key.shorthand or next(iter(known))
    given = "nothing (null)" if value is None else show(value)
    text = f"{dotted}: {given} is given where a section belongs; allowed: settings such as {dotted}.{example}"
    text += f"={show(known[example].default)}; keys of {dotted}: {', '.join(known)}"
    if isinstance(value, str) and re.match(r"\w+:", value):
        text += "; in YAML a space follows the colon"
    return text + ("; remove a section that sets nothing" if value is None else "")


def _unknown(top: type, cls: type, dotted: str, value: Any) -> typing.NoReturn:
    """Raise the `UserError` for a key that does not exist; `cls` is the section that should hold it."""
    prefix = dotted.rpartition(".")[0] if cls is not top else ""
    name = dotted[len(prefix) :].lstrip(".") if prefix else dotted
    known = keys(cls)
    everywhere = {name: key for name, key in all_keys(top) if not key.nested}
    if name in everywhere:
        hint = f"; write it as a section: {name.replace('.', ': {', 1)}: ...}}"
    else:
        near = _near_keys(name, prefix, known, everywhere)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
    what, of = ("key", f"keys of {prefix}") if prefix else ("section", "sections")
    entries = _entries(top, prefix)
    of += f" ({', '.join(f'{entry.key}={entry.name}' for entry in entries)})" if entries else ""
    if belongs := owners(entries, name):
        hint = "".join(f"; it is a key of {prefix}.{entry}" for entry in belongs)
    given = "a section" if isinstance(value, dict) else f"value {show(value)}"
    raise UserError(f"{_bare(dotted)}: unknown {what} ({given}){hint}; {of}: {', '.join(known)}")


def _near_keys(name: str, prefix: str, known: Iterable[str], everywhere: Iterable[str]) -> list[str]:
    """Dotted names that an unknown key was probably meant to be: a name from another section counts if it is exact."""
    beside = nearest(name, known, cutoff=0.7)
    if beside is None:
        leaves = {each.rpartition(".")[2] for each in everywhere}
        same = nearest(name, leaves, cutoff=0.95)
        if same is not None:
            return [each for each in everywhere if each.endswith("." + same)]
        beside = nearest(name, known)
        if beside is None and not prefix and (leaf := nearest(name, leaves, cutoff=0.7)):
            return [each for each in everywhere if each.endswith("." + leaf)]
    return [f"{prefix}.{beside}" if prefix else beside] if beside else []


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
        text = ", ".join(part for part in (error.context, error.problem) if part)
        raise UserError(f"{_at(where, error.problem_mark or error.context_mark)}: not YAML: {text}{hint}") from None
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


def _override(cls: type, text: str) -> dict[str, Any]:
    """`section.key=value` as a tree. A key for text takes the value as it stands unless it begins with a quote."""
    bad = _CONTROL.search(text)
    if bad is not None:
        raise UserError(f"override {show(text)}: holds the character U+{ord(bad[0]):04X}; allowed: section.key=value")
    if len(text) > MAX_BYTES:
        raise UserError(f"override {show(text)}: {len(text)} characters; allowed: at most {MAX_BYTES}")
    dotted, equals, raw = text.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"override {show(text)}: allowed: section.key=value, such as train.steps=100")
    section = keys(cls).get(parts[0])
    if len(parts) == 2 and section is not None and section.nested and parts[1] not in keys(section.kind):
        if _without_effect(_entries(cls, parts[0]), dotted.strip(), parse_yaml(raw, dotted)):
            return {}
    key = _find(cls, parts, raw)
    value = _override_value(key, raw, dotted.strip())
    for part in reversed(parts):
        value = {part: value}
    return value


def _find(cls: type, parts: list[str], raw: str) -> Key:
    section_cls = cls
    for place, part in enumerate(parts):
        key = keys(section_cls).get(part) or _unknown(cls, section_cls, ".".join(parts[: place + 1]), raw)
        if place + 1 < len(parts) and not key.nested:
            owner = ".".join(parts[: place + 1])
            raise UserError(f"{'.'.join(parts)}: unknown key (value {show(raw)}); {owner} is one value, not a section")
        section_cls = key.kind
    return key


def _override_value(key: Key, raw: str, dotted: str) -> Any:
    if key.optional and raw.strip() in ("", "~", "null"):
        return None
    quoted = ("'", '"', "[") if key.rule.listed else ("'", '"')
    boolean = key.rule.switch and isinstance(_WORDS.get(raw.strip().lower()), bool)
    if key.kind is str and not raw.lstrip().startswith(quoted) and not boolean:
        return raw
    return parse_yaml(raw, f"{dotted}={show(raw)}")
