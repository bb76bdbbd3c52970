"""jaxdist's own train step, on one device."""

from typing import Any

import jax
import numpy as np
import optax

from harness.task import BETAS, CLIP, DECAY, EPS, LR, Contender, Task, compiled_bytes, jax_memory, jax_peak
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn import why_not_cudnn
from jaxdist.state import place_params
from jaxdist.step import make_train_step


def jaxdist(task: Task) -> Contender:
    """Attention by cuDNN where it can be; on GPUs the blocks are unrolled, which copies less. The logits are whole:
    there is memory for them, and chunks compute them twice."""
    before, size = jax_memory(), task.size
    mesh = make_mesh(devices=jax.devices()[:1])
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    why = why_not_cudnn(
        capability=capability, dtype=task.compute, head_width=size.model.width // size.model.heads, dropout=0.0
    )
    unroll = 0 if task.gpu else 1
    config = size.model.replace(attention="xla" if why else "cudnn", loss_chunk=0, scan_blocks=unroll)
    model = gpt(config, max_length=size.length)
    tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LR, *BETAS, eps=EPS, weight_decay=DECAY))
    run = make_train_step(model, tx, mesh, precision=task.precision)
    batches = [
        jax.device_put({**batch, "weights": np.ones(batch["inputs"].shape, np.float32)}, jax.devices()[0])
        for batch in task.batches
    ]
    state: Any = place_params(task.params, tx, state_target(model, tx, mesh))
    predicted = compiled_bytes(run.lower(state, batches[0]).compile()) if task.gpu else None

    def step(i: int) -> tuple[Any, Any]:
        nonlocal state
        state, metrics = run(state, batches[i % len(batches)])
        return metrics["loss"], metrics["grad_norm"]

    def wait() -> None:
        jax.block_until_ready(state)

    about = {"jax": jax.__version__, "attention": config.attention, "scan_blocks": unroll}
    return Contender(step, wait, about, predicted, jax_peak(before))
