"""Losses of NNX and Linen modules: stock layers train as on one device in plain Flax; random streams are reseeded."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import batch_norm
import child
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import linen, nnx
from levels import levels

import jaxdist
from jaxdist.errors import UserError
from jaxdist.mesh import abstract_mesh

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


def classified(model: Any, batch: Any) -> Any:
    logits, weight = model(batch["x"], batch["w"] > 0.5), batch["w"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]) * weight
    right = jnp.where(logits.argmax(-1) == batch["y"], weight, 0)
    return losses.sum(), weight.sum(), {"accuracy": (right.sum(), weight.sum())}


@functools.cache
def plain_flax(depth: int) -> Any:
    """(losses, gradients, parameters, statistics) of three steps on one device, without jaxdist."""
    graph, params, statistics = nnx.split(Convolutions(nnx.Rngs(0), depth), nnx.Param, ...)
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


@pytest.mark.parametrize(
    ("strategy", "data", "fsdp", "depth"), [pytest.param("zero3", 2, 2, 1), *levels(LAYOUTS, slow=9)], ids=str
)
def test_stock_batch_norm_trains_as_in_plain_flax(strategy: str, data: int, fsdp: int, depth: int) -> None:
    with jax.enable_x64(True):
        model, tx = Convolutions(nnx.Rngs(0), depth), batch_norm.optimizer()
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


def test_a_module_is_given_back_and_evaluated_by_its_running_statistics() -> None:
    model, mesh, x = with_layer(nnx.BatchNorm), jaxdist.make_mesh(fsdp=2), np.eye(4, dtype=np.float32)
    loss = jaxdist.nnx_loss(model, squared)
    state = jaxdist.init_state(loss, optax.sgd(0.1), mesh, strategy="zero3")
    trained = jax.tree.map(lambda leaf: leaf + 0.5, (state.params, state.model_state))
    state = state._replace(params=trained[0], model_state=trained[1])
    assert jaxdist.nnx_update(model, state) is model
    total, _, _, same = loss.evaluation(state.params, x, None, state.model_state)
    assert float(total) == pytest.approx(float((nnx.view(model, use_running_average=True)(x) ** 2).sum()), rel=1e-5)
    jax.tree.map(np.testing.assert_array_equal, same, jax.device_get(state.model_state))
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(nnx.state(model)))


class Dropped(nnx.Module):
    """Two dropouts that store their streams, and BatchNorm, which all rows share."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropouts = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropouts[1](nnx.relu(self.dropouts[0](self.norm(self.up(x))))))


def squared(model: Any, batch: Any) -> Any:
    out = model(batch)
    return (out**2).sum(), out.shape[0], {"size": (jnp.abs(out).sum(), out.size)}


def losses_of(loss: Any, sizes: Any, strategy: str = "ddp", learning_rate: float = 0.1) -> list[float]:
    """Of three steps on the same batch, and what a metric says."""
    mesh, tx = jaxdist.make_mesh(**sizes), optax.sgd(learning_rate)
    state = jaxdist.init_state(loss, tx, mesh, strategy=strategy)
    step, found = jaxdist.make_train_step(loss, tx, mesh, strategy=strategy), []
    batch = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for _ in range(3):
        state, metrics = step(state, batch)
        found += [float(metrics["loss"]), float(metrics["size"])]
    return found


@functools.cache
def on_one_device() -> list[float]:
    return losses_of(jaxdist.nnx_loss(Dropped(nnx.Rngs(0)), squared, per_sample=True), {})


LARGER = [(strategy, sizes) for strategy in ("ddp", "zero3") for sizes in ({"data": 2}, {"fsdp": 4}, {"data": 8})]


@pytest.mark.parametrize(("strategy", "sizes"), [("zero3", {"data": 2, "fsdp": 2}), *levels(LARGER)], ids=str)
def test_dropout_of_each_sample_is_the_same_in_every_layout(strategy: str, sizes: Any) -> None:
    loss = jaxdist.nnx_loss(Dropped(nnx.Rngs(0)), squared, per_sample=True)
    np.testing.assert_allclose(losses_of(loss, sizes, strategy), on_one_device(), rtol=2e-6)


