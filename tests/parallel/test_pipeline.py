"""Pipelines train like one device: every schedule, with data, fsdp and tensor parallelism and every strategy."""

from typing import Any

import jax
import layouts
import oracle
import pytest
from jax.sharding import NamedSharding
from levels import levels
from pipelines import SCHEDULES, Case, check_wide, config_of, model_of, run, start

from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StrategyOptions
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import BATCH_SPEC
from jaxdist.step import make_train_step
from jaxdist.trainer.evaluation import make_eval_step

EACH_SCHEDULE = [
    Case("one_f_one_b", 2, "llama", True, "zero3", 4, (1, 2, 2), remat="full"),
    Case("gpipe", 2, "llama", False, "zero1", 4, (1, 2, 1)),
    Case("zero_bubble", 4, "llama", False, "zero3", 8, (1, 2, 1)),
    Case("interleaved", 2, "gpt2", True, "zero2", 4, (1, 2, 1), chunks=2),
]
SLOW = [
    Case("one_f_one_b", 4, "gpt2", True, "ddp", 8, (2, 1, 1)),
    Case("zero_bubble", 2, "gpt2", True, "ddp", 2, (1, 1, 2), dropout=0.2),
    *(
        Case(
            schedule,
            pipe,
            ("gpt2", "llama")[(i + j) % 2],
            (i + j) % 3 == 0,
            strategy,
            microbatches,
            mesh,
            layers=2 * pipe if schedule == "interleaved" else 8,
            chunks=2 if schedule == "interleaved" else 1,
            remat=("none", "full")[j % 2],
        )
        for i, schedule in enumerate(SCHEDULES)
        for j, (pipe, strategy, microbatches, mesh) in enumerate(
            (
                (2, "zero3", 2, (2, 2, 1)),
                (2, "zero2", 4, (2, 1, 2)),
                (2, "ddp", 8, (4, 1, 1)),
                (4, "zero1", 4, (1, 2, 1)),
                (4, "zero3", 8, (1, 1, 2)),
                (8, "ddp", 8, (1, 1, 1)),
                (2, "zero1", 4, (1, 4, 1)),
                (2, "zero3", 4, (1, 1, 4)),
            )
        )
    ),
    Case("one_f_one_b", 8, "llama", False, "zero3", 16, (1, 1, 1), layers=8),
    Case("one_f_one_b", 4, "gpt2", True, "ddp", 2, (1, 1, 1)),  # fewer microbatches than stages
    Case("zero_bubble", 4, "gpt2", True, "zero3", 1, (1, 2, 1)),
    Case("gpipe", 4, "gpt2", False, "ddp", 1, (1, 1, 2)),
    Case("interleaved", 2, "llama", True, "ddp", 4, (1, 1, 1), layers=6, chunks=3),
    Case("one_f_one_b", 1, "gpt2", True, "zero3", 4, (1, 4, 1)),
    *(Case(schedule, 2, "llama", True, "zero3", 4, (1, 2, 1), pipeline_cond=False) for schedule in SCHEDULES),
    Case("one_f_one_b", 2, "gpt2", True, "zero3", 4, (1, 1, 2), loss_chunk=24),
    Case("zero_bubble", 2, "llama", False, "ddp", 2, (2, 1, 1), remat="full", loss_chunk=7),
    *(
        Case(schedule, 2, "llama", False, "zero3", 4, (1, 2, 2), layers=10, remat="sqrt")
        for schedule in ("gpipe", "one_f_one_b")
    ),
    Case("interleaved", 2, "gpt2", True, "zero2", 4, (1, 2, 1), layers=20, chunks=2, remat="sqrt"),
    *(
        Case(schedule, 2, "gpt2", True, strategy, 4, (1, 2, 1), chunks=1 + (schedule == "interleaved"), remat=remat)
        for schedule, strategy, remat in zip(
            SCHEDULES,
            ("zero3", "zero1", "zero2", "zero3"),
            ("dots", ("attention.out",), "dots", ("mlp.hidden",)),
            strict=True,
        )
    ),
]


@pytest.mark.parametrize(
    "case", [*levels(EACH_SCHEDULE, everyday=8, slow=2, common=1), *levels(SLOW, slow=24, common=6)], ids=str
)
def test_pipelines_equal_one_device(case: Case) -> None:
    check_wide(case)


@pytest.mark.parametrize("case", levels(EACH_SCHEDULE, slow=4, common=2), ids=str)
def test_pipelines_equal_one_device_in_fp32(case: Case) -> None:
    with jax.enable_x64(True):
        want = layouts.reference(config_of(case), 32, "fp64")
        got = run(case, "fp32", 1)
    assert got.losses[0] == pytest.approx(want.losses[0], rel=1e-5)
    assert oracle.error(got.grads[0], want.grads[0]) < 1e-5


