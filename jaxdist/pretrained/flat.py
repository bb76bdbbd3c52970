"""Parameters of a single safetensors file in the names of this package, such as blocks.mlp.up.kernel."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint.huggingface.safetensors import TensorFiles
from jaxdist.pretrained.place import ParameterPiece, placed
from jaxdist.pretrained.source import Pretrained, Say, cast_text
from jaxdist.specs import STACKED


class Flat(Pretrained):
    """A safetensors file whose tensors are named as parameters are. It says nothing of an architecture."""

    def __init__(self, where: Path, *, key: str) -> None:
        self._key, self.described = key, str(where)
        self._files = TensorFiles(where)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        files = self._files
        return {
            name: jax.ShapeDtypeStruct(files.shape(name), jnp.dtype(files.dtype(name))) for name in sorted(files.names)
        }

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, leaf in self.shapes().items():
            digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode() + self._files.sample(name))
        return digest.hexdigest()

    def _arrays(
        self, target: Mapping[str, jax.ShapeDtypeStruct], order: np.ndarray | None, say: Say
    ) -> Iterable[tuple[str, jax.Array]]:
        shapes = self.shapes()
        cast = cast_text((shapes[name].dtype for name in target), (leaf.dtype for leaf in target.values()))
        say(f"{self._key}: parameters of {self.described}{cast}")
        return placed(self._pieces(target), target, order)

    def _pieces(self, target: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[ParameterPiece]:
        for name, like in target.items():
            array = self._files.finite(name).astype(like.dtype)
            if name.startswith(f"{STACKED}."):
                yield from (ParameterPiece(name, block, each) for block, each in enumerate(array))
            else:
                yield ParameterPiece(name, None, array)

    def close(self) -> None:
        self._files.close()
