"""A network with BatchNorm as a user writes it, and its training on one device in plain JAX and optax.

Legend: B rows, S positions along a side, C channels, K classes, N devices, M microbatches
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxdist

ROWS, SIDE, CLASSES = 24, 6, 3
Mean = Callable[[jax.Array, jax.Array], jax.Array]  # (x [B, S, S, C], weights [B]) -> [C]


def plain_mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The weighted mean over rows and positions, written a second time."""
    return jnp.einsum("bstc,b->c", x, weight) / (weight.sum() * x.shape[1] * x.shape[2])


def shared_mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jaxdist.batch_mean(x, weight, axis=(0, 1, 2))


def local_mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jaxdist.batch_mean(x, weight, axis=(0, 1, 2), sync=False)


def _convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=layout)


def _normalise(x: jax.Array, scale: Any, running: Any, weight: jax.Array, mean: Mean) -> tuple[jax.Array, Any]:
    middle = mean(x, weight)
    variance = mean((x - middle) ** 2, weight)
    new = {"mean": 0.9 * running["mean"] + 0.1 * middle, "var": 0.9 * running["var"] + 0.1 * variance}
    return (x - middle) * lax.rsqrt(variance + 1e-5) * scale, new


class Net(NamedTuple):
    """A residual network: a convolution, then blocks of two, [channels, stride] each, all with BatchNorm."""

    blocks: tuple[tuple[int, int], ...]
    channels: int

    def params(self) -> Any:
        rng, before = np.random.default_rng(0), 2
        layers = [(self.channels, 3)]
        for channels, _ in self.blocks:
            layers += [(channels, 3), (channels, 3), (channels, 1)]
        tree: dict[str, Any] = {}
        for i, (channels, side) in enumerate(layers):
            source = before if side == 3 else layers[max(0, i - 4)][0] if i > 3 else self.channels
            kernel = rng.normal(size=(side, side, source, channels)) / side / source**0.5
            tree[f"{i:02}"] = {"kernel": kernel, "scale": 1 + 0.1 * rng.normal(size=channels)}
            before = channels
        tree["head"] = rng.normal(size=(before, CLASSES))
        return jax.tree.map(jnp.asarray, tree)

    def state(self) -> Any:
        """Running statistics of each BatchNorm, and the number of steps."""
        start = lambda layer: {"mean": jnp.zeros_like(layer["scale"]), "var": jnp.ones_like(layer["scale"])}  # noqa: E731
        found = {name: start(layer) for name, layer in self.params().items() if name != "head"}
        return {"norms": found, "steps": jnp.int32(250)}

    def loss(self, params: Any, batch: Any, state: Any, mean: Mean) -> Any:
        """(sum, weight, metrics, new state), of rows weighted by `batch["w"]`."""
        weight, norms = batch["w"], {}

        def layer(x: jax.Array, number: int, stride: int = 1) -> jax.Array:
            name = f"{number:02}"
            x = _convolve(x, params[name]["kernel"], stride)
            x, norms[name] = _normalise(x, params[name]["scale"], state["norms"][name], weight, mean)
            return x

        x = jax.nn.relu(layer(batch["x"], 0))
        for i, (_, stride) in enumerate(self.blocks):
            inner = layer(jax.nn.relu(layer(x, 3 * i + 1, stride)), 3 * i + 2)
            x = jax.nn.relu(inner + layer(x, 3 * i + 3, stride))
        logits = x.mean((1, 2)) @ params["head"]
        right = jnp.where(logits.argmax(-1) == batch["y"], weight, 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]) * weight
        new = {"norms": norms, "steps": state["steps"] + 1}
        return losses.sum(), weight.sum(), {"accuracy": (right.sum(), weight.sum())}, new


TINY = Net(blocks=(), channels=4)
SMALL = Net(blocks=((6, 2),), channels=4)
DEEP = Net(blocks=((4, 1), (4, 1), (6, 2), (6, 1), (8, 2), (8, 1), (10, 2), (10, 1)), channels=4)  # as ResNet-18


def user_loss(net: Net, mean: Mean = shared_mean) -> Callable[..., Any]:
    """The loss as jaxdist takes it."""
    return lambda params, batch, keys, model_state: net.loss(params, batch, model_state, mean)


def make_batch(step: int, rows: int = ROWS) -> Any:
    rng = np.random.default_rng(step)
    x = rng.normal(size=(rows, SIDE, SIDE, 2)) + np.linspace(-1, 1, rows)[:, None, None, None]  # devices' rows differ
    return {"x": x, "y": rng.integers(0, CLASSES, rows), "w": rng.integers(1, 4, rows) / 2}


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-6))


class Trained(NamedTuple):
    """Of three steps. grads: of all of them; state: the model's."""

    losses: list[float]
    accuracies: list[float]
    grads: list[Any]
    params: Any
    state: Any


def reference(net: Net, *, devices: int = 1, microbatches: int = 1) -> Trained:
    """On one device, without jaxdist. A microbatch holds a part of the rows of each device, as in a step."""
    params, state, tx = net.params(), net.state(), optimizer()
    opt_state = tx.init(params)

    def parts(batch: Any) -> Any:  # [M, B / M, ...]
        cut = lambda x: x.reshape(devices, microbatches, -1, *x.shape[1:]).swapaxes(0, 1)  # noqa: E731
        return jax.tree.map(lambda x: cut(x).reshape(microbatches, -1, *x.shape[1:]), batch)

    @jax.jit
    def step(params: Any, opt_state: Any, state: Any, batch: Any) -> Any:
        whole = batch["w"].sum()

        def mean(params: Any) -> Any:
            found = [
                net.loss(params, jax.tree.map(lambda x, i=i: x[i], parts(batch)), state, plain_mean)
                for i in range(microbatches)
            ]
            right, states = sum(each[2]["accuracy"][0] for each in found), [each[3]["norms"] for each in found]
            norms = jax.tree.map(lambda *leaves: sum(leaves) / microbatches, *states)
            return sum(each[0] for each in found) / whole, (right / whole, norms)

        (loss, (accuracy, norms)), grads = jax.value_and_grad(mean, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = {"norms": norms, "steps": state["steps"] + 1}
        return loss, accuracy, grads, optax.apply_updates(params, updates), opt_state, new

    losses, accuracies, all_grads = [], [], []
    for i in range(3):
        with jax.numpy_dtype_promotion("standard"):
            loss, accuracy, grads, params, opt_state, state = step(params, opt_state, state, make_batch(i))
        losses.append(float(loss))
        accuracies.append(float(accuracy))
        all_grads.append(jax.device_get(grads))
    return Trained(losses, accuracies, all_grads, jax.device_get(params), jax.device_get(state))


def train(net: Net, mean: Mean = shared_mean, *, sizes: dict[str, int], **options: Any) -> Trained:
    """By jaxdist, in a layout."""
    mesh, tx, options = jaxdist.make_mesh(**sizes), optimizer(), {"precision": "fp64", **options}
    state = jaxdist.init_state(
        net.params(), tx, mesh, model_state=net.state(), strategy=options.get("strategy", "ddp"), precision="fp64"
    )
    step = jaxdist.make_train_step(user_loss(net, mean), tx, mesh, return_grads=True, **options)
    losses, accuracies, all_grads = [], [], []
    for i in range(3):
        state, metrics = step(state, make_batch(i))
        losses.append(float(metrics["loss"]))
        accuracies.append(float(metrics["accuracy"]))
        all_grads.append(jax.device_get(metrics["grads"]))
    return Trained(losses, accuracies, all_grads, jax.device_get(state.params), jax.device_get(state.model_state))
