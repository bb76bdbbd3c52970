"""What a source gives, and what sources share: the split in two, the fingerprint, the size check."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config.schema import DataConfig
from jaxdist.data.file_array import FileChanged, Ids
from jaxdist.data.samples import Samples, Stream
from jaxdist.errors import UserError

CHUNK_BYTES = 1 << 24  # what is read of a large file at a time


class Yardstick(NamedTuple):
    """Results that a model should beat, of simple methods on the held-out data.

    - measure: what is measured, in words: "of held-out lines right".
    - compute: gives them, by the name of the method. Called once, on one process.
    """

    measure: str
    compute: Callable[[], dict[str, float]]


class Source(NamedTuple):
    """Token ids of a text, or samples, in two parts that share no file (or, for a single file, no position)."""

    # Ids: 1-D, uint8, uint16 or uint32, in memory or in a file; read-only. Or samples of fixed shapes.
    train: Ids | Samples | Stream
    # The same type; nothing is ever trained on it. For a stream, `Samples`, or None: there are none.
    held_out: Ids | Samples | None
    vocab: int  # ids are in [0, vocab); 0 for samples that are no ids
    # name, path, unit ("bytes", "tokens" or "samples"), train and held_out (sizes in units; None: not known), files and
    # held_out_files (numbers of files on the two sides; a file cut in two counts on both), sha256 (hex, over names,
    # sizes and content in order); and, if there is more to say, lines (for the header of a run)
    info: dict[str, Any]
    # Of both sides, where documents start: int64, increasing from 0. None: not known, or not asked for.
    documents: tuple[np.ndarray, np.ndarray] | None = None
    parts: tuple["Part", ...] = ()  # of a mixture; its own train and held_out are empty
    yardstick: Yardstick | None = None
    labels: int | None = None  # labels of samples are below it; None: not known
    apart: bool = False  # whether batches of windows say where documents start

    @property
    def first(self) -> Ids | Samples | Stream:
        """What is trained on; of a mixture that of its first part: all are of one kind."""
        return self.parts[0].source.train if self.parts else self.train


class Part(NamedTuple):
    """A source in a mixture."""

    name: str
    samples: int  # of those of a block, `jaxdist.data.mixture.BLOCK`
    source: Source


def kind_of(source: Source) -> str:
    """What a run's identity remembers of the type: "uint16" of ids, "image uint8[28, 28], label int32[]" of samples."""
    if isinstance(source.train, Ids):
        return source.train.dtype.name
    return ", ".join(f"{leaf} {like.dtype.name}{list(like.shape)}" for leaf, like in source.train.leaves.items())


def missing(package: str, extra: str, *, source: str) -> UserError:
    """What the user sees when an extra is not installed."""
    what = f"data.source: {source!r} needs the package {package}, which is not installed"
    return UserError(f"{what}; pip install 'jaxdist[{extra}]'")


@contextlib.contextmanager
def readable(key: str, path: Path) -> Iterator[None]:
    """Inside, an `OSError` becomes the `UserError` for a file or folder that cannot be read; so does a `FileChanged`.

    key: what the message is about. path: is named if the error itself names none.
    """
    try:
        yield
    except FileChanged as error:
        raise UserError(f"{key}: {error}") from error
    except OSError as error:
        named = str(error.filename or path)
        raise UserError(
            f"{key}: cannot read {named!r}: {error.strerror}; check the file and its permissions"
        ) from error


def hash_fraction(name: str | bytes) -> float:
    """A number in [0, 1) that depends on nothing but `name`: the leading 8 bytes of its SHA-256."""
    encoded = name.encode("utf-8", "surrogateescape") if isinstance(name, str) else name
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big") / 2**64


def held_out_files(names: Sequence[str | bytes], fraction: float) -> list[bool]:
    """Which files are held out: those whose `hash_fraction` is below `fraction`.

    A file stays on its side when others come or go, so a growing corpus never moves held-out text into training. The
    one exception: if a side would be empty, the file whose hash is nearest to the limit changes sides. Needs two names.
    """
    assert len(names) >= 2
    place = [hash_fraction(name) for name in names]
    chosen = [value < fraction for value in place]
    if not any(chosen):
        chosen[place.index(min(place))] = True
    elif all(chosen):
        chosen[place.index(max(place))] = False
    return chosen


