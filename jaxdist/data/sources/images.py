"""Images with labels, in arrays of numpy: a `.npz` file, or a folder of `.npy` files, which stay in their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.file_array import FileArray, Ids
from jaxdist.data.samples import Samples
from jaxdist.data.source import Source, readable, source_info
from jaxdist.data.sources._arrays import fingerprint_of, samples_of, split_at_random
from jaxdist.errors import UserError

FACTS = SourceFacts(reads_files=True, ids=False, leaves=("image", "label"))

REQUIRED = ("image", "label")
_AT_A_TIME = 1 << 20  # labels


def images(config: DataConfig) -> Source:
    """Samples of `data.path`: a `.npz` file with the arrays `image` [n, ...] and `label` [n, ...], or a folder with
    `image.npy` and `label.npy`. Every other array that lies there is a part of each sample too: all have n rows.

    A batch has the arrays' rows as they are, 8-byte integers as int32 and 8-byte floats as float32, and `weights`.
    Held out are the samples of `data.val_path`, a file or folder of the same kind; without it the `data.held_out`-th
    part of them, taken at random, always the same. A `.npz` file is read into memory.

    Raises `UserError`: missing, unreadable, empty, Python objects in an array, rows that do not match.
    """
    arrays = _open(Path(config.path).expanduser(), key="data.path")
    whole, held_arrays = _samples(arrays, key="data.path"), None
    if config.val_path is not None:
        held_arrays = _open(Path(config.val_path).expanduser(), key="data.val_path")
        train, held_out = whole, _samples(held_arrays, key="data.val_path")
        if held_out.leaves != whole.leaves:
            raise UserError(
                f"data.val_path: {config.val_path!r} holds other arrays than data.path, or of other types"
                " or shapes; give both of one kind"
            )
    else:
        train, held_out = split_at_random(whole, config.held_out)
    both = {"train": arrays} | ({} if held_arrays is None else {"held_out": held_arrays})
    with readable("data.path", Path(config.path)):
        digest = fingerprint_of(both)
        labels = max(_labels(side["label"]) for side in both.values())
    sizes, files = (train.size, held_out.size), (len(arrays), len(held_arrays or arrays))
    info = source_info(config, "images", "samples", sizes=sizes, files=files, sha256=digest)
    return Source(train, held_out, 0, info, labels=labels or None)


def _labels(label: Ids) -> int:
    """1 + the largest label; 0 where they are no whole numbers."""
    if label.dtype.kind not in "iu":
        return 0
    return max(int(label[i : i + _AT_A_TIME].max()) + 1 for i in range(0, len(label), _AT_A_TIME))


def _open(path: Path, *, key: str) -> dict[str, Ids]:
    """The arrays, by name, in order of their names."""
    found: dict[str, Any]
    with readable(key, path):
        try:
            if path.is_dir():
                found = {each.stem: _in_file(each) for each in path.glob("[!.]*.npy")}
            elif path.suffix == ".npz" and path.is_file():
                with np.load(path, allow_pickle=False) as file:
                    found = {name: file[name] for name in file.files}
            else:
                names = ", ".join(REQUIRED)
                raise UserError(f"{key}: {str(path)!r} is no .npz file and no folder; give one with {names}")
        except (UserError, OSError):
            raise
        except Exception as error:  # zipfile.BadZipFile, ValueError for Python objects, EOFError ...
            raise UserError(
                f"{key}: {str(path)!r} holds something else than arrays of numbers ({error}); write it again"
                " with numpy.savez or numpy.save"
            ) from error
    if others := [name for name, array in found.items() if not isinstance(array, Ids)]:
        raise UserError(
            f"{key}: {str(path)!r} holds {others[0]!r}, which is no array; write it again with numpy.savez"
            " or numpy.save"
        )
    return dict(sorted(found.items()))


def _in_file(path: Path) -> Ids:
    """The array in a `.npy` file. It is read into memory only if its rows do not lie one after the other."""
    mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    if not mapped.flags.c_contiguous:
        return np.load(path, allow_pickle=False)
    return FileArray(path, mapped.dtype, shape=mapped.shape, offset=mapped.offset)


def _samples(arrays: Mapping[str, Ids], *, key: str) -> Samples:
    if lacking := [name for name in REQUIRED if name not in arrays]:
        raise UserError(
            f"{key}: has no array {lacking[0]!r}, only {', '.join(arrays) or 'nothing'}; allowed: image.npy and"
            " label.npy in a folder, or an .npz file with image and label, and others beside them; pictures as .png are"
            " not decoded: save them once with numpy.save (docs/data.md)"
        )
    counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    size = counts["image"]
    if not size:
        raise UserError(f"{key}: image has 0 rows; give 1 or more")
    if other := [name for name, count in counts.items() if count != size]:
        raise UserError(f"{key}: image has {size} rows, {other[0]} {counts[other[0]]}; give as many of each")
    return samples_of(arrays, key=key)
