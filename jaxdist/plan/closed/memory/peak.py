"""The memory of a device in closed form: what it holds, and the most at any time of a step, without tracing the step.

State and batch are exact (`at_rest`). Beside them a step goes through phases, each with arrays of its own; the peak is
that of the phase with most. Work space of blocks, embedding and head, and what is kept for the backward pass, come from
traces of these units alone (`units`).

What has no closed form is traced whole: a loss without blocks, distillation, and replicas that train by themselves.
"""

import math

from jaxdist.build import planned_mesh
from jaxdist.config.entries import ModelFacts, ScheduleFacts
from jaxdist.config.schema import Config
from jaxdist.parallel.pipeline.table import allocate_slots, table_of
from jaxdist.plan.closed.leaves import Known, mesh_sizes, parts_of_a_step, rows_of
from jaxdist.plan.closed.memory.at_rest import AtRest, at_rest
from jaxdist.plan.closed.memory.units import units_of
from jaxdist.plan.compiled.memory import batch_of, resident_bytes
from jaxdist.plan.explain import ESTIMATED_PEAK, ESTIMATED_TEMPORARY, IN_HOST_MEMORY, explain
from jaxdist.specs import STACKED

PEAK = "peak"
HOST_PARTS = (IN_HOST_MEMORY,)  # parts that are in no device's memory
OF_COPIES, OF_GRADIENTS, OF_ACTIVATIONS = (
    "gathered copies, the whole step",
    "gradients",
    "activations, kept for backward",
)
OF_STAGES, OF_A_BLOCK, OF_THE_HEAD = (
    "buffers between stages",
    "work space of one block",
    "work space of the head, with logits",
)
OF_THE_EMBEDDING, OF_THE_UPDATE = "work space of the embedding", "work space of the optimizer"
Phase = dict[str, float]

# Bounds beyond all of compiled peak / closed form, of 50 random configurations in
# docs/measurements/closed_memory_cpu.json. By the lower one a search leaves layouts out.
BOUNDS = (0.8, 1.5)


def memory_of(config: Config, known: Known, *, most: float = math.inf) -> dict[str, int]:
    """{part: bytes of one device} at the time of a step when it holds most, and their sum, `PEAK`.

    Parts in host memory (`HOST_PARTS`) are not in the sum.

    most: where state, batch and gradients alone are more bytes, the parts are these: nothing is traced for what is left
        out anyway.
    """
    if traced_whole(config):
        return _traced(config)
    mesh, rest = config.mesh, at_rest(config, known)
    key = ("batch", mesh_sizes(config), config.data.global_batch, config.data.seq_len)
    batch = known.get(key, lambda: resident_bytes(batch_of(config, planned_mesh(config))))
    fetched = rest.state.get(IN_HOST_MEMORY, 0)
    summed: Phase = {OF_GRADIENTS: sum(rest.gradients.values()) + rest.shards, OF_COPIES: sum(rest.copies.values())}
    phases: list[Phase] = [summed, {OF_GRADIENTS: rest.shards, OF_THE_UPDATE: rest.update + fetched}]
    found = _with_peak(rest.state | {"batch": batch}, phases)
    if found[PEAK] > most:
        return found
    parts, rows = parts_of_a_step(config), rows_of(config)
    sizes = {name: line(rows) for name, line in units_of(config, known, rows)._asdict().items()}
    sizes["kept"] -= min(sizes["cast"], rest.copies[STACKED])  # copies that are gathered once are cast already
    phases += _piped(config, known, sizes, rest) if mesh.pipe > 1 else _in_one(config, known, sizes, rest, parts)
    return _with_peak(rest.state | {"batch": batch}, phases)


def traced_whole(config: Config) -> bool:
    """Whether the memory of a step has no closed form: of a loss without blocks, distillation, replicas that train by
    themselves."""
    return ModelFacts.of(config.model.name).user_loss or config.distill.on or config.parallel.local.on


def _with_peak(held: dict[str, int], phases: list[Phase]) -> dict[str, int]:
    """What is held all the time, with what the largest phase adds, and the sum."""
    found = held | {part: round(size) for part, size in max(phases, key=lambda phase: sum(phase.values())).items()}
    return found | {PEAK: sum(size for part, size in found.items() if part not in HOST_PARTS)}


