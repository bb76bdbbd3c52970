# kind: contrastive retrieval, negatives inside each row, the hardest by top-k
import jax
import jax.numpy as jnp
import numpy as np


def encode(p, x):
    h = jax.nn.gelu(x @ p["w1"]) @ p["w2"]
    return h / jnp.sqrt((h**2).sum(-1, keepdims=True) + 1e-6)


def hard_negatives(scores, allowed, k):
    masked = jnp.where(allowed, scores, -1e9)
    top, _ = jax.lax.top_k(masked, k)
    return top


def loss_fn(params, batch, keys):
    query = encode(params["query"], batch["query"])
    docs = encode(params["doc"], batch["docs"])  # [B, candidates, D]; the first is the positive
    scores = jnp.exp(params["log_scale"]) * jnp.einsum("bd,bkd->bk", query, docs)
    allowed = batch["doc_mask"] & (jnp.arange(scores.shape[1]) > 0)
    negatives = hard_negatives(scores, allowed, 4)
    logits = jnp.concatenate([scores[:, :1], negatives], axis=1)
    losses = jax.nn.logsumexp(logits, axis=1) - logits[:, 0]
    # Uniformity among the candidates of a row, as of SimCLR but never across rows.
    gram = jnp.einsum("bkd,bld->bkl", docs, docs)
    off = 1 - jnp.eye(gram.shape[-1], dtype=gram.dtype)
    uniform = (off * jnp.exp(2 * gram - 2)).sum((1, 2)) / off.sum()
    return (losses + 0.1 * uniform).sum(), losses.size


def example():
    rng = np.random.default_rng(101)
    normal = lambda *s: (rng.normal(size=s) * 0.6).astype(np.float32)  # noqa: E731
    tower = lambda: {"w1": normal(5, 10), "w2": normal(10, 6)}  # noqa: E731
    params = {"query": tower(), "doc": tower(), "log_scale": np.float32(1.5)}
    mask = np.arange(9) < rng.integers(5, 10, 16)[:, None]
    return params, {"query": normal(16, 5), "docs": normal(16, 9, 5), "doc_mask": mask}
