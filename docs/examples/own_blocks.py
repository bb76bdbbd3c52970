"""Your own transformer of stock Flax NNX layers, ZeRO-3 block by block: python docs/examples/own_blocks.py"""

import jax
import numpy as np
import optax
from flax import nnx

import jaxdist


class Embed(nnx.Module):
    def __init__(self, rngs, width, vocab, length):
        self.tokens, self.positions = nnx.Embed(vocab, width, rngs=rngs), nnx.Embed(length, width, rngs=rngs)

    def __call__(self, batch, keys):  # keys: one random key a sample, for jaxdist.nn.dropout
        # The tables themselves: an nnx.Embed that is called computes in the dtype that it was made with.
        ids = batch["inputs"]  # [B, S]; generation has shorter rows
        return self.tokens.embedding[ids] + self.positions.embedding[: ids.shape[1]]


class Block(nnx.Module):
    def __init__(self, rngs, width):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, h, keys):
        # fp16 leaves a norm's parameters in float32, and so what it gives: cast it, or h would become float32.
        h = h + self.attention(self.norm1(h).astype(h.dtype), mask=nnx.make_causal_mask(h[..., 0]))
        return h + self.down(nnx.gelu(self.up(self.norm2(h).astype(h.dtype))))


class Head(nnx.Module):
    def __init__(self, rngs, width):
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def logits(self, h, embed):  # for sampling
        return self.norm(h) @ embed.tokens.embedding.T

    def __call__(self, h, batch, embed):  # (sum of losses, sum of weights): exact for ragged batches, in every layout
        losses = optax.softmax_cross_entropy_with_integer_labels(self.logits(h, embed), batch["targets"])
        return (losses * batch["weights"]).sum(), batch["weights"].sum()


class GPT(nnx.Module):
    def __init__(self, rngs, block=Block, layers=4, width=64, vocab=256, length=32):
        self.embed, self.head = Embed(rngs, width, vocab, length), Head(rngs, width)
        self.blocks = nnx.List([block(rngs, width) for _ in range(layers)])


def train(source, loss_or_model, mesh, **options):
    """Three steps, and what a device holds. source, loss_or_model: a `ModelDef` twice, or parameters and a loss."""
    ids, adamw = np.random.default_rng(0).integers(0, 256, (16, 33)).astype(np.int32), optax.adamw(1e-3)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((16, 32), np.float32)}
    state = jaxdist.init_state(source, adamw, mesh, **options)
    step = jaxdist.make_train_step(loss_or_model, adamw, mesh, **options)
    memory = step.lower(state, batch).compile().memory_analysis()
    for _ in range(3):
        state, metrics = step(state, batch)
    state_mib, temporary_mib = memory.output_size_in_bytes / 2**20, memory.temp_size_in_bytes / 2**20
    print(f"{options} loss {metrics['loss']:.4f}; a device holds {state_mib:.2f} + {temporary_mib:.2f} MiB")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # eight simulated devices; ignored on GPUs
    model = jaxdist.model_def(GPT, tied=True)  # tied: the head reads the embedding
    train(model, model, jaxdist.make_mesh(fsdp=8), strategy="zero3", remat="full")
    train(model, model, jaxdist.make_mesh(pipe=2, fsdp=4), strategy="zero3", schedule="one_f_one_b", microbatches=2)
