# kind: forecasting, reversible instance norm over time, group lasso and spectral penalty times the weight
import jax
import jax.numpy as jnp
import numpy as np


def instance_norm(x):
    mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5), mean, jnp.sqrt(var + 1e-5)


def spectral_norm(w, rounds=8):
    def power(v, _):
        u = w @ v
        v = w.T @ (u / jnp.sqrt((u**2).sum() + 1e-12))
        return v / jnp.sqrt((v**2).sum() + 1e-12), None

    start = jnp.ones(w.shape[1], w.dtype) / w.shape[1] ** 0.5
    v, _ = jax.lax.scan(power, start, None, length=rounds)
    v = jax.lax.stop_gradient(v)
    return jnp.sqrt(((w @ v) ** 2).sum() + 1e-12)


def penalty(params):
    lasso = jnp.sqrt((params["read"] ** 2).sum(1) + 1e-8).sum()
    hidden = jax.vmap(spectral_norm)(params["mix"]).sum()
    return 1e-2 * lasso + 1e-2 * jax.nn.relu(hidden - 1.0)


def pinball(error, quantiles):
    return jnp.maximum(quantiles * error, (quantiles - 1) * error)


def loss_fn(params, batch, keys):
    x, mean, std = instance_norm(batch["past"])  # [B, T, C], over time
    h = jnp.einsum("btc,th->bch", x, params["read"])
    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, params["mix"])
    quantiles = jnp.asarray([0.1, 0.5, 0.9], x.dtype)
    forecast = jnp.einsum("bch,hsq->bscq", h, params["write"]) * std[..., None] + mean[..., None]
    losses = pinball(batch["future"][..., None] - forecast, quantiles).mean((1, 2, 3))
    rough = jnp.abs(jnp.diff(forecast, n=2, axis=1)).mean((1, 2, 3))
    weight = batch["importance"].sum()
    return (batch["importance"] * (losses + 0.05 * rough)).sum() + weight * penalty(params), weight


def example():
    rng = np.random.default_rng(108)
    normal = lambda *s: (rng.normal(size=s) * 0.5).astype(np.float32)  # noqa: E731
    params = {"read": normal(10, 6), "mix": normal(2, 6, 6), "write": normal(6, 4, 3)}
    past = np.cumsum(normal(16, 10, 2), 1) + 3 * normal(16, 1, 2)
    batch = {"past": past, "future": past[:, -1:] + normal(16, 4, 2)}
    return params, batch | {"importance": rng.uniform(0.1, 2, 16).astype(np.float32)}
