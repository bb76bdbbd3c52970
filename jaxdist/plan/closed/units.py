"""What the units of a model (embedding, blocks, head) need of a device's memory, from traces of them alone.

A unit is traced on a mesh with only those axes that layers see, and with two where samples or parameters are split, for
two numbers of rows. Between these and beyond, bytes are a line: what does not depend on the rows, and what each adds.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.build import attention_of, make_model, step_options
from jaxdist.config.entries import ScheduleFacts, StrategyFacts
from jaxdist.config.schema import Config
from jaxdist.jaxpr.walk import opened
from jaxdist.collectives import to_varying
from jaxdist.mesh import BATCH_LIKE, AnyMesh, abstract_mesh
from jaxdist.parallel.blocks.branch import pack
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.microbatch import sample_keys
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.relay import blocks_of_chunk
from jaxdist.parallel.program import in_precision, make_program
from jaxdist.parallel.strategy import Strategy
from jaxdist.plan.closed.leaves import Known, _of_the_model
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.traced.liveness import peak_bytes
from jaxdist.specs import STACKED, PyTree, batch_spec, map_specs, without_idle

ROWS = (2, 4)  # of a device, for which units are traced


class Line(NamedTuple):
    """Bytes for any number of rows."""

    fixed: float
    each: float

    def __call__(self, rows: float) -> float:
        """Bytes for so many rows."""
        return self.fixed + self.each * rows


class UnitMemory(NamedTuple):
    """Bytes of the units of a model on one device, beside parameters and their gradients.

    h: the array between blocks.
    kept: what the forward pass keeps of all traced blocks (of one stage or chunk); without a pipeline of the embedding
        too.
    crossing: what B leaves for W (zero bubble).
    forward, backward, weights: work space of these passes through the blocks (and the embedding, without a pipeline).
    embed, head: work space of both passes of the embedding (in a pipeline) and the head.
    """

    h: Line
    kept: Line
    crossing: Line
    forward: Line
    backward: Line
    weights: Line
    embed: Line
    head: Line


def units_of(config: Config, known: Known) -> UnitMemory:
    """The memory of the units of a configuration."""
    mesh, split = config.mesh, ScheduleFacts.of(config.parallel.schedule).split_backward
    piped = mesh.pipe > 1
    rows = known.model(config).shapes[STACKED]
    rows = jax.tree.leaves(rows)[0].shape[0] // (mesh.pipe * config.parallel.chunks)
    layers = (mesh.expert, mesh.context, mesh.tensor, mesh.data * mesh.fsdp > 1, mesh.fsdp > 1)
    gathers = StrategyFacts.of(config.parallel.strategy).regathers and config.parallel.reshard_after_forward
    how = (config.memory.remat, config.parallel.min_shard_bytes, config.parallel.grad_sync, config.optimizer.frozen)
    one_stage = dataclasses.replace(
        config,
        mesh=dataclasses.replace(mesh, pipe=1),
        parallel=config.parallel.replace(chunks=1, stages=())
        if hasattr(config.parallel, "replace")
        else dataclasses.replace(config.parallel, chunks=1, stages=()),
    )
    key = ("units", *_of_the_model(one_stage), *layers, gathers, *how, piped, rows, split)
    return known.get(key, lambda: _traced(one_stage, piped=piped, rows=rows, split=split, gathers=gathers))


def _traced(config: Config, *, piped: bool, rows: int, split: bool, gathers: bool) -> UnitMemory:
    mesh = config.mesh
    sizes = {axis: getattr(mesh, axis) for axis in ("expert", "context", "tensor")}
    spread = {"fsdp": 2} if mesh.fsdp > 1 else {"data": 2} if mesh.data > 1 else {}
    small = abstract_mesh(**sizes, **spread)
    options = dataclasses.replace(
        step_options(config, small),
        strategy="zero3" if gathers else "ddp",
        schedule="accumulate",
        microbatches=1,
        prefetch=0,
        remat="full" if config.memory.remat == "offload" else config.memory.remat,
    )
    attention = attention_of(config, options.precision, small)[0]
    model = make_model(config, options.precision, stages=1, training=True, attention=attention)
    at = [_Traces(model, small, options, piped, rows, split).of(config, each) for each in ROWS]

    def line(name: str) -> Line:
        low, high = (each[name] for each in at)
        each = max(0.0, (high - low) / (ROWS[1] - ROWS[0]))
        return Line(low - each * ROWS[0], each)

    return UnitMemory(*(line(name) for name in UnitMemory._fields))


class _Traces:
    """Traces of the units of a model on a small mesh."""

    def __init__(self, model: Any, mesh: AnyMesh, options: StepOptions, piped: bool, rows: int, split: bool) -> None:
        self.model, self.mesh, self.options = model, mesh, options
        self.piped, self.rows, self.split = piped, rows, split
        self.strategy: Strategy = get_strategy(options)
        placed = self.strategy.place(model.shapes, model.specs, mesh)
        self.specs = map_specs(lambda spec: without_idle(spec, mesh), placed)

    def of(self, config: Config, rows: int) -> dict[str, float]:
        """Bytes by the fields of `UnitMemory`. rows: of a device."""
        found = dict.fromkeys(UnitMemory._fields, 0.0)
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"] * self.mesh.shape["expert"]
        config = dataclasses.replace(config, data=config.data.replace(global_batch=rows * shards))
        shapes = self.model.shapes
        if self.piped:
            cut = lambda leaf: jax.ShapeDtypeStruct((self.rows, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
            shapes = {**shapes, STACKED: jax.tree.map(cut, shapes[STACKED])}

        def region(params: PyTree, batch: PyTree) -> jax.Array:
            keys = sample_keys(0, jnp.int32(0), rows)
            batch = to_varying({**batch, "keys": keys}, BATCH_LIKE)
            diff, captured = self.strategy.begin(params, self.specs, STACKED)
            found.update(self.units(diff, captured, batch))
            return jnp.zeros(())

        run = jax.shard_map(region, mesh=self.mesh, in_specs=(self.specs, batch_spec(self.mesh)), out_specs=P())
        jax.eval_shape(run, shapes, batch_of(config, self.mesh))
        return found

    def units(self, diff: PyTree, captured: PyTree, batch: PyTree) -> dict[str, float]:
        """Bytes by the fields of `UnitMemory`, inside the region."""
        program = make_program(in_precision(self.model, self.options.precision), self.strategy, self.specs, self.options)
        stages, found = program.stages, dict[str, float]()
        embed = lambda unit: stages.embed(unit, captured["embed"], batch)  # noqa: E731
        h = jax.eval_shape(embed, diff["embed"])
        found["h"] = _size(h)
        units = {name: diff[name] for name in stages.head_units}

        def head(units: PyTree, h: jax.Array) -> Any:
            loss, weight = stages.head(diff | units, captured, h, batch)
            return loss.astype(jnp.float32), weight

        found["head"], _ = _workspace(jax.grad(head, argnums=(0, 1), has_aux=True), units, h)
        if not self.piped:
            whole = lambda diff: jax.vjp(lambda each: program.hidden(each, captured, batch), diff)  # noqa: E731
            found["forward"], (jaxpr, (_, pull)) = _workspace(whole, diff)
            found["kept"] = _made(jaxpr)
            found["backward"], _ = _workspace(lambda pull, dh: pull(dh), pull, h)
            return found
        found["embed"], _ = _workspace(lambda unit, dh: jax.vjp(embed, unit)[1](dh), diff["embed"], h)
        return found | self.stage(stages, diff, captured, batch, h)

    def stage(self, stages: Any, diff: PyTree, captured: PyTree, batch: PyTree, h: Any) -> dict[str, float]:
        """Of the blocks of a stage or chunk."""
        found = dict[str, float]()
        rows = lambda diff: blocks_of_chunk(diff, captured[STACKED], 0, chunks=1, counts=())  # noqa: E731
        given = stages.read_by_blocks(batch)
        forward = lambda diff, h: stages.blocks.forward(rows(diff), h, given)  # noqa: E731
        found["forward"], (jaxpr, (_, saved)) = _workspace(forward, diff[STACKED], h)
        found["kept"] = sum(_size(each) for each in jax.eval_shape(pack, saved))
        if not self.split:
            back = lambda diff, saved, dh: stages.blocks.backward(rows(diff), saved, dh)  # noqa: E731
            found["backward"], _ = _workspace(back, diff[STACKED], saved, h)
            return found
        first = lambda diff, saved, dh: stages.blocks.backward_input(rows(diff), saved, dh)  # noqa: E731
        found["backward"], (_, (crossing, _)) = _workspace(first, diff[STACKED], saved, h)
        found["crossing"] = sum(map(_size, jax.tree.leaves(crossing)))
        second = lambda diff, saved, crossing, dh: stages.blocks.backward_weights(rows(diff), saved, crossing, dh)  # noqa: E731
        found["weights"], _ = _workspace(second, diff[STACKED], saved, crossing, h)
        return found


def _workspace(function: Callable[..., Any], *arguments: Any) -> tuple[float, tuple[Any, Any]]:
    """(the most bytes beside arguments and results, (the program, shapes of its results))."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    sizes = [_size(each.aval) for each in jaxpr.jaxpr.invars]
    return peak_bytes(jaxpr, sizes), (jaxpr, shapes)


def _size(leaf: Any) -> int:
    return int(leaf.size) * getattr(leaf.dtype, "itemsize", 8)


def _made(jaxpr: Any) -> float:
    """Bytes of the results that are no arguments, each counted once."""
    given = {id(each) for each in (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.constvars)}
    made = {id(each): each for each in jaxpr.jaxpr.outvars if hasattr(each, "count") or hasattr(each, "aval")}
    return sum(_size(each.aval) for key, each in made.items() if key not in given and type(each).__name__ == "Var")
