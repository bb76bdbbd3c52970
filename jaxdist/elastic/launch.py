"""Ordinary jobs on a Ray cluster: `jaxdist launch --ray`.

Ray reserves hosts and starts the launcher on each, as ssh or SLURM would. All else is as without Ray: the launchers
meet at host 0, start the processes of their hosts, which `jax.distributed` joins, and start the job again when it
fails. Only texts and numbers travel through Ray.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.elastic.cluster import Asker, cluster, load_ray
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.launcher import exec_rank
from jaxdist.launcher.note_signals import noted_signals
from jaxdist.launcher.options import AMOUNT, make_plan, split_command
from jaxdist.launcher.ranks import Screen
from jaxdist.runtime.exit_status import SAME_S, STOPPED
from jaxdist.runtime.network.addresses import format_address, free_port, port_problem
from jaxdist.runtime.network.job_token import TOKEN, new_token, read_token

RESERVE_S, READ_S, EACH_S = 5.0, 0.5, 0.2  # for hosts to become free; of one look at a host's output, and for signals
FEWER = Asker("--nnodes", "give fewer, less of --host-cpus or --host-gpus")
CHOSEN = ("--node-rank", "--coordinator", "--token-file")  # by Ray, for each host


class Host:
    """The actor on one host: its launcher, which dies with it."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, bytes]] = []
        self.came = threading.Condition()
        self.pid = 0  # of the launcher
        self.status: int | None = None  # how it has ended, once all of its output has been read

    def where(self) -> tuple[str, int]:
        """The address of this host, and a port that is free on all of its addresses, as the next one is."""
        address = load_ray().util.get_node_ip_address()
        while (port := free_port("")) >= 65535 or port_problem(port + 1, ""):
            pass
        return address, port

    def start(self, arguments: list[str], token: str, folder: str) -> None:
        """Start the launcher in a folder. Raises `UserError` where that is not there."""
        if not Path(folder).is_dir():
            raise UserError(f"folder: {folder} is not on this host; start jobs from a folder that all hosts share")
        # It dies with the thread that starts it, as Linux counts, so that this one waits for it.
        threading.Thread(target=self._run, args=(arguments, token, folder), daemon=True).start()

    def _run(self, arguments: list[str], token: str, folder: str) -> None:
        begin = [sys.executable, "-I", "-S", exec_rank.__file__, str(os.getpid()), ""]
        process = subprocess.Popen(
            [*begin, sys.executable, "-m", "jaxdist.cli.main", "launch", *arguments],
            env={**os.environ, TOKEN: token},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.pid = process.pid
        pumps = [
            threading.Thread(target=self._pump, args=(stream, number), daemon=True)
            for number, stream in ((1, process.stdout), (2, process.stderr))
        ]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        with self.came:
            self.status = process.wait()
            self.came.notify_all()

    def _pump(self, stream: Any, number: int) -> None:
        for line in stream:
            with self.came:
                self.lines.append((number, line))
                self.came.notify_all()

    def read(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """(new lines of output, the exit status once there are no more), after a while at most."""
        with self.came:
            self.came.wait_for(lambda: self.lines or self.status is not None, READ_S)
            lines, self.lines = self.lines, []
            return lines, self.status

    def send(self, number: int) -> None:
        """Send the launcher a signal."""
        if self.pid and self.status is None:
            os.kill(self.pid, number)


class RayPlan(NamedTuple):
    """The hosts to reserve. launcher: the arguments of the launcher on each, without those of `CHOSEN`."""

    hosts: int
    cpus: float
    gpus: float
    launcher: tuple[str, ...]
    command: tuple[str, ...]

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves on each host, by Ray's names."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}

    @property
    def asked(self) -> str:
        """The hosts and what each of them has, in words."""
        needed = " and ".join(f"{amount:g} {name}s" for name, amount in self.bundle.items())
        return f"{self.hosts} hosts with {needed or 'any resources'} each"

    def arguments(self, node: int, coordinator: str) -> list[str]:
        """The launcher's arguments on one host."""
        own = ["--node-rank", str(node), "--coordinator", coordinator] if self.hosts > 1 else []
        return [*self.launcher, *own, "--", *self.command]


def make_ray_plan(arguments: Sequence[str], prog: str) -> RayPlan:
    """Read a command line with `--ray`. Raises `UserError`."""
    before, command = split_command(arguments)
    parser = CommandParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--host-cpus", type=AMOUNT, default=1.0)
    parser.add_argument("--host-gpus", type=AMOUNT, default=0.0)
    own, rest = parser.parse_known_args(before)
    for name in CHOSEN:
        if any(each == name or each.startswith(f"{name}=") for each in rest):
            raise UserError(f"{name}: is chosen by --ray; leave it out")
    hosts = _hosts(rest)
    plan = RayPlan(hosts, own.host_cpus, own.host_gpus, tuple(rest), command)
    make_plan(plan.arguments(0, "127.0.0.1:1"), os.environ, prog)  # what is wrong is said before a host is reserved
    return plan


def _hosts(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default="1")
    given = parser.parse_known_args(arguments)[0].nnodes
    return int(given) if given.isdecimal() else 1  # `make_plan` says what is wrong with it


def check_hosts(plan: RayPlan, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UserError` where a cluster has too few hosts with what is asked for. nodes: as `ray.nodes` has them."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    fit = [found for found in alive if all(found.get(name, 0) >= least for name, least in plan.bundle.items())]
    if len(fit) < plan.hosts:
        raise UserError(
            f"--nnodes: {plan.asked}, and the cluster has {len(fit)}; give fewer, less of --host-cpus or --host-gpus,"
            " or join a larger cluster by RAY_ADDRESS"
        )


@contextlib.contextmanager
def reserved(ray: Any, plan: RayPlan) -> Iterator[list[Any]]:
    """An actor on each of the hosts, which are given back at the end. Raises `UserError` where they are not free."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    check_hosts(plan, ray.nodes())
    group = placement_group([plan.bundle or {"CPU": 0.001}] * plan.hosts, strategy="STRICT_SPREAD")
    actors: list[Any] = []
    try:
        if not group.wait(RESERVE_S):
            raise UserError(
                f"--nnodes: {plan.asked} were not free in {RESERVE_S:g} s; end another job there, or give fewer"
            )
        for index in range(plan.hosts):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": plan.cpus, "num_gpus": plan.gpus, "max_concurrency": 4, "scheduling_strategy": where}
            actors.append(ray.remote(Host).options(**options).remote())
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def follow_hosts(ray: Any, hosts: Sequence[Any], signals: list[int], screen: Screen) -> int:
    """Show what the launchers print, pass signals on, and wait for their ends. Returns the exit status of host 0."""
    reading = {host.read.remote(): index for index, host in enumerate(hosts)}
    statuses: dict[int, int] = {}
    passed_on = 0
    while reading:
        ready, _ = ray.wait(list(reading), timeout=EACH_S)
        while len(signals) > passed_on:
            passed_on += 1
            for index in reading.values():
                hosts[index].send.remote(signal.SIGTERM)
        for reference in ready:
            index = reading.pop(reference)
            try:
                lines, status = ray.get(reference)
            except ray.exceptions.RayActorError:
                lines, status = [], STOPPED
                screen.write(2, f"[ray] host {index} is lost".encode())
            for stream, line in lines:
                screen.write(stream, line)
            if status is None:
                reading[hosts[index].read.remote()] = index
            else:
                statuses[index] = status if status >= 0 else STOPPED
                if index == 0:  # which decides for all
                    for other in reading.values():
                        hosts[other].send.remote(signal.SIGTERM)
    return statuses[0]


@reports_mistakes
def run_on_ray(arguments: Sequence[str], prog: str = "jaxdist launch") -> int:
    """Run a job on hosts of a Ray cluster, as a command line with `--ray` says. Returns the exit status."""
    plan, signals = make_ray_plan(arguments, prog), list[int]()
    token = read_token(os.environ) or new_token()
    try:
        with (
            cluster(cpus=plan.hosts * plan.cpus, gpus=plan.hosts * plan.gpus, asker=FEWER),
            noted_signals(signals, SAME_S),
            reserved(load_ray(), plan) as hosts,
        ):
            return _start_and_follow(plan, hosts, token, signals)
    except KeyboardInterrupt:  # while Ray started; later ones are in `signals`
        print("stopped    before the job began", file=sys.stderr)
        return STOPPED


def _start_and_follow(plan: RayPlan, hosts: Sequence[Any], token: str, signals: list[int]) -> int:
    ray = load_ray()
    where = format_address(*ray.get(hosts[0].where.remote()))
    folder = str(Path.cwd())
    try:
        starts = [host.start.remote(plan.arguments(n, where), token, folder) for n, host in enumerate(hosts)]
        ray.get(starts)
    except ray.exceptions.RayTaskError as error:
        raise UserError(str(error.cause)) from error
    return follow_hosts(ray, hosts, signals, Screen())
