"""jaxdist's own train step, on one device, with the settings that are fastest where memory is no matter."""

import jax

from harness.jaxdist_step import contender
from harness.task import Contender, Task, jax_memory
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn import why_not_cudnn
from jaxdist.parallel.options import StepOptions
from jaxdist.precision.policy import POLICIES


def jaxdist(task: Task) -> Contender:
    """Attention by cuDNN where it can be; on GPUs the blocks are unrolled, which copies less. The logits are whole:
    there is memory for them, and chunks compute them twice. Nothing is computed again for the backward pass."""
    before, size = jax_memory(), task.size
    mesh = make_mesh(devices=jax.devices()[:1])
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    why = why_not_cudnn(
        capability=capability, dtype=task.compute, head_width=size.model.width // size.model.heads, dropout=0.0
    )
    unroll = 0 if task.gpu else 1
    config = size.model.replace(attention="xla" if why else "cudnn", loss_chunk=0, scan_blocks=unroll)
    model = gpt(config, max_length=size.length)
    about = {"attention": config.attention, "scan_blocks": unroll}
    return contender(task, model, mesh, StepOptions(precision=POLICIES[task.precision]), about, before)
