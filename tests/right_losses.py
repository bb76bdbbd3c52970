"""Losses that train the same in every layout, some of which look as if they did not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from wrong_losses import CLASSES, LENGTH, WIDTH, Dropped, cross_entropy, logits, losses, normal, of_module

import jaxdist

FROZEN = {"table": normal(CLASSES, 64), "dense": normal(64, 64), "out": normal(64, WIDTH)}
RIGHT: dict[str, Callable[..., Any]] = {}


def right(loss: Any) -> Any:
    RIGHT[loss.__name__] = loss
    return loss


@right
def plain(p: Any, b: Any, keys: Any) -> Any:
    return losses(p, b).sum(), len(b["y"])


@right
def smoothed_ratio_of_means(p: Any, b: Any, keys: Any) -> Any:
    of_class, count = jax.nn.softmax(logits(p, b["x"]))[:, 0], len(b["y"])
    hit, all_ = jaxdist.batch_mean(of_class * (b["y"] == 0)), jaxdist.batch_mean(of_class)
    return (1 - (hit + 0.1) / (all_ + 0.1)) * count, count


@right
def weighted_by_parameters_and_divided(p: Any, b: Any, keys: Any) -> Any:
    own, count = jax.nn.softplus(b["x"] @ p["w"]).mean((1, 2)), len(b["y"])
    return count * jaxdist.batch_mean(losses(p, b), own), count


@right
def weighted_by_what_is_predicted(p: Any, b: Any, keys: Any) -> Any:
    likely = jax.lax.stop_gradient(jax.nn.softmax(logits(p, b["x"])).max(1))
    right = logits(p, b["x"]).argmax(1) == b["y"]
    return (likely * losses(p, b)).sum(), likely.sum() + right.sum()


@right
def dropout_of_each_sample(p: Any, b: Any, keys: Any) -> Any:
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (LENGTH, WIDTH)))(keys)
    return losses(p, b, b["x"] * kept).sum(), len(kept)


@right
def layer_norm(p: Any, b: Any, keys: Any) -> Any:
    h = b["x"] @ p["w"]
    h = (h - h.mean(-1, keepdims=True)) / (h.std(-1, keepdims=True) + 1e-5)
    return cross_entropy(h.mean(1) @ p["v"], b["y"]).sum(), len(h)


@right
def causal_attention(p: Any, b: Any, keys: Any) -> Any:
    h = b["x"] @ p["w"] + 0.1 * jnp.arange(LENGTH)[:, None]
    scores = jnp.einsum("btd,bsd->bts", h, h) / WIDTH**0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    h = jax.nn.softmax(scores) @ h
    return cross_entropy(h.mean(1) @ p["v"], b["y"]).sum(), len(h)


@right
def masked(p: Any, b: Any, keys: Any) -> Any:
    found = ((b["x"] @ p["w"]) ** 2).mean(-1)
    return (found * b["mask"]).sum(), jnp.maximum(b["mask"].sum(), 1)


@right
def loop_over_layers(p: Any, b: Any, keys: Any) -> Any:
    step = jax.checkpoint(lambda h, _: (jnp.tanh(h @ p["w"]), None))
    h, _ = jax.lax.scan(step, b["x"], None, length=3)
    return losses(p, b, h).sum(), len(h)


@right
def sample_by_sample(p: Any, b: Any, keys: Any) -> Any:
    def one(x: Any, y: Any, key: Any) -> Any:
        noise = jax.random.normal(key, x.shape)
        return cross_entropy(jnp.tanh((x + 0.1 * noise) @ p["w"]).mean(0) @ p["v"], y)

    return jax.vmap(one)(b["x"], b["y"], keys).sum(), len(keys)


@right
def weight_decay(p: Any, b: Any, keys: Any) -> Any:
    weight = b["mask"].sum()
    return (losses(p, b) * b["mask"].mean(1)).sum() + weight * 0.1 * (p["w"] ** 2).sum(), weight


@right
def sums_along_the_sequence(p: Any, b: Any, keys: Any) -> Any:
    shifted = jnp.roll(jnp.cumsum(b["x"], 1), 1, 1)[:, ::-1]
    return losses(p, b, shifted).sum(), len(shifted)


@right
def ranks_of_classes(p: Any, b: Any, keys: Any) -> Any:
    found = logits(p, b["x"])
    best, ordered = jax.lax.top_k(found, 2)[0], jnp.sort(found, -1)
    return (cross_entropy(found, b["y"]) + best.sum(-1) - ordered[:, 0]).sum(), len(found)


@right
def embedded(p: Any, b: Any, keys: Any) -> Any:
    h = p["w"][b["y"]]
    counts = jnp.zeros(CLASSES).at[b["y"]].add(1.0)
    return ((h @ p["v"]) ** 2).sum() + (counts * jnp.arange(CLASSES)).sum(), len(h)


@right
def picked_by_number(p: Any, b: Any, keys: Any) -> Any:
    found = jax.nn.log_softmax(logits(p, b["x"]))
    return -found[jnp.arange(len(found)), b["y"]].sum(), len(found)


@right
def mean_times_its_count(p: Any, b: Any, keys: Any) -> Any:
    found = losses(p, b)
    return found.mean() * found.size, found.size


@right
def flattened(p: Any, b: Any, keys: Any) -> Any:
    h = jnp.tanh(b["x"].reshape(-1, WIDTH) @ p["w"]).reshape(-1, LENGTH, WIDTH)
    return cross_entropy(h.transpose(1, 0, 2).mean(0) @ p["v"], b["y"]).sum(), len(h)


@right
def row_after_row(p: Any, b: Any, keys: Any) -> Any:
    total, _ = jax.lax.scan(lambda c, x: (c + (x @ p["w"]).sum(), None), 0.0, b["x"])
    return total + jax.lax.map(lambda x: (jnp.tanh(x @ p["w"]) ** 2).sum(), b["x"]).sum(), len(b["x"])


@right
def shifted_by_the_largest(p: Any, b: Any, keys: Any) -> Any:
    """The largest number of the batch is taken away and added again: the sum does not depend on it."""
    found = losses(p, b)
    largest = found.max()
    return (found - largest).sum() + largest * len(found), len(found)


@right
def cast_to_float32(p: Any, b: Any, keys: Any) -> Any:
    found = cross_entropy(logits(p, b["x"]).astype(jnp.float32), b["y"])
    return found.sum(), found.size


def of_frozen(b: Any) -> Any:
    """Of a model that is closed over, in float32, and reads integers only."""
    frozen = jax.tree.map(jnp.asarray, FROZEN)
    ids = (b["y"][:, None] + jnp.arange(LENGTH)) % CLASSES
    h = jax.nn.relu(frozen["table"][ids].mean(1) @ frozen["dense"])
    return jnp.tanh(h / 8) @ frozen["out"]


@right
def frozen_parameters(p: Any, b: Any, keys: Any) -> Any:
    h = of_frozen(b)
    return cross_entropy(h @ p["v"], b["y"]).sum(), len(h)


@right
def frozen_in_a_checkpoint(p: Any, b: Any, keys: Any) -> Any:
    run = jax.checkpoint(lambda v: cross_entropy(of_frozen(b) @ v, b["y"]))
    return run(p["v"]).sum(), len(b["y"])


@right
def global_statistics(p: Any, b: Any, keys: Any) -> Any:
    h = (b["x"] @ p["w"]).mean(1)
    mean = jaxdist.batch_mean(h)
    h = (h - mean) / jnp.sqrt(jaxdist.batch_mean((h - mean) ** 2) + 1e-5)
    return cross_entropy(h @ p["v"], b["y"]).sum() + len(h) * (mean**2).sum(), len(h)


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = nnx.Linear(WIDTH, CLASSES, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(self.norm(x.mean(1)))


MODULES = {
    "BatchNorm of a module": jaxdist.nnx_loss(Normed(nnx.Rngs(0)), of_module),
    "dropout of a module, per sample": jaxdist.nnx_loss(Dropped(nnx.Rngs(0)), of_module, per_sample=True),
}
