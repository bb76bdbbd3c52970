# kind: contrastive (SigLIP), in-batch negatives by rolling the text embeddings
# fault at line 30: negatives are the other rows at hand, so those of one device and microbatch only
import jax
import jax.numpy as jnp
import numpy as np


def tower(layers, x):
    def block(h, w):
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

    h, _ = jax.lax.scan(block, x, layers)
    return h / jnp.sqrt((h**2).sum(-1, keepdims=True) + 1e-6)


def pair_losses(image, text, scale, bias, sign):
    logits = jnp.exp(scale) * jnp.einsum("bd,bd->b", image, text) + bias
    return -jax.nn.log_sigmoid(sign * logits)


def loss_fn(params, batch, keys):
    image = tower(params["image"], batch["image"])
    text = tower(params["text"], batch["text"])
    n = image.shape[0]

    def chunk(carry, shift):
        text, total = carry
        sign = jnp.where(shift == 0, 1.0, -1.0).astype(image.dtype)
        total = total + pair_losses(image, text, params["scale"], params["bias"], sign)
        return (jnp.roll(text, 1, axis=0), total), None

    (_, total), _ = jax.lax.scan(chunk, (text, jnp.zeros_like(image[:, 0])), jnp.arange(n))
    return total.sum(), total.shape[0]


def example():
    rng = np.random.default_rng(1)
    normal = lambda *s: rng.normal(size=s).astype(np.float32)  # noqa: E731
    layers = lambda: {"up": normal(2, 6, 12) * 0.3, "down": normal(2, 12, 6) * 0.3}  # noqa: E731
    params = {"image": layers(), "text": layers(), "scale": np.float32(1.0), "bias": np.float32(-1.0)}
    return params, {"image": normal(16, 6), "text": normal(16, 6)}
