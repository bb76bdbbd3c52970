"""The memory of a device in closed form: what it holds, and the most at any time of a step, without tracing the step."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.build import optimizer_of, step_options
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.init import on_host, residual_target, state_target
from jaxdist.mesh import abstract_mesh
from jaxdist.model import ModelDef
from jaxdist.optim import leave_out
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.stages import order_of_blocks
from jaxdist.parallel.pipeline.table import allocate_slots, table_of
from jaxdist.plan.closed.leaves import Known, _of_the_model, mesh_sizes, planned_mesh
from jaxdist.plan.closed.units import UnitMemory, units_of
from jaxdist.plan.compiled.memory import batch_of, resident_bytes
from jaxdist.plan.traced.liveness import peak_bytes
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import STACKED, PyTree, bytes_per_device, dim_of, leaves_by_name, map_specs, shard_of, without_idle
from jaxdist.state import TrainState, shardings_of, updated

PEAK = "peak"


class Rest(NamedTuple):
    """Bytes that depend on the layout, the optimizer and the strategy alone."""

    state: dict[str, int]
    total: int
    grads: dict[str, int]
    shards: int
    copies: int
    update: int
    unit: dict[str, int]


def rest_of(config: Config, known: Known) -> Rest:
    parallel, sync = config.parallel, config.parallel.grad_sync
    key = (*_of_the_model(config), mesh_sizes(config), parallel.strategy, parallel.min_shard_bytes, config.optimizer)
    key = ("rest", *key, sync, config.memory.offload.optimizer, config.train.ema)
    return known.get(key, lambda: _rest(config, known))


def _rest(config: Config, known: Known) -> Rest:
    from jaxdist.plan.explain import memory_at_rest

    mesh, model = planned_mesh(config), known.model(config)
    options = step_options(config, mesh)
    order = order_of_blocks(model.layers, stages=config.mesh.pipe, chunks=config.parallel.chunks, blocks=config.parallel.stages)
    optimizer = optimizer_of(config, order.tolist())
    target = state_target(model, optimizer, mesh, options)
    state = memory_at_rest(target)
    whole_grads, gathers = _habits(options.strategy)
    trained = leaves_by_name(leave_out(model.shapes, config.optimizer.frozen))
    wide = accumulation_dtype(options.precision.reduce)
    grads, unit, shards, copies = dict.fromkeys(("embed", "blocks", "head"), 0), dict.fromkeys(("embed", "blocks", "head"), 0), 0, 0
    for leaf in known.leaves(config):
        over_pipe = mesh.shape["pipe"] if leaf.unit != STACKED and dim_of(leaf.spec, "pipe") is not None else 1
        shard = shard_of(leaf.spec)
        parts = 1 if shard is None else shard.parts(mesh)
        size = leaf.elements * over_pipe
        item = max(4, jnp.dtype(wide).itemsize)
        if leaf.name in trained:
            grads[leaf.unit] += size * item * (parts if whole_grads else 1)
            shards += leaf.nbytes
        if over_pipe * (parts if gathers else 1) > 1:
            copies += size * (parts if gathers else 1) * jnp.dtype(options.precision.received).itemsize
        unit[leaf.unit] += size * (parts - 1 if parts > 1 and not gathers else 0)* jnp.dtype(options.precision.received).itemsize
    return Rest(state, resident_bytes(target), grads, shards, copies, _update(optimizer, target, mesh), unit)


def _update(optimizer: Any, target: TrainState, mesh: Any) -> int:
    def run(grads: PyTree, state: TrainState) -> Any:
        return updated(optimizer, grads, state, taken=jnp.bool_(True), branch=True, shardings=shardings_of(target.params))

    jaxpr = jax.make_jaxpr(run)(target.params, target)
    leaves = jax.tree.leaves((target.params, target))
    return peak_bytes(jaxpr, [bytes_per_device(x, x.sharding.spec, mesh) for x in leaves])


def _habits(strategy: Any) -> tuple[bool, bool]:
    """(whether gradients are whole until the end of a step, whether parameters are gathered once a step)."""
    mesh, found = abstract_mesh(fsdp=2), {}
    made = get_strategy(StepOptions(strategy=strategy))
    whole = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    specs = {"w": P("fsdp")}

    def region(params: PyTree) -> jax.Array:
        diff, captured = made.begin(params, specs, None)
        found["whole"] = all(leaf.shape == (4, 4) for leaf in jax.tree.leaves(diff))
        found["gathers"] = any(leaf.shape == (4, 4) for leaf in jax.tree.leaves(captured))
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(region, mesh=mesh, in_specs=(specs,), out_specs=P()), {"w": whole})
    return found["whole"], found["gathers"]


def memory_of(config: Config, known: Known) -> dict[str, int]:
    """Bytes."""
    rest, units = rest_of(config, known), units_of(config, known)
    mesh, parallel = config.mesh, config.parallel
    key = ("batch", mesh_sizes(config), config.data.global_batch, config.data.seq_len)
    batch = known.get(key, lambda: resident_bytes(batch_of(config, planned_mesh(config))))
    rows = config.data.global_batch // (mesh.data * mesh.fsdp * mesh.expert * parallel.microbatches)
    sizes = {name: line(rows) for name, line in units._asdict().items()}
    if mesh.pipe > 1:
        phases = _piped(config, known, sizes, rest)
    else:
        phases = _in_one(config, sizes, rest)
    phases["update"] = rest.shards + rest.update
    temporary = max(phases.values())
    found = dict(rest.state) | {"batch": batch} | {f"phase {k}": round(v) for k, v in phases.items()}
    found["temporary"] = round(temporary)
    found[PEAK] = round(rest.total + batch + temporary)
    return found


def _in_one(config: Config, sizes: dict[str, float], rest: Rest) -> dict[str, float]:
    grads = sum(rest.grads.values())
    base = rest.copies + (grads if config.parallel.microbatches > 1 else 0)
    return {
        "forward": base + sizes["kept"] + sizes["forward"],
        "head": base + sizes["kept"] + sizes["h"] * 2 + sizes["head"] + rest.grads["head"] + rest.grads["embed"],
        "backward": base + sizes["kept"] + grads + sizes["h"] + sizes["backward"],
        "reduce": rest.copies + grads + rest.shards,
    }


def _piped(config: Config, known: Known, sizes: dict[str, float], rest: Rest) -> dict[str, float]:
    parallel, stages = config.parallel, config.mesh.pipe

    def slots() -> tuple[int, int, int]:
        found = allocate_slots(table_of(parallel.schedule)(stages, parallel.microbatches, parallel.chunks))
        return found.residuals.size, found.cotangents.size, found.residuals.size if found.late_loss else 1

    kept, crossing, late = known.get(("slots", parallel.schedule, stages, parallel.microbatches, parallel.chunks), slots)
    grads = sum(rest.grads.values())
    held = sizes["kept"] * kept + sizes["crossing"] * crossing + sizes["h"] * (late + 2)
    base = rest.copies + grads + held
    one = rest.grads[STACKED] / parallel.chunks
    return {
        "forward": base + sizes["kept"] + sizes["forward"] + sizes["h"],
        "head": base + sizes["h"] + sizes["head"] + rest.grads["head"] + rest.grads["embed"],
        "backward": base + sizes["kept"] + sizes["backward"] + (sizes["crossing"] or one) + sizes["h"],
        "weights": base + sizes["kept"] + sizes["crossing"] + sizes["weights"] + (one if sizes["crossing"] else 0),
        "embed": base + sizes["embed"] + rest.grads["embed"],
        "reduce": rest.copies + grads + rest.shards,
    }
