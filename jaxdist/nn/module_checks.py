"""What `model_def` refuses of an `nnx.Module`: how it is built, how its parts are called, and what they hold."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist.errors import UserError
from jaxdist.specs import STACKED

NO_ARRAYS = (
    "A model holds no arrays but its parameters: keep the numbers that it is made of, and compute it in __call__ (there"
    " the compiler makes a constant of it); or make it an nnx.Param of floats, which is trained unless `freeze` names"
    " it"
)


def _class_of(build: Any) -> str:
    """The name of the class that is built, or "Model" where it is not known, as of a lambda."""
    if isinstance(build, nnx.Module):
        return type(build).__name__
    name = getattr(getattr(build, "func", build), "__name__", "")
    return name if name.isidentifier() else "Model"


def check_build(build: Any) -> None:
    """Raise `UserError` unless it can be called with random streams alone."""
    give = f"give a function of random streams: model_def(lambda rngs: {_class_of(build)}(..., rngs=rngs))"
    if isinstance(build, nnx.Module):
        raise UserError(f"model_def: build is a {_class_of(build)} that is made already; {give}")
    partial = isinstance(build, functools.partial)
    called, given = (build.func, (build.args, build.keywords)) if partial else (build, ((), {}))
    if isinstance(called, type):  # `nnx.Module`'s metaclass takes anything
        called = functools.partial(called.__init__, None)  # type: ignore[misc]  # of this very class
    try:
        inspect.signature(called).bind(*given[0], None, **given[1])
    except (TypeError, ValueError) as error:  # ValueError: it has no signature
        raise UserError(f"model_def: build is not called with one argument, an nnx.Rngs ({error}); {give}") from None


def check_arrays(module: Any) -> None:
    """Raise `UserError` for an array that an attribute holds without an nnx.Param."""
    for path, node in nnx.iter_graph(module) if isinstance(module, nnx.Module) else ():
        own = lambda each: isinstance(each, nnx.Variable | nnx.Module)  # which are nodes themselves  # noqa: E731
        held = [] if own(node) else jax.tree.leaves(node, is_leaf=own) if isinstance(node, dict) else [node]
        if any(isinstance(each, jax.Array | np.ndarray) for each in held):
            raise UserError(f"model_def: {'.'.join(map(str, path))} is an array. {NO_ARRAYS}")


def check_calls(skeleton: Any, *, rows: bool) -> None:
    """Raise `UserError` for a part that does not take what it is called with. rows: whether blocks are given rows."""
    calls = {"embed": "batch, keys", STACKED: "h, keys, rows" if rows else "h, keys", "head": "h, batch, embed"}
    for part, given in calls.items():
        module = skeleton.blocks[0] if part == STACKED else getattr(skeleton, part)
        try:
            inspect.signature(module).bind(*given.split(", "))
        except TypeError as error:  # of what cannot be called, too
            other = "leave model_def's rows out" if rows else "for more give model_def(..., rows=lambda batch: ...)"
            raise UserError(
                f"model_def: {type(module).__name__} of {part} is called with ({given}), and does not take that"
                f" ({error}); write def __call__(self, {given}){f'; or {other}' if part == STACKED else ''}"
            ) from None


def _check_floats(place: str, param: nnx.Param) -> None:
    """Raise `UserError` for a parameter of other numbers than floats, to which all are cast. place: its path."""
    dtype = param.get_value().dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return
    instead = "keep integers and bools as numbers in a tuple, and make the array in __call__"
    if jnp.issubdtype(dtype, jnp.complexfloating):
        instead = "make two parameters of floats, and the array in __call__ by jax.lax.complex(real, imaginary)"
    raise UserError(f"model_def: parameter {place} is {dtype}; allowed: floats; {instead}")


def check_losses(skeleton: Any) -> None:
    """Raise `UserError` for a layer with losses of its own in blocks that get no rows, which weigh them."""
    for _, node in nnx.iter_graph(skeleton.blocks):
        options = getattr(node, "options", None) if callable(getattr(node, "figures", None)) else None
        for name in ("balance_loss", "z_loss"):
            if value := getattr(options, name, 0):
                raise UserError(
                    f"model_def: rows is not given, and {name} {value:g} of {type(node).__name__} would count nothing;"
                    " allowed: rows with the weight of each sample's losses, as docs/experts.md shows it; or"
                    f" {name}=0"
                )


def check_variables(skeleton: Any) -> None:
    """Raise `UserError` for state that is no parameter, and for a parameter outside the parts or in two of them, or of
    other numbers than floats."""
    nodes, owners = dict(nnx.iter_graph(skeleton)), dict[int, str]()
    blocks = {f"blocks[{i}]": block for i, block in enumerate(skeleton.blocks)}
    for part, module in {"embed": skeleton.embed, **blocks, "head": skeleton.head}.items():
        for path, node in nnx.iter_graph(module):
            if not isinstance(node, nnx.Param):
                continue
            _check_floats(".".join([part, *map(str, path)]), node)
            if owners.setdefault(id(node), part) != part:
                tied = "give the head the embedding as its third argument, by model_def(..., tied=True)"
                raise UserError(
                    f"model_def: {owners[id(node)]} and {part} share a parameter, which would become two;"
                    f" {tied if part == 'head' else 'make one for each'}"
                )
    if "blocks[0]" not in owners.values():
        raise UserError(
            "model_def: blocks have no parameter, and what is split and gathered is their parameters; allowed: one or"
            " more; put what has none into the embedding or the head"
        )
    for path, node in nodes.items():
        if not isinstance(node, nnx.Variable) or id(node) in owners:
            continue
        place, kind = ".".join(map(str, path)), type(node).__name__
        if isinstance(node, nnx.Param):
            raise UserError(
                f"model_def: parameter {place} is in none of embed, blocks and head, so that nothing would compute"
                " with it; put it into one of them"
            )
        while not isinstance(nodes[path], nnx.Module):
            path = path[:-1]
        layer, where = type(nodes[path]).__name__, ".".join(map(str, path))
        where = where or "the model itself"
        if isinstance(node, nnx.RngState):
            raise UserError(
                f"model_def: {where} ({layer}) holds random state, which would be the same at every step; keep no"
                " nnx.Rngs; for dropout use jaxdist.nn.dropout(h, keys, site=1, rate=0.1), with another site for each;"
                " recurrent layers of Flax keep one: give the model as a loss of your own, by jaxdist.nnx_loss"
            )
        raise UserError(
            f"model_def: {where} ({layer}) holds a {kind}, state that is no nnx.Param; use a layer without, such as"
            " nnx.LayerNorm or nnx.GroupNorm, or give the model as a loss of your own"
        )
