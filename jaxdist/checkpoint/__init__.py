"""Checkpoints: any layout in, any layout out, every byte verified; to and from other formats."""

from jaxdist.checkpoint.checksums import verify
from jaxdist.checkpoint.errors import SaveFailed
from jaxdist.checkpoint.manager import Checkpoints

__all__ = ["Checkpoints", "SaveFailed", "verify"]
