"""The calibration of a configuration on the devices of this job."""

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax

from jaxdist.config.checks import with_default_remat
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.mesh import count_hosts, host_of
from jaxdist.plan.calibration.blocks import LocalShape, can_narrow, measure_blocks
from jaxdist.plan.calibration.file import REMATS, Calibration, calibrated_subject
from jaxdist.plan.calibration.links import measure_link


def shapes_of(config: Config, devices: int) -> list[LocalShape]:
    """Local shapes that layouts on that many devices have.

    Each remat with the numbers of sequences of small microbatches, of plain data parallelism, and of two replicas; and
    parts of layers, where the model can be measured in parts.
    """
    remats = tuple(dict.fromkeys((*REMATS, config.memory.remat)))
    batch = config.data.global_batch
    rows = sorted({max(1, batch // share) for share in (4 * devices, devices, min(devices, 2))})
    parts = [n for n in (2, 4, 8) if n <= devices and can_narrow(config) and config.model.heads % n == 0]
    whole = [LocalShape(remat, 1, count) for remat in remats for count in rows]
    return [*whole, *(LocalShape("none", n, rows[-1]) for n in parts)]


def calibrate(
    config: Config, *, declared: float | None, burst: int, measured: Mapping[str, str], progress: Callable[[str], None]
) -> Calibration:
    """Measure. All processes of a job must call it.

    declared: bytes a second of the link between hosts, if known. burst: see `measure_link`.
    measured: the machine and the time.

    Raises `UserError` for a model that cannot be made with other numbers of blocks.
    """
    if config.model.layers is None:
        raise UserError(
            f"model.name: {config.model.name!r} has no key `layers`; allowed: a model with it, of which steps with"
            " one block and with three are measured; give its Options this key for the number of blocks"
        )
    began, load = time.time(), os.getloadavg()[0]
    config = with_default_remat(config, gpu=jax.default_backend() == "gpu")
    devices, hosts = jax.devices(), count_hosts()
    of_hosts = devices_by_host(devices)
    compute, optimizer = measure_blocks(config, shapes_of(config, len(devices)), progress=progress)
    between = inside = None
    if hosts > 1:
        between = measure_link(of_hosts, declared=declared, burst=burst, progress=progress)
    if len(devices) > hosts:  # of all hosts at once, each among its own devices
        inside = measure_link([*zip(*of_hosts, strict=True)], progress=progress)
    conditions: dict[str, Any] = {
        "measured": dict(measured),
        "versions": versions_now(),
        "seconds": round(time.time() - began, 1),
        "load_before": load,
    }
    return Calibration(
        devices[0].device_kind,
        hosts,
        len(devices) // hosts,
        calibrated_subject(config),
        compute,
        optimizer,
        inside,
        between,
        declared,
        conditions,
    )


def devices_by_host(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each host. Raises `UserError` unless they are as many everywhere."""
    found = [list(own) for _, own in itertools.groupby(sorted(devices, key=host_of), key=host_of)]
    if len(counts := {len(own) for own in found}) > 1:
        raise UserError(f"calibrate: hosts have from {min(counts)} to {max(counts)} devices; start it on equal hosts")
    return found


def versions_now() -> dict[str, str]:
    """What a calibration depends on besides devices."""
    return {name: version(name) for name in ("jax", "jaxlib")}
