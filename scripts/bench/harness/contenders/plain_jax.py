"""A step written by hand in plain JAX: what an expert would write for one device, without a library but optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from harness.task import BETAS, CLIP, DECAY, EPS, LR, Contender, Task, compiled_bytes, jax_memory, jax_peak

PyTree = Any


def norm(x: Any, p: PyTree, eps: float) -> Any:
    """LayerNorm, in fp32."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    return (wide * p["scale"] + p["bias"]).astype(x.dtype)


def linear(x: Any, p: PyTree) -> Any:
    """A product and a bias, in the type of x."""
    return jnp.tensordot(x, p["kernel"].astype(x.dtype), 1) + p["bias"].astype(x.dtype)


def attention(x: Any, p: PyTree, *, fused: bool) -> Any:
    """Causal, all heads; fused: by cuDNN's kernel."""
    qkv = linear(x, p["qkv"]["linear"])  # [B, S, heads, 3, K]
    q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]
    if fused:
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    else:
        scores = jnp.einsum("bsnk,btnk->bnst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("bnst,btnk->bsnk", jax.nn.softmax(scores).astype(v.dtype), v)
    return linear(mixed.reshape(x.shape), p["out"])


def loss_of(
    params: PyTree, batch: PyTree, task: Task, *, around: Callable[[Any], Any] = lambda block: block, unroll: int
) -> Any:
    """Mean cross-entropy. around: what the block is wrapped in. unroll: blocks of a round of the loop."""
    eps, embed = task.model.norm_eps, params["embed"]
    table = embed["tokens"]["table"].astype(task.compute)

    def block(h: Any, p: PyTree) -> tuple[Any, None]:
        h = h + attention(norm(h, p["norm1"], eps), p["attention"], fused=task.gpu and task.precision == "bf16")
        return h + linear(jax.nn.gelu(linear(norm(h, p["norm2"], eps), p["mlp"]["up"])), p["mlp"]["down"]), None

    h = table[batch["inputs"]] + embed["positions"]["table"].astype(task.compute)[: task.size.length]
    h, _ = jax.lax.scan(around(block), h, params["blocks"], unroll=unroll)
    h = norm(h, params["head"]["norm"], eps)
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
