"""What one key of a configuration may hold: the fields of its dataclasses, and the check of one value. Imports no jax.

A `Rule` is what `setting` writes beside each field; the check of a value and the reference both read it.
"""

from __future__ import annotations

import math
import re
import types
import typing
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from jaxdist import registry
from jaxdist.errors import UserError, nearest

LARGEST_INT = 2**31 - 1  # every integer here may end up as an int32 on a device
_NAMES: dict[Any, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a section",
    tuple[str, ...]: "a list of texts",
    tuple[int, ...]: "a list of integers",
}
_BESIDE = {"jaxdist.parallel.strategies": "parallel.strategy", "jaxdist.parallel.schedules": "parallel.schedule"}
SMALLEST_SHARE = 1e-4  # of a source in a mixture
UNEXPANDED = "; ${...} is not expanded, write the value itself"


class MixturePart(NamedTuple):
    """One source of `data.mixture`."""

    name: str
    weight: float
    source: str
    path: str


def parse_mixture(items: Sequence[str]) -> tuple[MixturePart, ...]:
    """The sources of `data.mixture`, each "NAME WEIGHT SOURCE PATH". Raises `UserError`."""
    parts = []
    for i, item in enumerate(items):
        fields = item.split(maxsplit=3)
        number = re.fullmatch(r"[0-9]*\.?[0-9]+", fields[1]) if len(fields) == 4 else None
        if number is None or not re.fullmatch(r"(?!nonfinite$)\w+", fields[0]):  # metrics use that name
            raise UserError(
                f"data.mixture[{i}]: {show(item)}; allowed: NAME WEIGHT SOURCE PATH, such as 'code 0.3 text my/code'"
            )
        rule = Rule("", folder="jaxdist.data.sources")
        check_value(fields[2], str, False, rule, f"data.mixture[{i}]")
        parts.append(MixturePart(fields[0], float(fields[1]), fields[2], fields[3]))
    names = [part.name for part in parts]
    if len(set(names)) < len(names) or len(names) == 1:
        raise UserError(
            f"data.mixture: sources named {', '.join(names)}; allowed: two or more, of different names; for"
            " one, use data.source and data.path"
        )
    total = sum(Fraction(str(part.weight)) for part in parts)
    for part in parts:
        if not part.weight or Fraction(str(part.weight)) < total * Fraction(str(SMALLEST_SHARE)):
            raise UserError(
                f"data.mixture: weight {part.weight:g} of {part.name} is too small; allowed: at least"
                f" {SMALLEST_SHARE:g} of the sum, {float(total):g}"
            )
    return tuple(parts)


@dataclass(frozen=True)
class Rule:
    """The description of one key and the values it may have, apart from its type."""

    doc: str
    choices: tuple[str, ...] = ()
    folder: str = ""  # the package that is the registry of this key's names
    dotted: bool = False  # a dotted path may stand in place of a choice
    listed: tuple[str, ...] = ()  # a list of some of these may stand in place of one text
    switch: bool = False  # true or false may stand in place of a text
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    also: int | None = None  # one value outside the range
    how: bool = False  # says how a run computes or reads, not what: a checkpoint resumes with another value

    def allowed(self, kind: Any, optional: bool) -> str:
        """The allowed values in words, for messages and for the reference."""
        if known := self.choices or (registry.names(self.folder) if self.folder else ()):
            text = "one of " + ", ".join(known) + (", or a dotted path" if self.dotted or self.folder else "")
        elif kind is bool:
            text = "true or false"
        else:
            bounds = {">=": self.at_least, ">": self.above, "<=": self.at_most, "<": self.below}
            parts = [f"{sign} {limit:.15g}" for sign, limit in bounds.items() if limit is not None]
            text = " ".join([_NAMES.get(kind, "a list of sections"), " and ".join(parts)]).strip()
        text = "true, false, or " + text if self.switch else text
        text += f", or {self.also}" if self.also is not None else ""
        text += f", or a list of some of {', '.join(self.listed)}" if self.listed else ""
        return text + (", or null" if optional else "")

    def holds(self, value: float) -> bool:
        """Whether a number is in the range (and is `also` the exception to it)."""
        if self.also is not None and value == self.also:
            return True
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


