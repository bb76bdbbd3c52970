"""Training of a small GPT in a pipeline, and beside it on one device."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import layouts
import numpy as np
import oracle

from jaxdist.config.schema import ModelConfig
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn import ModelDef
from jaxdist.parallel.pipeline.stages import arrange, arrange_rows, order_of_blocks
from jaxdist.precision.policy import POLICIES
from jaxdist.state import TrainState, place_params
from jaxdist.step import make_train_step
from jaxdist.train_step import TrainStep

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble")


class Case(NamedTuple):
    schedule: str
    pipe: int
    style: str
    tied: bool
    strategy: str
    microbatches: int
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    layers: int = 4
    chunks: int = 1
    remat: str | tuple[str, ...] = "none"
    dropout: float = 0.0
    pipeline_cond: bool = True
    loss_chunk: int | None = None
    stages: tuple[int, ...] = ()

    def __str__(self) -> str:
        uneven = ["+".join(map(str, self.stages))] if self.stages else []
        return "-".join(str(part) for part in (*self[:6], "x".join(map(str, self.mesh)), *self[7:-1], *uneven))


def config_of(case: Case) -> ModelConfig:
    plain = layouts.Case(case.style, case.tied, case.strategy, case.microbatches, case.mesh)
    own = {"layers": case.layers, "dropout": case.dropout, "loss_chunk": case.loss_chunk}
    return dataclasses.replace(layouts.model_config(plain), **own)


def model_of(case: Case, policy: str = "fp64") -> ModelDef:
    model = gpt(config_of(case), max_length=layouts.SEQ, param_dtype=POLICIES[policy].param)
    return arrange(model, stages=case.pipe, chunks=case.chunks, blocks=case.stages)


def reordered(params: Any, order: np.ndarray) -> Any:
    return {**params, "blocks": arrange_rows(params["blocks"], order)}


def start(case: Case, policy: str = "fp64") -> tuple[ModelDef, TrainState, TrainStep, np.ndarray]:
    """(model, state, step, which row of the state's blocks is block i)."""
    mesh = make_mesh(pipe=case.pipe, data=case.mesh[0], fsdp=case.mesh[1], tensor=case.mesh[2])
    model, tx = model_of(case, policy), layouts.optimizer()
    order = order_of_blocks(case.layers, stages=case.pipe, chunks=case.chunks, blocks=case.stages)
    params = reordered(layouts.initial(dataclasses.replace(config_of(case), dropout=0.0), policy), order)
    state = place_params(params, tx, state_target(model, tx, mesh, strategy=case.strategy))
    step = make_train_step(
        model,
        tx,
        mesh,
        strategy=case.strategy,
        schedule=case.schedule,
        microbatches=case.microbatches,
        precision=policy,
        remat=case.remat,
        pipeline_cond=case.pipeline_cond,
        return_grads=True,
    )
    return model, state, step, np.argsort(order)[-case.layers :]


def run(case: Case, policy: str, steps: int) -> layouts.Reference:
    _, state, step, back = start(case, policy)
    losses, grads = [], []
    for i in range(steps):
        state, metrics = step(state, layouts.make_batch(32, i))
        losses.append(float(metrics["loss"]))
        grads.append(reordered(jax.device_get(metrics["grads"]), back))
    return layouts.Reference(losses, grads, reordered(jax.device_get(state.params), back))


@functools.cache
def one_stage(case: Case) -> layouts.Reference:
    """With dropout, of which the oracle has none."""
    alone = case._replace(schedule="accumulate", pipe=1, chunks=1, strategy="ddp", mesh=(1, 1, 1), stages=())
    return run(alone, "fp64", 3)


def check_wide(case: Case) -> None:
    with jax.enable_x64(True):
        want = one_stage(case) if case.dropout else layouts.reference(config_of(case), 32, "fp64")
        got = run(case, "fp64", 3)
    assert max(abs(a - b) / b for a, b in zip(got.losses, want.losses, strict=True)) < 1e-10
    for step in range(3):
        assert oracle.error(got.grads[step], want.grads[step]) < 1e-10
    assert oracle.error(got.params, want.params) < 1e-10
