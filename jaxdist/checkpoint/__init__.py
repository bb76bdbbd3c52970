"""Checkpoints: any layout in, any layout out, every byte verified."""

from jaxdist.checkpoint.manager import Checkpoints, SaveFailed

__all__ = ["Checkpoints", "SaveFailed"]
