"""The cost of a synchronous parameter server, against its messages, written out one by one."""

import contextlib
import doctest
import io
import itertools
import json
import re
import statistics
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist.collectives import Link, cost, parameter_server
from jaxdist.collectives.parameter_server import server_cost, splits
from jaxdist.errors import UserError

LINK = Link(latency_s=0.0, bytes_per_s=5e6)
ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "docs" / "measurements" / "parameter_server_4hosts.json").read_text(encoding="utf-8"))


def by_messages(nbytes: int, workers: int, servers: int) -> tuple[int, int]:
    """(bytes of all messages, what the busiest end of a link carries one way and then the other)."""
    push = [(worker, workers + k, nbytes // servers) for worker in range(workers) for k in range(servers)]
    pull = [(server, worker, size) for worker, server, size in push]

    def busiest(way: list[tuple[int, int, int]]) -> int:
        ends = [(end, host) for end in (0, 1) for host in range(workers + servers)]
        return max(sum(message[2] for message in way if message[end] == host) for end, host in ends)

    return sum(size for *_, size in push + pull), busiest(push) + busiest(pull)


@pytest.mark.parametrize(("workers", "servers"), list(itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 8))))
def test_the_cost_is_that_of_its_messages(workers: int, servers: int) -> None:
    nbytes = 4 * 3 * 8 * 1000
    got = server_cost(nbytes, workers=workers, servers=servers)
    assert (got.rounds, got.total, got.serial) == (2, *by_messages(nbytes, workers, servers))
    assert got.busiest == max(nbytes, workers * nbytes // servers)  # a worker's pushes, or a server's answers
    assert got.seconds(LINK) == pytest.approx(2 * nbytes / 5e6 * max(1, workers / servers), rel=1e-12)


def test_parts_are_padded_and_latency_counts_twice() -> None:
    assert server_cost(10, workers=4, servers=3).serial == 2 * 4 * 4  # the largest part has four of the ten bytes
    slow = Link(latency_s=0.5, bytes_per_s=1e6)
    assert server_cost(10**6, workers=1, servers=1).seconds(slow) == pytest.approx(2 * 0.5 + 2.0, rel=1e-12)


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("compute", [0.0, 0.1, 10.0])
def test_a_ring_of_all_hosts_beats_every_split(hosts: int, compute: float) -> None:
    nbytes = 4 * hosts * 1000
    ring = hosts / (compute + cost("all_reduce", nbytes, hosts).seconds(LINK))
    found = splits(nbytes, hosts, compute, LINK)
    assert [each.servers for each in found] == list(range(1, hosts))
    assert all(each.workers + each.servers == hosts and each.per_second < ring for each in found)


def test_one_server_on_every_device_sends_what_balanced_fusion_does() -> None:
    """A part stays at home: (n-1)/n of what servers on hosts of their own send."""
    for n in (2, 4, 8):
        apart = server_cost(8000, workers=n, servers=n)
        assert cost("all_reduce", 8000, n, algorithm="balanced_fusion").serial == (n - 1) / n * apart.serial


def test_the_master_is_one_server_among_the_workers() -> None:
    for n in (2, 4, 8):
        apart = server_cost(8000, workers=n - 1, servers=1)
        assert cost("all_reduce", 8000, n, algorithm="master_worker").serial == apart.serial


def test_no_worker_or_no_server_is_refused() -> None:
    for name, workers, servers in (("workers", 0, 1), ("servers", 1, 0)):
        with pytest.raises(UserError, match=f"{name}: 0; allowed: 1 or more"):
            server_cost(8, workers=workers, servers=servers)
    with pytest.raises(UserError, match="hosts: 1; allowed: 2 or more"):
        splits(8, 1, 0.1, LINK)


def test_the_page_of_parameter_servers_prints_what_it_shows() -> None:
    text = (ROOT / "docs" / "parameter_server.md").read_text(encoding="utf-8")
    pairs = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(pairs) == 2
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec("\n".join(program for program, _ in pairs), {})
    assert printed.getvalue() == "".join(shown for _, shown in pairs)


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: f"{row['rate']}-{row['servers']}")
def test_what_was_measured_is_on_the_page(row: dict[str, Any]) -> None:
    """Within 5 % of the formula where there are no more servers than workers; each row of the table is that of the
    data."""
    workers, servers, rate = row["workers"], row["servers"], row["rate"].removesuffix("mbit")
    link = Link(latency_s=0.0, bytes_per_s=float(rate) * 125e3)
    formula = server_cost(MEASURED["nbytes"], workers=workers, servers=servers).seconds(link)
    took = statistics.median(map(statistics.mean, zip(*row["seconds"], strict=True)))
    assert servers > workers or abs(took / formula - 1) < 0.05
    cells = (f"{rate} Mbit/s", f"{workers}, {servers}", f"{took:.2f}", f"{formula:.2f}", f"{took / formula:.3f}")
    text = (ROOT / "docs" / "parameter_server.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(cells)} |" in text, cells


def test_the_examples_run() -> None:
    tests = doctest.DocTestFinder().find(parameter_server, extraglobs={"jaxdist": jaxdist, "jnp": jnp})
    examples = [test for test in tests if test.examples]
    assert len(examples) == 2
    assert not any(doctest.DocTestRunner().run(test).failed for test in examples)
