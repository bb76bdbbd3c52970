"""What to do when memory is short, in a command: the cheapest remedy that fits, or what is predicted to fit."""

import itertools
import math
import os
import re
import resource
import shlex
from pathlib import Path

import jax

from jaxdist.config.checks import check_config
from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.plan.calibration.file import REMATS
from jaxdist.plan.changes import changed, typed
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.memory.peak import PEAK, memory_of, traced_whole
from jaxdist.plan.compiled.hardware import gpu_of
from jaxdist.plan.remedies.table import Remedy, Table
from jaxdist.plan.search.space import microbatch_counts
from jaxdist.specs import format_bytes


def device_room(device: jax.Device) -> float:
    """Bytes that a step may take of a device of this process; math.inf where that is not known.

    Simulated devices share what the process may take.
    """
    if device.platform == "cpu":
        return host_room() / jax.local_device_count()
    if limit := (device.memory_stats() or {}).get("bytes_limit"):
        return float(limit)
    gpu = gpu_of(device.device_kind)
    return math.inf if gpu is None else gpu.usable


def host_room(container: Path = Path("/sys/fs/cgroup/memory.max")) -> float:
    """Bytes of memory that this process may still take: by its own limit, that of its container, and what is free."""
    mapped, resident = (
        os.sysconf("SC_PAGE_SIZE") * int(each) for each in Path("/proc/self/statm").read_text().split()[:2]
    )
    free = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    limits = [math.inf if free is None else 1024 * int(free[1])]
    if (own := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(own - mapped)
    if container.is_file() and (text := container.read_text().strip()).isdecimal():
        limits.append(int(text) - resident)
    return float(max(0, min(limits)))


def _less(room: float, now: float) -> float:
    """The bytes that a change may take: the room. Where the configuration itself, which takes `now`, should fit there
    and did not, half of what it takes: whatever was predicted of it was wrong."""
    return room if now > room else now / 2


def cheapest(table: Table, room: float) -> Remedy | None:
    """Of the remedies that fit, the one with the shortest step, or where none is predicted the fewest FLOPs."""
    most = _less(room, table.now.memory.peak)

    def price(each: Remedy) -> tuple[float, float, float]:
        assert each.cost is not None
        return each.cost.seconds or 0.0, each.cost.flops, each.cost.wire_bytes

    fitting = [each for each in table.remedies if each.cost is not None and each.cost.memory.peak <= most]
    return min(fitting, key=price, default=None)


def smaller_microbatches(config: Config, room: float) -> tuple[tuple[str, ...], int] | None:
    """(overrides, the peak by the closed form) of the same layout with the fewest microbatches that fit; of these, with
    the least that is computed again. None where no number is enough, or nothing can be said without a trace."""
    if traced_whole(config):
        return None
    known, parts = Known(), config.parallel.microbatches
    most = _less(room, memory_of(config, known)[PEAK])
    rows = config.data.global_batch // config.mesh.batch_shards
    pipeline = not ScheduleFacts.of(config.parallel.schedule).one_stage
    counts = [parts, *(count for count in microbatch_counts(rows, pipeline=pipeline) if count > parts)]
    for count, remat in itertools.product(counts, REMATS):
        values = {"parallel.microbatches": count, "memory.remat": remat}
        try:
            peak = memory_of(check_config(changed(config, values), planned=True), known)[PEAK]
        except UserError:  # not allowed
            continue
        if peak <= most:
            return tuple(typed(key, value) for key, value in values.items()), peak
    return None


def advice(config: Config, table: Table | None, room: float, file: Path) -> list[str]:
    """Lines: how much a device may take, and the command of a run that fits.

    table: None if nothing was compiled. file: the configuration in the run directory; a run with checkpoints goes on.
    """
    if room == math.inf:
        return []
    shared = f", as {jax.local_device_count()} share the memory of a process" if jax.default_backend() == "cpu" else ""
    said = f"a step may take {format_bytes(room)} of a device{shared}; "
    saved = file.parent / "checkpoints"
    again = f" --run-dir {shlex.quote(str(file.parent))}" if saved.is_dir() and any(saved.iterdir()) else ""
    command = f"jaxdist train {shlex.quote(str(file))}{again}"
    best = None if table is None else cheapest(table, room)
    if best is not None:
        return [f"{said}the cheapest remedy that fits: {command} {' '.join(best.overrides)}"]
    none = "" if table is None else "none of these fits; "
    found = smaller_microbatches(config, room)
    if found is None:
        changes = "a smaller data.global_batch or data.seq_len, which change the training"
        return [f"{said}{none}take more devices, or {changes}"]
    overrides, peak = found
    return [f"{said}{none}by the closed form ({format_bytes(peak)}) this does: {command} {' '.join(overrides)}"]
