"""What one microbatch sends, by the unit that sends it: traced once for each form of the layers, never for a layout.

What layers send depends on `tensor`, `context`, `expert`, on what is computed again and on the kind of schedule; not on
`data`, on the size of `fsdp`, on the number of microbatches or stages. So one microbatch is traced, by the model's own
units and the schedule's own code, on a mesh of the layers' axes with one stage and fsdp=2. Bytes of activations are
then affine in the rows of a microbatch; those of a parameter are so many times the parameter, wherever it is sharded.
Any `ModelDef` can be traced so, of somebody else's too.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import to_varying
from jaxdist.jaxpr.axes import moving_axes
from jaxdist.jaxpr.branches import Reached, outermost, reached
from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.jaxpr.walk import nbytes_of, operand_bytes
from jaxdist.mesh import BATCH_LIKE, AnyMesh, batch_shards
from jaxdist.model import ModelDef
from jaxdist.parallel.blocks.layers import at
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.microbatch import sample_keys, with_seed
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.relay import BACKWARD, FORWARD, blocks_of_chunk
from jaxdist.parallel.pipeline.run import embed_gradients, head_gradients
from jaxdist.parallel.pipeline.table import Ticks
from jaxdist.parallel.program import program_and_region
from jaxdist.parallel.schedule import EMBED, Program
from jaxdist.parallel.schedules.accumulate import accumulate
from jaxdist.plan.traced.ledger import GRADIENT, OP_OF_PRIMITIVE, meaning_of
from jaxdist.specs import (
    STACKED,
    UNITS,
    PyTree,
    active_specs,
    batch_spec,
    named_leaves,
    placed_specs,
    shard_count,
    shard_of,
)

BLOCKS, HEAD = UNITS[1:]
_MARK = "unit of a stage "  # a scope: which unit of a stage runs


class Parameter(NamedTuple):
    """How often a microbatch gathers a parameter (op "all_gather"), or reduce-scatters its gradient, if it is sharded.

    unit: the unit that computes with it: the head, too, with the table of an embedding.
    times: of the whole parameter. Of blocks a mean over their rows, above 0 where the backward pass wants no more.
    calls: as the program makes them, of all rows.
    """

    unit: str
    name: str
    op: str
    phase: str
    times: float
    calls: int

    @property
    def key(self) -> tuple[Any, ...]:
        """All but how often."""
        return self[:-2]


class Activation(NamedTuple):
    """A collective of layers, with all its calls for a microbatch, of blocks for all rows that were traced.

    fixed, row: bytes of one call's input, and those that each row of the microbatch adds.
    """

    unit: str
    op: str
    axes: tuple[str, ...]
    phase: str
    fixed: int
    row: float
    calls: int

    @property
    def key(self) -> tuple[Any, ...]:
        """All but how often."""
        return self[:-1]


class Microbatch(NamedTuple):
    """What a microbatch sends. h: bytes of a row between two blocks, on one device."""

    parameters: tuple[Parameter, ...]
    activations: tuple[Activation, ...]
    h: float

    def minus(self, other: "Microbatch") -> "Microbatch":
        """What it sends more than another one, whose collectives are a part of its own."""
        both: tuple[Any, ...] = (*other.parameters, *other.activations)
        of_other = {each.key: each for each in both}
        parameters, activations = list[Parameter](), list[Activation]()
        for parameter in self.parameters:
            less = of_other.get(parameter.key, parameter._replace(times=0.0, calls=0))
            times, calls = parameter.times - less.times, parameter.calls - less.calls
            parameters += [parameter._replace(times=times, calls=calls)] if calls else []
        for activation in self.activations:
            calls = activation.calls - (of_other[activation.key].calls if activation.key in of_other else 0)
            activations += [activation._replace(calls=calls)] if calls else []
        return Microbatch(tuple(parameters), tuple(activations), self.h)


def in_a_stage(
    program: Program, diff: PyTree, captured: PyTree, microbatches: PyTree, *, seed: Any, halves: bool, **_: Any
) -> Any:
    """The work of one stage for one microbatch, as `run_ticks` does it, but without ticks, slots and conditions.

    halves: whether the backward pass of the blocks is in two, B and W.
    """
    assert program.stages is not None
    stages, batch = program.stages, at(microbatches, 0)
    blocks: Any = stages.blocks
    rows = blocks_of_chunk(diff[STACKED], captured[STACKED], 0, chunks=1, counts=stages.counts)

    def embed(unit: PyTree) -> jax.Array:
        found: jax.Array = stages.embed(unit, captured[EMBED], batch)
        return found

    with jax.named_scope(FORWARD):
        h, saved = blocks.forward(rows, embed(diff[EMBED]), stages.read_by_blocks(batch))
        (of_head, dh), sums = head_gradients(stages, diff, captured, h, batch, seed)
    with jax.named_scope(BACKWARD):
        of_blocks, dh_first = (blocks.backward_input if halves else blocks.backward)(rows, saved, dh)
        of_embed = embed_gradients(embed, diff[EMBED], dh_first)
        if halves:
            of_blocks = blocks.backward_weights(rows, saved, of_blocks, dh)
    return sums, of_head, of_blocks, of_embed


def one_tick(places: int) -> Callable[[int, int, int], Ticks]:
    """The table of one stage and one microbatch: F, B and, with places, W in one tick."""
    work = np.zeros((1, 1, 2), np.int32)
    weights = np.where(np.arange(places)[:, None] > 0, -1, np.zeros((1, 1, places, 2), np.int32))
    return lambda stages, microbatches, chunks: Ticks(1, 1, work, work, weights.astype(np.int32))


def trace_microbatch(
    model: ModelDef, options: StepOptions, mesh: AnyMesh, batch: PyTree, run: Callable[..., Any]
) -> Microbatch:
    """What a microbatch sends.

    options: of the step. mesh: of the layers' axes, with one stage.
    batch: ShapeDtypeStructs of the rows of all devices.
    run: `accumulate`, or for a pipeline `in_a_stage`, or `run_ticks` with a table of `one_tick`.
    """
    strategy = get_strategy(options)
    specs = placed_specs(strategy.place(model.shapes, model.specs, mesh), mesh)
    program, region_of = program_and_region(model, strategy, specs, mesh, options)
    axes, between = tuple(str(axis) for axis in mesh.axis_names if mesh.shape[axis] > 1), list[Any]()
    program = program if run is accumulate else _marked(program, between)

    def region(params: PyTree, batch: PyTree) -> PyTree:
        keys = sample_keys(0, jnp.int32(0), jax.tree.leaves(batch)[0].shape[0])
        parts = jax.tree.map(lambda leaf: leaf[None], to_varying({**batch, "keys": keys}, BATCH_LIKE))
        diff, captured = strategy.begin(params, specs, STACKED)
        reduce_dtype = options.precision.reduce
        found = run(program, diff, captured, with_seed(program, parts, 1.0), seed=1.0, reduce_dtype=reduce_dtype)
        return jax.tree.map(lambda x: to_varying(x, axes)[None], found)

    mapped = region_of(
        region, mesh=mesh, in_specs=(active_specs(specs, mesh), batch_spec(mesh)), out_specs=P(axes or None)
    )
    jaxpr = without_dead_code(jax.make_jaxpr(mapped)(model.shapes, batch))
    rows = jax.tree.leaves(batch)[0].shape[0] // batch_shards(mesh)
    whole = {
        name: math.prod(leaf.shape)
        // shard_count(spec, mesh)
        * (1 if (shard := shard_of(spec)) is None else shard.parts(mesh))
        for name, spec, leaf in named_leaves(specs, model.shapes)
    }
    h = sum(map(nbytes_of, between[:1])) / rows
    return Microbatch(*_read(jaxpr, mesh, whole, rows=rows), h)


def _marked(program: Program, between: list[Any]) -> Program:
    """The program, whose units say in a scope which of them runs. between: gets the shape of what embed gives."""
    assert program.stages is not None
    stages = program.stages

    def embed(*given: Any) -> Any:
        with jax.named_scope(_MARK + EMBED):
            between.append(jax.typeof(found := stages.embed(*given)))
        return found

    head = jax.named_scope(_MARK + HEAD)(stages.head)
    return program._replace(stages=stages._replace(embed=embed, head=head))


def _read(
    jaxpr: Any, mesh: AnyMesh, whole: dict[str, int], *, rows: int
) -> tuple[tuple[Parameter, ...], tuple[Activation, ...]]:
    """The collectives of a microbatch, equal ones together. whole: elements of a parameter before it is sharded."""
    parameters, activations = dict[Any, Parameter](), dict[Any, Activation]()

    def size(each: Reached) -> float:
        return float(operand_bytes(each.equation))

    for each in reached(jaxpr, outermost(jaxpr, mesh.shape), lambda equation: bool(moving_axes(equation)), size):
        calls, op, axes = (
            int(each.scope.calls.max()),
            OP_OF_PRIMITIVE[each.equation.primitive.name],
            moving_axes(each.equation),
        )
        unit = next((name for name in UNITS if _MARK + name in each.names), "")
        phase, purpose = meaning_of(op, each.names.replace(_MARK + unit, ""), set(whole))
        name = purpose.removeprefix(GRADIENT)
        in_blocks = (name if name in whole else purpose.rpartition(" ")[2]).startswith(BLOCKS)
        unit = BLOCKS if in_blocks else unit or EMBED
        if not calls:
            continue
        if name in whole:
            elements = sum(math.prod(x.aval.shape) for x in each.equation.invars) * calls
            parts = math.prod(mesh.shape[axis] for axis in axes) if op == "all_gather" else 1
            parameter = Parameter(unit, name, op, phase, elements * parts / whole[name], calls)
            same = parameter.key, elements // calls  # calls of one size: algorithms pad each
            old = parameters.get(same, parameter._replace(times=0.0, calls=0))
            parameters[same] = parameter._replace(times=old.times + parameter.times, calls=old.calls + calls)
        else:
            nbytes = round(size(each))
            fixed, row = (0, nbytes / rows) if nbytes % rows == 0 else (nbytes, 0.0)
            activation = Activation(unit, op, axes, phase, fixed, row, calls)
            before = activations[activation.key].calls if activation.key in activations else 0
            activations[activation.key] = activation._replace(calls=before + calls)
    return tuple(parameters.values()), tuple(activations.values())
