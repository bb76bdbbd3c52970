"""Checkpoints: any layout in, any layout out, every byte verified; to and from other formats."""

from jaxdist.checkpoint.integrity import verify
from jaxdist.checkpoint.manager import Checkpoints, SaveFailed

__all__ = ["Checkpoints", "SaveFailed", "verify"]
