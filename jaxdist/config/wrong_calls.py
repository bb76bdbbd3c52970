"""Wrong arguments of calls in Python, each refused in one line. Imports no jax."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from jaxdist.errors import UserError, nearest

_MODEL = "a ModelDef, what jaxdist.nnx_loss or linen_loss makes, or a loss_fn(params, batch, keys)"
_ALLOWED = {
    "precision": "a jaxdist.Precision, or the name of a policy; give precision='bf16'",
    "grad_sync": "a jaxdist.GradSync; give grad_sync=jaxdist.GradSync(algorithm='ring')",
    "freeze": "a sequence of patterns; give freeze=('embed.*',)",
    "options": "a jaxdist.StepOptions, or None; give its fields as keywords, strategy='zero3'",
    "callbacks": "functions (step, metrics); give callbacks=[f]",
    "state": "a TrainState, as jaxdist.init_state makes it; call step(state, batch)",
    "optimizer": "what a call of optax makes; give optax.adam(1e-3)",
    "model": _MODEL,
    "loss": _MODEL,
}
_MODULES = {
    "flax.nnx": "; give jaxdist.nnx_loss(module, fn), whose fn(module, batch) computes the loss",
    "flax.linen": "; give jaxdist.linen_loss(module, variables, fn), whose fn(module, batch) computes the loss",
}
_ONLY_OF = {"rules": "init_state", "model_state": "init_state"}  # what is taken beside options, by that alone


@contextmanager
def own_names() -> Iterator[None]:
    """A context in which a `UserError` names what `fit` takes, not keys and options of `scripts/train.py`."""
    try:
        yield
    except UserError as error:
        own = re.sub(r"--(?=run-dir)|\btrain\.(?=(steps|seed|ema)\b)", "", str(error)).replace("run-dir", "run_dir")
        own = own.replace("precision.max_consecutive_skips", "max_skips")
        if own == str(error):
            raise
        raise UserError(own) from error


def refuse_argument(name: str, value: Any) -> NoReturn:
    """Raise the `UserError` for an argument of a wrong kind."""
    if isinstance(value, str | int | float | None):
        shown = f"{value!r:.60}"
    elif isinstance(value, type) or hasattr(value, "__name__"):
        shown = f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    else:
        shown = f"a {type(value).__name__}"
    kinds = [each.__module__ for each in (value if isinstance(value, type) else type(value)).__mro__]
    hints = [hint for package, hint in _MODULES.items() if any(kind.startswith(package) for kind in kinds)]
    raise UserError(f"{name}: is {shown}; allowed: {_ALLOWED[name]}{''.join(hints)}")


def refuse_keyword(name: str, value: Any, known: Iterable[str]) -> NoReturn:
    """Raise the `UserError` for a keyword that is none of those that are `known`, the options of a step."""
    near = nearest(name, [*known, *_ONLY_OF])
    hint = f"; did you mean {near}={value!r:.40}?" if near else ""
    if near in _ONLY_OF:
        hint = f"; {near}= is an argument of {_ONLY_OF[near]} alone"
    raise UserError(f"{name}: is no keyword; allowed: {', '.join(known)}{hint}")


def refuse_use(*, traced: bool = False, disabled: bool = False) -> NoReturn:
    """Raise the `UserError` for a call of a step inside of a program, inside of `jax.disable_jit`, or with a state that
    is used up."""
    if disabled:
        raise UserError(
            "jax.disable_jit: is on, and a state is laid out over devices by compiled programs; allowed: off; to look"
            " into a loss, call it by itself, or use jax.debug.print and jax.debug.breakpoint inside"
        )
    if traced:
        raise UserError(
            "state: is traced by jax, and a step is compiled by itself: inside jax.jit, lax.scan or jax.eval_shape it"
            " cannot be called; allowed there: what step.jitted(state) gives, called outside with the real state"
        )
    raise UserError("state: was given to an earlier step, which used it up; write state, metrics = step(state, batch)")


def refuse_state(
    leaves: Mapping[str, Any], loose: Iterable[str], cast: Iterable[str], *, guard: bool, dtype: str
) -> NoReturn:
    """Raise the `UserError` for a state that is not as `init_state` makes it for this step.

    loose, cast: the names of leaves without a layout on a mesh, and of parameters that are not in `dtype`.
    """
    if not guard:
        raise UserError("state: has no guard; make it with init_state, or add precision.loss_scale.fresh_guard()")
    for name in (each for each in leaves if each in loose):
        raise UserError(
            f"state: {name} is no array that is laid out on the mesh; allowed: arrays laid out as init_state made them;"
            " give jax.device_put(new, jax.tree.map(lambda x: x.sharding, old))"
        )
    for name in (each for each in leaves if each in cast):
        raise UserError(
            f"{name}: {leaves[name].dtype}, but this precision keeps parameters in {dtype}; cast it or choose another"
            " precision"
        )
    raise UserError("state: made on another mesh than the step's; give init_state and make_train_step the same")


def refuse_order(*orders: Sequence[int]) -> NoReturn:
    """Raise the `UserError` for a state whose blocks are in another order than its model's. orders: both, as in
    `BlockOrder.rows`."""
    mine, wanted = (f"as blocks {list(each)}" if each else "in the order of the model" for each in orders)
    raise UserError(
        f"state: the rows of its blocks are {mine}, and this step's model has them {wanted}; give init_state (or"
        " state_target) and make_train_step the same model; parameters that are in this order already go into its"
        " state: init_state(model, ...)._replace(params=params)"
    )


def refuse_whole(name: str, spec: Any, options: Any, *, own: bool) -> NoReturn:
    """Raise the `UserError` for a state without shards where the strategy shards the parameter `name`.

    own: whether parameters are a tree of the user's, which takes rules.
    """
    chosen = f"strategy={options.strategy!r:.60}"
    rules = f"; or rules=[({name!r}, P())], if they are to be whole" if own else ""
    raise UserError(
        f"state: all parameters are whole, as with strategy='ddp' or a larger min_shard_bytes, but {chosen}"
        f" shards {name} as {spec} with min_shard_bytes={options.min_shard_bytes}; give init_state and"
        f" make_train_step the same options, as init_state(..., {chosen}){rules}"
    )


def refuse_dim(name: str, shape: Sequence[int], dim: int, parts: Mapping[str, int], stacked: bool) -> NoReturn:
    """Raise the `UserError` for a dim of the parameter `name` that the sizes of the mesh axes do not divide.

    parts: these sizes. stacked: whether the dim is that of the blocks of a model.
    """
    size, over = shape[dim], f"{'*'.join(parts)}={math.prod(parts.values())}"
    if stacked:
        raise UserError(
            f"{name}: dim 0 of {tuple(shape)} is the number of blocks, {size}, not divisible by {over}; allowed:"
            " another number of blocks, another pipe, or stages of unequal sizes, by"
            f" jaxdist.parallel.pipeline.stages.arrange(model, stages={parts['pipe']}, blocks=(...))"
        )
    raise UserError(
        f"{name}: dim {dim} of {tuple(shape)} is {size}, not divisible by {over}; change the width or the mesh"
    )


def refuse_rows(batch: int, parts: Mapping[str, int], key: str, *, near: str, counts: str, of_call: bool) -> NoReturn:
    """Raise the `UserError` for a batch whose rows do not divide into `parts`. key: see `check_rows`.

    near, counts: the nearest numbers of rows, and of microbatches, that work.
    of_call: whether the key is an argument of a call, which is an array, not a number.
    """
    count = math.prod(parts.values())
    one = ("does not divide by", "is no batch, give a multiple of", "batch sizes")
    many = ("rows do not divide by", "rows are no batch, give a multiple of", "numbers of rows")
    over, none, sizes = many if of_call else one
    text = (
        f"{key}: {batch} {over if batch else none} {count}"
        f" ({' x '.join(f'{name} {size}' for name, size in parts.items())});"
        f" nearest {sizes} that work: {near}"
    )
    if "microbatches" in parts:
        text += f"; {'' if of_call else 'parallel.'}microbatches that work with {batch}: {counts}"
    raise UserError(text)


def refuse_needs(names: Iterable[str], error: Exception | None = None) -> NoReturn:
    """Raise the `UserError` for an optimizer whose update needs more than gradients, state and parameters."""
    raise UserError(
        f"optimizer: its update needs {', '.join(f'{name}=' for name in names)}, which a step does not give; allowed:"
        " optimizers that need no loss; give one that goes by gradients alone, such as optax.adam(1e-3)"
    ) from error
