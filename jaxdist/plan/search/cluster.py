"""The cluster that a plan is for: its devices, its links, and the rates that are assumed or were measured there."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxdist.collectives.cost import LINKS, Link
from jaxdist.mesh import AXES
from jaxdist.plan.calibration.file import Calibration
from jaxdist.plan.compiled.hardware import GPUS, get_gpu, gpu_of
from jaxdist.plan.machines import DEVICES, pcie, rate_of_link
from jaxdist.precision.policy import Precision

# Two plans whose predicted seconds differ by less than this are a tie, where nothing was measured: an assumption.
# Calibrations bring their own spread.
ASSUMED_SPREAD = 0.10
# The share of a kind of traffic that runs beside computation on GPUs: from schedules compiled for H200 (docs/plan.md,
# docs/experts.md), and where no schedule was compiled an assumption. On CPUs collectives block: nothing is hidden.
HIDDEN_ON_GPUS = {
    "parameters": 0.95,  # measured on schedules with prefetch: 97 to 99 %
    "gradients": 0.95,
    "tensor": 0.5,  # 48 to 53 % with sequence parallelism
    "tensor in halves": 0.6,  # 55 to 83 % of all, with parallel.batch_split: 2
    "expert": 0.39,  # in one piece; pieces 4: 63 %, pieces 8: 77 %
    "context": 0.5,  # an assumption
}


class PlanCluster(NamedTuple):
    """Devices and links.

    name: of the devices. hosts, per_host: how many.
    memory: bytes of a device that a step may take; math.inf: not judged.
    flops: a second that large matrix products reach in the precision of the plan. float8: of those in float8; None: as
    others.
    bandwidth: of a device's memory, bytes a second.
    inside: the link of a device to others of its host. between: of a host to other hosts, shared by its devices.
    to_host: bytes a second between a device and the memory of its host.
    hidden: {kind of traffic: the share of it that may run beside computation}.
    spread: the relative difference below which two predictions are a tie.
    measured: the seconds of the model's own units, where they were.
    """

    name: str
    hosts: int
    per_host: int
    memory: float
    flops: float
    bandwidth: float
    inside: Link
    between: Link
    to_host: float
    hidden: Mapping[str, float]
    spread: float
    measured: Calibration | None = None
    float8: float | None = None

    @property
    def gpu(self) -> bool:
        """Whether the devices are GPUs of the table."""
        return self.name in GPUS or gpu_of(self.name) is not None

    @property
    def devices(self) -> int:
        """All devices."""
        return self.hosts * self.per_host

    def link(self, axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[Link, bool]:
        """(the link of a device for a collective over these axes, whether it is between hosts).

        Devices are in the order of the mesh, the last axis fastest. A ring over devices of several hosts leaves each
        host once, so that all groups with members on a host share its link.
        """
        room, inside = self.per_host, 1
        for axis in reversed(AXES):
            here = math.gcd(sizes.get(axis, 1), room)
            room //= here
            inside *= here if axis in axes else 1
        if inside >= math.prod(sizes.get(axis, 1) for axis in axes):
            return self.inside, False
        used = min(self.per_host, math.prod(sizes.values()))
        share = self.between.bytes_per_s * inside / used
        return self.between._replace(bytes_per_s=min(share, self.inside.bytes_per_s)), True

    def described(self) -> str:
        """In a line, with the rates."""
        if self.measured is not None:
            return f"{self.hosts} x {self.per_host} {self.name}, calibrated"
        hosts = f"{self.hosts} hosts of {self.per_host}" if self.hosts > 1 else f"{self.per_host}"
        between = f", {self.between.bytes_per_s / 1e9:.4g} GB/s between hosts" if self.hosts > 1 else ""
        narrow = "" if self.float8 is None else f" and {self.float8 / 1e12:,.4g} in float8"
        return (
            f"{hosts} x {self.name}: products {self.flops / 1e12:.4g} TFLOP/s{narrow}, memory"
            f" {self.bandwidth / 1e9:,.4g} GB/s, {self.inside.bytes_per_s / 1e9:.4g} GB/s inside a host{between}"
        )


def gpu_cluster(
    gpu: str, precision: Precision, *, hosts: int, per_host: int, link: str | None, inside: str | None
) -> PlanCluster:
    """GPUs of the table, by the rates that replays assume.

    link: between hosts, of a host: a name or a rate such as "100gbit"; None: 50 GB/s for each GPU (400 Gbit/s).
    inside: "nvlink" or None for the GPU's own; "pcie3", "pcie4", "pcie5"; or a rate.

    Raises `UserError` for a GPU or a link that is not known.
    """
    found, rates = get_gpu(gpu), get_gpu(gpu).rates
    share = rates.flops / found.bf16
    near = LINKS["nvlink"]._replace(bytes_per_s=rates.network)
    bus = DEVICES[gpu].pcie if gpu in DEVICES else 5
    if inside is not None and inside != "nvlink":
        near = near._replace(bytes_per_s=rate_of_link(inside, key="--inside"))
    far = LINKS["infiniband"]
    far = far._replace(bytes_per_s=far.bytes_per_s * per_host if link is None else rate_of_link(link, key="--link"))
    return PlanCluster(
        name=gpu,
        hosts=hosts,
        per_host=per_host,
        memory=found.usable,
        flops=share * (found.bf16 if jnp.dtype(precision.compute).itemsize == 2 else found.tf32),
        bandwidth=found.bandwidth,
        inside=near,
        between=far,
        to_host=pcie(bus) * 0.8,  # what copies of large arrays reach: an assumption
        hidden=HIDDEN_ON_GPUS,
        spread=ASSUMED_SPREAD,
        float8=share * found.fp8 if precision.fp8 and found.fp8 else None,
    )


def calibrated_cluster(found: Calibration, *, memory: float = math.inf) -> PlanCluster:
    """The devices and links of a calibration. Their collectives hide as much as those of GPUs do where they are GPUs;
    on CPUs they block. A link inside a host that was not measured is taken for that between hosts."""
    gpu, near = gpu_of(found.device), found.inside or found.between
    inside = Link(0.0, math.inf) if near is None else near.link  # one device has no link
    return PlanCluster(
        name=found.device,
        hosts=found.hosts,
        per_host=found.per_host,
        memory=memory if gpu is None else min(memory, gpu.usable),
        flops=math.inf,
        bandwidth=1 / found.optimizer,
        inside=inside,
        between=found.between.link._replace(bytes_per_s=found.between.bytes_per_s * found.per_host)
        if found.between is not None
        else inside,
        to_host=math.inf if gpu is None else pcie(5) * 0.8,
        hidden={} if gpu is None else HIDDEN_ON_GPUS,
        spread=found.spread,
        measured=found,
    )
