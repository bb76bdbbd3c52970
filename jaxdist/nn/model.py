"""Model definitions: `model_def` turns an `nnx.Module` into pure functions on trees. The rest is plain JAX."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxdist.config.sections.optimizer import LoraConfig
from jaxdist.errors import UserError
from jaxdist.jaxpr.alike import stacked
from jaxdist.model import ModelDef
from jaxdist.nn.attention.cache import run_cached
from jaxdist.nn.embedding import PositionEmbed
from jaxdist.nn.module_checks import NO_ARRAYS, check_arrays, check_build, check_calls, check_losses, check_variables
from jaxdist.nn.param import specs_of, update_rules_of
from jaxdist.specs import STACKED, PyTree, map_specs

PARTS = {
    "embed": "a module, embed(batch, keys) -> h",
    "blocks": "an nnx.List of one or more modules that are built alike, block(h, keys) -> h",
    "head": "a module, head(h, batch, embed or None) -> (loss sum, weight sum)",
}


def _pure(module: nnx.Module) -> PyTree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _of_layers(module: nnx.Module, option: str) -> list[Any]:
    """The values of an attribute in all layers that have it."""
    return [getattr(node, option, None) for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)]


def _any_layer(module: nnx.Module, option: str) -> bool:
    return any(_of_layers(module, option))


def _skeleton(build: Callable[[nnx.Rngs], Any], *, rows: bool) -> Any:
    """The module without arrays. Raises `UserError` for what makes none, and for a module that has no such parts."""
    check_build(build)

    def checked() -> Any:
        module = build(nnx.Rngs(0))
        check_arrays(module)  # here, while it is traced: arrays among what is static cannot leave the trace
        return module

    try:
        skeleton = nnx.eval_shape(checked)
    except ValueError as error:
        first, *_ = str(error).splitlines()
        if isinstance(error, UserError) or not first.startswith("Found data"):
            raise
        raise UserError(f"model_def: {first.split(' Static ')[0]} {NO_ARRAYS}") from None  # Flax's of a list of arrays
    of = type(skeleton).__name__
    for part, what in PARTS.items():
        if not hasattr(skeleton, part):
            raise UserError(f"model_def: {of} has no attribute {part}; allowed: {part}: {what}; see docs/own_model.md")
        own = getattr(skeleton, part)
        modules: Any = own if part == STACKED else [own]
        fits = isinstance(modules, nnx.List | list) and len(modules) > 0
        if not fits or not all(isinstance(module, nnx.Module) for module in modules):
            raise UserError(f"model_def: {of}.{part}, a {type(own).__name__}, does not fit; allowed: {part}: {what}")
    check_variables(skeleton)
    check_calls(skeleton, rows=rows)
    if not rows:
        check_losses(skeleton)
    return skeleton


def _reads(reader: str, function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """The function, for which a leaf that the batch lacks is a `UserError`.

    reader: what reads it. place: the batch's among the arguments.
    """

    def read(*given: Any) -> Any:
        try:
            return function(*given)
        except KeyError as error:
            batch = given[place]
            if not isinstance(batch, dict) or error.args[0] in batch:
                raise  # it is a key of something else
            has = ", ".join(sorted(map(str, batch.keys() - {"keys"})))
            raise UserError(
                f"{reader}: reads batch[{error.args[0]!r}], which the batch does not have; it has {has}; read one of"
                " these, or give batches such a leaf"
            ) from error

    return read


def _uniform(blocks: Any) -> Any:
    """(definition, state) of each block. Raises `UserError` for blocks that differ."""
    split = [nnx.split(block, nnx.Param) for block in blocks]
    kinds = [(graph, jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(state))) for graph, state in split]
    if any(kind != kinds[0] for kind in kinds):
        raise UserError(
            "model_def: blocks must be uniform (same module, same options, same shapes): they are stacked, and a loop"
            " runs over them; give them what differs as parameters"
        )
    return split[0]


def _head_sums(head: Any, *given: Any) -> Any:
    """What the head returns. Raises `UserError` unless it is two scalars."""
    found = head(*given)
    if not isinstance(found, tuple) or len(found) != 2 or any(jnp.shape(each) for each in found):
        shown = jax.tree.map(lambda each: jax.typeof(each).str_short(), found)
        raise UserError(
            f"{type(head).__name__}: a head must return two scalars, (loss sum, weight sum) over these rows, such as"
            f" (losses.sum(), losses.size); it returned {shown}. For metrics of evaluations write a method"
            " metrics(h, batch, embed)"
        )
    return found


def _has_metrics(head: Any) -> bool:
    """Whether the head has a method for metrics. Raises `UserError` for one that is not called as the head is."""
    if not callable(getattr(head, "metrics", None)):
        return False
    try:
        inspect.signature(head.metrics).bind("h", "batch", "embed")
    except TypeError as error:
        raise UserError(
            f"model_def: metrics of {type(head).__name__} is called with (h, batch, embed), and does not take that"
            f" ({error}); write def metrics(self, h, batch, embed)"
        ) from None
    return True


def _cached_of(skeleton: Any, block_of: Callable[..., Any]) -> Callable[..., Any] | None:
    """`ModelDef.cached`; None unless the embedding takes `positions`, blocks take `cache` and need no rows, and no
    attention looks at later tokens. block_of: (params, keys_B) -> a block."""
    takes = lambda module, name: name in inspect.signature(module).parameters  # noqa: E731
    both_ways = any(getattr(node, "causal", True) is False for _, node in nnx.iter_graph(skeleton))
    if both_ways or not takes(skeleton.embed, "positions") or not takes(skeleton.blocks[0], "cache"):
        return None
    try:
        inspect.signature(skeleton.blocks[0]).bind("h", "keys", cache=None)
    except TypeError:
        return None
    return lambda params, h, keys_B, past: run_cached(block_of(params, keys_B), h, keys_B, past)


def _facts(skeleton: Any) -> dict[str, Any]:
    """The fields of a `ModelDef` that are read from its layers."""
    tables = [node.table.shape for _, node in nnx.iter_graph(skeleton) if isinstance(node, PositionEmbed)]
    return {
        "layers": len(skeleton.blocks),
        "fp8": _any_layer(skeleton, "fp8"),
        "collective_matmul": _any_layer(skeleton, "collective_matmul"),
        "context": next(filter(None, _of_layers(skeleton, "context")), None),
        "positions": min((length for length, _ in tables), default=None),
    }


def _own_updates(skeleton: Any) -> dict[str, Any]:
    """The fields of a `ModelDef` about parameters that no optimizer updates."""
    units = {"embed": skeleton.embed, STACKED: skeleton.blocks[0], "head": skeleton.head}
    rules = {
        f"{unit}.{path}": rule
        for unit, module in units.items()
        for path, rule in update_rules_of(nnx.state(module, nnx.Param)).items()
    }
    counting = [node for _, node in nnx.iter_graph(skeleton.blocks[0]) if callable(getattr(node, "figures", None))]
    if len(counting) > 1:
        raise UserError(
            f"model_def: a block has {len(counting)} layers with figures, such as MoE; allowed: one, since their"
            " figures have the same names"
        )
    figures = counting[0].figures if counting else None
    return {"update_rules": rules, "figures": figures, "weighs_rows": bool(counting)}


def _optional(skeleton: Any, head_def: Any, embedding: Any, of_head: Any, block_of: Any) -> dict[str, Any]:
    """The fields of a `ModelDef` that only some modules have."""
    return {
        **_facts(skeleton),
        **_own_updates(skeleton),
        **_parts_of_logits(skeleton.head, head_def, embedding),
        "metrics": _metrics_of(skeleton.head, of_head),
        "cached": _cached_of(skeleton, block_of),
    }


def _metrics_of(head: Any, of_head: Callable[..., Any]) -> Callable[..., Any] | None:
    """`ModelDef.metrics`. of_head: makes a head, and what its methods are called with, of a function's arguments."""

    def metrics(head: Any, *given: Any) -> Any:
        return head.metrics(*given)

    if not _has_metrics(head):
        return None
    return _reads(f"metrics of {type(head).__name__}", lambda *given: metrics(*of_head(*given)), 3)