def test_stored_streams_are_reseeded_at_every_step() -> None:
    """Parameters stay, and so does the batch: what differs are masks."""
    found = losses_of(jaxdist.nnx_loss(Dropped(nnx.Rngs(0)), squared), {"data": 2}, learning_rate=0)
    assert len(set(found)) == 6


class Streams(nnx.Module):
    """Streams by themselves: of a name, of another, and of two layers that are stacked."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w, self.rngs = nnx.Param(jnp.ones(3)), rngs
        self.stacked = rngs.split(2)

    def __call__(self) -> jax.Array:
        drawn = jnp.stack([self.rngs.dropout.uniform(), self.rngs.dropout.uniform(), self.rngs.noise.uniform()])
        return jnp.concatenate([drawn, jax.vmap(jax.random.uniform)(self.stacked.dropout.key[...])])


def test_each_stream_has_a_key_of_its_own() -> None:
    model = Streams(nnx.Rngs(dropout=0, noise=0))
    before = model.rngs.dropout.count[...]
    loss = jaxdist.nnx_loss(
        model, lambda model, batch: (model().sum(), 1.0, {f"{i}": (x, 1.0) for i, x in enumerate(model())})
    )
    keys = jax.random.split(jax.random.key(3), 2)
    drawn = [[float(pair[0]) for pair in loss(loss.params, (), own)[2].values()] for own in (keys, keys[1:])]
    assert len({*drawn[0], *drawn[1]}) == 10
    assert model.rngs.dropout.count[...] == before


@pytest.mark.parametrize("per_sample", [False, True])
def test_a_function_may_ask_for_the_keys(per_sample: bool) -> None:
    def fn(model: Any, batch: Any, keys: jax.Array) -> Any:
        return jax.vmap(jax.random.uniform)(keys).sum() + model(batch).sum(), len(batch)

    model, keys = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0)), jax.random.split(jax.random.key(0), 5)
    loss = jaxdist.nnx_loss(model, fn, per_sample=per_sample)
    total, weight = loss(loss.params, jnp.zeros((5, 3)), keys)
    assert float(total) == pytest.approx(float(jax.vmap(jax.random.uniform)(keys).sum()))
    assert int(weight) == 5


class OwnNorm(nnx.BatchNorm):
    """A subclass that calls its parent's."""

    def __call__(self, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return 2 * super().__call__(x, *args, **options)


class LocalNorm(nnx.Module):
    """A layer of somebody's own, with statistics of the rows at hand."""

    def __init__(self, features: int, rngs: nnx.Rngs) -> None:
        self.mean = nnx.BatchStat(jnp.zeros(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        return x - x.mean(0)


def with_layer(make: Callable[..., Any]) -> Any:
    return nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), make(4, rngs=nnx.Rngs(1)))


class LinenNet(linen.Module):
    rate: float = 0.5

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = linen.Dropout(self.rate, deterministic=not train)(linen.Dense(4)(x))
        return linen.BatchNorm(use_running_average=not train)(x)


def linen_loss(**options: Any) -> Any:
    module = LinenNet()
    variables = module.init(jax.random.key(0), jnp.ones((1, 4)), train=False)
    return jaxdist.linen_loss(module, variables, squared, **options)


def traced(loss: Any) -> Any:
    """(step, target, batch) to trace, on devices that are not there."""
    mesh, tx = abstract_mesh(data=2), optax.sgd(0.1)
    target, batch = jaxdist.state_target(loss, tx, mesh), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    return jaxdist.make_train_step(loss, tx, mesh), target, batch


nnx_of = lambda layer, **options: jaxdist.nnx_loss(with_layer(layer), squared, **options)  # noqa: E731
SUMS: dict[str, tuple[Any, int]] = {  # a loss, and how often it sums over devices
    "none": (functools.partial(nnx_of, nnx.Dropout), 0),
    "nnx": (functools.partial(nnx_of, nnx.BatchNorm), 4),  # two means forward, and two backward
    "of a subclass": (functools.partial(nnx_of, OwnNorm), 4),
    "of each device": (functools.partial(nnx_of, nnx.BatchNorm, sync=False), 2),  # of the new statistics
    "linen": (linen_loss, 4),
    "linen, of each device": (functools.partial(linen_loss, sync=False), 2),
}


@pytest.mark.parametrize("per_sample", [False, True], ids=["together", "per sample"])
@pytest.mark.parametrize("case", SUMS)
def test_batch_norm_sums_over_devices(case: str, per_sample: bool) -> None:
    make, sums = SUMS[case]
    found = jaxdist.ledger(*traced(make(per_sample=per_sample))).collectives
    assert sum(each.calls for each in found) == sums + 2  # those of every step: gradients, and loss with metrics


@pytest.mark.parametrize("train", [True, False])
def test_a_linen_module_is_normalised_as_by_flax(train: bool) -> None:
    module, batch = LinenNet(rate=0.0), np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    variables = module.init(jax.random.key(0), batch, train=False)
    want, new = module.apply(variables, batch, train, mutable="batch_stats")
    loss = jaxdist.linen_loss(module, variables, lambda model, batch: ((model(batch, train) ** 3).sum(), 1.0))
    total, _, _, state = loss(loss.params, batch, None, loss.model_state)
    assert float(total) == pytest.approx(float((want**3).sum()), rel=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), state, new)


