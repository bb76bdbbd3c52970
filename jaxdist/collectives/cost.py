"""The cost model of collectives: rounds, bytes, and time on a link (the alpha-beta model, Hockney 1994)."""

from typing import NamedTuple

from jaxdist.config.rules.grad_sync import link_rate


class Link(NamedTuple):
    """A network link between two devices.

    latency_s: seconds of one round, the call included (alpha).
    bytes_per_s: the rate of one device, one way (1 / beta).
    swap_factor: a round takes this many times as long if two devices send to each other over one connection.
    shared: whether the devices of a host share the link, so that a device can send alone at the rate of all.
    """

    latency_s: float
    bytes_per_s: float
    swap_factor: float = 1.0
    shared: bool = False


class Cost(NamedTuple):
    """The cost of one collective on n devices. Sizes are in bytes (in elements, from an `Algorithm`), with padding.

    rounds: messages that are sent one after the other.
    busiest: bytes that the busiest device sends.
    total: bytes that all devices send together.
    serial: the sum over rounds of the largest message. The time on the wire follows from it.
    swap: whether a large part of the bytes is exchanged between pairs of devices.
    inside_rounds: how many of `rounds` stay inside the fast neighbourhoods.
    inside: how much of `serial` stays there.
    """

    rounds: int
    busiest: int
    total: int
    serial: int
    swap: bool = False
    inside_rounds: int = 0
    inside: int = 0

    def scaled(self, itemsize: float) -> "Cost":
        """The cost in bytes, from one in elements of `itemsize` bytes."""
        counts = {name: round(getattr(self, name) * itemsize) for name in ("busiest", "total", "serial", "inside")}
        return self._replace(**counts)

    def seconds(self, link: Link, inside: Link | None = None) -> float:
        """Predicted time on links that nothing else uses.

        link: the link between neighbourhoods.
        inside: the link inside a neighbourhood; None: `link`.
        """
        near, factor = inside or link, link.swap_factor if self.swap else 1.0
        far_rounds, far = self.rounds - self.inside_rounds, self.serial - self.inside
        return (
            far_rounds * link.latency_s
            + far / link.bytes_per_s * factor
            + self.inside_rounds * near.latency_s
            + self.inside / near.bytes_per_s
        )


def even(rounds: int, sent: int, n: int, *, swap: bool = False) -> Cost:
    """The cost of an algorithm in which every device sends as much as the others: `sent` over all rounds."""
    return Cost(rounds, sent, n * sent, sent, swap)


def halves_cost(operation: str, size: int, n: int, rounds: int, *, swap: bool = False) -> Cost:
    """The cost of sending (n-1)/n of the data in `rounds` rounds; of an all-reduce, which does so twice, the double."""
    chunk, times = size if operation == "all_gather" else -(-size // n), 2 if operation == "all_reduce" else 1
    return even(times * rounds, times * (n - 1) * chunk, n, swap=swap)


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