def tail_size(size: int, fraction: float) -> int:
    """How many of `size` ids are held out: the last `fraction` of them, at least one."""
    return max(1, int(size * fraction))


def split_tail(ids: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Views of all but the last `fraction` of `ids`, and of that last part (at least one id)."""
    cut = ids.size - tail_size(ids.size, fraction)
    return ids[:cut], ids[cut:]


def split_starts(starts: np.ndarray, cut: int) -> tuple[np.ndarray, np.ndarray]:
    """Document starts of the two parts of ids that are cut at `cut`. The rest of a cut document is one of its own."""
    after = starts[starts > cut] - cut
    return starts[starts < cut], np.concatenate([np.zeros(1, np.int64), after])


def fingerprint(parts: Iterable[tuple[str, int, Iterable[bytes | memoryview]]]) -> str:
    """SHA-256 in hex over (name, size in bytes, content in pieces) of every part in order.

    Names and contents are preceded by their lengths: moving a byte from one part to the next changes the result.
    """
    digest = hashlib.sha256()
    for name, size, pieces in parts:
        encoded = name.encode("utf-8", "surrogateescape")
        digest.update(f"{len(encoded)} {size}\n".encode())
        digest.update(encoded)
        for piece in pieces:
            digest.update(piece)
    return digest.hexdigest()


def file_pieces(file: Path) -> Iterable[bytes]:
    """The content of a file, at most `CHUNK_BYTES` at a time."""
    with file.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            yield piece


def _uneven(config: DataConfig, unit: str, sizes: tuple[int | None, int], whole: str) -> list[str]:
    """A line where much more is held out than `data.held_out` says, because what is split has parts of many sizes."""
    train, held_out = sizes
    if not whole or config.val_path is not None or not train:
        return []
    share = held_out / (train + held_out)
    if share <= max(2 * config.held_out, config.held_out + 0.1):
        return []
    what, _, mend = whole.partition("; ")
    return [
        f"warning: {share:.0%} of the {unit} are held out, and data.held_out is {config.held_out:g}: {what} are held"
        f" out whole, by a hash; {mend}"
    ]


def source_info(
    config: DataConfig,
    name: str,
    unit: str,
    *,
    sizes: tuple[int | None, int],
    files: tuple[int, int],
    sha256: str,
    whole: str = "",
) -> dict[str, Any]:
    """`Source.info`. sizes, files: of what is trained on, and of what is held out.

    whole: what is held out whole, and what to do where that is too much: "files; give more".
    """
    lines = _uneven(config, unit, sizes, whole)
    return ({"lines": lines} if lines else {}) | {
        "name": name,
        "path": config.path,
        "unit": unit,
        "train": sizes[0],
        "held_out": sizes[1],
        "files": files[0],
        "held_out_files": files[1],
        "sha256": sha256,
    }


def source_of_ids(
    config: DataConfig,
    name: str,
    unit: str,
    sides: Sequence[Ids],
    *,
    vocab: int,
    files: tuple[int, int],
    sha256: str,
    documents: tuple[np.ndarray, np.ndarray] | None = None,
    whole: str = "",
) -> Source:
    """The source of these ids, sides: training and held-out. The others are `Source`'s and those of `source_info`.

    Raises `UserError` unless both sides hold at least one window of seq_len inputs and their targets.
    """
    train, held_out = sides
    need = config.seq_len + 1
    for side, kind, more in ((train, "training", "a smaller"), (held_out, "held-out", "a larger")):
        if side.size < need:
            raise UserError(
                f"data.path: {config.path!r} gives {side.size} {kind} {unit}, less than one window of"
                f" data.seq_len + 1 = {need}; use a longer text, a shorter data.seq_len or {more} data.held_out"
            )
    info = source_info(config, name, unit, sizes=(train.size, held_out.size), files=files, sha256=sha256, whole=whole)
    return Source(train, held_out, vocab, info, documents)
