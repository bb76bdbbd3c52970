"""A loss with the parameters and the state that its module starts with."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.errors import UserError
from jaxdist.parallel.batch_mean import SharedRows, shared_rows
from jaxdist.parallel.loss_results import check_form
from jaxdist.specs import PyTree, leaves_by_name

_SAMPLES = "samples"  # the axis of a `vmap` over rows


class ModuleLoss:
    """What `nnx_loss` and `linen_loss` make, to be given to `init_state` and `make_train_step`.

    It is a loss_fn(params, batch, keys, model_state), which may be called outside of a step too, for evaluation: keys
    are None then, and random streams stay as the module has them.

    params: the parameters that the module has, in nested dicts
    model_state: its other variables, in nested dicts; empty if it has none
    evaluation: the same loss with the module in evaluation mode, or None where the user's function says the mode
    init: key -> (params, model_state), of a module that is built in its layout: the two above are ShapeDtypeStructs
        then. None for a module that is made already.
    """

    empty_rows = 0  # as of a `ModelDef`: it has no stacked blocks

    def __init__(
        self,
        run: Callable[..., tuple[Any, PyTree]],
        params: PyTree,
        model_state: PyTree,
        *,
        per_sample: bool,
        evaluation: "ModuleLoss | None" = None,
        init: Callable[[jax.Array], tuple[PyTree, PyTree]] | None = None,
    ) -> None:
        """run: (params, batch, keys, model_state) -> (results of the user's function, new model_state)"""
        for name, leaf in leaves_by_name(params).items():
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise UserError(
                    f"params.{name} is {leaf.dtype}; allowed: floating-point parameters, as they are differentiated;"
                    " make it a variable that is none (nnx.Variable, self.variable)"
                )
        self.params, self.model_state, self.evaluation, self.init = params, model_state, evaluation, init
        self._run, self._per_sample = run, per_sample

    def __repr__(self) -> str:
        count, others = (len(jax.tree.leaves(tree)) for tree in (self.params, self.model_state))
        return f"ModuleLoss({count} parameters, {others} arrays of state{', per sample' if self._per_sample else ''})"

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(self.params))

    def __call__(
        self, params: PyTree, batch: PyTree, keys: jax.Array | None = None, model_state: PyTree | None = None
    ) -> Any:
        named = leaves_by_name(self.model_state)
        if named and not jax.tree.leaves(model_state):
            raise UserError(
                f"loss_fn: the module has state ({min(named)}), and was given none; allowed: a state of"
                " init_state(loss, optimizer, mesh), where loss is what nnx_loss or linen_loss returned"
            )
        given = (params, model_state if named else self.model_state)
        params, model_state = jax.tree.map(_not_numpy, given)  # in whose arrays a module would write in place
        result, new = (self._each_row if self._per_sample else self._run)(params, batch, keys, model_state)
        check_form(result, stateful=False)
        return (*(*result, {})[:3], new) if named else result

    def _each_row(self, params: PyTree, batch: PyTree, keys: jax.Array | None, model_state: PyTree) -> Any:
        """The results of every row by itself, a batch of one with its own key, added up."""

        def one(row: PyTree) -> Any:
            row, key = jax.tree.map(lambda leaf: leaf[None], row)
            result, new = self._run(params, row, key, model_state)
            check_form(result, stateful=False)
            return result, new

        rows = shared_rows.value or SharedRows()
        with shared_rows(rows._replace(samples=(_SAMPLES,))):
            results, new = jax.vmap(one, axis_name=_SAMPLES)((batch, keys))
        # A state is the same for all rows: one that is computed from a row is found in the whole loss, and refused.
        return jax.tree.map(lambda leaf: leaf.sum(0), results), jax.tree.map(lambda leaf: leaf[0], new)


def _not_numpy(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def call_user(fn: Callable[..., Any], module: Any, batch: PyTree, keys: jax.Array | None) -> Any:
    """The user's fn(module, batch), with the keys if it has an argument of that name."""
    return fn(module, batch, **({"keys": keys} if "keys" in inspect.signature(fn).parameters else {}))


def module_kind(module: Any) -> str:
    """What a user gave for a module, in an error."""
    return f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
