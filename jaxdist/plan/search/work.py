"""The work of a model in matrix products: of one block, and of embedding and head, traced once for each kind of remat.

Nothing but products is counted. The other operations read and write about the bytes that products do: those of their
operands and results, through the device's memory. That is an approximation, which a calibration replaces.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import psum, to_varying
from jaxdist.config.rules.remat import Remat
from jaxdist.config.schema import Config
from jaxdist.jaxpr.evaluate import without_dead_code
from jaxdist.mesh import BATCH_LIKE, abstract_mesh
from jaxdist.nn.dropout import unused_keys
from jaxdist.optim.patterns import fitting
from jaxdist.parallel.blocks.remat import rematerialise
from jaxdist.parallel.wrappers.keep_fp32 import as_received
from jaxdist.plan.changes import changed
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.traced.flops import bytes_of_products, flops_in_float8, flops_of
from jaxdist.precision.policy import precision_of
from jaxdist.specs import STACKED


class UnitWork(NamedTuple):
    """The work of a unit for each sequence, on one device that has all of the unit.

    flops: of matrix products, for each sequence. float8: those of them in float8.
    row_bytes: what products read and write for each sequence. fixed_bytes: whatever the number of sequences.
    """

    flops: float
    float8: float
    row_bytes: float
    fixed_bytes: float

    def __add__(self, other: "UnitWork") -> "UnitWork":  # type: ignore[override]
        return UnitWork(*(a + b for a, b in zip(tuple(self), tuple(other), strict=True)))

    def seconds(self, rows: float, parts: float, *, flops: float, float8: float, bandwidth: float) -> float:
        """Seconds for this many sequences on a device that has one of `parts` of the unit.

        flops: a second. float8: of products in float8. bandwidth: bytes a second. Products overlap their own traffic;
        other operations follow.
        """
        computing = rows * ((self.flops - self.float8) / flops + self.float8 / float8)
        moving = (rows * self.row_bytes + self.fixed_bytes) / bandwidth
        others = rows * self.row_bytes / bandwidth
        return (max(computing, moving) + others) / parts


class ModelWork(NamedTuple):
    """The work of a model, with gradients of what is trained.

    forward: of one block. block: of one block, both passes. plain: the same, with nothing computed again.
    ends: of embedding and head.
    """

    forward: UnitWork
    block: UnitWork
    plain: UnitWork
    ends: UnitWork


def model_work(config: Config, known: Known) -> ModelWork:
    """The work of a configuration's model, under its remat. The model must have blocks."""
    remat = config.memory.remat
    trained = (config.optimizer.lora, config.optimizer.frozen)
    key = ("work", config.model, config.data.seq_len, config.precision, trained, remat)
    found: ModelWork = known.get(key, lambda: _traced(config, known))
    return found


def _traced(config: Config, known: Known) -> ModelWork:
    remat: Remat = "full" if config.memory.remat in ("sqrt", "offload") else config.memory.remat
    one, two = (_passes(config, known, remat, rows) for rows in (1, 2))
    works = []
    for (flops, float8, nbytes), (*_, more) in zip(one, two, strict=True):
        works.append(UnitWork(flops, float8, more - nbytes, 2 * nbytes - more))
    forward, block, ends = works
    if config.memory.remat == "sqrt":  # a segment is computed again, and each of its blocks once more
        block += forward
    plain = block if remat == "none" else model_work(changed(config, {"memory.remat": "none"}), known).plain
    return ModelWork(forward, block, plain, ends)


