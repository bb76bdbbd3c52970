"""GPT-2 and Llama in PyTorch, with the weights of jaxdist's models."""

from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from harness.task import Task
from jaxdist.config.schema import ModelConfig

PyTree = Any


class Block(nn.Module):
    """Pre-norm, with one product for queries, keys and values, and one for gate and up."""

    def __init__(self, model: ModelConfig, length: int) -> None:
        super().__init__()
        width, self.heads, self.kv_heads = model.width, model.heads, model.kv_heads or model.heads
        self.head, self.gated, bias = width // model.heads, model.mlp == "swiglu", bool(model.bias)
        self.norm1, self.norm2 = norm(model), norm(model)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.head, bias)
        self.out = nn.Linear(width, width, bias)
        hidden = model.mlp_width or 4 * width
        self.up, self.down = nn.Linear(width, (1 + self.gated) * hidden, bias), nn.Linear(hidden, width, bias)
        self.turned = model.positions == "rope"
        if self.turned:
            half = torch.arange(self.head // 2) / (self.head // 2)
            angles = torch.arange(length)[:, None] * model.rope_theta**-half
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions; elements i and K / 2 + i of a head are a pair."""
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1).to(x.dtype)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        rows, length, width = h.shape
        qkv = self.qkv(self.norm1(h)).view(rows, length, -1, self.head).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.turned:
            q, k = self.rotated(q), self.rotated(k)
        shared = {"enable_gqa": True} if self.heads != self.kv_heads else {}
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **shared)
        h = h + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return h + self.down(self.activation(self.up(self.norm2(h))))

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        """SwiGLU, or GELU by tanh."""
        if not self.gated:
            return functional.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up


def norm(model: ModelConfig) -> nn.Module:
    """RMSNorm or LayerNorm."""
    return (nn.RMSNorm if model.norm == "rmsnorm" else nn.LayerNorm)(model.width, model.norm_eps)


class Model(nn.Module):
    """GPT-2 or Llama."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        model = task.model
        self.stream = torch.bfloat16 if task.precision == "bf16" else torch.float32
        self.tokens = nn.Embedding(model.vocab, model.width)
        self.positions = nn.Embedding(task.size.length, model.width) if model.positions == "learned" else None
        self.blocks = nn.ModuleList([Block(model, task.size.length) for _ in range(model.layers)])
        self.norm = norm(model)
        self.head = None if model.tied else nn.Linear(model.width, model.vocab, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.tokens(ids)
        if self.positions is not None:
            h = h + self.positions(torch.arange(ids.shape[1], device=ids.device))
        h = h.to(self.stream)  # autocast alone would leave the residual stream in fp32
        for block in self.blocks:
            h = block(h)
        table = self.tokens.weight if self.head is None else self.head.weight
        return functional.cross_entropy(functional.linear(self.norm(h), table).flatten(0, 1), targets.flatten())


def weights(params: PyTree) -> dict[str, Any]:
    """jaxdist's weights by the names of `Model`; PyTorch's linear layers keep [out, in]."""
    embed, head, blocks = params["embed"], params["head"], params["blocks"]
    found = {"tokens.weight": embed["tokens"]["table"], **_named("norm", head["norm"])}
    if "positions" in embed:
        found["positions.weight"] = embed["positions"]["table"]
    if "projection" in head:
        found["head.weight"] = head["projection"]["table"]
    for i in range(blocks["norm1"]["scale"].shape[0]):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], blocks)
        attention = own.pop("attention")
        qkv = jax.tree.map(_by_part, attention["qkv"]["linear"])
        for layer, leaves in {"qkv": qkv, "out": attention["out"], **own.pop("mlp"), **own}.items():
            found |= _named(f"blocks.{i}.{layer}", leaves)
    return {name: torch.tensor(value) for name, value in found.items()}


def _by_part(leaf: Any) -> Any:
    """[..., n, G + 2, K] -> [..., (n G + 2 n) K]: all queries, all keys, all values."""
    parts = leaf[..., :-2, :], leaf[..., -2:-1, :], leaf[..., -1:, :]
    return np.concatenate([part.reshape(*leaf.shape[:-3], -1) for part in parts], -1)


def _named(layer: str, leaves: PyTree) -> dict[str, Any]:
    """A layer's leaves by PyTorch's names."""
    found = {}
    for name, leaf in leaves.items():
        if name == "kernel":
            found[f"{layer}.weight"] = leaf.reshape(leaf.shape[0], -1).T
        else:
            found[f"{layer}.{'weight' if name == 'scale' else name}"] = leaf
    return found
