"""Parameters of a Hugging Face folder, tensor by tensor."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import registry
from jaxdist.checkpoint.huggingface.convert import check_model, model_of_config, pieces_of
from jaxdist.checkpoint.huggingface.family import CONFIG
from jaxdist.checkpoint.huggingface.names import family
from jaxdist.checkpoint.huggingface.safetensors import TensorFiles, read_json
from jaxdist.pretrained.place import ParameterPiece, placed
from jaxdist.pretrained.source import Pretrained, Say, cast_text
from jaxdist.specs import leaves_by_name

TOKENIZER = "tokenizer.json"


class Folder(Pretrained):
    """A Hugging Face folder: config.json beside safetensors files.

    A table of the vocabulary may have more rows in the model: they become the mean of the others. A table of positions
    may have fewer: the first are taken.
    """

    def __init__(self, where: Path, *, key: str) -> None:
        self._key, self.described = key, str(where)
        self._config = read_json(where / CONFIG)
        self._own, self._length = model_of_config(self._config)
        self.model, self.positions = self._own, self._length
        self.tokenizer = where if (where / TOKENIZER).is_file() else None
        self._files = TensorFiles(where)
        try:
            rows, self._dtypes = check_model(self._files, self._config, self._own, positions=self._length)
        except BaseException:
            self._files.close()
            raise
        self._rows = rows or 0

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        build = registry.load("jaxdist.models", self._own.name, key="model.name")
        made = build(self._own, max_length=self._length, param_dtype=jnp.dtype(self._dtypes[0]))
        tables = family(self._own).tables
        return {
            name: jax.ShapeDtypeStruct((self._rows, *leaf.shape[1:]), leaf.dtype) if name in tables else leaf
            for name, leaf in leaves_by_name(made.shapes).items()
        }

    def digest(self) -> str:
        """Of config.json, and of each tensor's name, type, shape and first and last numbers: not every byte is read."""
        digest = hashlib.sha256(repr(sorted(self._config.items(), key=str)).encode())
        for name in sorted(self._files.names):
            digest.update(f"{name} {self._files.dtype(name)} {self._files.shape(name)}".encode())
            digest.update(self._files.sample(name))
        return digest.hexdigest()

    def _fits(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        own = family(self._own)
        if found[1:] == wanted[1:] and name in own.tables:
            return found[0] <= wanted[0]
        return found == wanted or (name == own.positions and found[1:] == wanted[1:] and found[0] >= wanted[0])

    def _arrays(
        self, target: Mapping[str, jax.ShapeDtypeStruct], order: np.ndarray | None, say: Say
    ) -> Iterable[tuple[str, jax.Array]]:
        cast = cast_text(iter(self._dtypes), (leaf.dtype for leaf in target.values()))
        say(f"{self._key}: parameters of {self.described}{cast}{self._padding(target)}")
        given = pieces_of(self._files, self._own, dict(target), positions=self._length)
        return placed((ParameterPiece(*each) for each in given), target, order)

    def _padding(self, target: Mapping[str, Any]) -> str:
        wanted = max((target[name].shape[0] for name in family(self._own).tables if name in target), default=0)
        added = wanted - self._rows
        return f"; the vocabulary has {self._rows} rows there, {added} were added: the mean of the others" * (added > 0)

    def close(self) -> None:
        self._files.close()
