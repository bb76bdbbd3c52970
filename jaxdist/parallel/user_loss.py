"""A user's own loss, under every data-parallel strategy.

Ordinary code, such as a `lax.scan` from `jnp.zeros`, does not type-check under `check_vma=True`. A user loss therefore
runs in a second region, which is not checked. It may contain no collective and may not ask on which device it runs:
all reductions are the strategy's, explicit and outside autodiff, and the check has nothing to find. One is not:
`batch_mean`, whose derivative tests compare with one device's.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from optax import MaskedNode

from jaxdist.collectives import psum
from jaxdist.config.rules.user_loss import LOSS_AXES, check_one_unit
from jaxdist.errors import UserError
from jaxdist.jaxpr.dependence import depends
from jaxdist.jaxpr.forbidden import (
    LOCAL_SCOPE,
    SHARED_SCOPE,
    counting_rows,
    has_rules,
    is_shared,
    refuse_collectives,
    refuse_in_forward,
    refuse_means_with_rows,
)
from jaxdist.jaxpr.randomness import moving, refuse_stored_keys
from jaxdist.jaxpr.walk import every_equation
from jaxdist.mesh import AnyMesh
from jaxdist.optim import leave_out
from jaxdist.parallel.batch_mean import SPLIT_AXES, SharedRows, shared_rows
from jaxdist.parallel.blocks.remat import rematerialise
from jaxdist.parallel.loss_results import LossResults, check_call, in_state, read_results
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.schedule import Program, UserLoss
from jaxdist.parallel.strategy import Strategy, regathers
from jaxdist.precision.autocast import autocast
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import PyTree, leaves_by_name

# The size of the mesh axes in a trace that finds a `jax.vmap` with the name of one: inside of it the size is another. A
# prime that nobody has as a number of devices; products of a few are numbers of 32 bits.
NO_AXIS = 1009


def unchecked_region(
    function: Callable[..., Any], *, mesh: AnyMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` without the check, for programs made by `user_program` only."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


class _Differs(NamedTuple):
    """Where the values of a leaf of a new state may differ: between microbatches, and between devices too."""

    microbatches: bool
    devices: bool


class _Loss(NamedTuple):
    """A user's loss and the layout that it runs in.

    axes: the mesh axes that rows are spread over
    deterministic: whether results may not depend on the layout
    freeze: patterns of the parameters that are not trained
    checked: the results of `check`, by the types of its arguments: a step traces its loss several times
    """

    function: UserLoss
    axes: tuple[str, ...]
    deterministic: bool
    freeze: Sequence[str]
    checked: dict[Any, list[_Differs]]

    def run(
        self, params: PyTree, batch: PyTree, model_state: PyTree, *, rows: SharedRows
    ) -> tuple[jax.Array, LossResults]:
        """(sum of losses, the other results) of one microbatch. batch: with its keys."""
        # Copies of the containers: those that came from outside, such as an nnx.State, may know the trace they are of.
        params, model_state = jax.tree.map(lambda leaf: leaf, (params, model_state))
        arguments = (params, batch["batch"], batch["keys"], *([model_state] if jax.tree.leaves(model_state) else []))
        check_call(self.function, arguments)
        with shared_rows(rows):
            return read_results(self.function(*arguments), model_state)

    def check(self, *arguments: PyTree) -> list[_Differs]:
        """Where each leaf of the new state may differ. Raises `UserError` for what a loss may not do.

        arguments: params, batch, model_state
        """
        leaves, treedef = jax.tree.flatten(arguments)
        key = treedef, *map(jax.typeof, leaves)
        if key not in self.checked:
            forward = self._traced(SharedRows(), *arguments)
            self._refuse(forward, *arguments)
            self.checked[key] = self._differing(forward, *arguments) if jax.tree.leaves(arguments[2]) else []
        return self.checked[key]

    def _traced(self, rows: SharedRows, *arguments: PyTree) -> Any:
        """The jaxpr of `run`: leaves of the arguments -> leaves of the results, those of the new state last."""
        return jax.make_jaxpr(functools.partial(self.run, rows=rows))(*arguments)

    def _with_more_rows(self, rows: SharedRows, params: PyTree, batch: PyTree, model_state: PyTree) -> Any:
        """`_traced` with twice as many rows; None where the loss runs with no other number of them."""
        more = lambda leaf: jax.ShapeDtypeStruct((2 * leaf.shape[0], *leaf.shape[1:]), leaf.dtype)  # noqa: E731
        try:
            return self._traced(rows, params, jax.tree.map(more, batch), model_state)
        except Exception:  # a user's code may fail in any way
            return None

    def _refuse(self, forward: Any, params: PyTree, batch: PyTree, model_state: PyTree) -> None:
        """Raise `UserError` for what a loss may not do, but for its new state.

        forward: see `_traced`
        """
        refuse_in_forward(forward)
        # To differentiate takes as long as the rest of the checks together.
        given = params, batch, model_state
        whole, trained = self._differentiated(forward, *given) if has_rules(forward) else (forward, 0)
        refuse_collectives(whole)
        fresh, carried = [_marks(params, False), _marks(batch, True)], _marks(model_state, False)
        moves = moving(forward, [*fresh[0], *fresh[1], *carried], len(carried))
        refuse_stored_keys(whole, [False] * trained + moves)
        sites = list(every_equation(forward))
        if self.deterministic and any(SHARED_SCOPE in site.names or LOCAL_SCOPE in site.names for site in sites):
            raise UserError(
                "grad_sync.deterministic: a loss with batch_mean depends on how many rows a microbatch has, and so on"
                " the layout; leave one of the two out"
            )
        if any(map(is_shared, sites)):
            if (other := self._with_more_rows(SharedRows(), params, batch, model_state)) is not None:
                refuse_means_with_rows(forward, other)
            run: Any = functools.partial(self.run, rows=SharedRows(axis_size=NO_AXIS))
            for axis in SPLIT_AXES:
                run = jax.vmap(run, in_axes=None, out_axes=None, axis_size=NO_AXIS, axis_name=axis)
            jax.eval_shape(run, params, batch, model_state)

    def _differentiated(self, forward: Any, params: PyTree, *others: PyTree) -> tuple[Any, int]:
        """(the jaxpr of the loss and its gradient, the number of trained leaves): trained leaves, leaves of all
        arguments -> the leaves of the results, of which the first is the loss, and of the gradients.

        A custom_vjp may hide something in its backward pass.
        """
        values = jax.tree.leaves((params, *others))
        whole = lambda node: isinstance(node, MaskedNode)  # noqa: E731
        kept = jax.tree.leaves(leave_out(params, self.freeze), is_leaf=whole)
        places = [i for i, leaf in enumerate(kept) if not whole(leaf)]

        def total(trained: list[Any], values: list[Any]) -> tuple[jax.Array, list[Any]]:
            own = dict(zip(places, trained, strict=True))
            loss, *rest = jaxpr_as_fun(forward)(*(own.get(i, value) for i, value in enumerate(values)))
            return loss, rest

        with shared_rows(SharedRows(in_rule=True)):
            both = jax.value_and_grad(total, has_aux=True)
            return jax.make_jaxpr(both)([values[i] for i in places], values), len(places)

    def _differing(self, forward: Any, params: PyTree, batch: PyTree, model_state: PyTree) -> list[_Differs]:
        """`check` of the new state."""
        named = leaves_by_name(model_state)
        marked = [*_marks(params, False), *_marks(batch, True), *_marks(model_state, False)]

        def computed(blank: str) -> list[bool]:
            """Whether each leaf is computed from batch or keys otherwise than by means that are `blank`."""
            rows = SharedRows(blank=blank)
            return depends(self._traced(rows, params, batch, model_state) if blank else forward, marked)[-len(named) :]

        by_any = computed("")
        for (name, leaf), found in zip(named.items(), by_any, strict=True):
            if found and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise UserError(
                    f"loss_fn: {in_state(name)} is {leaf.dtype}, and is computed from the batch or keys, of which no"
                    " mean is such a number; allowed: floats, or a count that reads the model_state only"
                )
        local = computed("synchronous") if any(by_any) else by_any
        for name, found in zip(named, computed("every") if any(local) else local, strict=True):
            if found:
                raise UserError(
                    f"loss_fn: {in_state(name)} is computed from this device's rows or keys; take the mean over all"
                    " devices, jaxdist.batch_mean(x), or batch_mean(x, sync=False) for statistics of each device"
                )
        given, blank = (params, batch, model_state), SharedRows(blank="every")
        if (other := self._with_more_rows(blank, *given)) is not None:
            for name, found in zip(named, counting_rows(self._traced(blank, *given), other, len(named)), strict=True):
                if found:
                    raise UserError(
                        f"loss_fn: {in_state(name)} is computed from the number of this device's rows, which other"
                        " layouts have others of; give the size of the global batch as a number, or count steps"
                    )
        return list(map(_Differs, by_any, local))


def _marks(tree: PyTree, mark: bool) -> list[bool]:
    """The mark, for each leaf of a tree."""
    return [mark] * len(jax.tree.leaves(tree))


def user_program(loss_fn: UserLoss, strategy: Strategy, specs: PyTree, mesh: AnyMesh, options: StepOptions) -> Program:
    """A `Program` around loss_fn(params, batch, keys) -> (sum, weight), see `UserLoss`.

    The whole tree is one unit: under zero3 the state is sharded, but a step gathers all parameters at once.
    weight: the sum of losses is divided by the sum of weights, over the global batch. No gradient flows through it.
    params: in the dtype that the policy gives layers; the loss casts its inputs to it. A model_state keeps its dtypes.
    captured: beside that of the strategy it holds the model_state at the start of the step.
    """
    split, fp8 = options.batch_split, options.precision.fp8
    check_one_unit(prefetch=options.prefetch, remat=options.remat, fp8=fp8, batch_split=split)
    idle = [axis for axis in LOSS_AXES if mesh.shape[axis] > 1]
    if idle:
        raise UserError(
            f"mesh.{idle[0]}={mesh.shape[idle[0]]}: a user's loss_fn is split over data and fsdp only; set {idle[0]} "
            "to 1, or build the model from jaxdist.nn layers"
        )
    loss_fn = autocast(loss_fn, options.precision.compute) if options.precision.per_op else loss_fn
    axes = tuple(axis for axis in SPLIT_AXES if mesh.shape[axis] > 1)
    user = _Loss(loss_fn, axes, options.grad_sync.deterministic, options.freeze, {})

    def loss(diff: PyTree, captured: PyTree, batch: dict[str, Any]) -> tuple[jax.Array, jax.Array, PyTree]:
        captured, model_state = captured
        params = strategy.gather(diff, captured, specs)
        differs = user.check(params, batch, model_state)
        total, results = user.run(params, batch, model_state, rows=SharedRows(user.axes))
        return total, results.weight, (results.metrics, [*map(_summand, jax.tree.leaves(results.model_state), differs)])

    def settle(extra: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
        metrics, summands = extra
        leaves, treedef = jax.tree.flatten(model_state)
        means = [_mean(*pair, options.microbatches, axes) for pair in zip(summands, leaves, strict=True)]
        return metrics, jax.tree.unflatten(treedef, means)

    return Program(rematerialise(loss, options.remat, gathers=regathers(strategy, specs), in_scan=False), settle=settle)


class _OfOneDevice(NamedTuple):
    """A leaf of a new state that may differ between devices."""

    value: jax.Array


def _summand(leaf: jax.Array, differs: _Differs) -> Any:
    """A leaf of a new state as schedules add it up: in at least fp32 where it differs between microbatches, which only
    floats may. Others are added up in parts of 16 bits, whose sums and means are exact."""
    if differs.microbatches:
        wide = leaf.astype(accumulation_dtype(leaf.dtype))
        return _OfOneDevice(wide) if differs.devices else wide
    numbers = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    return jax.lax.bitcast_convert_type(numbers, _part(numbers.dtype)).astype(jnp.uint32)


def _part(dtype: Any) -> Any:
    return jnp.uint8 if dtype.itemsize == 1 else jnp.uint16


def _mean(total: Any, old: jax.Array, count: int, axes: tuple[str, ...]) -> jax.Array:
    """The mean of `count` summands, like the old leaf; over the devices too, where they differ."""
    if isinstance(total, _OfOneDevice):
        with jax.named_scope("model_state"):
            total, count = psum(total.value, axes), count * math.prod(map(jax.lax.axis_size, axes))
    if jnp.issubdtype(total.dtype, jnp.floating):
        return (total / count).astype(old.dtype)
    numbers = (total // count).astype(_part(old.dtype))
    return numbers.astype(bool) if old.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(numbers, old.dtype)
