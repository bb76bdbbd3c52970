"""The table of links and machines: PCIe, NVLink, network cards, and hosts that one can rent or buy.

All rates are of one direction, in bytes a second. Makers often print both directions together.
"""

import re
from typing import NamedTuple

from jaxdist.config.rules.grad_sync import link_rate
from jaxdist.errors import UserError, nearest
from jaxdist.plan.compiled.hardware import GPUS


class Device(NamedTuple):
    """A GPU, in the figures of its maker.

    memory: bytes, of 10^9 where the maker prints GB.
    half: dense FLOPs a second of products in 16 bits. single: in float32, without tensor cores where the GPU has no
        TF32.
    bandwidth: of its memory, bytes a second.
    nvlink: bytes a second that it sends; 0: it has none.
    pcie: the generation of its bus, with 16 lanes.
    """

    memory: float
    half: float
    single: float
    bandwidth: float
    nvlink: float
    pcie: int
    source: str


class HostKind(NamedTuple):
    """A machine with several GPUs.

    device: the name of its GPUs. cards, card_rate: its network cards for GPUs, and the bytes a second of each.
    pcie: the generation of the bus between GPUs and cards.
    """

    device: str
    devices: int
    cards: int
    card_rate: float
    pcie: int
    source: str

    @property
    def network(self) -> float:
        """Bytes a second that the host sends."""
        return self.cards * self.card_rate


GBIT = 1e9 / 8
_EC2, _DGX = "AWS, Amazon EC2 instance types, accelerated computing", "NVIDIA, datasheet of the DGX"


def pcie(generation: int, lanes: int = 16) -> float:
    """Bytes a second of a PCIe bus, from generation 3 on: 8 GT/s a lane, doubled by each, 128 of 130 bits are data.

    >>> from jaxdist.plan.machines import pcie
    >>> [f"{pcie(generation) / 1e9:.2f}" for generation in (3, 4, 5)]
    ['15.75', '31.51', '63.02']
    """
    assert generation >= 3, "earlier ones code 8 bits in 10"
    return 8e9 * 2 ** (generation - 3) * lanes * 128 / 130 / 8


def _compiled(name: str, bus: int) -> Device:
    """A GPU of the table of those that a step can be compiled for."""
    gpu = GPUS[name]
    return Device(gpu.memory, gpu.bf16, gpu.tf32, gpu.bandwidth, gpu.nvlink, bus, gpu.source)


DEVICES: dict[str, Device] = {
    "t4": Device(16e9, 65e12, 8.1e12, 320e9, 0.0, 3, "NVIDIA T4 datasheet; it has no NVLink"),
    "v100": Device(32e9, 125e12, 15.7e12, 900e9, 6 * 25e9, 3, "NVIDIA V100 datasheet: SXM2; NVLink 300 GB/s both ways"),
    "a100-40": _compiled("a100-40", 4),
    "a100-80": _compiled("a100-80", 4),
    "h100": _compiled("h100", 5),
    "h200": _compiled("h200", 5),
    "b200": _compiled("b200", 5),
}
HOSTS: dict[str, HostKind] = {
    "g4dn.12xlarge": HostKind("t4", 4, 1, 50 * GBIT, 3, _EC2),
    "g4dn.metal": HostKind("t4", 8, 1, 100 * GBIT, 3, _EC2),
    "p3.16xlarge": HostKind("v100", 8, 1, 25 * GBIT, 3, _EC2),
    "p3dn.24xlarge": HostKind("v100", 8, 1, 100 * GBIT, 3, f"{_EC2}: with EFA"),
    "p4d.24xlarge": HostKind("a100-40", 8, 4, 100 * GBIT, 3, f"{_EC2}: 4 x 100 Gigabit, EFA"),
    "p4de.24xlarge": HostKind("a100-80", 8, 4, 100 * GBIT, 3, f"{_EC2}: 4 x 100 Gigabit, EFA"),
    "p5.48xlarge": HostKind("h100", 8, 32, 100 * GBIT, 5, f"{_EC2}: 3200 Gigabit, EFA"),
    "p5en.48xlarge": HostKind("h200", 8, 16, 200 * GBIT, 5, f"{_EC2}: 3200 Gigabit, EFA"),
    "p6-b200.48xlarge": HostKind("b200", 8, 8, 400 * GBIT, 5, f"{_EC2}: 3200 Gigabit, EFA"),
    "dgx-a100": HostKind("a100-80", 8, 8, 200 * GBIT, 4, f"{_DGX} A100: ConnectX-6, for the cluster"),
    "dgx-h100": HostKind("h100", 8, 8, 400 * GBIT, 5, f"{_DGX} H100: ConnectX-7, for the cluster"),
    "dgx-h200": HostKind("h200", 8, 8, 400 * GBIT, 5, f"{_DGX} H200: ConnectX-7, for the cluster"),
    "dgx-b200": HostKind("b200", 8, 8, 400 * GBIT, 5, f"{_DGX} B200: ConnectX-7, for the cluster"),
}
# Bytes a second of one direction, by the names that `jaxdist cost --link` takes.
LINK_RATES: dict[str, float] = {
    **{f"pcie{generation}": pcie(generation) for generation in (3, 4, 5)},
    **{f"nvlink-{name}": device.nvlink for name, device in DEVICES.items() if device.nvlink},
    **{name: host.network for name, host in HOSTS.items()},
}


def rate_of_link(text: str, *, key: str) -> float:
    """Bytes a second of a rate such as "10gbit", or of a name of `LINK_RATES`. Raises `UserError`, naming `key`."""
    if text in LINK_RATES:
        return LINK_RATES[text]
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)[kmg]bit", text)
    rate = link_rate(text) if found and float(found[1]) else None
    if rate is None:
        raise UserError(
            f"{key}: {text!r} is not known; allowed: a rate such as 10gbit, or {', '.join(LINK_RATES)}{_meant(text)}"
        )
    return rate


def _meant(text: str) -> str:
    """A hint for what is nearly a rate or a name; "" without one."""
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmg]?)(b|bit|bits|bps|bit/s|bits/s|b/s)?", text, re.IGNORECASE)
    if number and float(number[1]):
        return f"; where bits a second are meant: {number[1]}{number[2].lower() or 'g'}bit"
    if text.lower() in DEVICES:
        linked = f"nvlink-{text.lower()}"
        return f"; did you mean {linked}?" if linked in LINK_RATES else "; it has no NVLink"
    near = nearest(text, LINK_RATES)
    return f"; did you mean {near}?" if near else ""
