"""A distilled step in every layout, against a loss written plainly on one device in float64."""

import functools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import NamedSharding
from layouts import SEQ, VOCAB, Case, initial, make_batch, model_config, optimizer
from levels import levels

from jaxdist.config.load import load_config
from jaxdist.config.schema import Config, ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.distill.model import IDS, LOGSUMEXP, VALUES, Mixture
from jaxdist.distill.step import join, of_student
from jaxdist.distill.teacher import Teacher
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.parallel.options import StepOptions
from jaxdist.plan.compiled.memory import footprint_of, resident_bytes
from jaxdist.plan.explain import explain
from jaxdist.plan.traced.ledger import ledger
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import TrainState, place_params
from jaxdist.trainer.train import train

ROWS = 32
TEACHER = ModelConfig(style="llama", layers=2, width=64, heads=8, kv_heads=4, vocab=VOCAB, mlp_width=64).resolved()
MIXTURE = Mixture(temperature=1.7, mixing=0.6, chunk=5)

CASES = [Case("gpt2", True, "zero3", 2, (1, 2, 2), remat="full")]
SLOW = [
    Case("llama", False, "zero1", 1, (2, 2, 2)),
    Case("llama", False, "zero3", 4, (1, 1, 2), pipe=2, schedule="one_f_one_b"),
    Case("gpt2", True, "ddp", 4, (2, 1, 2), pipe=2, schedule="one_f_one_b"),
    Case("gpt2", True, "zero2", 4, (1, 2, 1), pipe=2, schedule="zero_bubble"),
    Case("gpt2", True, "zero3", 1, (1, 4, 1), prefetch=1),
    Case("llama", False, "zero3", 2, (2, 2, 2), sequence=True),
]


def logits(params: Any, inputs: jax.Array, config: ModelConfig) -> jax.Array:
    """By the oracle's layers: [B, S, V]."""
    options = {"eps": config.norm_eps, "centre": config.norm == "layernorm"}
    h = params["embed"]["tokens"]["table"][inputs]
    if config.positions == "learned":
        h = h + params["embed"]["positions"]["table"][: h.shape[1]]
    for i in range(config.layers):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        h = h + oracle.attention(
            oracle.norm(h, block["norm1"], **options), block["attention"], config, jnp.zeros(inputs.shape, jnp.int32)
        )
        h = h + oracle.mlp(oracle.norm(h, block["norm2"], **options), block["mlp"], config)
    table = (params["embed"]["tokens"] if config.tied else params["head"]["projection"])["table"]
    return oracle.norm(h, params["head"]["norm"], **options) @ table.T


def plain_loss(params: Any, batch: Any, config: ModelConfig, said: jax.Array) -> jax.Array:
    """(1 - mixing) CE + mixing T^2 KL(teacher || student), the mean over weights. said: the teacher's logits."""
    own, (temperature, mixing, _) = logits(params, batch["inputs"], config), MIXTURE
    hard = -jnp.take_along_axis(jax.nn.log_softmax(own), batch["targets"][..., None], -1)[..., 0]
    p, q = jax.nn.softmax(said / temperature), jax.nn.softmax(own / temperature)
    soft = (p * (jnp.log(p) - jnp.log(q))).sum(-1)
    weights = batch["weights"].astype(own.dtype)
    return (((1 - mixing) * hard + mixing * temperature**2 * soft) * weights).sum() / weights.sum()


@functools.cache
def teacher_params() -> Any:
    return jax.tree.map(lambda leaf: 3 * leaf, initial(TEACHER, "fp64"))  # a teacher with opinions


@functools.cache
def said(step: int) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(functools.partial(logits, config=TEACHER))(teacher_params(), make_batch(ROWS, step)["inputs"])


@functools.cache
def reference(config: ModelConfig) -> tuple[list[float], list[Any], Any]:
    """Losses, gradients and the last parameters of three steps."""
    params, tx = initial(config, "fp64"), optimizer()

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any, said: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            loss, grads = jax.value_and_grad(plain_loss)(params, batch, config, said)
            updates, opt_state = tx.update(grads, opt_state, params)
        return loss, grads, optax.apply_updates(params, updates), opt_state

    losses, all_grads, opt_state = [], [], jax.jit(tx.init)(params)
    for i in range(3):
        loss, grads, params, opt_state = step(params, opt_state, make_batch(ROWS, i), said(i))
        losses.append(float(loss))
        all_grads.append(jax.device_get(grads))
    return losses, all_grads, jax.device_get(params)


