"""Losses of modules train in every layout as on one device in plain Flax, and sum as little over devices."""

import functools
from typing import Any

import batch_norm
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx
from levels import levels
from own_modules import Dropped, OwnNorm, linen_loss, nnx_of, squared, traced

import jaxdist

EXACT = 1e-10


class Convolutions(nnx.Module):
    """A network with stock BatchNorm: by the mean of squares, by the two-pass variance, and of masked rows."""

    def __init__(self, rngs: nnx.Rngs, depth: int) -> None:
        wide = {"param_dtype": jnp.float64, "rngs": rngs}
        plain = {"use_bias": False, **wide}  # a norm takes a bias away again
        convolutions = [nnx.Conv(2, 4, (3, 3), **plain), nnx.Conv(4, 4, (3, 3), 2, **plain)]
        norms = [nnx.BatchNorm(4, use_fast_variance=False, **wide), nnx.BatchNorm(4, **wide)]
        self.convolutions, self.norms = nnx.List(convolutions[:depth]), nnx.List(norms[:depth])
        self.masked = nnx.BatchNorm(2, momentum=0.8, use_bias=False, **wide)
        self.head = nnx.Linear(4, batch_norm.CLASSES, **wide)
        # Flax makes the running statistics in float32.
        nnx.update(self, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), nnx.state(self, nnx.BatchStat)))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.masked(x, mask=mask[:, None, None, None])
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.relu(norm(convolution(x)))
        return self.head(x.mean((1, 2)))


@functools.cache
def convolutions(depth: int) -> Convolutions:
    return Convolutions(nnx.Rngs(0), depth)


def classified(model: Any, batch: Any) -> Any:
    logits, weight = model(batch["x"], batch["w"] > 0.5), batch["w"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]) * weight
    right = jnp.where(logits.argmax(-1) == batch["y"], weight, 0)
    return losses.sum(), weight.sum(), {"accuracy": (right.sum(), weight.sum())}


@functools.cache
def plain_flax(depth: int) -> Any:
    """(losses, gradients, parameters, statistics) of three steps on one device, without jaxdist."""
    graph, params, statistics = nnx.split(convolutions(depth), nnx.Param, ...)
    tx = batch_norm.optimizer()
    opt_state, losses, all_grads = tx.init(params), [], []

    @jax.jit
    def step(params: Any, statistics: Any, opt_state: Any, batch: Any) -> Any:
        def mean(params: Any) -> Any:
            model = nnx.merge(graph, params, statistics, copy=True)
            total, weight, _ = classified(model, batch)
            return total / weight, nnx.state(model, nnx.BatchStat)

        (loss, statistics), grads = jax.value_and_grad(mean, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, grads, optax.apply_updates(params, updates), statistics, opt_state

    for i in range(3):
        with jax.numpy_dtype_promotion("standard"):
            loss, grads, params, statistics, opt_state = step(params, statistics, opt_state, batch_norm.make_batch(i))
        losses.append(float(loss))
        all_grads.append(jax.device_get(nnx.to_pure_dict(grads)))
    return losses, all_grads, *(jax.device_get(nnx.to_pure_dict(tree)) for tree in (params, statistics))


SHAPES = ((1, 1), (2, 1), (1, 3), (1, 4), (2, 2), (4, 2), (8, 1), (1, 8))
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
LAYOUTS = [(strategy, *shape, 2) for shape in SHAPES for strategy in STRATEGIES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "data", "fsdp", "depth"),
    [pytest.param("zero3", 2, 2, 1), *levels(LAYOUTS, slow=36, common=9)],
    ids=str,
)
def test_stock_batch_norm_trains_as_in_plain_flax(strategy: str, data: int, fsdp: int, depth: int) -> None:
    with jax.enable_x64(True):
        model, tx = convolutions(depth), batch_norm.optimizer()
        mesh, loss = jaxdist.make_mesh(data=data, fsdp=fsdp), jaxdist.nnx_loss(model, classified)
        state = jaxdist.init_state(loss, tx, mesh, strategy=strategy, precision="fp64")
        step = jaxdist.make_train_step(loss, tx, mesh, strategy=strategy, precision="fp64", return_grads=True)
        losses, grads = [], []
        for i in range(3):
            state, metrics = step(state, batch_norm.make_batch(i))
            losses.append(float(metrics["loss"]))
            grads.append(jax.device_get(metrics["grads"]))
        want = plain_flax(depth)
        np.testing.assert_allclose(losses, want[0], rtol=EXACT)
        got = (grads, jax.device_get(state.params), jax.device_get(state.model_state))
        for found, expected in zip(got, want[1:], strict=True):
            assert oracle.error(found, expected) < EXACT


