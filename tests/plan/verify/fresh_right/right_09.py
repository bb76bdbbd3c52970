# kind: policy gradient, discounted returns by a reverse scan, whitened over each trajectory's own steps
import jax
import jax.numpy as jnp
import numpy as np


def returns_to_go(rewards, mask, gamma=0.95):
    def combine(later, earlier):  # linear recurrences compose: r + g * R
        g1, r1 = later
        g2, r2 = earlier
        return g1 * g2, r2 + g2 * r1

    decay = gamma * mask
    _, out = jax.lax.associative_scan(combine, (decay, rewards * mask), axis=1, reverse=True)
    return out


def whiten(x, mask):
    n = mask.sum(1, keepdims=True)
    mean = (x * mask).sum(1, keepdims=True) / n
    var = (mask * (x - mean) ** 2).sum(1, keepdims=True) / n
    return mask * (x - mean) / jnp.sqrt(var + 1e-4)


def loss_fn(params, batch, keys):
    mask = batch["mask"]
    seen = jnp.cumsum(batch["obs"] * mask[..., None], axis=1) / jnp.cumsum(jnp.ones_like(mask), 1)[..., None]
    h = jnp.tanh(jnp.concatenate([batch["obs"], seen], -1) @ params["body"])
    logits = h @ params["pi"]
    # Exploration: Gumbel noise of each row's key perturbs the behaviour target.
    noise = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:], logits.dtype))(keys)
    soft = jax.lax.stop_gradient(jax.nn.softmax((logits + noise) / 0.7))
    logp = jax.nn.log_softmax(logits)
    advantage = jax.lax.stop_gradient(whiten(returns_to_go(batch["rewards"], mask), mask))
    chosen = jnp.take_along_axis(logp, batch["actions"][..., None], -1)[..., 0]
    kl = (soft * (jnp.log(soft + 1e-9) - logp)).sum(-1)
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    per_step = -chosen * advantage + 0.1 * kl - 0.01 * entropy
    return (mask * per_step).sum(), mask.sum()


def example():
    rng = np.random.default_rng(109)
    normal = lambda *s: (rng.normal(size=s) * 0.6).astype(np.float32)  # noqa: E731
    mask = (np.arange(8) < rng.integers(3, 9, 16)[:, None]).astype(np.float32)
    batch = {"obs": normal(16, 8, 3), "rewards": normal(16, 8), "mask": mask}
    batch["actions"] = rng.integers(0, 4, (16, 8)).astype(np.int32)
    return {"body": normal(6, 8), "pi": normal(8, 4)}, batch
