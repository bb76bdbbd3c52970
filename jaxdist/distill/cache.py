"""A cache of a teacher's largest logits: a folder of arrays [samples, S, ...] beside a manifest.

A sample has the number that `jaxdist.data.loader.GlobalBatches` gives it, so that batches of any size, in any layout,
find theirs. Files are read where they are, not loaded. The teacher's logsumexp over the whole vocabulary is kept beside
its largest logits, so that these stay the probabilities that the teacher gave (`jaxdist.distill.divergence`).

Legend: S sequence, K logits of a token.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.config.json_reader import read_json_file
from jaxdist.config.rules.fields import show
from jaxdist.data.file_array import FileArray
from jaxdist.data.loader import GlobalBatches
from jaxdist.data.manifest import ID_DTYPES, id_dtype
from jaxdist.distill.model import IDS, LOGSUMEXP, VALUES
from jaxdist.errors import UserError
from jaxdist.files.regular import replace_file

CACHE_FORMAT = 1
CACHE_MANIFEST = "manifest.json"
NUMBERS = ("samples", "length", "top_k", "vocab")  # of a manifest
REMEDY = "remove the folder, and make it again with jaxdist distill; or give another distill.cache"


class Kept(NamedTuple):
    """What a manifest says.

    - teacher: the digest of its parameters. temperature: of the logsumexp.
    - data: what makes sample k the same sample (`samples_of`).
    - dtype: of the ids; others are float32.
    """

    teacher: str
    temperature: float
    data: dict[str, Any]
    samples: int
    length: int
    top_k: int
    vocab: int
    dtype: str

    def files(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """{leaf of a batch: (dtype, shape) of its file}."""
        grid = self.samples, self.length
        single = np.dtype("<f4")
        return {
            VALUES: (single, (*grid, self.top_k)),
            IDS: (np.dtype(self.dtype).newbyteorder("<"), (*grid, self.top_k)),
            LOGSUMEXP: (single, grid),
        }

    def sizes(self) -> dict[str, int]:
        """{leaf of a batch: bytes of its file}."""
        return {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in self.files().items()}


def samples_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What makes sample k of a run the same sample. identity: as of `jaxdist.trainer.resume.identity`."""
    data = {key: value for key, value in identity["data"].items() if key != "global_batch"}
    return {**data, "seed": identity["train"]["seed"]}


def open_cache(folder: Path, key: str = "distill.cache") -> Kept:
    """What its manifest says. Raises `UserError` for a folder that is no complete cache. Reads no array."""
    path = folder / CACHE_MANIFEST
    if not path.is_file():
        raise UserError(
            f"{key}: {str(folder)!r} holds no {CACHE_MANIFEST}; make it: jaxdist distill with the run's configuration"
        )
    try:
        kept = _kept(read_json_file(path))
    except (ValueError, OSError) as error:
        raise UserError(f"{key}: {str(path)!r} is no manifest of format {CACHE_FORMAT}: {error}; {REMEDY}") from error
    for name, size in kept.sizes().items():
        file = folder / f"{name}.bin"
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise UserError(f"{key}: {str(file)!r} has {found or 0} bytes, and {size} belong there; {REMEDY}")
    return kept


def _kept(found: Any) -> Kept:
    """The content of a manifest, each field checked. Raises `ValueError`."""
    if not isinstance(found, dict) or found.get("format") != CACHE_FORMAT:
        raise ValueError("it is of another format")
    for name in NUMBERS:
        if type(found.get(name)) is not int or not 1 <= found[name] < 2**40:
            raise ValueError(f"{name} is {show(found.get(name))}; allowed: an integer from 1 on")
    kinds = {"teacher": str, "temperature": float, "data": dict}
    for name, kind in kinds.items():
        if type(found.get(name)) is not kind:
            raise ValueError(f"{name} is {show(found.get(name))}; allowed: {kind.__name__}")
    if found.get("dtype") not in ID_DTYPES or found["top_k"] > found["vocab"]:
        raise ValueError("dtype or top_k fits no vocabulary")
    return Kept(**{name: found[name] for name in Kept._fields})


