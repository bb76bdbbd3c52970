"""`memory.remat: auto` on GPUs: products are kept where that fits into memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax

from jaxdist.config.checks import with_default_remat
from jaxdist.config.rules.remat import AUTO, REMAT
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.model import ModelDef
from jaxdist.parallel.pipeline.table import table_of
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.memory.peak import PEAK, memory_of
from jaxdist.plan.compiled.hardware import gpu_of
from jaxdist.processes import from_first
from jaxdist.runtime.gpu_memory import memory_share
from jaxdist.runtime.start import start
from jaxdist.specs import format_bytes

# The peaks of the shipped configurations, compiled for H200 with "dots", were 0.63 to 1.06 times the closed form
# (docs/measurements/remat_h200_aot.json).
_MARGIN = 1.08


def start_fitting(config: Config, watched: Callable[[Config], AbstractContextManager[Any]] = nullcontext) -> Config:
    """`runtime.start.start`; with `memory.remat` "full" where it is auto and "dots" may not fit, which a line says."""
    config = start(config, watched)
    gpu = gpu_of(jax.devices()[0].device_kind)
    judged = with_default_remat(config, gpu=True)
    if config.memory.remat != AUTO or judged.memory.remat != "dots" or gpu is None:
        return config
    needed = needed_bytes(judged)
    if needed is None or from_first(needed <= gpu.usable):
        return config
    if jax.process_index() == 0:
        print(
            f"{REMAT}: auto is full here: with dots a GPU may need {format_bytes(needed)}, and a run takes"
            f" {memory_share():.0%} of {format_bytes(gpu.memory)}",
            flush=True,
        )
    return replace(config, memory=replace(config.memory, remat="full"))


def needed_bytes(config: Config) -> int | None:
    """Bytes of a device that a step may need; None where that has no closed form: of a loss of one's own, of a pipeline
    without a table, and of samples whose shapes only the data know."""
    known = Known()
    if config.mesh.pipe > 1 and table_of(config.parallel.schedule) is None:
        return None
    if not isinstance(known.model(config), ModelDef):
        return None
    try:
        return round(_MARGIN * memory_of(config, known)[PEAK])
    except UserError:  # of `check_windows`: the run itself finds the shapes
        return None
