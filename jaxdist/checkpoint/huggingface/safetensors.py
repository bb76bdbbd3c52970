"""Folders of safetensors files: a header of names, types, shapes and offsets, then plain bytes.

The library `safetensors` reads the files, and checks their headers. The writer is our own, because the library's needs
all tensors in memory at once. Format: https://github.com/huggingface/safetensors#format.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdist.config.json_reader import read_json_file
from jaxdist.config.rules.fields import show
from jaxdist.errors import UserError

TENSOR_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CODES = {name: code for code, name in TENSOR_DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9  # a file holds at most this many, or one tensor, as Hugging Face's own do
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class TensorEntry(NamedTuple):
    """A tensor to write. dtype: such as "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * np.dtype(jnp.dtype(self.dtype)).itemsize


def write(
    folder: Path, entries: Sequence[TensorEntry], arrays: Iterable[np.ndarray], *, file_bytes: int = FILE_BYTES
) -> int:
    """Write the arrays as they come, one for each entry and in the same order. Returns the number of files."""
    files = _divide(entries, file_bytes)
    stream = iter(arrays)
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    names = [SINGLE] if len(files) == 1 else names
    for name, inside in zip(names, files, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(inside))
            for entry in inside:
                array = next(stream)
                assert array.shape == entry.shape and str(array.dtype) == entry.dtype, (entry, array.shape, array.dtype)
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    assert next(stream, None) is None, "more arrays than entries"
    if len(files) > 1:
        where = {entry.name: name for name, inside in zip(names, files, strict=True) for entry in inside}
        total = sum(entry.nbytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(files)


def _divide(entries: Sequence[TensorEntry], file_bytes: int) -> list[list[TensorEntry]]:
    files: list[list[TensorEntry]] = [[]]
    for entry in entries:
        if files[-1] and sum(each.nbytes for each in files[-1]) + entry.nbytes > file_bytes:
            files.append([])
        files[-1].append(entry)
    return files


def _header(entries: Sequence[TensorEntry]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    start = 0
    for entry in entries:
        stop = start + entry.nbytes
        fields[entry.name] = {"dtype": CODES[entry.dtype], "shape": entry.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def tensor_name(tensor: str) -> str:
    """The name of a tensor for a message: a file may hold any text as one."""
    return tensor if tensor.isprintable() and len(tensor) <= 200 else show(tensor)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `UserError` when there is none."""
    try:
        found = read_json_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: does not exist; a model of Hugging Face has {path.name} beside its tensors") from None
    except (OSError, ValueError) as error:  # ValueError: neither UTF-8 nor JSON
        raise UserError(f"{path}: not to be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no JSON object")
    return found


class TensorFiles:
    """The safetensors files of a folder, or one file, to read one tensor at a time. Use it as a context.

    Raises `UserError` for a folder or a file that is not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        self._where: dict[str, Any] = {}  # name -> the open file
        self._paths: dict[str, Path] = {}
        self._stack = ExitStack()
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError:
            raise UserError("importing needs the package safetensors; pip install 'jaxdist[hf]'") from None
        self._open = safe_open
        for path, names in _files(folder):
            if path.exists() and not path.is_file():  # opening a pipe would wait
                raise UserError(f"{path}: is no regular file")
            try:
                file = self._stack.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                reason = str(error)[:300]  # it quotes names of the file, which may be of any length
                raise UserError(f"{path}: not a file of safetensors: {reason}") from None
            inside = set(file.keys())
            if missing := sorted(set(names or ()) - inside):
                raise UserError(f"{path}: has no tensor {show(missing[0])}, which {INDEX} says is there")
            self._where |= dict.fromkeys(names or inside, file)
            self._paths |= dict.fromkeys(names or inside, path)
        self.names = set(self._where)  # of all tensors

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Its elements are not read."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """ "float32", ... Raises `UserError` for a type that no parameter has."""
        code = self._where[name].get_slice(name).get_dtype()
        if code not in TENSOR_DTYPES:
            raise UserError(f"{show(name)}: is of type {code} in the file; allowed: {', '.join(TENSOR_DTYPES)}")
        return TENSOR_DTYPES[code]

    def read(self, name: str) -> np.ndarray:
        """One tensor."""
        # Opened once more, and closed: a file that stays open keeps every page that was read in this process's memory.
        with self._open(self._paths[name], framework="numpy") as file:
            return file.get_tensor(name)

    def finite(self, name: str) -> np.ndarray:
        """One tensor. Raises `UserError` where it holds numbers that are not finite."""
        tensor = self.read(name)
        if not np.isfinite(tensor).all():
            raise UserError(f"{name}: holds numbers that are not finite; such a model cannot be trained")
        return tensor

    def sample(self, name: str) -> bytes:
        """The bytes of the first and of the last row of a tensor."""
        rows = self._where[name].get_slice(name)
        size = rows.get_shape()[0] if rows.get_shape() else 0
        return b"".join(rows[at : at + 1].tobytes() for at in (0, size - 1)) if size else self.read(name).tobytes()


def _files(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """The files of a folder, each with the names of its tensors by the index; None without an index. Of a file, this
    file."""
    if folder.is_file():
        yield folder, None
        return
    if (folder / INDEX).is_file():
        where = read_json(folder / INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
            raise UserError(f"{folder / INDEX}: has no weight_map from names of tensors to names of files")
        for name in sorted(set(where.values())):
            if name in ("", ".", "..") or set(name) & set("/\\\0") or not name.endswith(".safetensors"):
                raise UserError(
                    f"{folder / INDEX}: names the file {show(name)}; allowed: files *.safetensors beside it"
                )
            yield folder / name, [tensor for tensor, file in where.items() if file == name]
        return
    if (folder / SINGLE).is_file():
        yield folder / SINGLE, None
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder; give one with config.json and {SINGLE}, or {INDEX}")
    if pickled := sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED):
        raise UserError(
            f"{folder}: has {pickled[0]} and no {SINGLE}; pickled files are never read, for they can run any code; save"
            " the model again with save_pretrained(..., safe_serialization=True)"
        )
    raise UserError(f"{folder}: has neither {SINGLE} nor {INDEX}")