STILL = 3  # the first steps, in which parameters stay


def losses_of(loss: Any, sizes: Any, strategy: str = "ddp") -> list[float]:
    """Of some steps on the same batch, and what a metric says."""
    mesh, tx = jaxdist.make_mesh(**sizes), optax.sgd(lambda step: jnp.where(step < STILL, 0, 0.1))
    state = jaxdist.init_state(loss, tx, mesh, strategy=strategy)
    step, found = jaxdist.make_train_step(loss, tx, mesh, strategy=strategy), []
    batch = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for _ in range(STILL + 3):
        state, metrics = step(state, batch)
        found += [float(metrics["loss"]), float(metrics["size"])]
    return found


@functools.cache
def on_one_device() -> list[float]:
    return losses_of(jaxdist.nnx_loss(Dropped(nnx.Rngs(0)), squared, per_sample=True), {})


LARGER = [(strategy, sizes) for strategy in ("ddp", "zero3") for sizes in ({"data": 2}, {"fsdp": 4}, {"data": 8})]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sizes"), [("zero3", {"data": 2, "fsdp": 2}), *levels(LARGER, slow=2, common=1)], ids=str
)
def test_dropout_of_each_sample_is_the_same_in_every_layout(strategy: str, sizes: Any) -> None:
    loss = jaxdist.nnx_loss(Dropped(nnx.Rngs(0)), squared, per_sample=True)
    np.testing.assert_allclose(losses_of(loss, sizes, strategy), on_one_device(), rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("per_sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stored_streams_are_reseeded_at_every_step(per_sample: bool) -> None:
    """Parameters stay, and so does the batch: what differs are masks."""
    together = lambda: losses_of(jaxdist.nnx_loss(Dropped(nnx.Rngs(0)), squared), {"data": 2})  # noqa: E731
    found = on_one_device() if per_sample else together()
    assert len(set(found[: 2 * STILL])) == 2 * STILL


SUMS: dict[str, tuple[Any, int]] = {  # a loss, and how often it sums over devices
    "none": (functools.partial(nnx_of, nnx.Dropout), 0),
    "nnx": (functools.partial(nnx_of, nnx.BatchNorm), 4),  # two means forward, and two backward
    "of a subclass": (functools.partial(nnx_of, OwnNorm), 4),
    "of each device": (functools.partial(nnx_of, nnx.BatchNorm, sync=False), 2),  # of the new statistics
    "linen": (linen_loss, 4),
    "linen, of each device": (functools.partial(linen_loss, sync=False), 2),
}


TOGETHER = [(case, False) for case in SUMS] + [("nnx", True), ("linen", True)]
PER_SAMPLE = [(case, True) for case in SUMS if (case, True) not in TOGETHER]


@pytest.mark.parametrize(
    ("case", "per_sample"), [*levels(TOGETHER, everyday=3), *levels(PER_SAMPLE, slow=2, common=1)], ids=str
)
def test_batch_norm_sums_over_devices(case: str, per_sample: bool) -> None:
    make, sums = SUMS[case]
    found = jaxdist.ledger(*traced(make(per_sample=per_sample))).collectives
    assert sum(each.calls for each in found) == sums + 2  # those of every step: gradients, and loss with metrics
