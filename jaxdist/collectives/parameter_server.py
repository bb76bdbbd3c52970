"""The cost of a synchronous parameter server: K servers beside W workers, on hosts of their own (Li et al. 2014).

No mesh has two roles, so there is no algorithm of this name: `jaxdist.elastic` runs it, and this says what it costs. An
all-reduce by `balanced_fusion` is the case in which every device is a worker and a server, `master_worker` the one in
which rank 0 is a worker and the only server.
"""

from typing import NamedTuple

from jaxdist.collectives.cost import Cost, Link
from jaxdist.errors import UserError


def server_cost(nbytes: int, *, workers: int, servers: int) -> Cost:
    """The cost of one synchronisation: every worker pushes its gradients and pulls the new parameters.

    Each server has an equal part of them. It sums that part of all workers before it sends anything back, so the two
    ways come one after the other. Each takes as long as the busiest link is in use: a worker's, which carries N bytes,
    or a server's, which carries W N / K. On links of B bytes a second each way, without latency, that is
    2 N/B max(1, W/K) seconds. Where K > W, parts that are ready early come back while others are still pushed; the cost
    is then a bound from above.

    Args:
        nbytes: N, the bytes of the gradients of one worker, and of the parameters.
        workers: W.
        servers: K.

    Raises `UserError` for less than one worker or server.

    >>> from jaxdist.collectives.parameter_server import server_cost
    >>> server_cost(4_000_000, workers=3, servers=1)
    Cost(rounds=2, busiest=12000000, total=24000000, serial=24000000, swap=False, inside_rounds=0, inside=0)
    >>> link = jaxdist.collectives.Link(latency_s=0.0, bytes_per_s=5e6)
    >>> [server_cost(4_000_000, workers=4 - k, servers=k).seconds(link) for k in (1, 2, 3)]
    [4.8, 1.6, 1.6]
    """
    for name, value in (("workers", workers), ("servers", servers)):
        if value < 1:
            raise UserError(f"{name}: {value}; allowed: 1 or more")
    part = -(-nbytes // servers)
    one_way = max(nbytes, workers * part)
    return Cost(rounds=2, busiest=one_way, total=2 * workers * nbytes, serial=2 * one_way)


class Split(NamedTuple):
    """A number of hosts as workers and servers. per_second: steps of one worker, summed over all workers."""

    workers: int
    servers: int
    per_second: float


def splits(nbytes: int, hosts: int, compute_s: float, link: Link) -> list[Split]:
    """Every way to make servers of some hosts and workers of the others, with its throughput.

    More servers shorten a synchronisation, and leave fewer workers. A ring of all hosts is never slower in bytes than
    the best split: it sends 2 (P-1)/P N where a split sends at least 2 N, and all P hosts work.

    Args:
        nbytes: The bytes of the gradients of one worker.
        hosts: P = W + K, at least 2.
        compute_s: The seconds in which a worker computes its gradients.
        link: The link of each host.

    >>> from jaxdist.collectives.parameter_server import splits
    >>> link = jaxdist.collectives.Link(latency_s=0.0, bytes_per_s=5e6)
    >>> [round(each.per_second, 3) for each in splits(4_000_000, 4, 0.4, link)]
    [0.577, 1.0, 0.5]
    >>> ring = jaxdist.collectives.cost("all_reduce", 4_000_000, 4).seconds(link)
    >>> round(4 / (0.4 + ring), 3)
    2.5
    """
    if hosts < 2:
        raise UserError(f"hosts: {hosts}; allowed: 2 or more, a worker and a server")
    found = []
    for servers in range(1, hosts):
        workers = hosts - servers
        seconds = server_cost(nbytes, workers=workers, servers=servers).seconds(link)
        found.append(Split(workers, servers, workers / (compute_s + seconds)))
    return found
