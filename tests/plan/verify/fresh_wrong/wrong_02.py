# kind: monocular depth, scale-invariant log loss as in BTS / AdaBins
# fault at line 22: the square root of a variance over all valid pixels of the rows at hand, not of each image
import jax
import jax.numpy as jnp
import numpy as np


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def predict_log_depth(params, image):
    h = jax.nn.relu(conv(image, params["c1"]))
    h = (h - h.mean((1, 2), keepdims=True)) / jnp.sqrt(h.var((1, 2), keepdims=True) + 1e-5)
    return conv(jax.nn.relu(h), params["c2"])[..., 0]


def silog(diff, valid, lam=0.85):
    n = jnp.maximum(valid.sum(), 1.0)
    mean_sq = (valid * diff**2).sum() / n
    mean = (valid * diff).sum() / n
    return 10.0 * jnp.sqrt(mean_sq - lam * mean**2 + 1e-8)


def loss_fn(params, batch, keys):
    depth = batch["depth"]
    valid = ((depth > 0.1) & (depth < 10.0)).astype(batch["image"].dtype)
    target = jnp.log(jnp.clip(depth, 0.1, 10.0))
    diff = predict_log_depth(params, batch["image"]) - target
    pixels = valid.sum()
    return silog(diff, valid) * pixels, pixels


def example():
    rng = np.random.default_rng(2)
    params = {
        "c1": rng.normal(size=(3, 3, 2, 4)).astype(np.float32) * 0.3,
        "c2": rng.normal(size=(3, 3, 4, 1)).astype(np.float32) * 0.3,
    }
    depth = rng.uniform(0.0, 12.0, (16, 6, 6)).astype(np.float32)
    return params, {"image": rng.normal(size=(16, 6, 6, 2)).astype(np.float32), "depth": depth}
