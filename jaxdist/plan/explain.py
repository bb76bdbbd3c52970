"""Explanation of a configuration without running it: its collectives, the memory of a device, its sharding."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.build import Parts, assemble, mesh_of_config, planned_mesh, prefetches_on, with_teacher
from jaxdist.config.schema import Config
from jaxdist.mesh import AnyMesh
from jaxdist.model import ModelDef
from jaxdist.optim import leave_out
from jaxdist.parallel.compose import get_strategy
from jaxdist.plan.compiled.hlo import Comparison, Compiled, compare, compiled_collectives
from jaxdist.plan.compiled.memory import batch_of, compile_step, footprint_of, resident_bytes
from jaxdist.plan.traced.activations import BETWEEN_STAGES, SAVED_KINDS, SavedArray, saved_activations
from jaxdist.plan.traced.ledger import Ledger, ledger
from jaxdist.plan.traced.liveness import temporary_bytes
from jaxdist.plan.traced.sharding import Row, sharding_rows, why_split
from jaxdist.specs import STACKED, PyTree, active_specs, map_specs
from jaxdist.state import TrainState, specs_of_arrays

# The sums of the table of memory: the only rows that may be compared with the memory of a device; and what they lack.
ESTIMATED_PEAK, COMPILED_PEAK = (f"peak, {how} (state, batch and temporary)" for how in ("estimated", "compiled"))
ESTIMATED_TEMPORARY = "temporary, estimated (gradients, copies, activations)"
# The last is known of models with blocks only.
IN_HOST_MEMORY = "host memory, optimizer state"
NOT_HERE = "not in this table (more in 1 of 10 configurations)"

# Compiled peak / estimated peak, tenth percentile, median and ninetieth, of the 50 random configurations in
# docs/measurements/explain_memory_cpu.json.
MEASURED = (0.97, 1.04, 1.16)


class Explanation(NamedTuple):
    """The facts of a configuration.

    memory: {purpose: bytes of a device}
    activations: arrays that one microbatch saves; of a pipeline those of all microbatches that a stage has begun
    empty_rows: rows of each stacked parameter that hold no block (see `jaxdist.parallel.pipeline.stages`); all figures
        count them
    added: collectives that the compiler adds; None if nothing was compiled
    compiled: {op: the ledger beside the compiled program}; None if nothing was compiled
    attention: the kernel of the traced program, and why it is not cuDNN's (see `jaxdist.build.Parts`)
    outer: of each fragment's outer step, once in `every` steps, where replicas train by themselves; `ledger` is then
        of an inner step
    """

    mesh: dict[str, int]
    ledger: Ledger
    parameters: list[Row]
    memory: dict[str, int]
    activations: list[SavedArray]
    empty_rows: int
    added: list[Compiled] | None
    compiled: dict[str, Comparison] | None
    attention: tuple[str, str | None]
    outer: tuple[Ledger, ...] = ()
    every: int = 0


def explain(config: Config, *, compiled: bool = False, devices_per_host: int = 8) -> Explanation:
    """Trace the step of a configuration.

    compiled: also compile it, for as many simulated CPU devices as its mesh has, which this process must have
    """
    mesh: AnyMesh = mesh_of_config(config) if compiled else planned_mesh(config)
    parts = assemble(config, mesh)
    return explain_parts(
        config, parts, mesh, batch_of(config, mesh), compiled=compiled, devices_per_host=devices_per_host
    )


def explain_parts(
    config: Config, parts: Parts, mesh: AnyMesh, batch: PyTree, *, compiled: bool = False, devices_per_host: int = 8
) -> Explanation:
    """`explain` of parts that are assembled already, as those of a run; a step that was traced is not traced again.

    batch: shapes with shardings
    """
    parts, batch = with_teacher(parts, batch)
    found = ledger(parts.step, parts.target, batch, devices_per_host=devices_per_host)
    rows = sharding_rows(parts.target.params, specs_of_arrays(parts.target.params), mesh)
    if isinstance(parts.model, ModelDef):
        reasons = why_split(parts.model, parts.options, mesh)
        rows = [row._replace(why=why) for row, why in zip(rows, reasons, strict=True)]
    kept = saved_activations(parts.step, parts.target, batch)
    memory = memory_at_rest(parts.target) | {"batch": resident_bytes(batch)} | memory_of_a_step(config, parts, mesh)
    sizes = dict.fromkeys(SAVED_KINDS, 0)  # and what is offloaded or sent, if anything is
    for each in kept:
        sizes[each.kind] = sizes.get(each.kind, 0) + each.bytes_per_device
    memory |= {kind if kind == BETWEEN_STAGES else f"{kind}, kept for backward": size for kind, size in sizes.items()}
    temporary, measured = temporary_bytes(parts.step, parts.target, batch), isinstance(parts.model, ModelDef)
    if not measured:  # elementwise chains of a loss without blocks count as fused across both passes
        temporary = max(temporary, sum(sizes[kind] for kind in SAVED_KINDS))
    memory[ESTIMATED_TEMPORARY] = temporary
    teacher = 0 if parts.teaching is None else resident_bytes(parts.teaching.target)
    memory |= {"parameters of the teacher": teacher} if teacher else {}
    memory[ESTIMATED_PEAK] = resident_bytes((parts.target, batch)) + temporary + teacher
    memory |= {} if compiled or not measured else {NOT_HERE: round((MEASURED[-1] - 1) * memory[ESTIMATED_PEAK])}
    added, compared = None, None
    if compiled:
        program = compile_step(parts, batch)
        if (footprint := footprint_of(program, config, parts)) is not None:
            memory["temporary, compiled (gradients, copies, activations)"] = footprint.temporary
            memory[COMPILED_PEAK] = footprint.peak
        everything = compiled_collectives(program.as_text())
        added = [each for each in everything if each.added and each.group_size > 1]
        compared = compare(found, everything)
    told = (found.mesh, found, rows, memory, kept, parts.model.empty_rows, added, compared, parts.attention)
    if parts.replicas is None:
        return Explanation(*told)
    from jaxdist.plan.traced.outer_steps import outer_ledgers

    outer = outer_ledgers(parts.step, parts.target, batch, devices_per_host=devices_per_host)
    return Explanation(*told, tuple(outer), config.parallel.local.every)


def memory_at_rest(target: TrainState) -> dict[str, int]:
    """Exact bytes of the state on one device, but for the count of steps."""
    state = {"parameters": resident_bytes(target.params), "optimizer state": resident_bytes(target.opt_state)}
    if host := resident_bytes((target.params, target.opt_state), on_host=True):  # the first: an anchor of replicas
        state[IN_HOST_MEMORY] = host
    return state | ({"residual of int8": resident_bytes(target.residual)} if jax.tree.leaves(target.residual) else {})


def memory_of_a_step(config: Config, parts: Parts, mesh: AnyMesh) -> dict[str, int]:
    """Bytes on one device of the gradients, and of the copies of parameters that are gathered once a step.

    Gradients have the shape of the differentiated parameters and at least fp32; those of prefetched blocks have the
    reduce dtype. (Tables of the head, gathered in slices beside the blocks, are counted as fp32.)
    """
    strategy, specs = get_strategy(parts.options), specs_of_arrays(parts.target.params)
    blocks = STACKED if isinstance(parts.model, ModelDef) else None
    sizes: dict[str, int] = {}

    reduced = dict[str, int]()
    if prefetches_on(config, mesh) and config.parallel.microbatches == 1:
        reduced = {STACKED: jax.numpy.dtype(parts.options.precision.reduce).itemsize}

    def gradient(unit: str, leaf: jax.Array) -> int:
        size = leaf.dtype.itemsize
        return leaf.size * (min(size, reduced[unit]) if unit in reduced else max(4, size))

    def region(params: PyTree) -> jax.Array:
        diff, captured = strategy.begin(params, specs, blocks)
        trained = leave_out(diff, config.optimizer.frozen)
        sizes["gradients"] = sum(gradient(unit, leaf) for unit in trained for leaf in jax.tree.leaves(trained[unit]))

        def kept(_: P, shard: jax.Array, leaf: Any, copy: Any) -> Any:  # a shard that is used as it is is no copy
            used = next(iter(jax.tree.leaves(copy)), leaf)
            return () if used.shape == shard.shape else used

        copies = jax.tree.leaves(map_specs(kept, specs, params, diff, captured))
        sizes["gathered copies, the whole step"] = sum(leaf.size * leaf.dtype.itemsize for leaf in copies)
        return jax.numpy.zeros(())

    jax.eval_shape(
        jax.shard_map(region, mesh=mesh, in_specs=(active_specs(specs, mesh),), out_specs=P()), parts.target.params
    )
    return sizes


def explanation_to_json(explanation: Explanation) -> dict[str, Any]:
    """The explanation as JSON: {"mesh", "wire_bytes", "collectives", "memory", "parameters", ...}.

    Entries have the fields of their types.
    """
    parameters = [
        {
            "path": row.path,
            "shape": list(row.shape),
            "dtype": row.dtype,
            "spec": str(row.spec),
            "bytes_per_device": row.bytes_per_device,
            "why": row.why,
        }
        for row in explanation.parameters
    ]

    def dicts(facts: Sequence[SavedArray | Compiled]) -> list[dict[str, Any]]:
        return [each._asdict() for each in facts]

    steps = [_sent_to_json(each) for each in explanation.outer]
    outer = {"outer": {"every": explanation.every, "steps": steps}} if explanation.every else {}
    compared = None
    if explanation.compiled is not None:
        compared = {op: each._asdict() | {"agrees": each.agrees} for op, each in explanation.compiled.items()}
    return {
        "mesh": explanation.mesh,
        **_sent_to_json(explanation.ledger),
        "memory": explanation.memory,
        "parameters": parameters,
        "activations": dicts(explanation.activations),
        "added": None if explanation.added is None else dicts(explanation.added),
        "compiled": compared,
        **outer,
    }


def _sent_to_json(found: Ledger) -> dict[str, Any]:
    """What a ledger says that is sent: {"wire_bytes", "collectives"}."""
    entries = [each._asdict() | {"axes": list(each.axes)} for each in found.collectives]
    return {"wire_bytes": found.wire_bytes, "collectives": entries}
