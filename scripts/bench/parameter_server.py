"""A synchronous parameter server on Ray, K servers beside W workers, against 2 N/B max(1, W/K) seconds.

    python scripts/bench/parameter_server.py [--hosts 4] [--rates 20mbit,40mbit] [--mb 4] [--rounds 7] [--json OUT]

Each actor has a virtual host of its own, behind a link of the given rate, and each host is a node of one Ray cluster.
In a round every worker pushes an equal part of N bytes to every server; a server moves its parameters by the mean of
what all workers have pushed, and sends them to each. A round ends for a worker when it has all parts. All splits of the
hosts are measured, one after the other in the same cluster: the median of many rounds in a row. Needs root, network
namespaces (see scripts/virtual_hosts.py) and Ray.
"""

import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.collectives import Link, cost
from jaxdist.collectives.parameter_server import server_cost
from jaxdist.config.arguments import COUNT, numeric, output_file
from jaxdist.elastic.cluster import load_ray
from jaxdist.elastic.outer import make_outer
from jaxdist.elastic.server import Server
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.lab.network import SUBNET, unavailable
from jaxdist.lab.virtual_hosts import exit_status, run_on_hosts
from jaxdist.observe import measured_on

PORT = 6379
HEAD = f"{SUBNET}.1:{PORT}"
WARM_UP = 3  # rounds that are not counted: connections and their windows grow, and the burst of the shaper is used up
FOLDER, END = "PARAMETER_SERVER_FOLDER", "end"  # of Ray on each host; a file by which host 0 ends the others


class Waiting:
    """A server of `jaxdist.elastic` that holds back its answers until all workers have pushed."""

    def __init__(self, workers: int, size: int) -> None:
        self.workers, self.arrived, self.results = workers, threading.Condition(), dict[int, Any]()
        self.server = Server(0, make_outer("sgd", 1.0, 0.0), None)
        self.server.begin(np.zeros(size, np.float32))

    def push(self, number: int, worker: str, part: np.ndarray) -> list[Any]:
        """A reference to the new parameters, when the last worker has pushed."""
        with self.arrived:
            assert not self.server.stage(worker, part)
            if len(self.server.staged) == self.workers:
                self.server.commit(sorted(self.server.staged))
                self.results = {number: load_ray().put(self.server.read())}
                self.arrived.notify_all()
            self.arrived.wait_for(lambda: number in self.results)
            return [self.results[number]]


