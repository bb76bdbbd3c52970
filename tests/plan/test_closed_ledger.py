"""The closed-form ledger beside the traced one: the same bytes on every axis, for all that is shipped."""

import functools
import importlib
import itertools
import math
import random
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec
from levels import others_slow
from random_layouts import ALGORITHMS, SCHEDULES, STRATEGIES, random_config, tiny

from jaxdist import collectives
from jaxdist.build import assemble, planned_mesh
from jaxdist.collectives.algorithm import get_algorithm
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.jaxpr.walk import every_equation
from jaxdist.mesh import abstract_mesh
from jaxdist.parallel.pipeline.run import run_ticks
from jaxdist.plan.closed import forms
from jaxdist.plan.closed.calls import collective_call
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.ledger import sends_of
from jaxdist.plan.closed.microbatch import one_tick, trace_microbatch
from jaxdist.plan.closed.sent import Transfer, bytes_by_axes
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.traced.ledger import OP_OF_PRIMITIVE, Ledger, ledger, wire_bytes

# Together they have every strategy, schedule, mode of remat, form of context and way of dispatch.
CASES = {
    "zero3, prefetched": "mesh={data: 2, fsdp: 2, tensor: 2} parallel.strategy=zero3 optimizer.name=muon"
    " parallel.min_shard_bytes=0 model.layers=3",
    "zero3 of a pipeline": "mesh={pipe: 2, fsdp: 2} parallel.strategy=zero3 parallel.schedule=one_f_one_b"
    " parallel.microbatches=4 parallel.stages=[2,1] model.layers=3 parallel.min_shard_bytes=0 memory.remat=dots",
    "zero2, a ring": "mesh={fsdp: 2, context: 2} parallel.strategy=zero2 parallel.context=ring memory.remat=full"
    " precision.policy=bf16 parallel.grad_sync.algorithm=ring parallel.grad_sync.wire_dtype=bfloat16",
    "zero1, experts": "mesh={fsdp: 2, expert: 2} parallel.strategy=zero1 model.moe.experts=4 parallel.microbatches=2"
    " memory.remat=[attention.context,mlp.rows] model.layers=2",
    "zero3 over expert": "mesh={expert: 4} parallel.strategy=zero3 model.moe.experts=4 model.layers=2"
    " parallel.min_shard_bytes=0",
    "zero3 over expert, prefetched": "mesh={expert: 4} parallel.strategy=zero3 model.moe.experts=4 model.layers=2"
    " parallel.prefetch=1 parallel.min_shard_bytes=0",
    "zero3 over fsdp and expert, prefetched": "mesh={fsdp: 2, expert: 2} parallel.strategy=zero3 model.moe.experts=4"
    " model.layers=2 parallel.prefetch=1 parallel.min_shard_bytes=0",
    "capacity, gathered keys, pairs": "mesh={context: 2, expert: 2, tensor: 2} model.moe.experts=4 model.layers=2"
    " model.moe.dispatch=capacity model.moe.group=8 parallel.context=gather parallel.sequence_parallel=true"
    " parallel.schedule=pairwise parallel.microbatches=2",
    "halves, masked": "mesh={pipe: 2, data: 2, tensor: 2} parallel.schedule=zero_bubble parallel.microbatches=4"
    " parallel.pipeline_cond=false parallel.sequence_parallel=true parallel.collective_matmul=true",
    "chunks, sqrt": "mesh={pipe: 2, tensor: 2} parallel.schedule=interleaved parallel.chunks=2 memory.remat=sqrt"
    " parallel.stages=[2,1,2,3] model.layers=8 parallel.microbatches=2 precision.policy=O1",
    "gpipe, bert": "mesh={pipe: 2, fsdp: 2} model.name=bert data.source=masked data.path=x parallel.schedule=gpipe"
    " parallel.grad_sync.algorithm=tree parallel.microbatches=2 parallel.min_shard_bytes=0 parallel.strategy=zero1",
    "deterministic, all to all": "mesh={data: 2, fsdp: 2} parallel.strategy=zero3 model.layers=2"
    " parallel.grad_sync.deterministic=true model.loss_chunk=48 optimizer.freeze=[embed.*]",
    "vit, int8, offload": "mesh={data: 2, tensor: 2} model.name=vit data.source=digits model.image_size=16"
    " model.patch_size=4 model.classes=16 parallel.grad_sync.algorithm=balanced_fusion memory.remat=offload"
    " parallel.grad_sync.wire_dtype=int8 parallel.grad_sync.bucket_mb=0.01",
    "a loss in chunks, fp16": "mesh={fsdp: 2, tensor: 2} model.loss_chunk=8 precision.policy=fp16 model.layers=2",
}
DRAWN, TOGETHER = 200, 10  # random configurations, and how many are one test


