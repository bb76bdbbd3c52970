"""A step written by hand in plain JAX: what an expert would write for one device, without a library but optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from harness.task import BETAS, CLIP, DECAY, EPS, LR, Contender, Task, compiled_bytes, jax_memory, jax_peak
from jaxdist.config.schema import ModelConfig

PyTree = Any


def norm(x: Any, p: PyTree, eps: float) -> Any:
    """LayerNorm, or RMSNorm where there is no bias; in fp32."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True) if "bias" in p else wide
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    wide = wide * p["scale"]
    return (wide + p["bias"] if "bias" in p else wide).astype(x.dtype)


def linear(x: Any, p: PyTree) -> Any:
    """A product, and a bias where there is one, in the type of x."""
    y = jnp.tensordot(x, p["kernel"].astype(x.dtype), 1)
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


def rotated(x: Any, theta: float) -> Any:
    """Rotary positions of x [B, S, heads, K]; elements i and K / 2 + i of a head are a pair."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(x: Any, p: PyTree, model: ModelConfig, *, fused: bool) -> Any:
    """Causal, all heads; fused: by cuDNN's kernel."""
    qkv = linear(x, p["qkv"]["linear"])  # [B, S, n, G + 2, K]
    q, k, v = qkv[..., :-2, :].reshape(*x.shape[:2], -1, qkv.shape[-1]), qkv[..., -2, :], qkv[..., -1, :]
    if model.positions == "rope":
        q, k = rotated(q, model.rope_theta), rotated(k, model.rope_theta)
    if fused:
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    else:
        k, v = (jnp.repeat(each, q.shape[2] // k.shape[2], axis=2) for each in (k, v))
        scores = jnp.einsum("bsnk,btnk->bnst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("bnst,btnk->bsnk", jax.nn.softmax(scores).astype(v.dtype), v)
    return linear(mixed.reshape(x.shape), p["out"])


def mlp(x: Any, p: PyTree) -> Any:
    """GELU, or SwiGLU where the first kernel is [D, 2, hidden]."""
    y = linear(x, p["up"])
    return linear(jax.nn.silu(y[..., 0, :]) * y[..., 1, :] if y.ndim > x.ndim else jax.nn.gelu(y), p["down"])


def loss_of(
    params: PyTree, batch: PyTree, task: Task, *, around: Callable[[Any], Any] = lambda block: block, unroll: int
) -> Any:
    """Mean cross-entropy. around: what the block is wrapped in. unroll: blocks of a round of the loop."""
    model, embed, head = task.model, params["embed"], params["head"]
    eps, fused = model.norm_eps, task.gpu and task.precision == "bf16"

    def block(h: Any, p: PyTree) -> tuple[Any, None]:
        h = h + attention(norm(h, p["norm1"], eps), p["attention"], model, fused=fused)
        return h + mlp(norm(h, p["norm2"], eps), p["mlp"]), None

    h = embed["tokens"]["table"].astype(task.compute)[batch["inputs"]]
    if "positions" in embed:
        h = h + embed["positions"]["table"].astype(task.compute)[: task.size.length]
    h, _ = jax.lax.scan(around(block), h, params["blocks"], unroll=unroll)
    h = norm(h, head["norm"], eps)
    table = (head["projection"] if "projection" in head else embed["tokens"])["table"].astype(task.compute)
    logits = jnp.einsum("bsd,vd->bsv", h, table, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def plain_jax(task: Task) -> Contender:
    """Jitted, donated, parameters stacked. Blocks are scanned, unrolled on GPUs: that spares copies of what the
    backward pass needs."""
    before, unroll = jax_memory(), task.model.layers if task.gpu else 1
    tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LR, *BETAS, eps=EPS, weight_decay=DECAY))

    def update(state: Any, batch: PyTree) -> tuple[Any, Any]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch, task, unroll=unroll)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, optax.tree.norm(grads))

    run = jax.jit(update, donate_argnums=0)
    params = jax.tree.map(jnp.array, task.params)
    batches = [jax.device_put(batch) for batch in task.batches]
    state: Any = (params, jax.jit(tx.init)(params))
    predicted = compiled_bytes(run.lower(state, batches[0]).compile()) if task.gpu else None

    def step(i: int) -> Any:
        nonlocal state
        with jax.numpy_dtype_promotion("standard"):
            state, metrics = run(state, batches[i % len(batches)])
        return metrics

    about = {"jax": jax.__version__, "optax": optax.__version__}
    return Contender(step, lambda: jax.block_until_ready(state), about, predicted, jax_peak(before))