def _with_adapters(build: Any, lora: LoraConfig | None) -> tuple[Any, Callable[[Any, jax.Array], Any]]:
    """(build with adapters, if there are any; what gives a block the dropout keys of its rows)."""
    if lora is None:
        return build, lambda block, keys_B: block
    from jaxdist.nn.lora import adapting, keyed  # which imports layers

    check_build(build)
    return adapting(build, lora), keyed


def _logits(head: Any, h: jax.Array, embed: Any) -> jax.Array:
    if not hasattr(head, "logits"):
        raise UserError(
            f"{type(head).__name__} has no method logits(h, embed or None) -> [B, S, vocabulary], which sampling"
            " needs; write one"
        )
    found: jax.Array = head.logits(h, embed)
    return found


def _drawn(build: Callable[[nnx.Rngs], Any], param_dtype: Any, key: jax.Array) -> PyTree:
    """The parameters of the module that is built with this key."""

    def draw(key: jax.Array) -> tuple[list[PyTree], PyTree]:
        module = build(nnx.Rngs(key))
        return [_pure(block) for block in module.blocks], {"embed": _pure(module.embed), "head": _pure(module.head)}

    blocks, ends = stacked(draw, key)
    return jax.tree.map(lambda leaf: leaf.astype(param_dtype), {**ends, "blocks": blocks})


