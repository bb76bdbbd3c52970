"""jaxdist as `scripts/train.py` runs a configuration that names the model, the batch and the precision alone."""

from dataclasses import replace

import jax

from harness.jaxdist_step import contender
from harness.task import Contender, Task, jax_memory
from jaxdist.build import assemble
from jaxdist.config.schema import Config, DataConfig, DevicesConfig, MeshConfig
from jaxdist.config.sections.precision import PrecisionConfig
from jaxdist.mesh import make_mesh
from jaxdist.model import ModelDef
from jaxdist.plan.auto_remat import fitting_mode
from jaxdist.plan.compiled.hardware import gpu_of


def jaxdist_as_trained(task: Task) -> Contender:
    """What blocks keep, the loop over them, chunks of the loss and the kernel of attention are what jaxdist takes by
    itself. The compiler's options of `devices.xla` are left out: they are of a process, and so of all contenders."""
    before, size = jax_memory(), task.size
    mesh = make_mesh(devices=jax.devices()[:1])
    config = Config(
        model=size.model,
        data=DataConfig(source="tokens", seq_len=size.length, global_batch=size.rows),
        mesh=MeshConfig(),
        precision=PrecisionConfig(task.precision),
        devices=DevicesConfig(simulated=1),
    )
    if (gpu := gpu_of(jax.devices()[0].device_kind)) is not None:
        config = replace(config, memory=replace(config.memory, remat=fitting_mode(config, gpu)[0]))
    parts = assemble(config, mesh)
    model = parts.model
    assert isinstance(model, ModelDef), model
    about = {"attention": parts.attention[0], "remat": parts.options.remat, "scan_blocks": model.scan_blocks}
    return contender(task, model, mesh, parts.options, about, before)
