"""Make a training state, laid out from its first byte."""

import fnmatch
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config.entries import StrategyFacts
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import UserError
from jaxdist.files.launcher_notes import not_joined
from jaxdist.mesh import HOST, AnyMesh, check_mesh, has_host_memory
from jaxdist.model import ModelDef, rules_of
from jaxdist.optim import leave_out, only_trained
from jaxdist.optim.ema import carrying, not_carrying
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.modules.module_loss import ModuleLoss
from jaxdist.parallel.options import StepOptions, make_options
from jaxdist.precision.reproducible import products_rounded
from jaxdist.specs import (
    SHARD_AXES,
    STACKED,
    PyTree,
    claimed_axes,
    entry_axes,
    leaves_by_name,
    map_specs,
    path_name,
    placed_specs,
    spec_axes,
    spec_leaves,
    without_idle,
)
from jaxdist.state import TrainState, abstract_state, fresh_state, lay_out, place_params, shardings_of

Rules = Sequence[tuple[str, P]]
ParameterSource = ModelDef | ModuleLoss | Callable[[jax.Array], PyTree] | PyTree


def _pairs_of(rules: Any) -> Rules:
    """The rules. Raises `UserError` unless they are pairs of a pattern and a spec."""
    wanted = "allowed: a list of pairs (pattern, PartitionSpec)"
    example = "give [('*.kernel', P(None, 'fsdp'))]"
    if isinstance(rules, Mapping | str) or not isinstance(rules, Iterable):
        mend = "give list(rules.items())" if isinstance(rules, Mapping) else example
        raise UserError(f"rules: is a {type(rules).__name__}; {wanted}; {mend}")
    rules = [*rules]
    for pair in rules:
        pattern, spec = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        if not isinstance(pattern, str) or not isinstance(spec, P):
            raise UserError(f"rules: {pair!r:.60} is no pair; {wanted}; {example}")
    return rules


def apply_rules(specs: PyTree, rules: Sequence[tuple[str, P]]) -> PyTree:
    """The specs after sharding rules: a leaf gets the spec of the first rule whose pattern fits its path.

    rules: pairs (pattern, spec), as ("blocks.mlp.*", P(None, "fsdp")).

    Raises `UserError` for a rule that no path reaches, and for a spec other than one dim over fsdp, or P().
    """
    rules, used = _pairs_of(rules), set()

    def one(path: tuple[Any, ...], spec: P) -> P:
        for i, (pattern, chosen) in enumerate(rules):
            if fnmatch.fnmatchcase(path_name(path), pattern):
                used.add(i)
                return chosen
        return spec

    for pattern, chosen in rules:
        if spec_axes(chosen) not in ((), ("fsdp",)):
            raise UserError(f"rules: {pattern!r}: {chosen}; allowed: one dim over fsdp, as P(None, 'fsdp'), or P()")
    chosen_specs = jax.tree_util.tree_map_with_path(one, specs, is_leaf=lambda node: isinstance(node, P))
    if missed := [pattern for i, (pattern, _) in enumerate(rules) if i not in used]:
        raise UserError(
            f"rules: {missed[0]!r} is reached by no parameter (the first rule that fits wins); leave it "
            "out, or put it earlier"
        )
    return chosen_specs


def check_divisible(shapes: PyTree, specs: PyTree, mesh: AnyMesh) -> None:
    """Raise `UserError` with parameter, dim and axis if a dim is not divisible by the axes over which it is split, and
    for two parameters of one name, which no checkpoint can tell apart."""
    for (name, shape), spec in zip(leaves_by_name(shapes).items(), spec_leaves(specs), strict=True):
        if len(spec) > len(shape.shape):
            raise UserError(f"{name}: spec {spec} has more entries than the shape {shape.shape} has dims")
        for dim, entry in enumerate(spec):
            if shape.shape[dim] % math.prod(mesh.shape[axis] for axis in entry_axes(entry)):
                from jaxdist.config.wrong_calls import refuse_dim

                stacked = dim == 0 and entry_axes(entry) == ("pipe",) and name.startswith(f"{STACKED}.")
                refuse_dim(name, shape.shape, dim, {axis: mesh.shape[axis] for axis in entry_axes(entry)}, stacked)


