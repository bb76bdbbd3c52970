"""Checkpoints: any layout in, any layout out."""

from jaxdist.checkpoint.manager import Checkpoints

__all__ = ["Checkpoints"]
