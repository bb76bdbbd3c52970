"""Parameters that exist already: those of a run, of a step of it, of a Hugging Face folder, of a safetensors file."""

from jaxdist.pretrained.open import open_pretrained
from jaxdist.pretrained.source import Pretrained

__all__ = ["Pretrained", "open_pretrained"]
