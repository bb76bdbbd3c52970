"""Token ids in flat binary files as nanoGPT writes them: no header, uint16 or uint32, little-endian."""

from pathlib import Path

import numpy as np

from jaxdist.config import DataConfig
from jaxdist.data.source import CHUNK_BYTES, Source, file_pieces, fingerprint, read_error, require_windows, split_tail
from jaxdist.errors import UserError

_MAX_ID = 2**31 - 1  # batches are int32


def tokens(config: DataConfig) -> Source:
    """Ids of `data.path`, mapped into memory read-only.

    `data.path`: a file, or a folder that holds `train.bin`. Held out is the file `data.val_path`; without it `val.bin`
    beside `train.bin`; without that the last `data.held_out` of the training file. `data.token_dtype` is the type in
    the files. Both files are read once in full, for the largest id (vocab = 1 + that) and the fingerprint: about a
    second per GB.

    Raises `UserError`: missing, unreadable, empty, not a whole number of ids, ids above 2**31 - 1 or shorter than a
    window.
    """
    dtype = np.dtype(config.token_dtype).newbyteorder("<")
    try:
        train_file, val_file = _files(config)
        train = _map(train_file, dtype, key="data.path")
        whole = [("train", train_file, train)]
        if val_file is None:
            train, held_out = split_tail(train, config.held_out)
        else:
            held_out = _map(val_file, dtype, key="data.val_path")
            whole.append(("held_out", val_file, held_out))
        digest = fingerprint((role, ids.nbytes, file_pieces(file)) for role, file, ids in whole)
    except OSError as error:
        raise read_error("data.path", Path(config.path), error) from error
    largest = max(_largest(ids) for _, _, ids in whole)
    if largest > _MAX_ID:
        raise UserError(
            f"data.path: {str(train_file)!r} holds the id {largest}, above the limit {_MAX_ID}; "
            f"data.token_dtype is {config.token_dtype}: is that what the file was written as?"
        )
    info = {
        "name": "tokens",
        "path": config.path,
        "unit": "tokens",
        "train": int(train.size),
        "held_out": int(held_out.size),
        "files": 1,
        "held_out_files": 1,
        "sha256": digest,
    }
    source = Source(train, held_out, largest + 1, info)
    require_windows(source, seq_len=config.seq_len)
    return source


def _files(config: DataConfig) -> tuple[Path, Path | None]:
    """The training file, and the file of held-out ids if there is one."""
    path = Path(config.path).expanduser()
    train = path / "train.bin" if path.is_dir() else path
    if not train.exists():
        hint = "the folder must hold it" if path.is_dir() else "give a file of ids, or a folder that holds train.bin"
        raise UserError(f"data.path: {str(train)!r} does not exist; {hint}")
    if config.val_path is None:
        beside = train.with_name("val.bin")
        return train, beside if train.name == "train.bin" and beside.exists() else None
    val = Path(config.val_path).expanduser()
    if not val.exists():
        raise UserError(f"data.val_path: {str(val)!r} does not exist; give a file of token ids, or null for a part")
    if val.samefile(train):
        raise UserError(f"data.val_path: {str(val)!r} is the training file; give another, or null for its end")
    return train, val


def _map(file: Path, dtype: np.dtype, *, key: str) -> np.ndarray:
    """The ids of a file, mapped read-only."""
    if not file.is_file():
        raise UserError(f"{key}: {str(file)!r} is not a regular file; give a file of token ids")
    size = file.stat().st_size
    if size == 0:
        raise UserError(f"{key}: {str(file)!r} is empty; give a file with token ids in it")
    if size % dtype.itemsize:
        raise UserError(
            f"{key}: {str(file)!r} has {size} bytes, not a multiple of {dtype.itemsize}, one {dtype.name} id "
            "(data.token_dtype); the file is cut off or of another type"
        )
    return np.memmap(file, dtype=dtype, mode="r")


def _largest(ids: np.ndarray) -> int:
    step = CHUNK_BYTES // ids.itemsize
    return max(int(ids[start : start + step].max()) for start in range(0, ids.size, step))
