# kind: WGAN-GP critic, random interpolation for the gradient penalty
# fault at line 33: the interpolation of all rows is drawn from the first row's key
import jax
import jax.numpy as jnp
import numpy as np


def critic(p, x):
    h = jax.nn.leaky_relu(x @ p["w1"] + p["b1"], 0.2)
    h = jax.nn.leaky_relu(h @ p["w2"] + p["b2"], 0.2)
    return (h @ p["w3"])[..., 0]


def generator(g, z):
    return jnp.tanh(z @ g["w"] + g["b"])


def interpolate(key, real, fake):
    eps = jax.random.uniform(key, (real.shape[0], 1), real.dtype)
    return eps * real + (1 - eps) * fake


def gradient_penalty(p, x):
    slopes = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(p, x)
    norm = jnp.sqrt((slopes**2).sum(-1) + 1e-12)
    return (norm - 1.0) ** 2


def loss_fn(params, batch, keys):
    real = batch["x"]
    latent = lambda key: jax.random.normal(jax.random.fold_in(key, 1), (3,), real.dtype)  # noqa: E731
    fake = jax.lax.stop_gradient(generator(params["gen"], jax.vmap(latent)(keys)))
    mixed = interpolate(keys[0], real, fake)
    wasserstein = critic(params["critic"], fake) - critic(params["critic"], real)
    losses = wasserstein + 10.0 * gradient_penalty(params["critic"], mixed)
    return losses.sum(), losses.size


def example():
    rng = np.random.default_rng(4)
    normal = lambda *s: (rng.normal(size=s) * 0.5).astype(np.float32)  # noqa: E731
    critic = {"w1": normal(5, 8), "b1": normal(8), "w2": normal(8, 8), "b2": normal(8), "w3": normal(8, 1)}
    return {"critic": critic, "gen": {"w": normal(3, 5), "b": normal(5)}}, {"x": normal(16, 5)}