class Masks(linen.Module):
    """A mask for each of four time steps, by the stream of this name."""

    split: Any
    name_of_stream: str = "dropout"

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        class Cell(linen.Module):
            stream: str

            @linen.compact
            def __call__(self, carry: Any, _: Any) -> Any:
                return carry, jax.random.uniform(self.make_rng(self.stream))

        drawn = linen.scan(Cell, split_rngs=dict(self.split), length=4)(self.name_of_stream)(0.0, None)[1]
        return drawn * self.param("w", linen.initializers.ones, ())


def masks(split: Any, name: str = "dropout", seeded: bool = True, **options: Any) -> list[float]:
    module, keys = Masks(tuple(split.items()), name), jax.random.split(jax.random.key(3), 2)
    variables = {"params": {"w": jnp.ones(())}}

    def fn(model: Any, batch: Any) -> Any:
        return jnp.zeros(()), 1.0, {f"{i}": (x, 1.0) for i, x in enumerate(model(batch))}

    loss = jaxdist.linen_loss(module, variables, fn, **options)
    return [float(pair[0]) for pair in loss(loss.params, jnp.zeros((2, 4)), keys if seeded else None)[2].values()]


BOTH = ("dropout", "noise")


def test_linen_transforms_split_streams_by_name() -> None:
    assert len(set(masks({"params": False, "dropout": True}))) == 4
    assert len(set(masks({"dropout": True}))) == 4
    assert len(set(masks({"params": True, "dropout": False}))) == 1
    noise = masks({"noise": True}, "noise", streams=BOTH)
    assert len({*noise, *masks({"dropout": True}, streams=BOTH)}) == 8


class OwnLinenNorm(linen.BatchNorm):
    @linen.compact
    def __call__(self, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return 2 * super().__call__(x, *args, **options)


def test_a_subclass_of_linen_batch_norm_keeps_its_own_code() -> None:
    module, x = OwnLinenNorm(use_running_average=False), np.random.default_rng(0).normal(size=(8, 4))
    variables = module.init(jax.random.key(0), x)
    want, new = module.apply(variables, x, mutable="batch_stats")
    loss = jaxdist.linen_loss(module, variables, lambda model, batch: ((model(batch) ** 3).sum(), 1.0))
    total, _, _, state = loss(loss.params, x, None, loss.model_state)
    assert float(total) == pytest.approx(float((want**3).sum()), rel=1e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), state, new)
    assert (
        sum(each.calls for each in jaxdist.ledger(*traced(loss)).collectives) == 2 + 2
    )  # two means, and those of every step