class Worker:
    """A worker whose gradients are all the same number, that of the worker."""

    def __init__(self, servers: list[Any], size: int, number: int) -> None:
        self.servers, self.name = servers, str(number)
        self.parts = [np.full(size // len(servers), number, np.float32) for _ in servers]

    def run(self, rounds: int, mean: float) -> list[float]:
        """The seconds of each round, in which the parameters move by the mean of all workers' gradients."""
        ray, seconds = load_ray(), []
        for number in range(rounds):
            start = time.perf_counter()
            pushes = [(number, self.name, ray.put(part)) for part in self.parts]
            answers = [server.push.remote(*push) for server, push in zip(self.servers, pushes, strict=True)]
            pulled = ray.get([answer[0] for answer in ray.get(answers)])
            seconds.append(time.perf_counter() - start)
            assert all((each == -mean * (number + 1)).all() for each in pulled)
        return seconds


def start_node() -> None:
    """Make this host a node of the cluster."""
    index, folder = int(os.environ["HOST_INDEX"]), os.environ[FOLDER]
    # Hosts share the machine's files, and their nodes would take each other's sockets.
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
    while index:
        try:
            socket.create_connection((f"{SUBNET}.1", PORT), 2).close()
            break
        except OSError:
            time.sleep(0.2)
    own = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={SUBNET}.{index + 1}"]
    options = ["--num-cpus=1", "--object-store-memory=300000000", "--disable-usage-stats"]
    subprocess.run([*ray, *options, *([f"--address={HEAD}"] if index else own)], check=True, capture_output=True)


def measure_here(hosts: int, size: int, rounds: int) -> None:
    """On host 0: measure each split, and print a line of JSON for it."""
    ray = load_ray()
    ray.init(address=HEAD, _node_ip_address=f"{SUBNET}.1", log_to_driver=False, configure_logging=False)
    while len(nodes := [node for node in ray.nodes() if node["Alive"]]) < hosts:
        time.sleep(0.2)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_of = {node["NodeManagerAddress"]: node["NodeID"] for node in nodes}

    def make(kind: type, host: int, *arguments: Any) -> Any:
        where = NodeAffinitySchedulingStrategy(node_of[f"{SUBNET}.{host + 1}"], soft=False)
        options = {"num_cpus": 0, "max_concurrency": hosts, "scheduling_strategy": where}
        return ray.remote(kind).options(**options).remote(*arguments)

    for servers in range(1, hosts):
        workers = hosts - servers
        parts = [make(Waiting, workers + k, workers, size // servers) for k in range(servers)]
        loops = [make(Worker, index, parts, size, index + 1) for index in range(workers)]
        seconds = ray.get([loop.run.remote(WARM_UP + rounds, (workers + 1) / 2) for loop in loops])
        counted = [[round(each, 4) for each in own[WARM_UP:]] for own in seconds]
        print(json.dumps({"workers": workers, "servers": servers, "seconds": counted}), flush=True)
        for actor in (*loops, *parts):
            ray.kill(actor)
    ray.shutdown()


def on_host(hosts: int, size: int, rounds: int, end: Path) -> None:
    """The program of each virtual host."""
    start_node()
    if os.environ["HOST_INDEX"] == "0":
        try:
            measure_here(hosts, size, rounds)
        finally:
            end.touch()
    while not end.exists():
        time.sleep(0.2)


def measure(rate: str, hosts: int, size: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one rate."""
    link = Link(latency_s=0.0, bytes_per_s=float(rate.removesuffix("mbit")) * 125e3)
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp") as folder, tempfile.TemporaryDirectory() as shared:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Ray makes its workers nice to other programs, by 15: they would wait for the processor, not for the link.
        options = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        environ = {**os.environ, **token, **options, FOLDER: folder}
        end = str(Path(shared) / END)
        command = [sys.executable, __file__, "--on-host", end]
        command += ["--hosts", str(hosts), "--mb", str(size * 4 / 1e6), "--rounds", str(rounds)]
        results = run_on_hosts(command, hosts=hosts, rate=rate, environ=environ)
    if exit_status(results):
        raise UserError(f"the hosts failed at {rate}: {next(r.stderr for r in results if r.status)[-2000:]}")
    rows = []
    for line in results[0].stdout.splitlines():
        row = json.loads(line)
        formula = server_cost(size * 4, workers=row["workers"], servers=row["servers"]).seconds(link)
        # A worker that is early begins the next round early, and waits there: its rounds are long and short in turn,
        # and the mean over workers is even. The median leaves out what else the machine did for a moment.
        middle = statistics.median(map(statistics.mean, zip(*row["seconds"], strict=True)))
        rows.append({"rate": rate, **row, "median": middle, "formula": formula, "ratio": middle / formula})
        split = f"W={row['workers']} K={row['servers']}"
        print(f"{rate:>8} {split} {middle:.3f} s, formula {formula:.3f} s, ratio {middle / formula:.3f}", flush=True)
    print(f"{rate:>8} a ring of {hosts}, by its cost: {cost('all_reduce', size * 4, hosts).seconds(link):.3f} s")
    return rows


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for wrong arguments and where there are no virtual hosts."""
    parser = CommandParser(description="A synchronous parameter server on Ray and shaped links, against its formula.")
    parser.add_argument("--hosts", type=numeric(int, at_least=2), default=4, help="workers and servers together")
    parser.add_argument("--rates", default="20mbit,40mbit", help="of the links, in mbit, with commas between")
    parser.add_argument("--mb", type=numeric(float, above=0), default=4.0, help="MB of gradients of each worker")
    parser.add_argument("--rounds", type=COUNT, default=7, help=f"that are counted, after {WARM_UP} that are not")
    parser.add_argument("--json", type=output_file, metavar="OUT")
    parser.add_argument("--on-host", metavar="END", help="the program of a virtual host; this script starts it")
    arguments = parser.parse_args()
    parts = 4 * 3 * 5 * 7  # every number of servers up to 7 divides them
    size = max(1, round(arguments.mb * 1e6 / 4 / parts)) * parts
    if arguments.on_host:
        on_host(arguments.hosts, size, arguments.rounds, Path(arguments.on_host))
        return 0
    load_ray()
    if reason := unavailable():
        raise UserError(reason)
    rates = arguments.rates.split(",")
    rows = [row for rate in rates for row in measure(rate, arguments.hosts, size, arguments.rounds)]
    if arguments.json:
        ray = load_ray().__version__
        found = {**measured_on(), "ray": ray, "hosts": arguments.hosts, "nbytes": size * 4, "rows": rows}
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
