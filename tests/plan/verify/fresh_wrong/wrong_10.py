# kind: detection (RetinaNet / FCOS), normalised by the number of positive anchors
# fault at line 36: max(positives, 1) is taken for each device and microbatch, so those without objects add weight 1
import jax
import jax.numpy as jnp
import numpy as np


def focal_bce(logits, targets, alpha=0.25, gamma=2.0):
    p = jax.nn.sigmoid(logits)
    ce = -(targets * jax.nn.log_sigmoid(logits) + (1 - targets) * jax.nn.log_sigmoid(-logits))
    pt = p * targets + (1 - p) * (1 - targets)
    return (alpha * targets + (1 - alpha) * (1 - targets)) * (1 - pt) ** gamma * ce


def giou_1d(a, b):
    inter = jnp.maximum(0, jnp.minimum(a[..., 1], b[..., 1]) - jnp.maximum(a[..., 0], b[..., 0]))
    union = (a[..., 1] - a[..., 0]) + (b[..., 1] - b[..., 0]) - inter
    hull = jnp.maximum(a[..., 1], b[..., 1]) - jnp.minimum(a[..., 0], b[..., 0])
    return inter / union - (hull - union) / hull


def heads(params, feats):
    h = jax.nn.relu(jnp.einsum("bad,df->baf", feats, params["trunk"]))
    offsets = jax.nn.softplus(h @ params["box"])
    centre = jnp.arange(feats.shape[1]).astype(feats.dtype)
    return h @ params["cls"], jnp.stack([centre - offsets[..., 0] - 0.1, centre + offsets[..., 1] + 0.1], -1)


def loss_fn(params, batch, keys):
    logits, boxes = heads(params, batch["feats"])
    classes = batch["anchor_class"]  # 0: background
    positive = (classes > 0).astype(logits.dtype)
    onehot = jax.nn.one_hot(classes - 1, logits.shape[-1], dtype=logits.dtype)
    cls = focal_bce(logits, onehot).sum()
    box = (positive * (1 - giou_1d(boxes, batch["anchor_box"]))).sum()
    num_pos = jnp.maximum(positive.sum(), 1.0)
    return cls + 2.0 * box, num_pos


def example():
    rng = np.random.default_rng(10)
    normal = lambda *s: (rng.normal(size=s) * 0.5).astype(np.float32)  # noqa: E731
    params = {"trunk": normal(5, 8), "cls": normal(8, 3), "box": normal(8, 2)}
    classes = np.where(rng.random((16, 10)) < 0.15, rng.integers(1, 4, (16, 10)), 0).astype(np.int32)
    classes[4:8] = 0  # images without objects, next to each other
    classes[12:16] = 0
    centre = np.arange(10) + 0.3 * normal(16, 10)
    half = rng.uniform(0.4, 1.5, (16, 10, 2)) * np.array([-1, 1])
    box = (centre[..., None] + half).astype(np.float32)
    return params, {"feats": normal(16, 10, 5), "anchor_class": classes, "anchor_box": box}
