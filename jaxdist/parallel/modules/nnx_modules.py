"""Flax NNX modules in losses: taken apart for a step, and put together again after it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.errors import UserError
from jaxdist.parallel.modules.batch_norm import normalise
from jaxdist.parallel.modules.module_loss import ModuleLoss, call_user, module_kind
from jaxdist.specs import PyTree, leaves_by_name

_PARTS = (nnx.Param, nnx.RngState, nnx.Intermediate, ...)  # of a module, as it is split
_STATE = nnx.All(nnx.Not(nnx.Param), nnx.Not(nnx.RngState), nnx.Not(nnx.Intermediate))  # variables that a step carries


def nnx_loss(
    module: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
    fn: Callable[..., tuple[Any, ...]],
    *,
    per_sample: bool = False,
    sync: bool = True,
) -> ModuleLoss:
    """The loss of a Flax NNX module, to give to `init_state` and `make_train_step`.

    Parameters (`nnx.Param`) are trained. All other variables, such as BatchNorm's running statistics, are the
    model_state. Random streams that the module stores are reseeded at every step, each by another key. `nnx.BatchNorm`
    takes the statistics of all devices' rows. The module itself stays as it is until `nnx_update`.

    module: in the mode that it is to be trained in (`module.train()`); `nnx_loss(...).evaluation` is the same loss in
        evaluation mode. Or a function of random streams that builds it, `lambda rngs: Net(64, rngs)`: then nothing is
        allocated until `init_state`, which builds each leaf in its layout, by its seed.
    fn: (module, batch) -> (sum of losses, weight), or with metrics (sum, weight, {"accuracy": (sum, weight)}). If it
        has an argument `keys`, it is given the step's keys, one a row.
    per_sample: call fn with one row at a time, by `vmap`, and random streams of that row: losses with dropout are then
        the same in every layout.
    sync: False has BatchNorm take the statistics of each device's rows, as PyTorch's does. Layouts then differ.

    >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    >>> loss = jaxdist.nnx_loss(model, lambda model, batch: ((model(batch) ** 2).sum(), len(batch)))
    >>> mesh, tx = jaxdist.make_mesh(fsdp=8), optax.sgd(0.1)
    >>> state = jaxdist.init_state(loss, tx, mesh, strategy="zero3")
    >>> step = jaxdist.make_train_step(loss, tx, mesh, strategy="zero3")
    >>> state, metrics = step(state, np.eye(8, 4, dtype=np.float32))
    >>> jax.tree.map(jnp.shape, state.model_state)
    {'layers': {1: {'mean': (8,), 'var': (8,)}}}
    """
    module, init = _made(module)
    nnx.pop(module, nnx.Any(nnx.Perturbation, _is_sown))  # what an earlier call has left
    graph, *parts = nnx.split(module, *_PARTS)
    params, streams, _, model_state = map(nnx.to_pure_dict, parts)

    def loss_of(graph: Any, evaluation: ModuleLoss | None) -> ModuleLoss:
        def run(params: PyTree, batch: PyTree, keys: jax.Array | None, model_state: PyTree) -> Any:
            given = (params, _reseeded(streams, keys), model_state)
            filled = map(_filled, (parts[0], parts[1], parts[3]), given)
            model = nnx.merge(graph, *filled, parts[2], copy=True)
            _share_statistics(model, sync=sync)
            result = call_user(fn, model, batch, keys)
            new = nnx.to_pure_dict(nnx.state(model, _STATE))
            _check_same(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params)
            _check_same(new, model_state)
            return result, new

        return ModuleLoss(run, params, model_state, per_sample=per_sample, evaluation=evaluation, init=init)

    module.eval()
    return loss_of(graph, loss_of(nnx.graphdef(module), None))


def _made(module: Any) -> tuple[nnx.Module, Callable[[jax.Array], tuple[PyTree, PyTree]] | None]:
    """(a copy of the module, None); of a function that builds one, (the module without arrays, `ModuleLoss.init`)."""
    if isinstance(module, nnx.Module):
        return nnx.clone(module), None
    build = module
    if not inspect.isroutine(build) and not isinstance(build, functools.partial):  # modules can be callable, too
        raise UserError(
            f"nnx_loss: module is {module_kind(build)}; allowed: an nnx.Module that is made, such as"
            " MLP(nnx.Rngs(0)), or a function that makes it, lambda rngs: MLP(rngs); other models are a"
            " loss_fn(params, batch, keys)"
        )

    def init(key: jax.Array) -> tuple[PyTree, PyTree]:
        _, *parts = nnx.split(build(nnx.Rngs(key)), *_PARTS)
        return nnx.to_pure_dict(parts[0]), nnx.to_pure_dict(parts[3])

    made = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    if not isinstance(made, nnx.Module):
        raise UserError(f"nnx_loss: the function gives {module_kind(made)}; allowed: an nnx.Module")
    if found := jax.tree.leaves(nnx.state(made, nnx.Intermediate)):
        raise UserError(
            f"nnx_loss: the module that the function builds has {len(found)} nnx.Intermediate from the start; allowed:"
            " an nnx.Variable, which the state carries"
        )
    return made, init


def _is_sown(_: Any, leaf: Any) -> bool:
    """Whether `sow` made a variable, and not the module's `__init__`."""
    return isinstance(leaf, nnx.Intermediate) and isinstance(leaf.get_value(), tuple)