def _traced(config: Config) -> dict[str, int]:
    """`memory_of` from a trace of the whole step: seconds."""
    memory = explain(config).memory
    rest = memory[ESTIMATED_PEAK] - memory[ESTIMATED_TEMPORARY]
    return {
        "parameters": memory["parameters"],
        "optimizer state": memory["optimizer state"],
        "the rest of state and batch": rest - memory["parameters"] - memory["optimizer state"],
        ESTIMATED_TEMPORARY: memory[ESTIMATED_TEMPORARY],
        PEAK: memory[ESTIMATED_PEAK],
    }


def _in_one(config: Config, known: Known, sizes: dict[str, float], rest: AtRest, parts: int) -> list[Phase]:
    """The phases of a microbatch in one stage. parts: the number of microbatches."""
    grads, kept, h = sum(rest.gradients.values()), sizes["kept"], sizes["h"]
    model = known.model(config)
    # The table's gradient: with tied embeddings the head makes it, else the embedding, when blocks are done.
    embed = rest.gradients["embed"]
    late = 0 if model.tied else embed
    sums = 0.0  # of the microbatches before
    if parts > 1:
        pairs = ScheduleFacts.of(config.parallel.schedule).power_of_two or config.parallel.grad_sync.deterministic
        sums = grads * (math.log2(parts) if pairs else 1)
    head = rest.gradients["head"] + embed - late
    copies, layers = float(sum(rest.copies.values())), model.layers
    if config.memory.remat == "offload":
        kept = max(0.0, kept - h * layers)
    if known.prefetches(config):  # two blocks stay gathered, and another one is under way
        copies += 3 * rest.whole[STACKED] / layers
    base = {OF_COPIES: copies, OF_ACTIVATIONS: kept}
    return [
        base | {OF_GRADIENTS: sums, OF_A_BLOCK: sizes["forward"]},
        base | {OF_GRADIENTS: sums + head, OF_THE_HEAD: sizes["head"] + 2 * h},
        base | {OF_GRADIENTS: sums + grads - late, OF_A_BLOCK: sizes["backward"] + h},
        {OF_COPIES: copies, OF_GRADIENTS: sums + grads, OF_THE_EMBEDDING: h},
    ]


def _piped(config: Config, known: Known, sizes: dict[str, float], rest: AtRest) -> list[Phase]:
    """The phases of a tick of a pipeline."""
    parallel, stages = config.parallel, config.mesh.pipe

    def slots() -> tuple[int, int, int]:
        table = table_of(parallel.schedule)
        assert table is not None, f"{parallel.schedule} runs stages"
        found = allocate_slots(table(stages, parallel.microbatches, parallel.chunks))
        return found.residuals.size, found.cotangents.size, found.residuals.size if found.late_loss else 1

    key = ("slots", parallel.schedule, stages, parallel.microbatches, parallel.chunks)
    residuals, cotangents, late = known.get(key, slots)
    h, kept, crossing = sizes["h"], sizes["kept"], sizes["crossing"]
    grads = sum(rest.gradients.values())
    chunk = rest.gradients[STACKED] / parallel.chunks
    sliced = rest.used[STACKED] / parallel.chunks if parallel.chunks > 1 else 0  # the parameters of a chunk
    base = {
        OF_COPIES: sum(rest.copies.values()),
        OF_ACTIVATIONS: kept * residuals + crossing * cotangents + h * late,
        OF_STAGES: 2 * h,
        OF_GRADIENTS: grads,
    }
    own = 0 if crossing else chunk  # gradients of blocks that B makes
    # The loop over one block is unrolled: what it reads and makes stays where it is kept between ticks.
    there = 0 if known.model(config).layers == stages * parallel.chunks else 1
    made, read, read_weights, left = (there * sizes[name] for name in ("kept", "read", "read_weights", "crossing"))
    units = rest.gradients["head"] + (rest.gradients["embed"] if known.model(config).tied else 0)
    return [
        base | {OF_A_BLOCK: made + h + sliced + sizes["forward"]},
        base | {OF_THE_HEAD: h + sizes["head"], OF_GRADIENTS: grads + units},
        base | {OF_A_BLOCK: read + h + sliced + sizes["backward"] + left, OF_GRADIENTS: grads + own},
        base | {OF_A_BLOCK: read_weights + left + sizes["weights"], OF_GRADIENTS: grads + chunk},
        base | {OF_THE_EMBEDDING: sizes["embed"], OF_GRADIENTS: grads + rest.gradients["embed"]},
    ]
