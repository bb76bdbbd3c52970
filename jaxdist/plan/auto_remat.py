"""`memory.remat: auto` on GPUs: products are kept where that fits into memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax

from jaxdist.config.rules.remat import AUTO, REMAT
from jaxdist.config.schema import Config
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.memory.peak import MARGIN, PEAK, memory_of
from jaxdist.plan.compiled.hardware import gpu_of
from jaxdist.runtime.gpu_memory import memory_share
from jaxdist.runtime.start import start
from jaxdist.specs import format_bytes


def start_fitting(config: Config, watched: Callable[[Config], AbstractContextManager[Any]] = nullcontext) -> Config:
    """`runtime.start.start`, with the `memory.remat` that fits where it was auto; a line says so if that is "full"."""
    asked, config = config.memory.remat, start(config, watched)
    gpu = gpu_of(jax.devices()[0].device_kind)  # the same on all processes of a job
    if asked != AUTO or config.memory.remat != "dots" or gpu is None:
        return config
    share = memory_share()
    needed, limit = needed_bytes(config), share * gpu.memory
    if needed <= limit:
        return config
    if jax.process_index() == 0:
        print(
            f"{REMAT}: auto is full here: with dots a GPU may need {format_bytes(needed)}, and a run takes {share:.0%}"
            f" of {format_bytes(gpu.memory)}",
            flush=True,
        )
    return replace(config, memory=replace(config.memory, remat="full"))


def needed_bytes(config: Config) -> int:
    """Bytes of a device that a step may need: of ten configurations, nine needed less."""
    return round(MARGIN[2] * memory_of(config, Known())[PEAK])
