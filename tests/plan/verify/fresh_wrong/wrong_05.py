# kind: deep residual regressor with an orthogonality regulariser of its layers
# fault at line 35: the penalty is added once for each device and microbatch, not times the weight
import jax
import jax.numpy as jnp
import numpy as np


def forward(params, x):
    def block(h, w):
        normed = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
        return h + jnp.tanh(normed @ w), None

    h, _ = jax.lax.scan(block, x @ params["inp"], params["layers"])
    return (h @ params["out"])[..., 0]


def orthogonality(layers):
    def gram_gap(w):
        gram = jnp.einsum("ij,ik->jk", w, w)
        return ((gram - jnp.eye(w.shape[-1], dtype=w.dtype)) ** 2).sum()

    return jax.vmap(gram_gap)(layers).sum()


def huber(err, delta=1.0):
    small = jnp.abs(err) <= delta
    return jnp.where(small, 0.5 * err**2, delta * (jnp.abs(err) - 0.5 * delta))


def loss_fn(params, batch, keys):
    err = forward(params, batch["x"]) - batch["y"]
    confidence = batch["confidence"]
    data = (confidence * huber(err)).sum()
    penalty = 1e-2 * orthogonality(params["layers"])
    return data + penalty, confidence.sum()


def example():
    rng = np.random.default_rng(5)
    normal = lambda *s: (rng.normal(size=s) * 0.5).astype(np.float32)  # noqa: E731
    params = {"inp": normal(4, 6), "layers": normal(3, 6, 6), "out": normal(6, 1)}
    confidence = rng.uniform(0.2, 1.0, 16).astype(np.float32)
    return params, {"x": normal(16, 4), "y": normal(16), "confidence": confidence}
