"""A train step of jaxdist as a contender, on one device."""

from typing import Any

import jax
import numpy as np
import optax

from harness.task import BETAS, CLIP, DECAY, EPS, LR, Contender, Task, compiled_bytes, jax_peak
from jaxdist.init import state_target
from jaxdist.model import ModelDef
from jaxdist.parallel.options import StepOptions
from jaxdist.state import place_params
from jaxdist.step import make_train_step


def contender(
    task: Task, model: ModelDef, mesh: Any, options: StepOptions, about: dict[str, Any], before: tuple[int, int]
) -> Contender:
    """The step of `model` with these options. before: `jax_memory` before anything was made."""
    tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LR, *BETAS, eps=EPS, weight_decay=DECAY))
    run = make_train_step(model, tx, mesh, options)
    batches = [
        jax.device_put({**batch, "weights": np.ones(batch["inputs"].shape, np.float32)}, jax.devices()[0])
        for batch in task.batches
    ]
    state: Any = place_params(task.params, tx, state_target(model, tx, mesh, options))
    predicted = compiled_bytes(run.lower(state, batches[0]).compile()) if task.gpu else None

    def step(i: int) -> tuple[Any, Any]:
        nonlocal state
        state, metrics = run(state, batches[i % len(batches)])
        return metrics["loss"], metrics["grad_norm"]

    def wait() -> None:
        jax.block_until_ready(state)

    return Contender(step, wait, {"jax": jax.__version__, **about}, predicted, jax_peak(before))