def _passes(config: Config, known: Known, remat: Remat, rows: int) -> list[tuple[float, float, float]]:
    """(FLOPs, those in float8, bytes of products) of a block's forward pass, of both its passes, and of embedding and
    head. Backward passes end where nothing before them is trained."""
    single = _on_one_device(config, rows)
    precision, model = precision_of(config.precision), known.model(single)
    batch = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in batch_of(single, abstract_mesh()).items()
    }
    params = jax.eval_shape(lambda params: as_received(params, precision), model.shapes)  # routers stay in fp32
    block = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params[STACKED])
    keys = jax.eval_shape(lambda: unused_keys(rows))
    batch |= {"keys": keys} | ({"loss_seed": jax.ShapeDtypeStruct((rows,), jnp.float32)} if model.weighs_rows else {})

    def through(block: Any, h: jax.Array, batch: Any) -> jax.Array:
        result: jax.Array = model.block(block, h, *model.read_by_blocks(batch))
        return result

    def ends(embed: Any, head: Any, of_blocks: jax.Array, batch: Any) -> jax.Array:
        h = model.embed(embed, batch, batch["keys"]) + of_blocks
        loss: jax.Array = model.head(head, embed if model.tied else None, h, batch)[0]
        return loss

    h = _shape_of(lambda embed, batch: model.embed(embed, batch, batch["keys"]), params["embed"], batch)
    # As a plan for GPUs: attention is then cuDNN's, unless the configuration asks for another.
    fused = jnp.dtype(precision.compute).itemsize == 2 and getattr(single.model, "attention", "xla") != "xla"
    again = rematerialise(through, remat, gathers=True, in_scan=True)
    frozen = fitting(params, config.optimizer.frozen, key="optimizer.freeze")
    moved = jax.tree.map(lambda each: not each, frozen)
    before = any(jax.tree.leaves((moved["embed"], moved[STACKED])))  # whether h depends on what is trained
    return [
        _counted(through, (False, False, False), block, h, batch, fused=fused),
        _counted(again, (moved[STACKED], before, False), block, h, batch, fused=fused),
        _counted(
            ends, (moved["embed"], moved["head"], before, False), params["embed"], params["head"], h, batch, fused=fused
        ),
    ]


def _on_one_device(config: Config, rows: int) -> Config:
    usual = Config()
    return changed(config, {"mesh": usual.mesh, "parallel": usual.parallel, "data.global_batch": rows})


def _region(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside of the manual region, on one device."""

    def region(*given: Any) -> Any:
        found = function(*to_varying(given, BATCH_LIKE))
        return jax.tree.map(lambda x: psum(to_varying(x, BATCH_LIKE), BATCH_LIKE), found)

    return jax.shard_map(region, mesh=abstract_mesh(), in_specs=P(), out_specs=P())


def _shape_of(function: Callable[..., Any], *given: Any) -> Any:
    return jax.eval_shape(_region(function), *given)


def _counted(
    function: Callable[..., Any], moved: tuple[Any, ...], *given: Any, fused: bool
) -> tuple[float, float, float]:
    """(FLOPs, those in float8, bytes of products) of a call, and of its backward pass over what is moved, if any.

    moved: of each argument a bool, or a tree of them. fused: whether attention is a kernel that stores no scores.
    """
    flags = jax.tree.leaves(
        [
            jax.tree.map(lambda _: own, each) if isinstance(own, bool) else own  # noqa: B023
            for own, each in zip(moved, given, strict=True)
        ]
    )

    def both(*given: Any) -> Any:
        leaves, structure = jax.tree.flatten(given)
        if not any(flags):
            return function(*given)

        def of(chosen: list[jax.Array]) -> Any:
            left = iter(chosen)
            filled = [next(left) if flag else leaf for flag, leaf in zip(flags, leaves, strict=True)]
            return function(*jax.tree.unflatten(structure, filled))

        value, pull = jax.vjp(of, [leaf for flag, leaf in zip(flags, leaves, strict=True) if flag])
        # Without the value no first pass would be left.
        return value, pull(to_varying(jnp.ones_like(value), BATCH_LIKE))

    program = without_dead_code(jax.make_jaxpr(_region(both))(*given))
    return flops_of(program), flops_in_float8(program), bytes_of_products(program, fused_attention=fused)