def parts(case: Case, cached: int = 0, mixture: Mixture = MIXTURE) -> tuple[Any, TrainState, Any, Any]:
    """(step, state, teacher or None, mesh). cached: how many of the largest logits batches hold."""
    mesh = make_mesh(data=case.mesh[0], fsdp=case.mesh[1], tensor=case.mesh[2], pipe=case.pipe)
    student = gpt(model_config(case), max_length=SEQ, param_dtype=jnp.float64, sequence_parallel=case.sequence)
    options = StepOptions(
        strategy=case.strategy,
        schedule=case.schedule,
        microbatches=case.microbatches,
        precision="fp64",
        remat=case.remat,
        prefetch=case.prefetch,
        return_grads=True,
    )
    teacher: Any = {}
    if not cached:
        model = gpt(TEACHER, max_length=SEQ, param_dtype=jnp.float64)
        teacher = Teacher(model, mesh, StepOptions(strategy="zero3", precision="fp64"))
        teacher.place(teacher_params())
    tx = optimizer()
    step = of_student(join(student, teacher, tx, mesh, options, mixture), mesh, options)
    target = state_target(student, tx, mesh, options)
    state = place_params(initial(model_config(case), "fp64"), tx, target)
    return step, state, teacher, mesh


def batch_of(step: int, mesh: Any, cached: int = 0) -> Any:
    batch = make_batch(ROWS, step)
    if cached:
        values, ids = jax.lax.top_k(said(step), cached)
        total = jax.nn.logsumexp(said(step) / MIXTURE.temperature, axis=-1)
        batch |= {VALUES: np.asarray(values), IDS: np.asarray(ids), LOGSUMEXP: np.asarray(total)}
    return jax.device_put(batch, NamedSharding(mesh, BATCH_SPEC))


