"""Attention: the layers, the kernels that compute it, and rotary positions."""

from jaxdist.nn.attention.kernels import PackedDocuments, why_not_cudnn
from jaxdist.nn.attention.layers import Attention, CrossAttention, QKVProjection
from jaxdist.nn.attention.rotary import RopeScaling

__all__ = ["Attention", "CrossAttention", "PackedDocuments", "QKVProjection", "RopeScaling", "why_not_cudnn"]
