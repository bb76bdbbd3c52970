"""Traces of the units of a model, read for several numbers of rows and of blocks.

A unit is traced on a mesh of the layers' axes with one stage and two devices that have other samples. The numbers of
rows and of blocks are large primes there (`Known.primes`). A dim that such a prime divides comes from rows or blocks:
the real number is put in its place (`Reading`). So one trace tells the bytes for any number of rows and blocks.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.build import attention_of, cuda_capability, step_options
from jaxdist.collectives import to_varying
from jaxdist.config.entries import is_shipped
from jaxdist.config.schema import Config
from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.jaxpr.walk import equations
from jaxdist.mesh import BATCH_LIKE, abstract_mesh, batch_shards
from jaxdist.parallel.blocks.branch import pack
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.microbatch import sample_keys, with_seed
from jaxdist.parallel.pipeline.relay import blocks_of_chunk
from jaxdist.parallel.program import in_precision, make_program
from jaxdist.parallel.schedule import Program, seeded_loss
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.traced.liveness import BytesOfSizes, peaks_of_sizes
from jaxdist.specs import STACKED, PyTree, active_specs, batch_spec, placed_specs

UNIT_ROWS = (2, 4)  # of a device: the numbers for which bytes are told
Readings = dict[str, list[tuple[float, float]]]  # {what: bytes for each number of blocks, for both of `UNIT_ROWS`}


@dataclass(frozen=True)
class Reading:
    """How the dims of a trace are read: a type of an array -> bytes.

    numbers: (prime, what stands in its place) of the dims that have it as a factor.
    """

    numbers: tuple[tuple[int, int], ...]

    def __call__(self, aval: Any) -> float:
        """Bytes of an array; keys of random numbers count as none."""
        size = getattr(aval.dtype, "itemsize", 0)
        for dim in aval.shape:
            read = dim
            for prime, number in self.numbers:
                while read and read % prime == 0:
                    read = read // prime * number
            size *= read
        return float(size)


class _Needs(NamedTuple):
    """What a function needs, in each of the readings.

    work: the most bytes beside arguments and results. results: their shapes.
    made: bytes of the results that are no arguments. read: of each argument, 0 for one that is not read.
    """

    work: BytesOfSizes
    results: Any
    made: BytesOfSizes
    read: list[BytesOfSizes]


class UnitTraces:
    """The units of a configuration's model on a small mesh.

    gathers: whether parameters are gathered where they are used. together: whether the program has another form for
    each number of blocks, as where some of them are run as one.
    """

    def __init__(self, config: Config, known: Known, *, gathers: bool, together: bool) -> None:
        mesh = config.mesh
        axes = {axis: getattr(mesh, axis) for axis in ("expert", "context", "tensor")}
        gpus = config.devices.platform == "gpu" or cuda_capability(config, abstract_mesh())
        axes["fsdp" if gathers and mesh.fsdp > 1 else "data"] = 2
        self.mesh = abstract_mesh(**axes, platform="gpu" if gpus else None)
        options = step_options(config, self.mesh)
        self.options = replace(
            options,
            # Whole copies are used as whole parameters are.
            strategy=options.strategy if gathers else "ddp",
            schedule="accumulate",
            microbatches=1,
            prefetch=0,
            remat="full" if options.remat == "offload" else options.remat,
        )
        self.config, self.together, self.primes = config, together, known.primes(config)
        model = known.model_in_order(config, attention_of(config, options.precision, self.mesh)[0])
        self.shapes = model.shapes
        self.strategy = get_strategy(self.options)
        placed = self.strategy.place(self.shapes, model.specs, self.mesh)
        self.specs = placed_specs(placed, self.mesh)
        model = in_precision(model, options.precision)
        self.program: Program = make_program(model, self.strategy, self.specs, self.options)
        assert self.program.stages is not None and self.program.hidden is not None, "neither prefetches nor offloads"
        self.stages, self.hidden = self.program.stages, self.program.hidden
        # Experts round the rows of a buffer up, and so may a model of somebody else's: no multiple of the rows.
        experts = getattr(config.model, "moe", None)
        self.rounds = not is_shipped(config.model.name) or (experts is not None and experts.on)

    def head(self, rows: tuple[int, int]) -> Readings:
        """h, and the work space of both passes of the head, for these numbers of rows. (A loss in chunks has other
        dims for other rows.)"""

        def read(given: "_Given") -> dict[str, BytesOfSizes]:
            def head(units: PyTree, h: jax.Array) -> Any:
                loss, weight = self.stages.head(given.diff | units, given.captured, h, given.batch)
                return seeded_loss(loss, 1.0), weight

            units = {name: given.diff[name] for name in self.stages.head_units}
            work = given.needs(jax.grad(head, argnums=(0, 1), has_aux=True), units, given.h).work
            return {"h": given.size(given.h), "head": work}

        return self._at(read, (1,), each=rows)

    def embedding(self) -> Readings:
        """The work space of both passes of the embedding, in a pipeline."""

        def read(given: "_Given") -> dict[str, BytesOfSizes]:
            pull = lambda unit, dh: jax.vjp(lambda unit: self.embed(given, unit), unit)[1](dh)  # noqa: E731
            return {"embed": given.needs(pull, given.diff["embed"], given.h).work}

        return self._at(read, (1,), each=UNIT_ROWS)

    def in_one_stage(self, blocks: int) -> Readings:
        """What embedding and blocks need in one stage."""

        def read(given: "_Given") -> dict[str, BytesOfSizes]:
            hidden = lambda each: self.hidden(each, given.captured, given.batch)  # noqa: E731
            both = given.needs(lambda diff: jax.vjp(hidden, diff), given.diff)
            back = given.needs(lambda pull, dh: pull(dh), both.results[1], given.h)
            cast = _sum(map(given.size, self._casts(given, both.results[1])), given.measures)
            return {"forward": both.work, "kept": both.made, "cast": cast, "backward": back.work}

        return self._at(read, (blocks,))

    def _casts(self, given: "_Given", kept: PyTree) -> list[Any]:
        """Of what is kept, the stacked parameters in another type."""
        own = {leaf.shape: leaf.dtype for leaf in jax.tree.leaves(given.diff[STACKED])}
        return [leaf for leaf in jax.tree.leaves(kept) if leaf.shape in own and leaf.dtype != own[leaf.shape]]

    def stage(self, counts: tuple[int, ...]) -> Readings:
        """What the forward pass of the blocks of a stage needs, for these numbers of blocks."""

        def read(given: "_Given") -> dict[str, BytesOfSizes]:
            run: Any = self.stages.blocks
            forward = given.needs(
                lambda diff, h: run.forward(given.rows(diff), h, given.read), given.diff[STACKED], given.h
            )
            saved = jax.tree.leaves(jax.eval_shape(pack, forward.results[1]))
            return {"forward": forward.work, "kept": _sum(map(given.size, saved), given.measures)}

        return self._at(read, counts)

    def backward(self, counts: tuple[int, ...], *, split: bool) -> Readings:
        """What the backward pass of the blocks of a stage needs. split: whether it is in two halves, B and W."""

        def read(given: "_Given") -> dict[str, BytesOfSizes]:
            run: Any = self.stages.blocks
            blocks, h, rows = given.diff[STACKED], given.h, given.rows
            saved = jax.eval_shape(lambda diff, h: run.forward(rows(diff), h, given.read), blocks, h)[1]
            # What is kept is among the arguments of a backward pass, behind the parameters.
            places = slice(first := len(jax.tree.leaves(blocks)), first + len(jax.tree.leaves(saved)))
            summed = lambda sizes: _sum(sizes, given.measures)  # noqa: E731
            if not split:
                back = given.needs(lambda diff, saved, dh: run.backward(rows(diff), saved, dh), blocks, saved, h)
                return {"backward": back.work, "read": summed(back.read[places])}
            back = given.needs(lambda diff, saved, dh: run.backward_input(rows(diff), saved, dh), blocks, saved, h)
            crossing = back.results[0]
            late = lambda diff, saved, across, dh: run.backward_weights(rows(diff), saved, across, dh)  # noqa: E731
            weights = given.needs(late, blocks, saved, crossing, h)
            found = {"backward": back.work, "read": summed(back.read[places])}
            found |= {"weights": weights.work, "read_weights": summed(weights.read[places])}
            return found | {"crossing": summed(map(given.size, jax.tree.leaves(crossing)))}

        return self._at(read, counts)

    def embed(self, given: "_Given", unit: PyTree) -> jax.Array:
        """The array before the first block."""
        found: jax.Array = self.stages.embed(unit, given.captured["embed"], given.batch)
        return found

    def _at(
        self,
        read: Callable[["_Given"], dict[str, BytesOfSizes]],
        counts: tuple[int, ...],
        *,
        each: tuple[int, ...] = (),
    ) -> Readings:
        """What a function tells of a trace, for these numbers of blocks.

        each: numbers of rows that are traced one by one; (): `UNIT_ROWS` are told by one trace, if that can be.
        """
        of_rows, of_blocks = self.primes
        blocks = counts[0] if self.together else of_blocks
        numbers = [(of_blocks, count) for count in counts]
        if each or self.rounds:
            readings = [Reading((number,)) for number in numbers]
            traced = [self._trace(read, rows, blocks, readings) for rows in each or UNIT_ROWS]
            return {what: list(zip(*(found[what] for found in traced), strict=True)) for what in traced[0]}
        readings = [Reading(((of_rows, rows), number)) for number in numbers for rows in UNIT_ROWS]
        found = self._trace(read, of_rows, blocks, readings)
        return {what: list(itertools.pairwise(sizes))[:: len(UNIT_ROWS)] for what, sizes in found.items()}

    def _trace(
        self, read: Callable[["_Given"], dict[str, BytesOfSizes]], rows: int, blocks: int, measures: Sequence[Reading]
    ) -> dict[str, BytesOfSizes]:
        """What a function tells of a trace with so many rows of a device and blocks of a stage."""
        found = dict[str, BytesOfSizes]()
        cut = lambda leaf: jax.ShapeDtypeStruct((blocks, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
        shapes = {**self.shapes, STACKED: jax.tree.map(cut, self.shapes[STACKED])}

        def region(params: PyTree, batch: PyTree) -> jax.Array:
            keys = sample_keys(0, jnp.int32(0), rows)
            parts = jax.tree.map(lambda leaf: leaf[None], to_varying({**batch, "keys": keys}, BATCH_LIKE))
            one = jax.tree.map(lambda leaf: leaf[0], with_seed(self.program, parts, 1.0))
            diff, captured = self.strategy.begin(params, self.specs, STACKED)
            found.update(read(_Given(self, diff, captured, one, measures)))
            return jnp.zeros(())

        run = jax.shard_map(
            region, mesh=self.mesh, in_specs=(active_specs(self.specs, self.mesh), batch_spec(self.mesh)), out_specs=P()
        )
        data = self.config.data.replace(global_batch=rows * batch_shards(self.mesh))
        jax.eval_shape(run, shapes, batch_of(replace(self.config, data=data), self.mesh))
        return found


class _Given:
    """What units are given inside of the region.

    diff, captured: parameters as of `Strategy.begin`. batch: of one microbatch. h: type of the array between blocks.
    read: what blocks read of the batch.
    """

    def __init__(
        self, traces: UnitTraces, diff: PyTree, captured: PyTree, batch: PyTree, measures: Sequence[Reading]
    ) -> None:
        self.diff, self.captured, self.batch, self.measures = diff, captured, batch, measures
        self.h = jax.eval_shape(lambda unit: traces.embed(self, unit), diff["embed"])
        self.read = traces.stages.read_by_blocks(batch)

    def rows(self, diff: PyTree) -> Any:
        """The stacked blocks of a stage, with what is not trained."""
        return blocks_of_chunk(diff, self.captured[STACKED], 0, chunks=1, counts=())

    def size(self, leaf: Any) -> BytesOfSizes:
        """Bytes of an array, in each of the readings."""
        return tuple(measure(leaf) for measure in self.measures)

    def needs(self, function: Callable[..., Any], *arguments: PyTree) -> _Needs:
        """What a function needs, by its trace."""
        traced, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
        alive = without_dead_code(traced)
        given = [*alive.jaxpr.invars, *alive.jaxpr.constvars]
        made = {id(each): self.size(each.aval) for each in alive.jaxpr.outvars if each not in given}
        reads = {id(each) for equation in equations(alive) for each in equation.invars}
        sizes = [self.size(each.aval) for each in alive.jaxpr.invars]
        nothing = (0.0,) * len(self.measures)
        read = [size if id(each) in reads else nothing for size, each in zip(sizes, alive.jaxpr.invars, strict=True)]
        work = peaks_of_sizes(alive, sizes, self.measures)
        return _Needs(work, results, _sum(made.values(), self.measures), read)


def _sum(sizes: Iterable[BytesOfSizes], measures: Sequence[Reading]) -> BytesOfSizes:
    """The sum of bytes, in each of the readings."""
    given = list(sizes)
    return tuple(math.fsum(each[place] for each in given) for place in range(len(measures)))
