"""Samples of a Python object of the user's, in the order in which it gives them, shuffled in a buffer."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from jaxdist import registry
from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.samples import Samples, Stream, as_dtype, sample_leaves
from jaxdist.data.source import Source, fingerprint, source_info
from jaxdist.errors import UserError

FACTS = SourceFacts(ids=None)

_END = object()


def iterable(config: DataConfig) -> Source:
    """The samples of the object at `data.path`, a dotted path.

    The object has `__iter__`; or it is a class of such objects, called without arguments, or a function that returns an
    iterator. docs/data.md says what else it may have. A sample is one of:
    - a dict of arrays, with the same names, shapes and types each time. Integers under `inputs`, and `targets` beside
      them, are token ids.
    - `data.seq_len` + 1 token ids. The attribute `vocab` of the object says how many ids there are.

    The samples of the object at `data.val_path` are held out, and kept in memory; without it, none are. Raises
    `UserError`: not found, not iterable, not from the start each time, no samples, other samples.
    """
    train, vocab, first = _stream(config, config.path, key="data.path")
    held_out = None
    if config.val_path is not None:
        stream, held_vocab, _ = _stream(config, config.val_path, key="data.val_path")
        if stream.leaves != train.leaves:
            raise UserError(
                f"data.val_path: {config.val_path!r} gives other samples than data.path; allowed: the same"
                " names, shapes and types"
            )
        vocab, held_out = max(vocab, held_vocab), _in_memory(stream)
    paths = [config.path] if config.val_path is None else [config.path, config.val_path]
    found = [registry.load("jaxdist.data.sources", path, key="data.path") for path in paths]
    versions = [getattr(each, "version", None) for each in found]
    said = [(f"version {i}", 0, [repr(version).encode()]) for i, version in enumerate(versions)]
    begins = ((leaf, array.nbytes, [array.tobytes()]) for leaf, array in sorted(first.items()))
    digest = fingerprint([*said, ("size", 0, [repr(train.size).encode()]), *begins])
    sizes = (train.size, 0 if held_out is None else held_out.size)
    info = source_info(config, "iterable", "samples", sizes=sizes, files=(0, 0), sha256=digest)
    return Source(train, held_out, vocab, info)


def _stream(config: DataConfig, path: str, *, key: str) -> tuple[Stream, int, dict[str, np.ndarray]]:
    """The stream, how many ids its samples are of (0: they are no ids), and its first sample."""
    if "." not in path:
        raise UserError(f"{key}: {path!r}; allowed: a dotted path to an object with __iter__, such as package.my_data")
    found = registry.load("jaxdist.data.sources", path, key=key)
    made = found() if isinstance(found, type) else found
    if not hasattr(made, "__iter__") and not callable(made):
        raise UserError(f"{key}: {path!r} is a {type(made).__name__} without __iter__; give an object that has it")
    begin: Callable[[], Iterator[Any]] = (lambda: iter(made)) if hasattr(made, "__iter__") else (lambda: iter(made()))
    if begin() is begin():
        raise UserError(
            f"{key}: {path!r} can be read once only; give an object whose __iter__ begins anew, such as a"
            " function with yield"
        )

    def start(first: int) -> Iterator[Any]:
        if hasattr(made, "iter_from"):
            return iter(made.iter_from(first))
        rest = begin()
        next(islice(rest, first, first), None)  # passes over `first` samples
        return rest

    one = next(start(0), _END)
    if one is _END:
        raise UserError(f"{key}: {path!r} gives no samples; give an object whose __iter__ does")
    vocab, wanted = getattr(made, "vocab", None) or 0, config.seq_len + 1
    leaves = sample_leaves(_rows(one, vocab, wanted, where=f"{key}: {path!r}: sample 0"), where=f"{key}: {path!r}")

    def take(raw: Any, number: int) -> dict[str, np.ndarray]:
        where = f"{key}: {path!r}: sample {number}"
        rows = _rows(raw, vocab, wanted, where=where)
        if {name: like.shape for name, like in leaves.items()} != {name: row.shape for name, row in rows.items()}:
            shapes = ", ".join(f"{name} {list(row.shape)}" for name, row in rows.items())
            raise UserError(f"{where} has {shapes}, unlike the first; give all of one shape")
        for name, row in rows.items():
            if not np.can_cast(row.dtype, leaves[name].dtype, "same_kind"):
                raise UserError(
                    f"{where} has {name} of type {row.dtype}, unlike the first, {leaves[name].dtype}; give"
                    " all of one type"
                )
        return {name: as_dtype(row, leaves[name].dtype, where=f"{where}: {name}") for name, row in rows.items()}

    size = len(made) if hasattr(made, "__len__") else None
    return Stream(size, leaves, start, take, config.buffer), vocab, take(one, 0)


def _rows(raw: Any, vocab: int, wanted: int, *, where: str) -> dict[str, np.ndarray]:
    """The arrays of a sample, whose ids are checked."""
    sample = raw() if callable(raw) else raw
    if isinstance(sample, dict):
        rows = {name: _array(value, where=f"{where}: {name}") for name, value in sample.items()}
        if "inputs" in rows and rows["inputs"].dtype.kind in "iu":  # then they are ids
            for name in {"inputs", "targets"} & rows.keys():
                _check_ids(rows[name], vocab, where=f"{where}: {name}", negative=name == "targets")
        return rows
    ids = _array(sample, where=where)
    if ids.shape != (wanted,) or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(
            f"{where} is a {type(sample).__name__} of {ids.dtype.name}{list(ids.shape)}; allowed: a dict of"
            f" arrays, or data.seq_len + 1 = {wanted} integer ids"
        )
    _check_ids(ids, vocab, where=where)
    return {
        "inputs": ids[:-1].astype(np.int32),
        "targets": ids[1:].astype(np.int32),
        "weights": np.ones(wanted - 1, np.float32),
    }


def _array(value: Any, *, where: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of several lengths
        raise UserError(f"{where}: is no array ({error}); give arrays, or lists of one length") from error


def _check_ids(ids: np.ndarray, vocab: int, *, where: str, negative: bool = False) -> None:
    """Raise `UserError` for ids that the object's `vocab` does not count; none may be negative, unless `negative`."""
    lowest, highest = (int(ids.min()), int(ids.max())) if ids.size else (0, -1)
    if not vocab or highest >= vocab or (lowest < 0 and not negative):
        said = f"holds ids from {lowest} to {highest}, and the object's vocab is {vocab or 'not given'}"
        allowed = "below vocab" if negative else "from 0 to vocab - 1"
        raise UserError(f"{where} {said}; allowed: an attribute vocab, and ids {allowed}")


def _in_memory(stream: Stream) -> Samples:
    taken = [stream.take(raw, number) for number, raw in enumerate(stream.start(0))]
    whole = {leaf: np.stack([each[leaf] for each in taken]) for leaf in stream.leaves}
    return Samples(len(taken), stream.leaves, lambda numbers: {leaf: rows[numbers] for leaf, rows in whole.items()})