class ScaledNorm(nnx.BatchNorm):
    """A subclass with an attribute of a name that an option of `nnx_loss` has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sync = 0.5

    def __call__(self, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return super().__call__(x, *args, **options) * self.sync


class Trees(nnx.Module):
    """Variables that hold dicts, and an intermediate of `__init__`."""

    def __init__(self) -> None:
        self.w, self.seen = nnx.Param({"x": jnp.ones(4)}), nnx.Variable({"n": jnp.zeros(()), "m": jnp.zeros(2)})
        self.last = nnx.Intermediate(jnp.zeros(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen.set_value({"n": self.seen.get_value()["n"] + 1, "m": self.seen.get_value()["m"]})
        self.last.set_value(x.sum(0))
        return x * self.w.get_value()["x"] + 0 * self.last[...]


def called(loss: Any) -> Any:
    return loss(loss.params, jnp.arange(32.0).reshape(8, 4), None, loss.model_state)


def test_a_subclass_of_batch_norm_keeps_its_attributes() -> None:
    want = squared(with_layer(ScaledNorm), jnp.arange(32.0).reshape(8, 4))[0]
    assert float(called(nnx_of(ScaledNorm))[0]) == pytest.approx(float(want))


def test_variables_may_hold_dicts() -> None:
    model, mesh = Trees(), jaxdist.make_mesh(fsdp=2)
    loss = jaxdist.nnx_loss(model, squared)
    assert called(loss)[-1]["seen"]["n"] == 1
    state = jaxdist.init_state(loss, optax.sgd(0.1), mesh)
    state = state._replace(model_state=jax.tree.map(lambda leaf: leaf + 2, state.model_state))
    assert jaxdist.nnx_update(model, state).seen.get_value()["n"] == 2


def test_an_update_keeps_the_dtypes_of_the_module() -> None:
    model = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    state = jaxdist.TrainState(0, {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, (), model_state={})
    assert jaxdist.nnx_update(model, state).kernel.dtype == jnp.bfloat16


class Makes(nnx.Module):
    """It makes a variable of this kind in a call."""

    def __init__(self, kind: Any) -> None:
        self.w, self.kind = nnx.Param(jnp.ones(4)), kind

    def __call__(self, x: jax.Array) -> jax.Array:
        self.last = self.kind(x.sum())
        return x * self.w[...]


class Sows(linen.Module):
    """It sows into this collection."""

    name_of_collection: str

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(self.name_of_collection, "h", (x**2).mean())
        return linen.Dense(2)(x)


def sown(name: str) -> Any:
    module = Sows(name)
    return called(jaxdist.linen_loss(module, module.init(jax.random.key(0), jnp.ones((1, 4))), squared))


def raised(make: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as found:
        make()
    assert "\n" not in str(found.value)
    return str(found.value)


ones = nnx.initializers.ones
PARAMS = {"w": jnp.ones((4, 4))}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (
        lambda: jaxdist.nnx_loss(Dropped, squared),
        "module is the class Dropped; allowed: an nnx.Module that is made",
    ),
    "a Linen module": (lambda: jaxdist.nnx_loss(LinenNet(), squared), "nnx_loss: module is a LinenNet"),
    "no variables": (lambda: jaxdist.linen_loss(LinenNet(), {}, squared), "linen_loss: variables has nothing"),
    "NNX for Linen": (
        lambda: jaxdist.linen_loss(with_layer(nnx.Dropout), {"params": PARAMS}, squared),
        "linen_loss: module is a Sequential; allowed: a linen.Module that is made",
    ),
    "a Linen class": (
        lambda: jaxdist.linen_loss(LinenNet, {"params": PARAMS}, squared),
        "linen_loss: module is the class LinenNet",
    ),
    "parameters alone": (
        lambda: called(jaxdist.linen_loss(LinenNet(rate=0.0), {"params": linen_loss().params}, squared)),
        r"variables hold no batch_stats of BatchNorm_0; allowed: all that module.init\(key, x\) returns",
    ),
    "what is sown elsewhere": (
        lambda: sown("losses"),
        "a call adds to the collection losses.*return it from __call__, and leave losses out of variables",
    ),
    "a variable made in a call": (
        lambda: called(jaxdist.nnx_loss(Makes(nnx.BatchStat), squared)),
        "variable last is made or removed in a call.*make it in __init__, or sow it",
    ),
    "a parameter made in a call": (
        lambda: called(jaxdist.nnx_loss(Makes(nnx.Param), squared)),
        "variable last is made or removed in a call",
    ),
    "a parameter of integers": (
        lambda: jaxdist.nnx_loss(nnx.Linear(2, 2, param_dtype=jnp.int32, kernel_init=ones, rngs=nnx.Rngs(0)), squared),
        "params.bias is int32; allowed: floating-point parameters",
    ),
    "no module to update": (
        lambda: jaxdist.nnx_update(LinenNet(), jaxdist.TrainState(0, PARAMS, ())),
        "nnx_update: module is a LinenNet; allowed: the nnx.Module that nnx_loss was given",
    ),
    "a class to update": (
        lambda: jaxdist.nnx_update(nnx.Linear, jaxdist.TrainState(0, PARAMS, ())),
        "nnx_update: module is the class Linear",
    ),
    "a stream that is not given": (
        lambda: masks({"noise": True}, "noise"),
        r"a random stream 'noise'; given: dropout; add it: .*streams=\('dropout', 'noise'\)",
    ),
    "a stream without keys": (lambda: masks({"dropout": True}, seeded=False), "no keys are given; give keys"),
    "statistics of a layer of one's own": (
        lambda: trace(nnx_of(LocalNorm)),
        r"model_state.layers.1.mean is computed from this device.*jaxdist.batch_mean",
    ),
    "the same, per sample": (
        lambda: trace(nnx_of(LocalNorm, per_sample=True)),
        r"model_state.layers.1.mean is computed from this device.*jaxdist.batch_mean",
    ),
    "axis_name": (
        lambda: trace(nnx_of(functools.partial(nnx.BatchNorm, axis_name="data"))),
        "BatchNorm: axis_name='data'.*allowed: None",
    ),
    "no mode": (
        lambda: trace(nnx_of(functools.partial(nnx.BatchNorm, use_running_average=None))),
        r"use_running_average is None; call module.train\(\)",
    ),
    "a state that is not given": (
        lambda: trace(nnx_of(nnx.BatchNorm), source=nnx_of(nnx.BatchNorm).params),
        r"the module has state \(layers.1.mean\).*init_state\(loss, optimizer, mesh\)",
    ),
    "a module as parameters": (
        lambda: trace(nnx_of(nnx.BatchNorm), source=with_layer(nnx.BatchNorm)),
        r"params: holds a Sequential of Flax NNX; .*loss = jaxdist.nnx_loss\(module, fn\)",
    ),
    "statistics as parameters": (
        lambda: trace(nnx_of(nnx.BatchNorm), source=nnx.state(with_layer(nnx.BatchNorm))),
        "params: holds a BatchStat of Flax NNX",
    ),
    "a mean": (
        lambda: trace(jaxdist.nnx_loss(with_layer(nnx.BatchNorm), lambda model, batch: model(batch).mean())),
        "must return two scalars",
    ),
    "a mean, per sample": (
        lambda: trace(jaxdist.nnx_loss(with_layer(nnx.Dropout), lambda *_: jnp.ones(()), per_sample=True)),
        "must return two scalars",
    ),
    "another module's state": (
        lambda: jaxdist.nnx_update(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jaxdist.TrainState(0, PARAMS, ())),
        r"nnx_update: params.bias has shape None in the state, and \(3,\) in the module",
    ),
}


def trace(loss: Any, source: Any = None) -> None:
    step, target, batch = traced(loss)
    if source is not None:
        target = jaxdist.state_target(source, optax.sgd(0.1), abstract_mesh(data=2))
    step.jitted(target).trace(target, batch)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_line(case: str) -> None:
    make, message = REFUSED[case]
    assert re.search(message, raised(make))


EXAMPLE = child.ROOT / "docs" / "examples" / "own_modules.py"


def test_the_page_shows_the_example() -> None:
    assert EXAMPLE.read_text() in (child.ROOT / "docs" / "own_loss.md").read_text()


@pytest.mark.slow
def test_the_example_runs() -> None:
    environment = child.environment() | child.QUICK | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert [float(line.rpartition(" ")[2]) > 0.95 for line in done.stdout.splitlines()] == [True, True]
