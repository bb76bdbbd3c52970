"""The doctor: what it finds wrong with a job is named, a healthy job has no finding, and no secret is printed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import child
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.cli.work.doctor import addresses_shared, differing, environment_of
from jaxdist.cli.work.link_bandwidth import ALL_PAIRS, SlowLink, _one_program, bandwidths, pairs, slow_links
from jaxdist.config.resolve import has_gpus
from jaxdist.lab.network import unavailable
from jaxdist.lab.virtual_hosts import exit_status, run_on_hosts
from jaxdist.runtime.network.addresses import port_problem

SCRIPT = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "doctor.py")]
TOKENS = {"NCCL_TOKEN": "hunter2", "JAX_API_KEY": "hunter2"}
SECRETS = TOKENS | {"https_proxy": "http://user:hunter2@proxy:3128"}  # which gRPC would use to reach the coordinator


def matrix(n: int, **speeds: float) -> np.ndarray:
    """100 MB/s between all, but what is given for ends ("e1") and for what one sends another ("e0_e2")."""
    values = np.full((n, n), 100.0)
    np.fill_diagonal(values, np.nan)
    for name, speed in speeds.items():
        ends = [int(part[1:]) for part in name.split("_")]
        if len(ends) == 1:
            values[ends[0]], values[:, ends[0]] = speed, speed
            values[ends[0], ends[0]] = np.nan
        else:
            values[ends[0], ends[1]] = speed
    return values


@pytest.mark.parametrize(
    ("mb_per_s", "links"),
    [
        (matrix(3), []),
        (matrix(3, e1=20.0), [SlowLink((1,), 20.0, 100.0)]),
        (matrix(8, e0=49.0), [SlowLink((0,), 49.0, 100.0)]),
        (matrix(8, e0=51.0), []),
        (matrix(4, e0_e2=10.0, e2_e0=12.0), [SlowLink((0, 2), 12.0, 100.0)]),
        (matrix(4, e0_e2=10.0), []),  # the other way is as fast as it should be: the moment, not the link
        (matrix(5, e4=30.0, e1=20.0), [SlowLink((1,), 20.0, 100.0), SlowLink((4,), 30.0, 100.0)]),
        (matrix(2, e1=1.0), []),  # nothing to compare with
    ],
)
def test_slow_links_of_a_matrix(mb_per_s: np.ndarray, links: list[SlowLink]) -> None:
    assert slow_links(mb_per_s) == links


def test_pairs() -> None:
    assert sorted(pairs(5)) == [(i, j) for i in range(5) for j in range(5) if i != j]
    many = list(pairs(100))
    assert len(many) == len(set(many)) == 700
    assert {i for i, _ in many} == {j for _, j in many} == set(range(100)), ALL_PAIRS


def test_all_pairs_of_one_process_are_measured() -> None:
    found = bandwidths(jax.devices()[:3], mib=0.01, repetitions=1)
    assert np.isnan(np.diag(found)).all()
    assert (found[~np.eye(3, dtype=bool)] > 0).all()


def test_pairs_are_branches_of_one_program_and_send_what_they_should() -> None:
    mesh, every = Mesh(np.array(jax.devices()[:4]), ("ends",)), list(pairs(4))
    send = _one_program(mesh, every)
    x = jax.device_put(np.arange(1.0, 5.0, dtype=np.float32)[:, None], NamedSharding(mesh, P("ends")))
    for i, (sender, receiver) in enumerate(every):
        wanted = np.zeros((4, 1))
        wanted[receiver] = sender + 1
        np.testing.assert_array_equal(send(x, jax.device_put(np.int32(i), NamedSharding(mesh, P()))), wanted)
    assert send._cache_size() == 1  # type: ignore[attr-defined]


def report(rank: int, **changes: Any) -> dict[str, Any]:
    base = {
        "rank": rank,
        "host": f"host{rank}",
        "address": f"10.0.0.{rank + 1}",
        "devices": ["cpu"],
        "versions": {"jax": "0.12.0"},
        "environment": {"JAX_PROCESS_ID": str(rank), "NCCL_DEBUG": "INFO"},
    }
    return base | changes


def test_what_differs_between_processes() -> None:
    assert differing([report(0), report(1)]) == addresses_shared([report(0), report(1)]) == []
    old = report(1, versions={"jax": "0.10.2"}, environment={}, devices=["cpu", "cpu"])
    assert differing([report(0), old]) == [
        "jax: '0.12.0' on rank 0, '0.10.2' on rank 1 (host1)",
        "NCCL_DEBUG: 'INFO' on rank 0, 'not there' on rank 1 (host1)",
        "devices: 1 x cpu on rank 0, 2 x cpu on rank 1",
    ]
    (line,) = addresses_shared([report(0), report(1, address="127.0.1.1")])
    assert line.startswith("host name host1 (rank 1): 127.0.1.1;")
    assert addresses_shared([report(0, address="127.0.1.1"), report(1, host="host0", address="127.0.1.1")]) == []


def test_environment_without_secrets() -> None:
    others = {"NCCL_SOCKET_IFNAME": "eth0", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "hunter2"}
    found = environment_of(SECRETS | others)
    assert list(found) == ["JAX_API_KEY", "NCCL_SOCKET_IFNAME", "NCCL_TOKEN", "https_proxy"]
    assert found["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "hunter2" not in str(found)


def test_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert port_problem(port) == f"port {port}: Address already in use"


def test_one_process(tmp_path: Path) -> None:
    """Text, picture, no secret; a port that is taken is a finding, and status 1."""
    environ = child.environment() | SECRETS
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ["--platform", "cpu", "--simulated", "2", "--mib", "0.1", "--port", port, "--plot", "links.png"]
        command = [*SCRIPT, *options]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1, done
    lines = done.stdout.splitlines()
    assert lines[-1] == f"FINDING    port {port}: Address already in use"
    assert "devices    2 (cpu)" in lines
    assert "variable   NCCL_TOKEN=[redacted]" in lines
    assert "hunter2" not in done.stdout + done.stderr
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(has_gpus(), reason="there is a GPU")
def test_a_platform_that_is_not_here() -> None:
    done = subprocess.run([*SCRIPT, "--platform", "gpu"], env=child.environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: --platform: 'gpu', but JAX cannot use one (it found 1 x cpu); allowed: ")


@pytest.mark.slow
def test_a_job_that_does_not_come_together() -> None:
    job = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3", "RANK": "0", "JAXDIST_JOIN_TIMEOUT": "0.5"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        job["MASTER_PORT"] = str(probe.getsockname()[1])
    command = [*SCRIPT, "--platform", "cpu"]
    done = subprocess.run(command, env=child.environment() | job, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr == f"error: ranks 1 and 2 of 3 did not come to 127.0.0.1:{job['MASTER_PORT']} within 0.5 s"
        " (an address that only processes of the same host can reach)\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")
@pytest.mark.parametrize(("rate", "slow"), [("100mbit", []), ("100mbit,100mbit,20mbit", [2])])
def test_three_hosts(rate: str, slow: list[int]) -> None:
    """The host with the slow link is named; on an even network none is."""
    if reason := unavailable():
        pytest.skip(reason)
    command = ["timeout", "100", *SCRIPT, "--platform", "cpu", "--mib", "2", "--json"]
    results = run_on_hosts(command, hosts=3, rate=rate, environ=child.environment() | TOKENS)
    assert exit_status(results) == (1 if slow else 0), results
    found = json.loads(next(line for line in results[0].stdout.splitlines() if line.startswith("{")))
    assert [link["ends"] for link in found["slow_links"]] == [[end] for end in slow]
    assert [
        text.startswith(f"slow link of rank {end} (host{end}):")
        for text, end in zip(found["findings"], slow, strict=True)
    ] == [True] * len(slow)
    bound = np.array([[100.0 if {i, j}.isdisjoint(slow) else 20.0 for j in range(3)] for i in range(3)]) / 8
    measured = np.array([[np.nan if v is None else v for v in row] for row in found["mb_per_s"]])
    ratio = (measured / bound)[~np.eye(3, dtype=bool)]
    assert (ratio > 0.6).all() and (ratio < 1.3).all(), found["mb_per_s"]
    assert max(found["clock_differences_s"]) < 0.5
    assert "hunter2" not in "".join(result.stdout + result.stderr for result in results)
