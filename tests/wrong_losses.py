"""Losses that train otherwise in other layouts, each with its cause and, marked by `# wrong`, its line.

The batch has as many rows as a sample has positions, and as a layer is wide: nothing can be told by a size alone.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist

ROWS = LENGTH = WIDTH = 8
CLASSES = 5
rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


PARAMS = {"w": 0.3 * normal(WIDTH, WIDTH), "v": 0.3 * normal(WIDTH, CLASSES)}
BATCH = {
    "x": normal(ROWS, LENGTH, WIDTH),
    "y": rng.integers(0, CLASSES, ROWS).astype(np.int32),
    "mask": (rng.random((ROWS, LENGTH)) < 0.6).astype(np.float32),
}
OF_ROWS = normal(ROWS)
TABLE = np.arange(CLASSES * LENGTH * WIDTH, dtype=np.float32).reshape(CLASSES, LENGTH, WIDTH) / 100
TRACES = [0.0]
WRONG: dict[str, tuple[Callable[..., Any], str]] = {}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def wrong(cause: str) -> Any:
    def add(loss: Any) -> Any:
        WRONG[loss.__name__] = (loss, cause)
        return loss

    return add


def logits(p: Any, x: Any) -> Any:
    return jax.nn.relu(x @ p["w"]).mean(1) @ p["v"]


def losses(p: Any, b: Any, x: Any = None) -> Any:
    return cross_entropy(logits(p, b["x"] if x is None else x), b["y"])


@wrong("batch statistics")
def batch_norm(p: Any, b: Any, keys: Any) -> Any:
    h = (b["x"] @ p["w"]).mean(1)
    h = (h - h.mean(0)) / (h.std(0) + 1e-5)  # wrong
    return cross_entropy(h @ p["v"], b["y"]).sum(), len(h)


@wrong("batch statistics")
def statistics_in_a_loop(p: Any, b: Any, keys: Any) -> Any:
    def layer(h: Any, _: Any) -> Any:
        h = jnp.tanh(h @ p["w"])
        return h - h.mean(0), None  # wrong

    h, _ = jax.lax.scan(layer, b["x"], None, length=3)
    return losses(p, b, h).sum(), len(h)


@wrong("batch statistics")
def balance_loss(p: Any, b: Any, keys: Any) -> Any:
    gates = jax.nn.softmax(logits(p, b["x"]))
    load = gates.mean(0)  # wrong
    return losses(p, b).sum() + len(gates) * 0.1 * (load**2).sum(), len(gates)


@wrong("batch statistics")
def scaled_by_the_largest(p: Any, b: Any, keys: Any) -> Any:
    found = losses(p, b)
    largest = jax.lax.stop_gradient(found.max())  # wrong
    return (found / largest).sum(), len(found)


@jax.custom_vjp
def clipped(h: jax.Array) -> jax.Array:
    return h


def _backward(_: None, g: jax.Array) -> tuple[jax.Array]:
    return (g / (1e-3 + jnp.sqrt((g**2).sum())),)  # in the rule


clipped.defvjp(lambda h: (h, None), _backward)


@wrong("batch statistics")
def gradient_rule(p: Any, b: Any, keys: Any) -> Any:
    h = clipped(b["x"] @ p["w"])  # wrong
    return cross_entropy(h.mean(1) @ p["v"], b["y"]).sum(), len(h)


@wrong("other samples of the batch")
def contrastive(p: Any, b: Any, keys: Any) -> Any:
    h = (b["x"] @ p["w"]).mean(1)
    scores = h @ h.T  # wrong
    return cross_entropy(scores, jnp.arange(len(h))).sum(), len(h)


@wrong("other samples of the batch")
def hardest_negative(p: Any, b: Any, keys: Any) -> Any:
    h = (b["x"] @ p["w"]).mean(1)
    apart = ((h[:, None] - h[None]) ** 2).sum(-1)  # wrong
    apart = jnp.where(jnp.eye(len(h), dtype=bool), jnp.inf, apart)
    return jax.nn.relu(1 - apart.min(1)).sum(), len(h)


@wrong("mean of means")
def mean(p: Any, b: Any, keys: Any) -> Any:
    return losses(p, b).mean(), 1.0  # wrong


@wrong("mean of means")
def mean_with_a_count(p: Any, b: Any, keys: Any) -> Any:
    found = losses(p, b).mean()  # wrong
    return found, len(b["y"])


@wrong("mean of means")
def masked_mean(p: Any, b: Any, keys: Any) -> Any:
    found = ((b["x"] @ p["w"]) ** 2).mean(-1) * b["mask"]
    return found.sum() / b["mask"].sum() * len(found), len(found)  # wrong


@wrong("constant weight")
def constant_weight(p: Any, b: Any, keys: Any) -> Any:
    return losses(p, b).sum(), 8.0  # wrong


@wrong("penalty in each call")
def penalty(p: Any, b: Any, keys: Any) -> Any:
    return losses(p, b).sum() + 0.1 * (p["w"] ** 2).sum(), len(b["y"])  # wrong


@wrong("batch statistics")
def smoothed_ratio_of_sums(p: Any, b: Any, keys: Any) -> Any:
    of_class = jax.nn.softmax(logits(p, b["x"]))[:, 0]
    hit, all_, count = (of_class * (b["y"] == 0)).sum(), of_class.sum(), len(b["y"])  # wrong
    return (1 - (hit + 0.1) / (all_ + 0.1)) * count, count


def weighted_by_parameters(p: Any, b: Any, keys: Any) -> Any:
    own = jax.nn.softplus(b["x"] @ p["w"]).mean((1, 2))
    return (own * losses(p, b)).sum(), own.sum()


@wrong("randomness without keys")
def stored_key(p: Any, b: Any, keys: Any) -> Any:
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, b["x"].shape)  # wrong
    return losses(p, b, b["x"] * kept).sum(), len(kept)


@wrong("one key for all samples")
def one_key(p: Any, b: Any, keys: Any) -> Any:
    kept = jax.random.bernoulli(keys[0], 0.5, b["x"].shape)  # wrong
    return losses(p, b, b["x"] * kept).sum(), len(kept)


@wrong("one key for all samples")
def one_mask(p: Any, b: Any, keys: Any) -> Any:
    kept = jax.random.bernoulli(keys[0], 0.5, (WIDTH,))  # wrong
    return losses(p, b, b["x"] * kept).sum(), len(b["y"])


@wrong("data-dependent shape")
def chosen_rows(p: Any, b: Any, keys: Any) -> Any:
    h = b["x"][b["mask"] > 0]  # wrong
    return ((h @ p["w"]) ** 2).sum(), len(h)


@wrong("data-dependent shape")
def branch_of_python(p: Any, b: Any, keys: Any) -> Any:
    found = losses(p, b)
    if found.mean() > 1:  # wrong
        found = 2 * found
    return found.sum(), len(found)


@wrong("numpy on a traced value")
def numpy_table(p: Any, b: Any, keys: Any) -> Any:
    h = TABLE[b["y"]]  # wrong
    return losses(p, b, h).sum(), len(h)


@wrong("closed-over rows")
def closed_over(p: Any, b: Any, keys: Any) -> Any:
    found = losses(p, b) * OF_ROWS  # wrong
    return found.sum(), len(found)


@wrong("closed-over rows")
def closed_over_and_cut(p: Any, b: Any, keys: Any) -> Any:
    found = losses(p, b)
    found = found * jnp.asarray(OF_ROWS)[: len(found)]  # wrong
    return found.sum(), len(found)


@wrong("fixed number of rows")
def fixed_shape(p: Any, b: Any, keys: Any) -> Any:
    h = b["x"].reshape(8, LENGTH * WIDTH)  # wrong
    return losses(p, b, h.reshape(-1, LENGTH, WIDTH)).sum(), len(h)


@wrong("program differs at each trace")
def counter(p: Any, b: Any, keys: Any) -> Any:
    TRACES[0] += 1
    return TRACES[0] * losses(p, b).sum(), len(b["y"])  # wrong


@wrong("program differs at each trace")
def numpy_random(p: Any, b: Any, keys: Any) -> Any:
    noise = np.random.default_rng().normal(size=WIDTH).astype(np.float32)
    return losses(p, b, b["x"] + noise).sum(), len(b["y"])  # wrong


@wrong("program differs at each trace")
def clock(p: Any, b: Any, keys: Any) -> Any:
    warm = jnp.tanh(time.perf_counter() % 1.0)  # wrong
    return warm * losses(p, b).sum(), len(b["y"])


@wrong("host callback")
def callback(p: Any, b: Any, keys: Any) -> Any:
    shape = jax.ShapeDtypeStruct(b["y"].shape, b["y"].dtype)
    y = jax.pure_callback(np.asarray, shape, b["y"])  # wrong
    return cross_entropy(logits(p, b["x"]), y).sum(), len(y)


@wrong("sort or top-k over the batch")
def hardest_half(p: Any, b: Any, keys: Any) -> Any:
    found = losses(p, b)
    return jax.lax.top_k(found, len(found) // 2)[0].sum(), len(found) // 2  # wrong


@wrong("sort or top-k over the batch")
def below_the_median(p: Any, b: Any, keys: Any) -> Any:
    found = losses(p, b)
    return jnp.minimum(found, jnp.median(found)).sum(), len(found)  # wrong


@wrong("order dependence")
def weighted_by_place(p: Any, b: Any, keys: Any) -> Any:
    found = losses(p, b)
    place = jnp.arange(len(found))  # wrong
    return (place * found).sum(), len(found)


@wrong("order dependence")
def sums_along_the_batch(p: Any, b: Any, keys: Any) -> Any:
    return losses(p, b, jnp.cumsum(b["x"], 0)).sum(), len(b["y"])  # wrong


@wrong("order dependence")
def neighbour(p: Any, b: Any, keys: Any) -> Any:
    return losses(p, b, b["x"] - jnp.roll(b["x"], 1, 0)).sum(), len(b["y"])  # wrong


@wrong("order dependence")
def first_row(p: Any, b: Any, keys: Any) -> Any:
    return losses(p, b, b["x"] - b["x"][0]).sum(), len(b["y"])  # wrong


@wrong("order dependence")
def recurrent_over_rows(p: Any, b: Any, keys: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        carry = jnp.tanh(carry @ p["w"] + x)
        return carry, carry

    _, h = jax.lax.scan(step, jnp.zeros((LENGTH, WIDTH)), b["x"])  # wrong
    return losses(p, b, h).sum(), len(h)


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.dropout = nnx.Linear(WIDTH, CLASSES, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(self.dropout(x.mean(1)))  # the line of the draw


def of_module(model: Any, b: Any) -> Any:
    return cross_entropy(model(b["x"]), b["y"]).sum(), len(b["y"])


MODULES = {"dropout of a module": (jaxdist.nnx_loss(Dropped(nnx.Rngs(0)), of_module), "one key for all samples")}
