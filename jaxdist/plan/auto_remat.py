"""`memory.remat: auto` on GPUs: products are kept where that fits into memory, and on one GPU everything."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from jaxdist.config.checks import default_remat, one_device, unrolls
from jaxdist.config.rules.remat import AUTO, REMAT, Remat
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.model import ModelDef
from jaxdist.parallel.pipeline.table import table_of
from jaxdist.plan.changes import changed
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.memory.peak import PEAK, memory_of
from jaxdist.plan.compiled.hardware import Gpu, gpu_of
from jaxdist.processes import from_first
from jaxdist.runtime.gpu_memory import memory_share
from jaxdist.runtime.start import start
from jaxdist.specs import format_bytes

# The peaks of the shipped configurations that have blocks, compiled for 8 H200 and more with "dots", are 0.91 to 1.03
# times today's closed form (peaks: docs/measurements/remat_h200_aot.json). Random layouts with "dots" in bf16, the
# optimizer's state on the device: 0.90 to 1.08 (closed_memory_h200.json). In fp32, without cuDNN's attention, more.
_MARGIN = 1.08


def start_fitting(config: Config, watched: Callable[[Config], AbstractContextManager[Any]] = nullcontext) -> Config:
    """`runtime.start.start`; with `memory.remat` "none" or "full" where it is auto and that is better than "dots", as a
    line says."""
    config = start(config, watched)
    gpu = gpu_of(jax.devices()[0].device_kind)
    if config.memory.remat != AUTO or default_remat(config, gpu=True) != "dots" or gpu is None:
        return config
    mode, why = from_first(fitting_mode(config, gpu))
    if mode == "dots":
        return config
    if jax.process_index() == 0:
        print(f"{REMAT}: auto is {mode} here: {why}", flush=True)
    return changed(config, {REMAT: mode})


def fitting_mode(config: Config, gpu: Gpu) -> tuple[Remat, str]:
    """(the mode of `memory.remat` with the shortest step that fits a GPU, why it is not "dots"). It is "dots" where the
    bytes have no closed form."""
    room = f"by the planner's closed form, and a run takes {memory_share():.0%} of {format_bytes(gpu.memory)}"
    known = Known()
    if unrolls(config, gpu=True) or (one_device(config) and config.model.scan_blocks == 0):
        # In a loop what blocks keep is copied, and "none" took longer than "dots". Without one it takes 4 to 7 % less:
        # compiled GPT-2 of 355 M and 1.3 B, BERT and ViT, replayed.
        needed = needed_bytes(changed(config, {REMAT: "none"}), known)
        if needed is not None and needed <= gpu.usable:
            return "none", f"everything fits: {format_bytes(needed)} {room}"
    needed = needed_bytes(changed(config, {REMAT: "dots"}), known)
    if needed is None or needed <= gpu.usable:
        return "dots", ""
    return "full", f"with dots a GPU may need {format_bytes(needed)} {room}"


def needed_bytes(config: Config, known: Known) -> int | None:
    """Bytes of a device that a step may need; None where that has no closed form: of a loss of one's own, of a pipeline
    without a table, and of samples whose shapes only the data know."""
    if config.mesh.pipe > 1 and table_of(config.parallel.schedule) is None:
        return None
    if not isinstance(known.model(config), ModelDef):
        return None
    try:
        return round(_MARGIN * memory_of(config, known)[PEAK])
    except UserError:  # of `check_windows`: the run itself finds the shapes
        return None