def on_host(target: PyTree) -> PyTree:
    """The tree of ShapeDtypeStructs in host memory."""

    def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not leaf.ndim:  # counts of steps stay on the device: 4 bytes each, and the step would wait for every one
            return leaf
        there = leaf.sharding.with_memory_kind(HOST)
        if there.memory_kind != HOST:  # meshes of described devices drop the memory kind (jax 0.12)
            there = NamedSharding(leaf.sharding.mesh.abstract_mesh, leaf.sharding.spec, memory_kind=HOST)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there)

    return jax.tree.map(one, target)


def residual_target(shapes: PyTree, specs: PyTree, mesh: AnyMesh, sync: GradSync) -> tuple[PyTree, PyTree]:
    """(shapes, specs) of the residual: the errors of each device's int8 encodings, a leaf for each parameter.

    ((), ()) for other formats. The leading dim of a leaf has an entry for each copy of the parameter. A parameter
    without copies is not summed; its leaf is a zero, [1].
    """
    if sync.wire_dtype != "int8":
        return (), ()

    def copies(spec: P) -> int:
        return math.prod(mesh.shape[axis] for axis in claimed_axes(spec))

    def shape_of(spec: P, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((copies(spec), *leaf.shape) if copies(spec) > 1 else (1,), jnp.float32)

    def spec_of(spec: P) -> P:
        return without_idle(P(claimed_axes(spec), *spec), mesh) if copies(spec) > 1 else P()

    return map_specs(shape_of, specs, shapes), map_specs(spec_of, specs)


def _is_init(source: Any) -> bool:
    """Whether it is a function key -> parameters. Trees of parameters can be callable, too: modules of Equinox are."""
    return callable(source) and jax.tree_util.all_leaves([source])


def _taken_apart(source: ParameterSource, model_state: PyTree) -> tuple[Any, PyTree]:
    """Parameters, or what makes them, and state: of the loss of a module its own, of a `ModelDef` the order of its
    blocks; those that are given otherwise."""
    if isinstance(source, ModelDef) and not jax.tree.leaves(model_state):
        return source, source.arranged if source.arranged and source.arranged.rows else ()
    if not isinstance(source, ModuleLoss):
        return source, model_state
    init = source.init
    params = source.params if init is None else lambda key: init(key)[0]
    return params, model_state or source.model_state


def _refuse_modules(source: PyTree) -> None:
    """Raise `UserError` for a class of Flax, and for NNX modules and variables that are no parameters: as leaves they
    would be trained."""
    if callable(source) and "flax.linen" in [each.__module__.rpartition(".")[0] for each in type(source).__mro__]:
        raise UserError(
            f"params: is a {type(source).__name__} of Flax Linen; give what loss = jaxdist.linen_loss(module, variables"
            ", fn) returns, to make_train_step too: it takes the module apart"
        )
    if isinstance(source, type) and any(each.__module__.startswith("flax.") for each in source.__mro__):
        raise UserError(
            f"params: is the class {source.__name__}; allowed: a ModelDef, a loss of jaxdist.nnx_loss(module, fn), a "
            "function key -> parameters, or a tree of arrays; give one of these"
        )
    if (nnx := sys.modules.get("flax.nnx")) is None:  # then there is none
        return
    for node in jax.tree.leaves(source, is_leaf=lambda node: isinstance(node, nnx.Module | nnx.Variable)):
        if isinstance(node, nnx.Module | nnx.Variable) and not isinstance(node, nnx.Param):
            raise UserError(
                f"params: holds a {type(node).__name__} of Flax NNX; give what loss = jaxdist.nnx_loss(module, fn)"
                " returns, to make_train_step too: it takes the module apart"
            )


def _shapes_and_specs(source: ParameterSource) -> tuple[PyTree, PyTree]:
    if isinstance(source, ModelDef):
        _refuse_kinds(source.shapes)
        return source.shapes, source.specs
    _refuse_modules(source)
    for path, leaf in [] if _is_init(source) else jax.tree_util.tree_leaves_with_path(source):
        if not hasattr(leaf, "shape"):
            raise UserError(
                f"params.{path_name(path)}: {leaf!r:.60} is no array; give a tree of arrays, such as the first of "
                "eqx.partition(model, eqx.is_inexact_array)"
            )
    shapes = jax.eval_shape(source, jax.random.key(0)) if _is_init(source) else jax.eval_shape(lambda: source)
    _refuse_kinds(shapes)
    return shapes, jax.tree.map(lambda _: P(), shapes)


def _refuse_kinds(shapes: PyTree) -> None:
    """Raise `UserError` for parameters that are no real floats, and for empty ones."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise UserError(
                f"params.{path_name(path)}: {leaf.dtype}; allowed: real parameters, whose sums and norms are defined;"
                " give real and imaginary parts as two arrays, and join them in the loss by jax.lax.complex"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"params.{path_name(path)}: {leaf.dtype}, which has no gradient; give parameters alone, as "
                "nnx.to_pure_dict(nnx.state(model, nnx.Param)) does, or what jaxdist.nnx_loss(model, fn) returns"
            )
        if not leaf.size:
            raise UserError(
                f"params.{path_name(path)}: {leaf.dtype}{list(leaf.shape)} is empty, which no checkpoint can hold;"
                " allowed: arrays of at least one number; leave it out"
            )


def _in_bytes(dtype: Any) -> bool:
    """Whether numbers of a dtype are real ones of whole bytes."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits >= 8
    return dtype == jnp.bool_ or (jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits >= 8)


def _replicated_like(tree: PyTree, mesh: AnyMesh) -> PyTree:
    """A tree of arrays as ShapeDtypeStructs that are whole on every device."""
    shapes, sharding = jax.eval_shape(lambda tree: tree, tree), NamedSharding(mesh, P())
    for name, leaf in leaves_by_name({"model_state": shapes}).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise UserError(
                f"{name}: {leaf.dtype}; random keys are no state, a loss is given new ones at every step; leave it out"
            )
        if not leaf.size or not _in_bytes(leaf.dtype):
            raise UserError(
                f"{name}: {leaf.dtype}{list(leaf.shape)}; allowed: arrays of at least one bool, integer or float, of 8"
                " bits or more; give a complex array as two floats, and leave an empty one out"
            )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)


