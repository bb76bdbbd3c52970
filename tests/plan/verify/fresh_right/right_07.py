# kind: learning to rank, LambdaRank and ListMLE over each query's documents, weight = queries with a relevant one
import jax
import jax.numpy as jnp
import numpy as np


def discounts(scores, mask):
    order = jnp.argsort(jnp.where(mask, -scores, jnp.inf), axis=-1)
    rank = jnp.argsort(order, axis=-1)
    return 1.0 / jnp.log2(2.0 + rank)


def ideal_dcg(gains):
    best = -jnp.sort(-gains, axis=-1)
    return (best / jnp.log2(2.0 + jnp.arange(gains.shape[-1]))).sum(-1)


def list_mle(scores, labels, mask):
    order = jnp.argsort(jnp.where(mask, -labels, jnp.inf), axis=-1)
    s = jnp.take_along_axis(jnp.where(mask, scores, -1e4), order, -1)
    m = jnp.take_along_axis(mask, order, -1)
    tail = jax.lax.cumlogsumexp(s, axis=1, reverse=True)
    return jnp.where(m, tail - s, 0).sum(-1) / mask.sum(-1)


def loss_fn(params, batch, keys):
    docs, labels, mask = batch["docs"], batch["labels"], batch["mask"]
    real = mask[..., None].astype(docs.dtype)
    context = (real * docs).sum(1, keepdims=True) / real.sum(1, keepdims=True)  # the mean of a query's documents
    h = jax.nn.silu((docs - context) @ params["w1"] + context @ params["w2"])
    scores = h @ params["w3"]
    gains = jnp.where(mask, 2.0**labels - 1, 0)
    disc = discounts(jax.lax.stop_gradient(scores), mask)
    delta = jnp.abs((gains[:, :, None] - gains[:, None]) * (disc[:, :, None] - disc[:, None]))
    better = (labels[:, :, None] > labels[:, None]) & mask[:, :, None] & mask[:, None]
    pair = jax.nn.softplus(-(scores[:, :, None] - scores[:, None]))
    ideal = ideal_dcg(gains)
    usable = ideal > 0
    ranked = jnp.where(better, delta * pair, 0).sum((1, 2)) / jnp.where(usable, ideal, 1)
    losses = ranked + 0.1 * list_mle(scores, labels, mask)
    return jnp.where(usable, losses, 0).sum(), usable.sum()


def example():
    rng = np.random.default_rng(107)
    normal = lambda *s: (rng.normal(size=s) * 0.6).astype(np.float32)  # noqa: E731
    mask = np.arange(8) < rng.integers(3, 9, 16)[:, None]
    labels = np.where(rng.random((16, 8)) < 0.5, 0, rng.integers(0, 4, (16, 8))).astype(np.float32)
    labels[5] = 0  # a query without a relevant document
    params = {"w1": normal(5, 8), "w2": normal(5, 8), "w3": normal(8)}
    return params, {"docs": normal(16, 8, 5), "labels": labels, "mask": mask}
