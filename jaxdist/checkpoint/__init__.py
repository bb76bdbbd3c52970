"""Checkpoints: any layout in, any layout out; to and from other formats."""

from jaxdist.checkpoint.integrity import verify
from jaxdist.checkpoint.manager import Checkpoints

__all__ = ["Checkpoints", "verify"]