def check_cache(kept: Kept, *, folder: Path, data: dict[str, Any], temperature: float, vocab: int) -> None:
    """Raise `UserError` for a cache of other samples, another temperature or another vocabulary."""
    if kept.data != data:
        other = [key for key in {*kept.data, *data} if kept.data.get(key) != data.get(key)]
        raise UserError(
            f"distill.cache: {str(folder)!r} is of other samples: {', '.join(sorted(other))}"
            f" {'differs' if len(other) == 1 else 'differ'}; set them back, or {REMEDY}"
        )
    if kept.temperature != temperature:
        raise UserError(
            f"distill.temperature: {temperature:g}, but the logsumexps in {str(folder)!r} are of {kept.temperature:g};"
            f" allowed: {kept.temperature:g}; or {REMEDY}"
        )
    if kept.vocab != vocab:
        from jaxdist.distill.divergence import check_vocabularies

        check_vocabularies(vocab, kept.vocab, key="distill.cache")


def check_samples(kept: Kept, folder: Path, wanted: int) -> None:
    """Raise `UserError` for a cache of fewer samples."""
    if kept.samples < wanted:
        raise UserError(
            f"distill.cache: {str(folder)!r} holds {kept.samples} samples, and the run takes {wanted}; make it with the"
            " train.steps and data.global_batch of the run"
        )


def cached_leaves(kept: Kept, rows: int, sharding: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves that a batch of so many rows gets. sharding: of the batch."""
    return {
        name: jax.ShapeDtypeStruct((rows, *shape[1:]), dtype.newbyteorder("="), sharding=sharding)
        for name, (dtype, shape) in kept.files().items()
    }


def with_cached_logits(loader: GlobalBatches, folder: Path, kept: Kept) -> GlobalBatches:
    """The loader, whose batches have the teacher's largest logits besides."""
    arrays = {
        name: FileArray(folder / f"{name}.bin", dtype, shape=shape) for name, (dtype, shape) in kept.files().items()
    }

    def samples(k: np.ndarray) -> dict[str, np.ndarray]:
        check_samples(kept, folder, int(k.max(initial=-1)) + 1)
        return loader.samples(k) | {name: array[k] for name, array in arrays.items()}

    leaves = loader.leaves | cached_leaves(kept, loader.global_batch, loader.sharding)
    return GlobalBatches(
        samples, leaves, global_batch=loader.global_batch, sharding=loader.sharding, batches=loader.batches
    )


def write_cache(folder: Path, kept: Kept, rows: Iterator[dict[str, np.ndarray]]) -> None:
    """Write a cache. rows: arrays [n, S, ...] by name, in the order of the samples. The manifest is written last.

    Raises `UserError` where there is a cache, or something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"distill.cache: {str(folder)!r} is not empty; give a new folder, or remove this one")
        files = {name: (folder / f"{name}.bin").open("xb") for name in kept.files()}
        try:
            for each in rows:
                for name, (dtype, _) in kept.files().items():
                    files[name].write(np.ascontiguousarray(each[name], dtype))
        finally:
            for file in files.values():
                file.close()
        text = json.dumps({"format": CACHE_FORMAT, **kept._asdict()}, indent=1)
        replace_file(folder / CACHE_MANIFEST, text.encode())
    except OSError as error:
        raise UserError(
            f"distill.cache: {str(folder)!r} cannot be written: {error.strerror}; mend it, or give another folder"
        ) from error


def new_kept(
    *, teacher: str, temperature: float, data: dict[str, Any], samples: int, length: int, top_k: int, vocab: int
) -> Kept:
    """What the manifest of a new cache will say."""
    dtype = id_dtype(vocab - 1).name
    return Kept(teacher, float(temperature), data, samples, length, min(top_k, vocab), vocab, dtype)
