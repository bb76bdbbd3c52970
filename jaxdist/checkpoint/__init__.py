"""Checkpoints: any layout in, any layout out, every byte verified; to and from other formats."""

from jaxdist.checkpoint.failures import SaveFailed
from jaxdist.checkpoint.integrity import verify
from jaxdist.checkpoint.manager import Checkpoints

__all__ = ["Checkpoints", "SaveFailed", "verify"]