@pytest.mark.parametrize("schedule", levels(reversed(SCHEDULES), slow=4))
def test_bf16(schedule: str) -> None:
    """As near to float64 as one stage is."""
    case = Case(schedule, 2, "llama", True, "zero3", 4, (1, 2, 1), chunks=1 + (schedule == "interleaved"))
    one = case._replace(schedule="accumulate", pipe=1, chunks=1, strategy="ddp", mesh=(1, 1, 1))
    want, got = (run(each, "bf16", 1) for each in (one, case))
    assert got.losses[0] == pytest.approx(want.losses[0], rel=2e-3)
    assert oracle.error(got.grads[0], want.grads[0]) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("case", levels(EACH_SCHEDULE[::2], everyday=len(EACH_SCHEDULE)), ids=str)
def test_evaluation_goes_from_stage_to_stage(case: Case) -> None:
    with jax.enable_x64(True):
        model, state, _, _ = start(case)
        mesh, strategy = jax.tree.leaves(state.params)[0].sharding.mesh, case.strategy
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state.params)
        options = StrategyOptions(POLICIES["fp64"], strategy=strategy)
        evaluate = make_eval_step(model, mesh, specs, get_strategy(options))
        batch = jax.device_put(layouts.make_batch(32, 0), NamedSharding(mesh, BATCH_SPEC))
        total, weight = evaluate(state.params, batch)["loss"]
        want = layouts.reference(config_of(case), 32, "fp64").losses[0]
    assert float(total / weight) == pytest.approx(want, rel=1e-10)


def temporary_bytes(schedule: str, microbatches: int) -> int:
    case = Case(schedule, 4, "gpt2", False, "ddp", microbatches, (1, 1, 1), chunks=1)
    with jax.enable_x64(True):
        _, state, step, _ = start(case)
        batch = layouts.make_batch(2 * microbatches, 0)  # two sequences a microbatch
        return int(step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble"])
def test_memory_does_not_grow_with_microbatches(schedule: str) -> None:
    few, many = temporary_bytes(schedule, 8), temporary_bytes(schedule, 64)
    assert many == pytest.approx(few, rel=0.02)


@pytest.mark.slow
def test_memory_of_gpipe_grows_with_microbatches() -> None:
    assert temporary_bytes("gpipe", 64) > 4 * temporary_bytes("gpipe", 8)


def test_every_schedule_of_several_stages_is_tested() -> None:
    assert {case.schedule for case in EACH_SCHEDULE} == set(SCHEDULES)


@pytest.mark.slow
def test_sums_by_hand_inside_stages_are_refused() -> None:
    """They would hang; not with `pipeline_cond=False`, nor where a strategy sums at the end."""
    mesh, model, tx = make_mesh(pipe=2, fsdp=2), model_of(EACH_SCHEDULE[1], "fp32"), layouts.optimizer()

    def trace(strategy: str, *, pipeline_cond: bool = True) -> None:
        step = make_train_step(
            model,
            tx,
            mesh,
            strategy=strategy,
            schedule="gpipe",
            microbatches=2,
            grad_sync=GradSync("ring"),
            pipeline_cond=pipeline_cond,
        )
        step.lower(state_target(model, tx, mesh, strategy=strategy), layouts.make_batch(32, 0))

    for strategy in ("zero2", "zero3"):
        with pytest.raises(
            UserError, match="^parallel.grad_sync.algorithm: 'ring' would sum inside .* allowed: native"
        ) as error:
            trace(strategy)
        assert "\n" not in str(error.value)
    trace("zero1")
    trace("zero3", pipeline_cond=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "accumulate"}, "mesh.pipe: 2 is given, but the parallel.schedule of this step has one stage"),
        (
            {"schedule": "interleaved", "chunks": 2, "microbatches": 3},
            "parallel.microbatches: 3 is no multiple of mesh.pipe 2",
        ),
        ({"chunks": 2}, "parallel.chunks: 2 is not for parallel.schedule one_f_one_b"),
        ({"schedule": "interleaved", "chunks": 3}, "parallel.chunks: 3 does not divide the 2 blocks of a stage"),
    ],
    ids=str,
)
def test_what_makes_no_pipeline_is_named(options: dict[str, Any], message: str) -> None:
    case = Case("one_f_one_b", 2, "gpt2", True, "ddp", 4, (1, 1, 1))._replace(**options)
    with pytest.raises(UserError, match=message) as error:
        _, state, step, _ = start(case, "fp32")
        step.lower(state, layouts.make_batch(24, 0))
    assert "\n" not in str(error.value)
