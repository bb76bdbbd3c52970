"""Entries of the registries, as a configuration sees them: the facts that checks go by, and the keys that they add to
the section that names them. Imports no jax."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from jaxdist import registry
from jaxdist.errors import UserError


class Entry(NamedTuple):
    """An entry that a key of a section names."""

    key: str
    folder: str
    name: str

    @property
    def shipped(self) -> bool:
        """Whether it lies in the folder, and is not somebody else's."""
        return is_shipped(self.name)


def is_shipped(name: str) -> bool:
    """Whether an entry of this name lies in its folder, and is not somebody else's, which has a dotted path."""
    return "." not in name


Entries = tuple[Entry, ...]
WINDOW_LEAVES = ("inputs", "targets", "weights")  # the leaves of a batch of token ids


@dataclass(frozen=True)
class EntryFacts:
    """What checks know of an entry. The defaults are those of an entry that says nothing, and refuse nothing."""

    folder: ClassVar[str]

    @classmethod
    def of(cls, name: Any) -> Self:
        """The facts of an entry, by its name or dotted path, or of the entry itself, a function."""
        found = registry.facts(cls.folder, name)
        if unknown := found.keys() - {each.name for each in fields(cls)}:
            raise UserError(f"{name}: FACTS of its module has {min(unknown)!r}; allowed: FACTS = {cls.__name__}(...)")
        return cls(**found)

    @classmethod
    def with_fact(cls, **wanted: Any) -> list[str]:
        """The names in the folder of the entries with these facts."""
        return [name for name in registry.names(cls.folder) if wanted.items() <= vars(cls.of(name)).items()]


@dataclass(frozen=True)
class ModelFacts(EntryFacts):
    """Facts of a model.

    - ids_only: it takes windows of token ids, and no other samples.
    - kernels, key_mask: `model.attention` chooses among kernels by what the devices can do; it may get a key mask.
    - generates: it predicts the token after those that it has seen, so that it can write text.
    - documents: it reads the leaf documents of a batch, and keeps the documents of a row apart.
    - user_loss: it gives a loss, as of `nnx_loss`, and no `ModelDef`: one unit, split over data and fsdp only.
    """

    folder = "jaxdist.models"
    ids_only: bool = False
    kernels: bool = False
    key_mask: bool = False
    documents: bool = False
    user_loss: bool = False
    generates: bool = True


@dataclass(frozen=True)
class SourceFacts(EntryFacts):
    """Facts of a data source.

    - reads_files: `data.path` and `data.val_path` are files or folders, but for these `words`.
    - path, val_path: what they may be, in words for a message; val_path "": it is not read.
    - ids: whether it gives windows of token ids; None: that is seen when it is read.
    - leaves: of a sample, where it gives no windows of token ids; (): that is seen when it is read.
    - next_token: with ids, whether the target of a position is the token after it.
    """

    folder = "jaxdist.data.sources"
    reads_files: bool = False
    words: tuple[str, ...] = ()
    path: str = "an existing file or folder"
    val_path: str = "an existing file or folder, or null"
    ids: bool | None = True
    leaves: tuple[str, ...] = ()
    next_token: bool = True

    @classmethod
    def giving(cls, leaves: Iterable[str], *, next_token: bool = True) -> list[str]:
        """The names in the folder of the sources whose samples may have these leaves, and suit a model that sees the
        token after a position unless `next_token`."""
        every = {name: cls.of(name) for name in registry.names(cls.folder)}
        return [name for name, facts in every.items() if facts.may_give(leaves, next_token=next_token)]

    def may_give(self, leaves: Iterable[str], *, next_token: bool = True) -> bool:
        """Whether this source is one of `giving`."""
        if not self.ids:
            return not self.leaves or set(leaves) <= {*self.leaves}
        return {*leaves} <= {*WINDOW_LEAVES} and (next_token or not self.next_token)


@dataclass(frozen=True)
class StrategyFacts(EntryFacts):
    """Facts of a strategy.

    - sharded: parameters, or what belongs to them, are split over `fsdp`, `expert` and `context`.
    - regathers: it gathers parameters where they are used, so that prefetching hides that.
    - next: the strategy that keeps less on each device.
    """

    folder = "jaxdist.parallel.strategies"
    sharded: bool = False
    regathers: bool = False
    next: str = ""


@dataclass(frozen=True)
class ScheduleFacts(EntryFacts):
    """Facts of a schedule.

    - one_stage: it runs the model in one piece; False: as a pipeline; None: not known.
    - chunks: a stage may have several chunks of blocks; None: not known.
    - split_backward: the backward pass runs in two halves.
    - power_of_two: it halves the microbatches until one is left, so that they are a power of two.
    - deterministic: `parallel.grad_sync.deterministic`, which runs pairwise, may stand beside it.
    - one_backward_pass: with one microbatch it differentiates the model once, so that gradients may be reduced in that
      backward pass.
    """

    folder = "jaxdist.parallel.schedules"
    one_stage: bool | None = None
    chunks: bool | None = None
    split_backward: bool = False
    power_of_two: bool = False
    deterministic: bool = False
    one_backward_pass: bool = False