def _written_out(spec: P, shape: jax.ShapeDtypeStruct) -> P:
    """The spec with an entry for every dim. By these `check_placed` knows that rules, not a strategy, keep it whole."""
    return P(*spec, *[None] * (len(shape.shape) - len(spec)))


def state_target(
    source: ParameterSource,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh,
    options: StepOptions | None = None,
    *,
    rules: Rules = (),
    model_state: PyTree = (),
    **keywords: Any,
) -> TrainState:
    """The state as ShapeDtypeStructs with shardings: what `init_state` fills, a checkpoint is restored into, and a step
    is compiled for without allocating anything.

    >>> mesh = jaxdist.make_mesh(fsdp=8)
    >>> jaxdist.state_target(lambda key: {"w": jnp.zeros((1024, 256))}, optax.sgd(0.1), mesh, strategy="zero3")
    TrainState(abstract, 262,144 parameters, 128.02 KiB a device, mesh: fsdp=8)
    """
    check_mesh(mesh)
    source, model_state = _taken_apart(source, model_state)
    shapes, specs = _shapes_and_specs(source)
    check_divisible(shapes, specs, mesh)
    options = make_options(options, keywords)
    optimizer, placing = only_trained(optimizer, options.freeze, rules_of(source)), get_strategy(options)
    placed = placing.place(shapes, specs, mesh)
    if rules and isinstance(source, ModelDef):
        raise UserError("rules: are for parameter trees of your own; the layers of a ModelDef say how they are sharded")
    if jax.tree.leaves(model_state) and isinstance(source, ModelDef):
        raise UserError("model_state: a ModelDef has none; allowed: with a loss_fn of your own, which takes it")
    placed = map_specs(_written_out, apply_rules(placed, rules), shapes) if rules else placed
    check_divisible(shapes, placed, mesh)
    stored = placed_specs(placed, mesh)
    residual = residual_target(
        leave_out(shapes, options.freeze), leave_out(stored, options.freeze), mesh, options.grad_sync
    )
    target = carrying(abstract_state(shapes, stored, optimizer, mesh, residual), _replicated_like(model_state, mesh))
    return target._replace(opt_state=on_host(target.opt_state)) if options.offload and has_host_memory(mesh) else target


@functools.cache  # once
def _tell_whole(strategy: str, data: int, over: str) -> None:
    """over: the axes to shard over, as "fsdp=8"; "": each has one device."""
    axes = f"{', '.join(SHARD_AXES[:-1])} and {SHARD_AXES[-1]}"
    none = f"{axes}, which have one device each here: every device of data={data} has all parameters"
    mend = f"make_mesh(fsdp={data})"
    if over:
        none = f"{over}, which divides no dim of a parameter: every device has all of them"
        mend = "dims or sizes of the mesh that divide"
    logging.getLogger("jaxdist").warning(
        f"strategy: {strategy!r} shards over {none}; give {mend} to shard them, or strategy='ddp'"
    )


