"""What a collective costs, before it runs: rounds, bytes, and time on a link (the alpha-beta model, Hockney 1994)."""

from typing import NamedTuple

from jaxdist.config.rules.grad_sync import link_rate


class Link(NamedTuple):
    """latency_s: of one round, the call included (alpha). bytes_per_s: one way, of one device (1 / beta).

    swap_factor: how many times as long a round takes in which two devices send to each other over one connection.
    shared: whether the devices of a host share it, so that one alone can send at the rate of all.
    """

    latency_s: float
    bytes_per_s: float
    swap_factor: float = 1.0
    shared: bool = False


class Cost(NamedTuple):
    """One collective of n devices.

    rounds: messages one after the other. busiest: sent by the device that sends most. total: sent by all devices
    together. serial: the largest message of each round, summed, which is what the wire's time comes from. All in bytes,
    padding included (in elements when they come from an `Algorithm`). swap: whether a large part of the bytes goes in
    exchanges between pairs. inside_rounds, inside: how much of `rounds` and `serial` stays in the fast neighbourhoods.
    """

    rounds: int
    busiest: int
    total: int
    serial: int
    swap: bool = False
    inside_rounds: int = 0
    inside: int = 0

    def scaled(self, itemsize: float) -> "Cost":
        """In bytes instead of elements."""
        counts = {name: round(getattr(self, name) * itemsize) for name in ("busiest", "total", "serial", "inside")}
        return self._replace(**counts)

    def seconds(self, link: Link, inside: Link | None = None) -> float:
        """Predicted time when nothing else uses the links. inside: the neighbourhoods' links; None: as the others."""
        near, factor = inside or link, link.swap_factor if self.swap else 1.0
        far_rounds, far = self.rounds - self.inside_rounds, self.serial - self.inside
        return (
            far_rounds * link.latency_s
            + far / link.bytes_per_s * factor
            + self.inside_rounds * near.latency_s
            + self.inside / near.bytes_per_s
        )


def even(rounds: int, sent: int, n: int, *, swap: bool = False) -> Cost:
    """Cost of an algorithm in which every device sends the same in every round: `sent` in all."""
    return Cost(rounds, sent, n * sent, sent, swap)


NOTHING = Cost(0, 0, 0, 0)

# Latency and bandwidth of one ppermute. "local" and the TCP latency were measured (docs/collectives.md says where);
# bandwidths of hardware are the vendors' one-way figures a GPU, latencies of NCCL what nccl-tests commonly shows.
LINKS = {
    "local": Link(200e-6, 1e9),  # eight simulated devices on two cores: within a factor of two
    "nvlink": Link(6e-6, 450e9),  # H100: NVLink 4, 900 GB/s both ways
    "infiniband": Link(15e-6, 50e9),  # 400 Gbit/s a GPU
    "tcp": Link(400e-6, 117e6, swap_factor=2.0, shared=True),  # gloo over 1 Gbit Ethernet
}


def make_link(name: str) -> Link:
    """A name in `LINKS`, or a rate such as "200mbit" or "10gbit": gloo over TCP of that rate."""
    rate = link_rate(name)
    return LINKS[name] if rate is None else LINKS["tcp"]._replace(bytes_per_s=rate)
