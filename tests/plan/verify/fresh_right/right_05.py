# kind: masked autoencoder with R-Drop, patches shuffled and units dropped by each row's own key
import jax
import jax.numpy as jnp
import numpy as np


def drop(key, x, rate):
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def reconstruct(params, key, patches, keep):
    noise = jax.random.uniform(key, (patches.shape[0],))
    order = jnp.argsort(noise)
    restore = jnp.argsort(order)
    seen = patches[order[:keep]]
    h = jax.nn.gelu(seen @ params["enc"] + params["pos"][order[:keep]])
    h = drop(jax.random.fold_in(key, 7), h, 0.2)
    hidden = jnp.broadcast_to(params["mask_token"], (patches.shape[0] - keep, h.shape[-1]))
    full = jnp.concatenate([h, hidden])[restore] + params["pos"]
    mixed = jax.nn.softmax(full @ full.T / full.shape[-1] ** 0.5) @ full
    masked = (restore >= keep).astype(patches.dtype)
    return mixed @ params["dec"], masked


def row_loss(params, key, patches):
    target = (patches - patches.mean(-1, keepdims=True)) / jnp.sqrt(patches.var(-1, keepdims=True) + 1e-6)
    k1, k2 = jax.random.split(key)
    (out1, m1), (out2, m2) = (reconstruct(params, k, patches, 4) for k in (k1, k2))
    error = lambda out, m: (m * ((out - target) ** 2).mean(-1)).sum() / m.sum()  # noqa: E731
    logp, logq = jax.nn.log_softmax(out1), jax.nn.log_softmax(out2)
    agree = ((jnp.exp(logp) - jnp.exp(logq)) * (logp - logq)).sum(-1).mean()
    return 0.5 * (error(out1, m1) + error(out2, m2)) + 0.3 * agree


def loss_fn(params, batch, keys):
    losses = jax.vmap(row_loss, (None, 0, 0))(params, keys, batch["patches"])
    return (losses * batch["quality"]).sum(), batch["quality"].sum()


def example():
    rng = np.random.default_rng(105)
    normal = lambda *s: (rng.normal(size=s) * 0.5).astype(np.float32)  # noqa: E731
    params = {"enc": normal(6, 8), "pos": normal(9, 8), "mask_token": normal(8), "dec": normal(8, 6)}
    return params, {"patches": normal(16, 9, 6), "quality": rng.uniform(0.5, 2, 16).astype(np.float32)}