@functools.cache  # once
def _tell_alone(said: str) -> None:
    """said: of `not_joined`."""
    if said:
        logging.getLogger("jaxdist").warning(said)


def _tell_unsharded(source: Any, options: StepOptions, mesh: Mesh, params: PyTree) -> None:
    """Say, once, that a strategy shards nothing, unless because parameters are small."""
    split = any({*spec_axes(leaf.sharding.spec)} & {*SHARD_AXES} for leaf in jax.tree.leaves(params))
    if split or jax.process_index() != 0 or not StrategyFacts.of(options.strategy).sharded:
        return
    over = " ".join(f"{axis}={mesh.shape[axis]}" for axis in SHARD_AXES if mesh.shape[axis] > 1)
    least = options.min_shard_bytes * (source.layers if isinstance(source, ModelDef) else 1)
    large = any(leaf.size * leaf.dtype.itemsize >= least for leaf in jax.tree.leaves(params))
    if large if over else mesh.shape["data"] > 1:
        _tell_whole(options.strategy, mesh.shape["data"], over)


def _allocate(
    make_params: Callable[[jax.Array], PyTree],
    key: jax.Array,
    optimizer: optax.GradientTransformation,
    target: TrainState,
) -> TrainState:
    """A state at step 0, made directly in the layout of `target`: no device ever has more than its part.

    make_params: key -> parameters. They are the same bits in every layout, as far as `products_rounded` goes.
    target: see `abstract_state`.
    """

    def make(key: jax.Array) -> TrainState:
        return fresh_state(products_rounded(make_params)(key), optimizer, target.residual)

    return jax.jit(make, out_shardings=shardings_of(target))(key)


def init_state(
    source: ParameterSource,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    options: StepOptions | None = None,
    *,
    rules: Rules = (),
    model_state: PyTree = (),
    **keywords: Any,
) -> TrainState:
    """A `TrainState` at step 0. Each leaf is allocated in its final layout: no device ever holds more than its part.

    source: a `ModelDef`; or what `nnx_loss` or `linen_loss` returned; or a function key -> parameters; or a pytree of
    parameters that exist already.
    options, keywords: a `StepOptions`, or its fields. The step must get the same.
    rules: (pattern, PartitionSpec) pairs for parameter trees of your own; the first match wins:
    [("*.kernel", P(None, "fsdp")), ("*.bias", P())]. Other parameters are placed by their shapes.
    model_state: a tree of arrays that a loss of your own takes and returns, such as running means; whole on every
    device, in the dtypes that it has: docs/own_loss.md. That of a module comes with its loss.

    >>> params = {"w": jnp.ones((16, 4)), "b": jnp.ones(3)}
    >>> state = jaxdist.init_state(params, optax.sgd(0.1), jaxdist.make_mesh(fsdp=8), strategy="zero3")
    >>> {name: leaf.addressable_shards[0].data.shape for name, leaf in state.params.items()}  # of one device
    {'b': (3,), 'w': (2, 4)}
    """
    if jax.config.jax_disable_jit:
        from jaxdist.config.wrong_calls import refuse_use

        refuse_use(disabled=True)
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        from jaxdist.jaxpr.layouts import refuse_context

        check_mesh(mesh)
        refuse_context(mesh)
    module_init = source.init if isinstance(source, ModuleLoss) else None
    source, model_state = _taken_apart(source, model_state)
    options = make_options(options, keywords)
    _tell_alone(not_joined(os.environ, jax.process_count()))
    target = state_target(source, optimizer, mesh, options, rules=rules, model_state=model_state)
    if not rules:  # by which the user may want all of them whole
        _tell_unsharded(source, options, mesh, target.params)
    carried, bare = target.model_state, not_carrying(target)
    optimizer, key = only_trained(optimizer, options.freeze, rules_of(source)), jax.random.key(options.seed)
    make = source.init if isinstance(source, ModelDef) else source
    state = _allocate(make, key, optimizer, bare) if _is_init(make) else place_params(make, optimizer, bare)
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model_state))
    if module_init is not None and abstract:  # its module builds it, unless the caller has given one
        carry = jax.jit(lambda key: module_init(key)[1], out_shardings=shardings_of(carried))
        return carrying(state, carry(key), target)
    # Copies: the state is donated, and the caller keeps what he gave.
    copies = jax.tree.map(lambda leaf, like: jnp.array(leaf, like.dtype), model_state, carried)
    return carrying(state, lay_out(copies, carried), target)
