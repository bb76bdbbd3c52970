"""Flax NNX and optax as their documentation has it: nnx layers, nnx.Optimizer, nnx.jit; no sharding, no scan."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from harness.task import BETAS, CLIP, DECAY, EPS, LR, Contender, OtherModelError, Task, jax_memory, jax_peak

PyTree = Any


class Block(nnx.Module):
    """Pre-norm; attention is flax's own."""

    def __init__(self, task: Task, rngs: nnx.Rngs) -> None:
        model, dtype, eps = task.model, task.compute, task.model.norm_eps
        self.norm1 = nnx.LayerNorm(model.width, epsilon=eps, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            model.heads, model.width, dtype=dtype, decode=False, use_bias=True, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(model.width, epsilon=eps, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(model.width, 4 * model.width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * model.width, model.width, dtype=dtype, rngs=rngs)

    def __call__(self, h: jax.Array, mask: jax.Array) -> jax.Array:
        h = h + self.attention(self.norm1(h), mask=mask)
        return h + self.down(nnx.gelu(self.up(self.norm2(h))))


class Model(nnx.Module):
    """GPT-2, tied."""

    def __init__(self, task: Task, rngs: nnx.Rngs) -> None:
        model, dtype = task.model, task.compute
        self.tokens = nnx.Embed(model.vocab, model.width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(task.size.length, model.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(task, rngs) for _ in range(model.layers)])
        self.norm = nnx.LayerNorm(model.width, epsilon=model.norm_eps, dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        h = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        mask = nnx.make_causal_mask(ids)
        for block in self.blocks:
            h = block(h, mask)
        return self.tokens.attend(self.norm(h))


def load(model: Model, params: PyTree) -> None:
    """Put jaxdist's weights into the model."""

    def fill(layer: Any, values: PyTree) -> None:
        for name, value in values.items():
            leaf = getattr(layer, name)
            leaf[...] = jnp.asarray(value).reshape(leaf[...].shape)

    embed, head = params["embed"], params["head"]
    fill(model.tokens, {"embedding": embed["tokens"]["table"]})
    fill(model.positions, {"embedding": embed["positions"]["table"]})
    fill(model.norm, head["norm"])
    for i, block in enumerate(model.blocks):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        qkv = own["attention"]["qkv"]["linear"]  # kernel [D, heads, 3, K]
        for j, name in enumerate(("query", "key", "value")):
            part = {"kernel": qkv["kernel"][..., j, :], "bias": qkv["bias"][..., j, :]}
            fill(getattr(block.attention, name), part)
        fill(block.attention.out, own["attention"]["out"])
        for name, values in (("norm1", own["norm1"]), ("norm2", own["norm2"]), *own["mlp"].items()):
            fill(getattr(block, name), values)


def plain_flax(task: Task) -> Contender:
    """The step of flax's documentation, donated."""
    if task.model.style != "gpt2":
        raise OtherModelError(f"it is written for gpt2, and this size is of {task.model.style}")
    before = jax_memory()
    with jax.numpy_dtype_promotion("standard"):
        model = Model(task, nnx.Rngs(0))
        load(model, task.params)
        tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LR, *BETAS, eps=EPS, weight_decay=DECAY))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    batches = [jax.device_put(batch) for batch in task.batches]

    @nnx.jit(donate_argnums=(0, 1))
    def update(model: Model, optimizer: nnx.Optimizer, batch: PyTree) -> tuple[Any, Any]:
        def loss_of(model: Model) -> jax.Array:
            logits = model(batch["inputs"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss, optax.tree.norm(grads)

    def step(i: int) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return update(model, optimizer, batches[i % len(batches)])

    def wait() -> None:
        jax.block_until_ready(nnx.state((model, optimizer)))

    about = {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__}
    return Contender(step, wait, about, None, jax_peak(before))
