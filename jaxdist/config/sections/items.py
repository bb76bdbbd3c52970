"""Lists of sections in a configuration: each item is a mapping with the keys of a dataclass."""

from typing import Any, TypeVar

from jaxdist.config.rules.fields import check_section, keys, show
from jaxdist.errors import UserError, nearest

_T = TypeVar("_T")


def item_of(cls: type[_T], value: Any, key: str) -> _T:
    """The item, from a mapping, or one that a program has made. key: its name in messages. Raises `UserError`."""
    if isinstance(value, cls):
        check_section(value, key)
        return value
    known = keys(cls)
    if not isinstance(value, dict):
        raise UserError(f"{key}: {show(value)} is given where a section belongs; allowed: {{{', '.join(known)}}}")
    for name in value:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            raise UserError(f"{key}.{name}: unknown key{hint}; keys of {key}: {', '.join(known)}")
    return cls(**{name: known[name].check(each, f"{key}.{name}") for name, each in value.items()})
