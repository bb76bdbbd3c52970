# kind: detection (SSD), focal loss and hard-negative mining, normalised per image; a scan over rows that only adds up
import jax
import jax.numpy as jnp
import numpy as np


def focal(logp, gamma=1.5):
    return -((1 - jnp.exp(logp)) ** gamma) * logp


def smooth_l1(d):
    return jnp.where(jnp.abs(d) < 1, 0.5 * d**2, jnp.abs(d) - 0.5)


def image_loss(params, feats, classes, boxes):
    h = jax.nn.relu(feats @ params["trunk"])
    logp = jax.nn.log_softmax(h @ params["cls"])
    losses = focal(jnp.take_along_axis(logp, classes[:, None], 1)[:, 0])
    positive = classes > 0
    count = jnp.maximum(positive.sum(), 1)  # of this image
    # Three negatives a positive, the hardest of the image's anchors.
    rank = jnp.argsort(jnp.argsort(jnp.where(positive, jnp.inf, -losses)))
    negative = ~positive & (rank < 3 * count)
    box = smooth_l1(h @ params["box"] - boxes).sum(-1)
    return jnp.where(positive | negative, losses, 0).sum() / count + jnp.where(positive, box, 0).sum() / count


def loss_fn(params, batch, keys):
    # One image at a time: saves memory. The carry holds nothing but sums.
    def add(carry, row):
        total, images = carry
        one = image_loss(params, row["feats"], row["classes"], row["boxes"])
        has_any = (row["classes"] >= 0).any()
        return (total + one, images + has_any.astype(images.dtype)), None

    zero = jnp.zeros((), batch["feats"].dtype)
    (total, images), _ = jax.lax.scan(jax.checkpoint(add), (zero, zero), batch)
    return total, images


def example():
    rng = np.random.default_rng(106)
    normal = lambda *s: (rng.normal(size=s) * 0.6).astype(np.float32)  # noqa: E731
    params = {"trunk": normal(5, 8), "cls": normal(8, 4), "box": normal(8, 4)}
    classes = np.where(rng.random((16, 14)) < 0.15, rng.integers(1, 4, (16, 14)), 0).astype(np.int32)
    return params, {"feats": normal(16, 14, 5), "classes": classes, "boxes": normal(16, 14, 4)}
