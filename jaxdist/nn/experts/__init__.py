"""Mixture of experts: a router, the ways in which tokens reach their experts, and what balances them."""

from jaxdist.nn.experts.layer import ExpertBlock, MoE

__all__ = ["ExpertBlock", "MoE"]
