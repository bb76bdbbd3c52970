"""`jaxdist launch --ray`: what it reserves and starts, and a job on two nodes of a Ray cluster; fit in a JaxTrainer."""

import contextlib
import functools
import importlib.util
import itertools
import json
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import child
import pytest
from jobs import marked, wait_until
from pages import on_page

from jaxdist.cli.main import main
from jaxdist.elastic import cluster as clusters
from jaxdist.elastic import launch
from jaxdist.elastic.launch import check_hosts, make_ray_plan
from jaxdist.errors import UserError
from jaxdist.launcher.options import make_plan

ROOT = Path(__file__).parents[2]
JAXDIST = [sys.executable, "-m", "jaxdist.cli.main"]
MODEL = ("model.layers=1", "model.width=16", "model.heads=2", "data.global_batch=8", "data.seq_len=16")
MESH = ("mesh.data=-1", "mesh.fsdp=1", "mesh.tensor=1", "devices.simulated=1")
FEW = ("train.steps=3", "train.eval_every=0", "train.sample_tokens=0", "checkpoint.every=0", "observe.report=false")
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra elastic is not installed")
# Two nodes of one cluster on this machine, until its standard input is closed.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def test_each_host_gets_the_launchers_arguments() -> None:
    asked = ["--ray", "-n", "1", "--nnodes", "3", "--grace", "2", "--host-gpus", "8", "--", "job", "--run-dir", "x"]
    plan = make_ray_plan(asked, "launch")
    assert (plan.hosts, plan.cpus, plan.gpus, plan.command) == (3, 1.0, 8.0, ("job", "--run-dir", "x"))
    found = make_plan(plan.arguments(2, "10.0.0.1:99"), {})
    assert (found.procs, found.nnodes, found.node_rank, found.coordinator) == (1, 3, 2, "10.0.0.1:99")
    assert (found.grace, found.command) == (2.0, plan.command)
    alone = make_plan(make_ray_plan(["--ray", "-n", "4", "--", "job"], "launch").arguments(0, "10.0.0.1:99"), {})
    assert (alone.procs, alone.nnodes, alone.coordinator) == (4, 1, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "1", "--coordinator", "a:1", "--", "job"], "--coordinator: is chosen by --ray; leave it out"),
        (["-n", "1", "--node-rank=1", "--", "job"], "--node-rank: is chosen by --ray; leave it out"),
        (["-n", "1", "--host-cpus", "-1", "--", "job"], "--host-cpus: -1; allowed: a number >= 0 and < "),
        (["-n", "1", "--nnodes", "2", "--", "job"], "--run-dir: not given in the command"),
        (["-n", "0", "--", "job"], "-n/--procs: 0; allowed: an integer >= 1"),
        (["-n", "1"], "command: none given"),
    ],
)
def test_what_is_wrong_is_said_before_a_host_is_reserved(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_ray_plan(["--ray", *arguments], "launch")


def test_too_few_hosts_are_one_line() -> None:
    asked = ["--ray", "-n", "1", "--nnodes", "3", "--host-gpus", "4", "--", "job", "--run-dir", "x"]
    plan = make_ray_plan(asked, "launch")
    assert plan.bundle == {"CPU": 1.0, "GPU": 4.0}
    fits = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}}
    small, dead = {"Alive": True, "Resources": {"CPU": 8.0}}, fits | {"Alive": False}
    check_hosts(plan, [fits, fits, small, fits])
    with pytest.raises(UserError, match="--nnodes: 3 hosts with 1 CPUs and 4 GPUs each, and the cluster has 2; give"):
        check_hosts(plan, [fits, dead, small, fits])
    plan = make_ray_plan(["--ray", "-n", "1", "--nnodes", "3", "--", "job", "--run-dir", "x"], "launch")
    with pytest.raises(UserError) as error:
        check_hosts(plan, [fits, small])
    on_page("docs/ray.md", f"error: {error.value}")


def test_the_coordinators_port_is_free_on_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own processes listen on the host's address, and not on 127.0.0.1."""
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.2"))
    monkeypatch.setattr(launch, "load_ray", lambda: ray)
    with socket.create_server(("127.0.0.2", 0)) as taken:
        after_it = taken.getsockname()[1]
        ports = itertools.chain([after_it - 1, 65535], iter(functools.partial(launch.free_port, ""), None))
        monkeypatch.setattr(launch, "free_port", lambda address: next(ports))
        assert launch.Host().where() not in [("127.0.0.2", after_it - 1), ("127.0.0.2", 65535)]


def test_a_machine_without_gpus_is_told_of_the_options_of_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nothing = SimpleNamespace(init=lambda **_: None, shutdown=lambda: None, cluster_resources=lambda: {"CPU": 1.0})
    monkeypatch.setattr(clusters, "load_ray", lambda secure: nothing)
    assert main(["launch", "--ray", "-n", "1", "--host-gpus", "8", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert "--nnodes: this machine has 0 GPUs, and 8 are needed; give fewer, less of --host-cpus or --host-gpus" in said
    assert "worker" not in said and said.count("\n") == 1


def test_ray_options_need_ray() -> None:
    for option in ("--host-cpus", "--host-gpus"):
        with pytest.raises(UserError, match=f"{option}: only with --ray"):
            make_plan(["-n", "1", option, "2", "--", "job"], {})


def environ(**more: str) -> dict[str, str]:
    clean = {name: text for name, text in child.environment().items() if not name.startswith("RAY_")}
    return clean | child.QUICK | {"RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"} | more


@contextlib.contextmanager
def two_nodes() -> Iterator[dict[str, str]]:
    """An environment with a cluster of two nodes, which ends at the end."""
    own = environ(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    command, null = [sys.executable, "-c", CLUSTER], subprocess.DEVNULL
    with subprocess.Popen(command, env=own, text=True, stdin=-1, stdout=-1, stderr=null) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            lines = (line.strip() for line in process.stdout)
            yield own | {"RAY_ADDRESS": next(line for line in lines if line.rpartition(":")[2].isdecimal())}
        finally:
            process.stdin.close()
            process.wait(60)


@needs_ray
@pytest.mark.slow
def test_a_job_on_two_nodes(tmp_path: Path) -> None:
    job = ["--", *JAXDIST, "train", "quickstart", *MODEL, *MESH, *FEW, "--run-dir", str(tmp_path / "run")]
    with two_nodes() as cluster:
        command = [*JAXDIST, "launch", "--ray", "-n", "1", "--nnodes", "2", *job]
        done = subprocess.run(command, env=cluster, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "[1] rank 1 of 2 joined" in done.stdout and "2 processes" in done.stdout
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(number: int, tmp_path: Path) -> None:
    mark = f"mark-{secrets.token_hex(8)}"
    sleeps = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)", mark]
    command = [*JAXDIST, "launch", "--ray", "-n", "1", "--log-dir", str(tmp_path), "--", *sleeps]
    with subprocess.Popen(command, env=environ(), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "up" in process.stdout.readline()
        assert marked(mark, "cmdline")
        process.send_signal(number)
        assert process.wait(60) == (75 if number == signal.SIGTERM else -number)
    wait_until(lambda: not marked(mark, "cmdline"), "the end of all its processes", 30)


@needs_ray
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="ray[train] is not installed")
def test_fit_in_a_jax_trainer_goes_on_after_a_failure() -> None:
    command = [sys.executable, str(ROOT / "docs" / "examples" / "ray_train.py")]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed  after step 10" in done.stdout + done.stderr
    assert "\n30 steps, the last is 30, loss 1.4e-05\n" in done.stdout
