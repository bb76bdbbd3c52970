"""DataParallel as one program that drives all devices: replicate, scatter, apply, gather, update.

Device 0 has the parameters, the optimizer state and the batch. Each step copies the parameters to the other devices
and gathers there what they have computed. PyTorch has a thread for each device. JAX goes on without waiting, so that
one thread keeps all devices at work.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdist.errors import UserError
from jaxdist.lab.data_parallel import closed_forms as phases
from jaxdist.lab.data_parallel.cases import ModelCase
from jaxdist.lab.data_parallel.wires import Wires
from jaxdist.specs import PyTree

InputsAndLabels = tuple[PyTree, PyTree]  # inputs, labels


class Held(NamedTuple):
    """What stays on device 0 from step to step: parameters, running statistics of BatchNorm, optimizer state."""

    params: PyTree
    state: PyTree
    opt_state: PyTree


class Computed(NamedTuple):
    """What a step has computed on device 0: the mean loss, its gradients, the new running statistics."""

    loss: jax.Array
    grads: PyTree
    state: PyTree


class DataParallel:
    """A step of DataParallel on these devices; the first of them is device 0.

    A device takes BatchNorm's statistics of its own rows, and those of device 0 are kept, as in PyTorch.

    balanced: whether labels are scattered too, so that every device computes loss and gradients by itself. Otherwise
        device 0 gathers the outputs and computes the loss of the whole batch alone.
    """

    def __init__(
        self, case: ModelCase, optimizer: optax.GradientTransformation, devices: list[jax.Device], *, balanced: bool
    ) -> None:
        self._devices, self._balanced, self._optimizer = devices, balanced, optimizer
        forward, loss_of = case.forward, case.loss

        def apply(params: PyTree, state: PyTree, inputs: PyTree) -> Any:
            """(outputs, new state, the function from gradients of outputs to those of parameters, which is a pytree)"""
            outputs, back, state = jax.vjp(lambda params: forward(params, state, inputs), params, has_aux=True)
            return outputs, state, back

        def whole(params: PyTree, state: PyTree, inputs: PyTree, labels: PyTree) -> Any:
            def loss(params: PyTree) -> tuple[jax.Array, Any]:
                outputs, new = forward(params, state, inputs)
                total, weight = loss_of(outputs, labels)
                return total, (weight, new)

            (total, (weight, new)), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return (total, weight), grads, new

        def mean_loss(outputs: jax.Array, labels: PyTree) -> jax.Array:
            total, weight = loss_of(outputs, labels)
            return total / weight

        self._apply, self._whole = jax.jit(apply), jax.jit(whole)
        self._pull = jax.jit(lambda back, grads: back(grads)[0])
        self._loss = jax.jit(jax.value_and_grad(mean_loss))
        self._join = jax.jit(lambda *outputs: jnp.concatenate(outputs))
        self._sum = jax.jit(_sum_of)
        self._mean = jax.jit(lambda sums, trees: (_over(*_sum_of(*sums)), _divided(_sum_of(*trees), _sum_of(*sums)[1])))
        self._update = jax.jit(self._updated, donate_argnums=(0, 1))

    def place(self, params: PyTree, state: PyTree) -> Held:
        """The state of training on device 0."""
        params, state = jax.device_put((params, state), self._devices[0])
        return Held(params, state, jax.jit(self._optimizer.init)(params))

    def step(self, wires: Wires, held: Held, batch: InputsAndLabels) -> tuple[Held, jax.Array]:
        """The state after a step, and the loss. The state that was given is used up."""
        loss, grads, state = self.gradients(wires, held, batch)
        params, opt_state = wires.run(phases.ROOT_UPDATE, self._update, held.params, held.opt_state, grads)
        return Held(params, state, opt_state), loss

    def gradients(self, wires: Wires, held: Held, batch: InputsAndLabels) -> Computed:
        """All of a step but its update."""
        copies = [wires.put(phases.REPLICATE, (held.params, held.state), device) for device in self._devices]
        return (self._by_all if self._balanced else self._by_root)(wires, copies, batch)

    def _by_root(self, wires: Wires, copies: list[Any], batch: InputsAndLabels) -> Computed:
        inputs, labels = batch
        shares = self._scatter(wires, phases.SCATTER, inputs)
        results = [wires.run(phases.APPLY, self._apply, *copy, own) for copy, own in zip(copies, shares, strict=True)]
        state = results[0][1]
        outputs = [wires.put(phases.GATHER, result[0], self._devices[0]) for result in results]
        pulls = [result[2] for result in results]
        del results
        joined = wires.run(phases.GATHER, self._join, *outputs)
        del outputs
        loss, grad = wires.run(phases.LOSS, self._loss, joined, labels)
        del joined
        parts = self._scatter(wires, phases.SCATTER_BACK, grad)
        del grad
        grads = []
        for _ in self._devices:  # what a device has pulled back is dropped at once
            grads.append(wires.run(phases.PULL_BACK, self._pull, pulls.pop(0), parts.pop(0)))
        grads = self._gather(wires, phases.REDUCE, grads)
        return Computed(loss, wires.run(phases.REDUCE, self._sum, *grads), state)

    def _by_all(self, wires: Wires, copies: list[Any], batch: InputsAndLabels) -> Computed:
        shares = self._scatter(wires, phases.SCATTER, batch)
        results = [wires.run(phases.APPLY, self._whole, *copy, *own) for copy, own in zip(copies, shares, strict=True)]
        sums, grads, states = ([result[i] for result in results] for i in range(3))
        del results
        sums, grads = self._gather(wires, phases.GATHER, sums), self._gather(wires, phases.REDUCE, grads)
        loss, mean = wires.run(phases.REDUCE, self._mean, tuple(sums), tuple(grads))
        return Computed(loss, mean, states[0])

    def _scatter(self, wires: Wires, phase: str, tree: PyTree) -> list[PyTree]:
        """A part of equal rows for each device."""
        rows, count = len(jax.tree.leaves(tree)[0]), len(self._devices)
        if rows % count:
            raise UserError(f"batch: {rows} rows on {count} devices; allowed: as many on each; give another number")
        share = rows // count
        parts = [jax.tree.map(lambda leaf: leaf[i * share : (i + 1) * share], tree) for i in range(count)]  # noqa: B023
        return [wires.put(phase, part, device) for part, device in zip(parts, self._devices, strict=True)]

    def _gather(self, wires: Wires, phase: str, trees: list[PyTree]) -> list[PyTree]:
        """All on device 0. The list that was given is emptied, so that copies do not outlive their use."""
        return [wires.put(phase, trees.pop(0), self._devices[0]) for _ in self._devices]

    def _updated(self, params: PyTree, opt_state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        with jax.numpy_dtype_promotion("standard"):  # optax divides its int32 counts
            updates, opt_state = self._optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state


def _sum_of(*trees: PyTree) -> PyTree:
    return jax.tree.map(lambda *leaves: functools.reduce(jnp.add, leaves), *trees)


def _over(total: jax.Array, weight: jax.Array) -> jax.Array:
    return total / weight


def _divided(tree: PyTree, weight: jax.Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), tree)
