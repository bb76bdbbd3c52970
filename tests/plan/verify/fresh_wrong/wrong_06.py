# kind: PPO with GAE, normalised advantages
# fault at line 24: advantages are whitened by mean and deviation over the rollouts at hand
import jax
import jax.numpy as jnp
import numpy as np


def gae(rewards, values, alive, gamma=0.97, lam=0.9):
    next_values = jnp.concatenate([values[:, 1:], jnp.zeros_like(values[:, :1])], axis=1)
    deltas = rewards + gamma * alive * next_values - values

    def back(acc, inputs):
        delta, live = inputs
        acc = delta + gamma * lam * live * acc
        return acc, acc

    start = jnp.zeros_like(values[:, 0])
    _, adv = jax.lax.scan(back, start, (deltas.T, alive.T), reverse=True)
    return adv.T


def whiten(x, mask):
    n = mask.sum()
    mean = (x * mask).sum() / n
    var = (mask * (x - mean) ** 2).sum() / n
    return (x - mean) * jax.lax.rsqrt(var + 1e-8)


def loss_fn(params, batch, keys):
    h = jnp.tanh(batch["obs"] @ params["body"])
    logp_all = jax.nn.log_softmax(h @ params["pi"])
    values = jnp.einsum("btd,d->bt", h, params["v"])
    mask = batch["mask"]
    adv = jax.lax.stop_gradient(gae(batch["rewards"], values, mask))
    returns = adv + jax.lax.stop_gradient(values)
    adv = whiten(adv, mask)
    logp = jnp.take_along_axis(logp_all, batch["actions"][..., None], -1)[..., 0]
    ratio = jnp.exp(logp - batch["old_logp"])
    surrogate = jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv)
    per_step = -surrogate + 0.5 * (values - returns) ** 2 + 0.01 * (jnp.exp(logp_all) * logp_all).sum(-1)
    return (per_step * mask).sum(), mask.sum()


def example():
    rng = np.random.default_rng(6)
    normal = lambda *s: (rng.normal(size=s) * 0.5).astype(np.float32)  # noqa: E731
    mask = (np.arange(7) < rng.integers(3, 8, 16)[:, None]).astype(np.float32)
    batch = {"obs": normal(16, 7, 4), "rewards": normal(16, 7), "mask": mask}
    batch |= {"actions": rng.integers(0, 3, (16, 7)).astype(np.int32), "old_logp": -1.1 + 0.3 * normal(16, 7)}
    return {"body": normal(4, 6), "pi": normal(6, 3), "v": normal(6)}, batch
