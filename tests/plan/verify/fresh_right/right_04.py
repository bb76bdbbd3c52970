# kind: handwriting model, GRU over time (time-major scan) with a mixture density head, weight = real steps
import jax
import jax.numpy as jnp
import numpy as np


def cell(p, h, x):
    gates = jax.nn.sigmoid(jnp.concatenate([x, h], -1) @ p["gates"])
    reset, update = jnp.split(gates, 2, axis=-1)
    new = jnp.tanh(jnp.concatenate([x, reset * h], -1) @ p["new"])
    return update * h + (1 - update) * new


def mixture_nll(out, target, components=3):
    logit, mu, log_sigma = jnp.split(out, [components, 3 * components], axis=-1)
    mu = mu.reshape(*mu.shape[:-1], components, 2)
    log_sigma = jnp.clip(log_sigma.reshape(mu.shape), -3, 3)
    z = (target[..., None, :] - mu) / jnp.exp(log_sigma)
    logp = (-0.5 * z**2 - log_sigma - 0.5 * jnp.log(2 * jnp.pi)).sum(-1)
    return -jax.nn.logsumexp(jax.nn.log_softmax(logit) + logp, axis=-1)


def loss_fn(params, batch, keys):
    strokes = batch["strokes"]
    mask = batch["mask"]
    # Coordinates are scaled by the deviation of each sequence's own steps.
    count = mask.sum(1)[:, None, None]
    scale = jnp.sqrt((mask[..., None] * strokes**2).sum((1, 2), keepdims=True) / count + 1e-4)
    strokes = strokes / scale
    inputs, targets = strokes[:, :-1].swapaxes(0, 1), strokes[:, 1:].swapaxes(0, 1)

    def step(carry, inputs):
        h, total = carry
        x, y, m = inputs
        new = cell(params, h, x)
        h = jnp.where(m[:, None] > 0, new, h)
        return (h, total + (m * mixture_nll(h @ params["head"], y)).sum()), None

    h0 = jnp.zeros((strokes.shape[0], params["head"].shape[0]), strokes.dtype)
    start = (h0, jnp.zeros((), strokes.dtype))
    (_, total), _ = jax.lax.scan(step, start, (inputs, targets, mask[:, 1:].T))
    return total, mask[:, 1:].sum()


def example():
    rng = np.random.default_rng(104)
    normal = lambda *s: (rng.normal(size=s) * 0.5).astype(np.float32)  # noqa: E731
    params = {"gates": normal(8, 12), "new": normal(8, 6), "head": normal(6, 15)}
    mask = (np.arange(9) < rng.integers(4, 10, 16)[:, None]).astype(np.float32)
    return params, {"strokes": normal(16, 9, 2), "mask": mask}