def _shapes(param_dtype: Any, layers: int, **states: Any) -> PyTree:
    """The parameters as `_drawn` gives them, by the state of each part; that of the blocks is of one of them."""

    dtype = jax.dtypes.canonicalize_dtype(param_dtype)

    def whole(part: str, state: Any) -> PyTree:
        lead = (layers,) if part == STACKED else ()
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), dtype), nnx.to_pure_dict(state))

    return {part: whole(part, state) for part, state in states.items()}


def _parts_of_logits(head: Any, head_def: Any, embedding: Callable[[PyTree], Any]) -> dict[str, Any]:
    """`features` and `vocabulary` of a `ModelDef`, where the head has both methods."""
    if not all(callable(getattr(head, method, None)) for method in ("features", "vocabulary")):
        return {}
    return {
        "features": lambda params, h: nnx.merge(head_def, params).features(h),
        "vocabulary": lambda params, embed: nnx.merge(head_def, params).vocabulary(embedding(embed)),
    }


def model_def(
    build: Callable[[nnx.Rngs], Any],
    *,
    tied: bool = False,
    param_dtype: Any = jnp.float32,
    scan_blocks: int | None = None,
    columns: bool = False,
    rows: Callable[[PyTree], PyTree] | None = None,
    lora: LoraConfig | None = None,
) -> ModelDef:
    """The `ModelDef` of an nnx.Module. Nothing is allocated: the module is traced abstractly.

    build: rngs -> the module. Its parts are three attributes:
        embed: a module, embed(batch, keys_B) -> h.
        blocks: an nnx.List of uniform modules, block(h, keys_B) -> h; with rows, block(h, keys_B, rows) -> h. For a
            key/value cache a block takes `cache`, which it passes on to its `jaxdist.nn.Attention`, and embed takes
            `positions` [B, S] or None too (docs/generation.md).
        head: a module, head(h, batch, embed | None) -> (loss sum, weight sum), with a method logits(h, embed | None) ->
            logits over the whole vocabulary, if text is to be sampled; and a method metrics(h, batch, embed | None) ->
            {"accuracy": (sum, weight)}, if evaluations are to have more; and, to be distilled, features and vocabulary.
    param_dtype: the dtype of all parameters.
    lora: adapters of linear layers, see `jaxdist.nn.lora`. tied, scan_blocks, columns, rows: see `ModelDef`.

    Raises `UserError` for a module without such parts, with state that is no parameter, or with blocks that are not
    uniform: they are stacked and scanned over.

    >>> class Part(nnx.Linear):  # stands for embed, block and head as above
    ...     def __call__(self, x, *given): ...
    >>> class Model(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.embed, *blocks, self.head = (Part(8, 8, rngs=rngs) for _ in range(6))
    ...         self.blocks = nnx.List(blocks)
    >>> assert jaxdist.model_def(Model).layers == 4
    """
    build, keyed = _with_adapters(build, lora)
    init, skeleton = functools.partial(_drawn, build, param_dtype), _skeleton(build, rows=rows is not None)
    ends = (nnx.split(module, nnx.Param) for module in (skeleton.embed, skeleton.head))
    (embed_def, embed_state), (head_def, head_state) = ends
    block_def, block_state = _uniform(skeleton.blocks)
    block_of = lambda params, keys_B: keyed(nnx.merge(block_def, params), keys_B)  # noqa: E731
    block_specs = map_specs(lambda spec: P("pipe", *spec), specs_of(block_state))
    embedding = lambda params: None if params is None else nnx.merge(embed_def, params)  # noqa: E731
    name = lambda module: type(module).__name__  # noqa: E731
    of_head = lambda params, embed, *given: (nnx.merge(head_def, params), *given, embedding(embed))  # noqa: E731
    return ModelDef(
        init=init,
        specs={"embed": specs_of(embed_state), "blocks": block_specs, "head": specs_of(head_state)},
        shapes=_shapes(param_dtype, len(skeleton.blocks), embed=embed_state, blocks=block_state, head=head_state),
        embed=_reads(name(skeleton.embed), lambda params, *given: nnx.merge(embed_def, params)(*given), 1),
        block=lambda params, h, keys_B, *rows: block_of(params, keys_B)(h, keys_B, *rows),
        head=_reads(name(skeleton.head), lambda *given: _head_sums(*of_head(*given)), 3),
        logits=lambda params, embed, h: _logits(nnx.merge(head_def, params), h, embedding(embed)),
        tied=tied,
        columns=columns,
        scan_blocks=scan_blocks,
        rows=rows and _reads(f"rows of {name(skeleton)}", rows, 0),
        **_optional(skeleton, head_def, embedding, of_head, block_of),
    )