def setting(default: Any, doc: str, **limits: Any) -> Any:
    """A dataclass field with its one-line description and its allowed values, the fields of `Rule`."""
    return field(default=default, metadata={"rule": Rule(doc, **limits)})


def section(cls: type, doc: str, *, shorthand: str | None = None) -> Any:
    """A dataclass field that is a dataclass. `shorthand`: the key that a bare text stands for."""
    return field(default_factory=cls, metadata={"rule": Rule(doc), "shorthand": shorthand})


@dataclass(frozen=True)
class Key:
    """One key of a section: `kind` is bool, int, float, str, tuple[str, ...], tuple[int, ...] or the dataclass of a
    nested section; str also where a list of texts or a boolean may stand (`Rule.listed`, `Rule.switch`)."""

    name: str
    kind: Any
    optional: bool
    rule: Rule
    shorthand: str | None
    default: Any

    @property
    def nested(self) -> bool:
        return is_dataclass(self.kind)

    def check(self, value: Any, dotted: str) -> Any:
        """`check_value` for this key, which messages call `dotted`."""
        return check_value(value, self.kind, self.optional, self.rule, dotted)


def keys(cls: type) -> dict[str, Key]:
    """The keys of a section, in order, from the fields of its dataclass."""
    hints = typing.get_type_hints(cls)
    found = {}
    for each in fields(cls):
        hint = hints[each.name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kind = next(one for one in kinds if one is not types.NoneType)  # of several the first is what `Key` says
        default = None if each.default is MISSING else each.default
        rule, shorthand = each.metadata["rule"], each.metadata.get("shorthand")
        name = each.name.removesuffix("_")  # `from_`: see reader.py
        found[name] = Key(name, kind, types.NoneType in kinds, rule, shorthand, default)
    return found


def all_keys(cls: type, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Every (dotted name, key) below a section, sections themselves included, in order."""
    for name, key in keys(cls).items():
        yield prefix + name, key
        if key.nested:
            yield from all_keys(key.kind, f"{prefix}{name}.")


def check_argument(name: str, value: Any, good: bool, known: Collection[str] = ()) -> None:
    """Raise the `UserError` for an argument of a call in Python that is not `good`. known: the keywords there are."""
    if not good:
        from jaxdist.config.wrong_calls import refuse_argument, refuse_keyword

        refuse_keyword(name, value, known) if known else refuse_argument(name, value)


def check_section(values: Any, prefix: str) -> None:
    """Raise `UserError` for a value that its key does not allow, in a section that a program has made, not YAML.
    prefix: the section's dotted name."""
    for name, key in keys(type(values)).items():
        dotted, value = f"{prefix}.{name}", getattr(values, name)
        check_section(value, dotted) if key.nested else key.check(value, dotted)


def show(value: Any) -> str:
    """A value as a user wrote it, shortened to what fits on a line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a mapping"
    if isinstance(value, int) and abs(value) >= 10**30:  # Python refuses to print integers of thousands of digits
        return f"an integer of about {int(value.bit_length() * 0.30103) + 1} digits"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:60] + "..."


def is_list(kind: Any) -> bool:
    """Whether it is the type of a list: tuple[int, ...] or tuple[str, ...]."""
    return typing.get_origin(kind) is tuple


def check_value(value: Any, kind: Any, optional: bool, rule: Rule, key: str) -> Any:
    """The value in the type of its key (an int becomes a float where a float is wanted). Raises `UserError`."""
    allowed = rule.allowed(kind, optional)
    if value is None and optional:
        return None
    if value is None:
        raise UserError(f"{key}: nothing (null) is given; allowed: {allowed}; write a value or remove the key")
    if is_list(kind):
        return _check_list(value, kind, rule, key)
    if rule.listed and isinstance(value, list | tuple):
        return _check_list(value, tuple[str, ...], Rule(rule.doc, choices=rule.listed), key)
    if rule.switch and type(value) is bool:
        return value
    if kind is float and type(value) is int and abs(value) < 10**300:
        value = float(value)
    if kind is float and type(value) is int:
        raise UserError(f"{key}: {show(value)} is out of range; allowed: {allowed}, at most 1e300")
    if type(value) is not kind:  # not isinstance: a bool is no int here
        raise UserError(f"{key}: {_mistyped(value)}; allowed: {allowed}{_type_hint(value, kind)}")
    if kind is str:
        _check_text(value, optional, rule, key)
    elif kind is float and not math.isfinite(value):
        raise UserError(f"{key}: {value} is not a finite number; allowed: {allowed}")
    elif kind is not bool and not rule.holds(value):
        raise UserError(f"{key}: {show(value)} is out of range; allowed: {allowed}")
    elif kind is int and abs(value) > LARGEST_INT:
        raise UserError(f"{key}: {show(value)} is out of range; allowed: {allowed}, at most {LARGEST_INT}")
    return value


def _check_list(value: Any, kind: Any, rule: Rule, key: str) -> tuple[Any, ...]:
    """A tuple. The rule's choices and range are those of each item."""
    item = typing.get_args(kind)[0]
    if not isinstance(value, (list, tuple)):
        hint = f"; write [{value!r}]" if isinstance(value, item) else ""
        raise UserError(
            f"{key}: {show(value)} is given where a list belongs; allowed: {rule.allowed(kind, False)}{hint}"
        )
    made = getattr(item, "item", lambda value, key: check_value(value, item, False, rule, key))  # of a section
    return tuple(made(each, f"{key}[{i}]") for i, each in enumerate(value))


def _mistyped(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return f"{show(value)} is given where one value belongs"
    kind = type(value)
    return f"{show(value)} is {'a float' if kind is float else _NAMES[kind]}"


def _type_hint(value: Any, kind: type) -> str:
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_INT:
        return f"; write {int(value)}"
    if isinstance(value, str) and "${" in value:
        return UNEXPANDED
    if kind in (int, float) and isinstance(value, str) and re.fullmatch(r"\s*[-+]?[0-9.]+([eE][-+]?[0-9]+)?\s*", value):
        return "; write it without quotes and without leading zeros"
    if kind is str and isinstance(value, (bool, int, float)):
        return "; put it in quotes if it is meant as text"
    return "; write it without quotes" if kind is bool and str(value).lower() in ("true", "false") else ""


def _check_text(value: str, optional: bool, rule: Rule, key: str) -> None:
    bad = next((c for c in value if unicodedata.category(c) in ("Cc", "Cs") and c not in "\t\n\r"), None)
    if bad is not None:
        raise UserError(f"{key}: {show(value)} holds the character U+{ord(bad):04X}; allowed: printable text")
    if "${" in value or value == "???":
        raise UserError(f"{key}: {show(value)}: ${{...}} and ??? are not expanded; write the value itself")
    if not (rule.choices or rule.folder):
        return
    allowed = rule.allowed(str, optional)
    if (rule.folder or rule.dotted) and "." in value:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value):
            raise UserError(f"{key}: {show(value)} is not known; allowed: {allowed} such as package.module.name")
        registry.check(rule.folder, value, key=key)
        return
    known = rule.choices or registry.names(rule.folder)
    if value not in known:
        near = None if value in rule.listed else nearest(value, known)
        hint = f"; did you mean {near!r}?" if near else f"; write [{value}]" if value in rule.listed else ""
        for folder, other in _BESIDE.items() if rule.folder in _BESIDE and not near else ():
            if name := nearest(value, registry.names(folder), cutoff=0.9):
                hint = f"; did you mean {other}={name}?"
        raise UserError(f"{key}: {show(value)} is not known; allowed: {allowed}{hint}")