def _filled(part: Any, values: PyTree) -> Any:
    """The variables of a part of a module, with these values, of which each may be a tree."""
    pairs = []
    for path, leaf in nnx.to_flat_state(part):
        value = functools.reduce(lambda tree, key: tree[key], path, values)
        pairs.append((path, leaf.replace(value) if isinstance(leaf, nnx.Variable) else value))
    return nnx.from_flat_state(pairs)


def _check_same(found: PyTree, given: PyTree) -> None:
    """Raise `UserError` for variables that a call has made or taken away."""
    differ = leaves_by_name(found).keys() ^ leaves_by_name(given).keys()
    if differ:
        raise UserError(
            f"nnx_loss: variable {min(differ)} is made or removed in a call, and a step carries those that are there"
            " before; make it in __init__, or sow it (nnx.Intermediate), which is dropped"
        )


def nnx_update(module: nnx.Module, state: Any) -> nnx.Module:
    """The module, with the parameters and the model_state of a `TrainState` put into it in place, in its own dtypes.

    Arrays that are spread over devices are gathered; all processes of a job must call it. Random streams stay as they
    are. For evaluation, call `module.eval()` first or afterwards.

    >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    >>> loss = jaxdist.nnx_loss(model, lambda model, batch: ((model(batch) ** 2).sum(), len(batch)))
    >>> mesh, tx = jaxdist.make_mesh(fsdp=2), optax.sgd(0.5)
    >>> state = jaxdist.init_state(loss, tx, mesh, strategy="zero3")
    >>> state, _ = jaxdist.make_train_step(loss, tx, mesh, strategy="zero3")(state, np.ones((2, 4), np.float32))
    >>> model = jaxdist.nnx_update(model, state)
    >>> bool((model.kernel[...] == state.params["kernel"]).all())
    True
    """
    if not isinstance(module, nnx.Module):
        raise UserError(f"nnx_update: module is {module_kind(module)}; allowed: the nnx.Module that nnx_loss was given")
    given: list[Any] = [("params", state.params, nnx.Param), ("model_state", state.model_state, _STATE)]
    for field, tree, kind in given:
        there, found = (leaves_by_name(each) for each in (nnx.to_pure_dict(nnx.state(module, kind)), tree))
        differ = [name for name in there.keys() | found.keys() if _shape(there, name) != _shape(found, name)]
        if differ:
            name = min(differ)
            raise UserError(
                f"nnx_update: {field}.{name} has shape {_shape(found, name)} in the state, and {_shape(there, name)}"
                " in the module; give the module that nnx_loss was given"
            )
    for _, tree, kind in given:
        old = nnx.state(module, kind)
        whole = jax.tree.map(lambda old, new: _whole(new).astype(old.dtype), nnx.to_pure_dict(old), tree)
        nnx.update(module, _filled(old, whole))
    return module


def _shape(leaves: dict[str, Any], name: str) -> Any:
    return jnp.shape(leaves[name]) if name in leaves else None


def _whole(leaf: jax.Array) -> jax.Array:
    """The array on one device, as if it had been made there."""
    if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        mesh = leaf.sharding.mesh  # type: ignore[attr-defined]
        leaf = jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(mesh, P()))(leaf)
    return jnp.asarray(np.asarray(leaf))


def _reseeded(streams: PyTree, keys: jax.Array | None) -> PyTree:
    """The keys of random streams, each folded with its number, and their counts at zero; or as they are."""
    leaves, treedef = jax.tree.flatten(streams)

    def fresh(number: int, leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros_like(leaf)
        key = jax.random.fold_in(keys[0], number)  # type: ignore[index]
        return jax.random.split(key, leaf.shape) if leaf.shape else key  # several: of layers that are stacked

    if keys is None and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        keys = jax.random.key(0)[None]  # a module that was never made has no keys of its own
    return streams if keys is None else jax.tree.unflatten(treedef, map(fresh, range(len(leaves)), leaves))


class _SharedBatchNorm(nnx.BatchNorm):
    """An `nnx.BatchNorm` by `normalise`."""

    _jaxdist_sync: bool  # set on the object

    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None) -> Any:
        use_running = self.use_running_average if use_running_average is None else use_running_average
        if use_running is None:
            raise UserError("nnx.BatchNorm: use_running_average is None; call module.train(), or give it to the call")
        affine = [None if leaf is None else leaf[...] for leaf in (self.scale, self.bias)]
        y, (mean, variance) = normalise(
            self,
            x,
            (self.mean[...], self.var[...]),
            (affine[0], affine[1]),
            use_running=use_running,
            mask=mask,
            sync=self._jaxdist_sync,
        )
        self.mean[...], self.var[...] = mean, variance
        return y


@functools.cache
def _shared_kind(kind: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """The subclass of a kind of BatchNorm whose `super().__call__` is that of `_SharedBatchNorm`."""
    return _SharedBatchNorm if kind is nnx.BatchNorm else type(kind.__name__, (kind, _SharedBatchNorm), {})


def _share_statistics(model: nnx.Module, *, sync: bool) -> None:
    """Make each `nnx.BatchNorm` in the module one that takes the statistics of all rows."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.BatchNorm):
            shared: Any = node
            shared.__class__, shared._jaxdist_sync = _shared_kind(type(node)), sync