@dataclass(frozen=True)
class AlgorithmFacts(EntryFacts):
    """Facts of a collective algorithm.

    - int8: it encodes every value that it sends exactly once, as the error feedback of int8 needs.
    """

    folder = "jaxdist.collectives.algorithms"
    int8: bool = False


class Section:
    """A section with the keys of the entries that it names: `DataConfig(source="parquet", column="a")` makes an object
    of a subclass that has `column`. In the code, values of such keys are of type Any."""

    def __new__(cls, *values: Any, **given: Any) -> Self:
        if Section not in cls.__bases__:
            return object.__new__(cls)
        given |= dict(zip((each.name for each in fields(cls)), values, strict=False))  # type: ignore[arg-type]
        return object.__new__(with_options(cls, entries_in(cls, given)))

    def replace(self, **changes: Any) -> Self:
        """The section with other values of these keys."""
        return replace(self, **changes)  # type: ignore[type-var]

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any: ...


def named(cls: type, given: Mapping[str, Any]) -> Entries:
    """The entries that the keys of a section name. given: values of keys; others have their defaults."""
    return tuple(Entry(name, folder, given.get(name, default)) for name, folder, default in _naming(cls))


@functools.cache  # asked for each section of thousands of candidates of a plan
def _naming(cls: Any) -> tuple[tuple[str, str, Any], ...]:
    """(key, folder, default) of the keys of a section that name entries."""
    keys = [(each.name, each.metadata["rule"].folder, each.default) for each in fields(cls)]
    return tuple(each for each in keys if each[1])


def entries_in(cls: Any, given: Mapping[str, Any]) -> Entries:
    """The entries that a section names: `named`, unless it finds them in a way of its own, as `data` does."""
    return cls.named_entries(given) if hasattr(cls, "named_entries") else named(cls, given)


def entries_of(config: Any) -> Entries:
    """All entries that a configuration names."""
    inner = (entries_of(each) for each in vars(config).values() if is_dataclass(each))
    return sum(inner, entries_in(type(config), vars(config)))


def options_of(folder: str, name: str) -> tuple[type, ...]:
    """The classes of an entry's options: one or none. An entry of somebody else's that exports none has those of all
    entries of the folder, as it had before entries had options."""
    found = getattr(registry.options(folder, name), "Options", None)
    if found is None:
        every = registry.names(folder) if "." in name else ()
        found = [each for other in every for each in options_of(folder, other)]
        return tuple(sorted(found, key=lambda each: -len(fields(each))))  # the first one's defaults count
    frozen = getattr(found, "__dataclass_params__", None)
    if frozen is None or not frozen.frozen or not all("rule" in each.metadata for each in fields(found)):
        raise UserError(
            f"{name}: Options of {found.__module__} is no section of settings; allowed: a class with"
            " @dataclass(frozen=True), of fields that are setting(...) of jaxdist.config.rules.fields"
        )
    return (found,)


def with_options(cls: type, entries: Entries) -> type:
    """The section `cls` with the keys of these entries: `cls` itself where they have none."""
    return _joined(cls, tuple(dict.fromkeys(each for _, *entry in entries for each in options_of(*entry))))


@functools.cache  # equal configurations are of one class
def _joined(cls: Any, options: tuple[type, ...]) -> type:
    if len(options) <= 1 and all(issubclass(each, cls) for each in options):
        return options[0] if options else cls
    plain = [each for each in options if not issubclass(each, cls)]
    common = {each.name for each in fields(cls)}
    for each in plain:
        if both := common & {key.name for key in fields(each)}:
            raise UserError(f"{min(both)}: is a key of {cls.__name__} and of Options of {each.__module__}; rename it")
    bases = (*options, *([cls] if len(plain) == len(options) else []))
    return make_dataclass(cls.__name__, [], bases=bases, frozen=True, namespace={"__doc__": cls.__doc__})


def bound(cls: Any, section: Any, key: str) -> Any:
    """The entry that `key` of a section names, with its options as keyword arguments; its name where it has none.
    cls: the section without options."""
    (entry,) = (each for each in named(cls, vars(section)) if each.key == key)
    common = {each.name for each in fields(cls)}
    own = {each.name for options in options_of(*entry[1:]) for each in fields(options)} - common
    values = {each: getattr(section, each) for each in sorted(own)}
    return functools.partial(registry.load(*entry[1:], key=key), **values) if own else entry.name


def owners(entries: Entries, key: str) -> dict[str, Any]:
    """The entries in the same folders that have a key of this name, and its default: {"source=parquet": None}."""
    return {
        f"{entry.key}={name}": each.default
        for entry in entries
        for name in registry.names(entry.folder)
        for options in options_of(entry.folder, name)
        for each in fields(options)
        if each.name == key
    }