@pytest.mark.parametrize("case", ["gpipe, bert", "zero3 of a pipeline", "halves"])
def test_a_stage_without_ticks_sends_what_one_with_them_does(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`in_a_stage` does the work of `run_ticks` by itself, for it is traced in half the time."""
    halves = case == "halves"
    zero_bubble = ("mesh={pipe: 2, tensor: 2}", "parallel.schedule=zero_bubble", "parallel.microbatches=2")
    config = tiny(*zero_bubble, "memory.remat=dots") if halves else config_of(case)
    seen = list[bool]()

    def both_ways(*given: Any) -> Any:
        *rest, run = given
        found = trace_microbatch(*rest, run)
        ticks = functools.partial(run_ticks, one_tick(int(run.keywords["halves"])))
        seen.append(run.keywords["halves"])
        assert found == trace_microbatch(*rest, ticks)
        return found

    monkeypatch.setattr(forms, "trace_microbatch", both_ways)
    sends_of(config, Known())
    assert {*seen} == {halves}


def both(config: Config, known: Known) -> tuple[list[Transfer], Ledger]:
    """What the closed forms and the trace of a step say."""
    mesh = planned_mesh(config)
    parts = assemble(config, mesh)
    return sends_of(config, known), ledger(parts.step, parts.target, batch_of(config, mesh))


def differing(sent: list[Transfer], traced: Ledger) -> dict[tuple[str, ...], tuple[float, float]]:
    """The axes on which they differ by more than half a byte, with the bytes of both."""
    closed, wanted = bytes_by_axes(sent), traced.total("axes")
    each = {axes: (closed.get(axes, 0.0), wanted.get(axes, 0.0)) for axes in {*closed, *wanted}}
    return {axes: pair for axes, pair in each.items() if abs(pair[0] - pair[1]) > 0.5}


def config_of(case: str) -> Config:
    """The configuration of overrides that are parted by spaces before a section."""
    parts = (" " + CASES[case]).replace("mesh=", "\nmesh=")
    for section in ("parallel", "model", "data", "memory", "precision", "optimizer"):
        parts = parts.replace(f" {section}.", f"\n{section}.")
    return tiny(*(each.strip() for each in parts.split("\n") if each.strip()))


@pytest.mark.parametrize("case", others_slow(CASES, *list(CASES)[:2]))
def test_closed_bytes_are_traced_bytes(case: str) -> None:
    sent, traced = both(config_of(case), Known())
    assert not differing(sent, traced)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(DRAWN // TOGETHER))
def test_closed_bytes_are_traced_bytes_of_random_configurations(seed: int) -> None:
    rng, known, left = random.Random(1000 + seed), Known(), TOGETHER
    while left:
        config, overrides = random_config(rng)
        try:
            sent, traced = both(config, known)
        except UserError:  # what only building finds out is drawn again
            continue
        assert not differing(sent, traced), overrides
        left -= 1


def module_of(folder: str, name: str) -> Any:
    return importlib.import_module(f"jaxdist.{folder}.{name}")


def test_every_entry_says_what_it_sends() -> None:
    """Nothing is added to these folders without a closed form, nor without a case above."""
    configs = [config_of(case) for case in CASES]
    run = {config.parallel.schedule for config in configs} | {"pairwise"}  # of a deterministic step
    assert {config.parallel.strategy for config in configs} == set(STRATEGIES)
    assert run == set(SCHEDULES)
    for name in STRATEGIES:
        assert callable(getattr(module_of("parallel.strategies", name), "sends", None)), name
    for name in SCHEDULES:
        module = module_of("parallel.schedules", name)
        assert callable(getattr(module, "table", None)) or callable(getattr(module, "sends", None)), name


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("axes", [("data", "fsdp"), ("pipe",)], ids="+".join)
def test_a_call_sends_what_its_trace_sends(name: str, axes: tuple[str, ...]) -> None:
    sizes = {"pipe": 4, "data": 2, "fsdp": 3}
    n, algorithm = math.prod(sizes[axis] for axis in axes), get_algorithm(name)
    mesh, over = abstract_mesh(**{axis: sizes[axis] for axis in axes}), PartitionSpec(axes)
    links = (None, "200mbit") if name in ("auto", "two_level") else (None,)
    for operation, link in itertools.product(("all_reduce", "reduce_scatter", "all_gather"), links):
        if getattr(algorithm, operation) is None or (axes == ("pipe",) and operation == "all_gather"):
            continue
        how = {"algorithm": name, "link": link}
        if operation != "all_gather":
            how["wire_dtype"] = None
        run = lambda x, of=operation, how=how: collectives.to_varying(getattr(collectives, of)(x, axes, **how), axes)  # noqa: E731
        mapped = jax.shard_map(run, mesh=mesh, in_specs=over, out_specs=over)
        size = 12 * n if operation != "all_gather" else 12
        jaxpr = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((n * size,), "float32"))
        wanted = [0.0] * sizes["pipe"]
        for site in every_equation(jaxpr):
            op = OP_OF_PRIMITIVE.get(site.equation.primitive.name)
            if op is None:
                continue
            nbytes = sum(x.aval.size * x.aval.dtype.itemsize for x in site.equation.invars)
            pairs = site.equation.params.get("perm", ()) if axes == ("pipe",) else ()
            senders = {source for source, _ in pairs} or set(range(sizes["pipe"]))
            for stage in senders:
                wanted[stage] += wire_bytes(op, nbytes, n) * site.times
        found = collective_call(operation, size, "float32", axes, sizes, how)
        assert max(wanted) == pytest.approx(max(found.by_stage or (found.messages * found.wire_bytes,))), operation