def check(case: Case, cached: int = 0) -> None:
    with jax.enable_x64(True):
        losses, all_grads, last = reference(model_config(case))
        step, state, _, mesh = parts(case, cached)
        for i in range(3):
            state, metrics = step(state, batch_of(i, mesh, cached))
            assert abs(float(metrics["loss"]) - losses[i]) / losses[i] < 1e-10
            assert oracle.error(metrics["grads"], all_grads[i]) < 1e-10
        assert oracle.error(state.params, last) < 1e-10


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_those_of_one_device(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", levels(SLOW, slow=3, common=1), ids=str)
def test_three_steps_equal_those_of_one_device_in_more_layouts(case: Case) -> None:
    check(case)


@pytest.mark.slow
def test_all_logits_as_the_largest_ones_equal_whole_logits() -> None:
    check(Case("gpt2", True, "zero3", 2, (1, 2, 2)), cached=VOCAB)


@pytest.fixture(scope="module")
def traced() -> Any:
    """(step, state, batch, teacher) with a split vocabulary under zero3."""
    with jax.enable_x64(True):
        step, state, teacher, mesh = parts(Case("llama", False, "zero3", 1, (1, 2, 2)))
        yield step, state, batch_of(0, mesh), teacher


def test_the_teacher_has_no_reduction(traced: Any) -> None:
    """Of all that a step sends, the teacher's table is gathered, and its gradient never reduced."""
    step, state, batch, _ = traced
    with jax.enable_x64(True):
        found = ledger(step, state, batch).collectives
    of_teacher = {each.op for each in found if "teacher" in each.purpose}
    assert of_teacher == {"all_gather"}
    assert {"reduce_scatter"} <= {each.op for each in found}  # those of the student


@pytest.mark.slow
def test_no_array_has_all_logits(traced: Any) -> None:
    """Neither the traced nor the compiled program has an array of B x S x V, of a device or of all."""
    step, state, batch, _ = traced
    tokens = ROWS * SEQ // 2  # of a device: fsdp is 2
    logits = tokens * VOCAB // 2  # of a device: tensor is 2
    with jax.enable_x64(True):
        text = step.lower(state, batch).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f64\[([\d,]+)\]", text)}
    assert (1, 5, VOCAB // 2) in {shape[-3:] for shape in shapes}  # a chunk
    found = [shape for shape in shapes if shape[-1] in (VOCAB, VOCAB // 2) and math.prod(shape) >= logits]
    assert not found, found


def test_vocabularies_of_two_sizes_are_refused() -> None:
    mesh = make_mesh()
    models = [
        gpt(ModelConfig(layers=1, width=16, heads=2, vocab=vocab), max_length=SEQ) for vocab in (VOCAB, 2 * VOCAB)
    ]
    teacher = Teacher(models[1], mesh, StepOptions())
    with pytest.raises(UserError, match=r"distill.teacher: the teacher has a vocabulary of 96, the student of 48"):
        join(models[0], teacher, optimizer(), mesh, StepOptions(), MIXTURE)


def test_a_teacher_under_deterministic_sums_is_refused() -> None:
    mesh, model = make_mesh(), gpt(ModelConfig(layers=1, width=16, heads=2, vocab=VOCAB), max_length=SEQ)
    options = StepOptions(grad_sync=GradSync(deterministic=True))
    with pytest.raises(UserError, match=r"parallel.grad_sync.deterministic is true; allowed: false"):
        join(model, Teacher(model, mesh, StepOptions()), optimizer(), mesh, options, MIXTURE)


@pytest.mark.slow
def test_the_step_does_not_take_a_table_that_a_failed_step_used_up(traced: Any) -> None:
    step, state, batch, _ = traced
    with jax.enable_x64(True):
        again = jax.tree.map(jnp.copy, state)
        state, first = step(jax.tree.map(jnp.copy, state), batch)
        for leaf in step.jitted(state)._table.values():
            leaf.delete()
        _, second = step(again, batch)
    assert float(first["loss"]) == float(second["loss"])


def test_a_head_that_is_trained_alone_leaves_the_teacher_as_it_is() -> None:
    model = gpt(TEACHER, max_length=SEQ)
    mesh, options = make_mesh(), StepOptions(freeze=("*", "!head.*"))
    joint = join(model, Teacher(model, mesh, options), optimizer(), mesh, options, MIXTURE)
    own = state_target(model, optimizer(), mesh, options)
    assert len(jax.tree.leaves(joint.target.opt_state)) == len(jax.tree.leaves(own.opt_state))


@pytest.mark.slow
def test_explain_has_the_teacher(tmp_path: Path) -> None:
    """Its table is one of the parameters, with the reason for its layout; a report is drawn from the same."""
    small = ["model.layers=1", "model.width=16", "model.heads=2", "data.global_batch=4", "data.seq_len=16"]
    run = ["train.steps=1", "train.eval_every=0", "checkpoint.every=1", "observe.report=false", "devices.simulated=8"]
    assert train(load_config("configs/distill_quickstart.yaml", [*small, *run]), tmp_path) == 0
    found = explain(load_config("configs/distill_quickstart.yaml", [*small, f"distill.teacher={tmp_path}"]))
    rows = {row.path: row.why for row in found.parameters}
    assert "head.teacher.table" in rows and all(rows.values())


def test_the_memory_of_a_step_has_the_teacher_in_it() -> None:
    """Where layouts are compared, as in explain."""
    config, target = Config(), state_target(gpt(TEACHER, max_length=SEQ), optimizer(), make_mesh())
    sizes = SimpleNamespace(
        argument_size_in_bytes=100,
        output_size_in_bytes=0,
        alias_size_in_bytes=0,
        temp_size_in_bytes=0,
        host_argument_size_in_bytes=0,
    )
    program = SimpleNamespace(memory_analysis=lambda: sizes)

    def peak(teaching: Any) -> int:
        parts: Any = SimpleNamespace(target=target, teaching=teaching)
        found = footprint_of(program, config, parts)
        assert found is not None
        return found.peak

    assert peak(None) == 100
    assert peak(SimpleNamespace(target=target.params)) == 100 + resident_bytes(target.params)
