"""Normalisation over the model width: the layers, and their function with its gradient."""

from jaxdist.nn.norm.layers import LayerNorm, RMSNorm, make_norm

__all__ = ["LayerNorm", "RMSNorm", "make_norm"]
