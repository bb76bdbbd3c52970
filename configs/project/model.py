"""A small transformer of Flax NNX layers, for config.yaml: change it as you like."""

import optax
from flax import nnx

from jaxdist import model_def


class Embed(nnx.Module):
    """Ids to vectors, with learned positions."""

    def __init__(self, rngs, width, vocab, length):
        self.tokens, self.positions = nnx.Embed(vocab, width, rngs=rngs), nnx.Embed(length, width, rngs=rngs)

    def __call__(self, batch, keys):  # keys: a random key for each sample, for dropout
        ids = batch["inputs"]  # [B, S]; generation has shorter rows
        return self.tokens.embedding[ids] + self.positions.embedding[: ids.shape[1]]


class Block(nnx.Module):
    """Causal attention and an MLP. A device gathers the parameters of one block at a time."""

    def __init__(self, rngs, width):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, h, keys):
        h = h + self.attention(self.norm1(h).astype(h.dtype), mask=nnx.make_causal_mask(h[..., 0]))
        return h + self.down(nnx.gelu(self.up(self.norm2(h).astype(h.dtype))))


class Head(nnx.Module):
    """The loss: a sum over tokens, and the sum of their weights."""

    def __init__(self, rngs, width):
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def logits(self, h, embed):  # for sampling
        return self.norm(h) @ embed.tokens.embedding.T

    def __call__(self, h, batch, embed):
        losses = optax.softmax_cross_entropy_with_integer_labels(self.logits(h, embed), batch["targets"])
        return (losses * batch["weights"]).sum(), batch["weights"].sum()


class Model(nnx.Module):
    """The three parts that jaxdist asks for: embed, blocks, head."""

    def __init__(self, rngs, layers, width, vocab, length):
        self.embed, self.head = Embed(rngs, width, vocab, length), Head(rngs, width)
        self.blocks = nnx.List([Block(rngs, width) for _ in range(layers)])


def make(config, *, max_length, param_dtype):
    """The model of a configuration. config: the section `model`. max_length: data.seq_len."""
    sizes = {"layers": config.layers, "width": config.width, "vocab": config.vocab, "length": max_length}
    return model_def(lambda rngs: Model(rngs, **sizes), tied=True, param_dtype=param_dtype)
