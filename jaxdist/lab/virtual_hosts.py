"""Virtual hosts: the processes of one job run on hosts of a virtual network, whose links have the rates you say."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal, NamedTuple

from jaxdist.errors import UserError
from jaxdist.lab.network import (
    INTERFACE,
    START,
    SUBNET,
    ShapedLink,
    build_network,
    byte_counts,
    clean,
    new_name,
    parse_links,
    remove,
    unavailable,
)
from jaxdist.launcher.note_signals import noted_signals
from jaxdist.launcher.options import check_command
from jaxdist.runtime.network.job_token import TOKEN, new_token

COORDINATOR_PORT = 9999  # on host 0
TAIL = 20  # lines of output kept of each host where all of it is shown anyway
WAIT_S = 0.01  # between two looks whether hosts have ended
# The command is process 2 of its PID namespace, because process 1 is deaf to signals that it does not handle. Process 1
# is a shell that waits through signals; its trap is not inherited.
FIRST = 'trap : INT TERM; echo "$0" >/proc/sys/kernel/hostname || exit 125; "$@"; exit $?'

Output = Literal["prefixed", "first", "captured"]


class HostResult(NamedTuple):
    """The end of the command on one host."""

    host: int
    status: int  # 0 to 255, 128 + n after signal n
    killed: bool  # whether it was killed after the grace period
    seconds: float  # since the start of the job
    tx_bytes: int  # sent through `eth0`, headers included
    rx_bytes: int  # received
    stdout: str  # all of it if output is captured, else the last lines
    stderr: str


@dataclass
class _Host:
    """A host whose command runs."""

    index: int
    namespace: str
    process: subprocess.Popen[str]
    before: tuple[int, int]
    kept: dict[str, deque[str]]
    pumps: list[threading.Thread] = field(default_factory=list)
    killed: bool = False
    seconds: float = 0.0

    def send(self, number: int) -> None:
        """Send a signal to the command's process group. SIGKILL ends whatever else it has started, too."""
        if self.process.poll() is None:
            self.killed |= number == signal.SIGKILL
            os.killpg(self.process.pid, number)

    def result(self) -> HostResult:
        for pump in self.pumps:
            pump.join()
        code = self.process.wait()
        now = byte_counts(self.namespace)
        status, moved = code if code >= 0 else 128 - code, (now[0] - self.before[0], now[1] - self.before[1])
        printed = ("".join(self.kept["stdout"]), "".join(self.kept["stderr"]))
        return HostResult(self.index, status, self.killed, self.seconds, *moved, *printed)


class _Job:
    """A run while it runs. signals: those that this process has received."""

    def __init__(
        self, name: str, links: Sequence[ShapedLink], output: Output, environ: Mapping[str, str], signals: list[int]
    ) -> None:
        self.name, self.links, self.output, self.environ, self.signals = name, links, output, environ, signals
        self.token = new_token()
        self.hosts: list[_Host] = []
        self.begun = 0.0
        self.lock = threading.Lock()

    def start(self, command: Sequence[str], index: int) -> None:
        """Start the command on one host."""
        job = {
            "HOST_INDEX": str(index),
            "HOST_COUNT": str(len(self.links)),
            "JAX_COORDINATOR_ADDRESS": f"{SUBNET}.1:{COORDINATOR_PORT}",
            "JAX_NUM_PROCESSES": str(len(self.links)),
            "JAX_PROCESS_ID": str(index),
            TOKEN: self.token,
            "VIRTUAL_HOSTS_INTERFACE": INTERFACE,
            "VIRTUAL_HOSTS_RATE": self.links[index].text,
        }
        namespace = f"{self.name}-host{index}"
        arguments = [*START, "ip", "netns", "exec", namespace, "sh", "-c", FIRST, f"host{index}", *command]
        before = byte_counts(namespace)
        process = subprocess.Popen(
            arguments,
            env={"PYTHONUNBUFFERED": "1", **self.environ, **job},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        lines = None if self.output == "captured" else TAIL
        host = _Host(index, namespace, process, before, {each: deque(maxlen=lines) for each in ("stdout", "stderr")})
        self.hosts.append(host)
        shown = self.output == "prefixed" or (self.output == "first" and index == 0)
        prefix = f"[host{index}] " if self.output == "prefixed" else ""
        for source, stream, target in ((process.stdout, "stdout", sys.stdout), (process.stderr, "stderr", sys.stderr)):
            assert source is not None
            options = (source, host.kept[stream], target if shown else None, prefix)
            host.pumps.append(threading.Thread(target=self._pump, args=options, daemon=True))
            host.pumps[-1].start()

    def _pump(self, source: IO[str], kept: deque[str], target: Any, prefix: str) -> None:
        """Keep and show the output of a host, line by line."""
        with source:
            for line in source:
                kept.append(line)
                if target is None:
                    continue
                try:
                    with self.lock:
                        target.write(prefix + line + ("\n" if prefix and not line.endswith("\n") else ""))
                        target.flush()
                except OSError:  # whoever read this has gone, as in `... | head`
                    os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
                    self.signals.append(signal.SIGPIPE)
                    target = None

    def watch(self, grace: float) -> list[HostResult]:
        """Wait until all hosts have ended. Signals are passed on. After the first one, or the first failure, the hosts
        have `grace` seconds to end by themselves; a second signal ends them at once."""
        deadline, passed_on = float("inf"), 0
        running = list(self.hosts)
        while running:
            now = time.monotonic()
            for host in [host for host in running if host.process.poll() is not None]:
                host.seconds = now - self.begun
                running.remove(host)
            failed = any(host.process.returncode for host in self.hosts)
            if failed or self.signals:
                deadline = min(deadline, now + grace)
            if len(self.signals) > passed_on:
                number = self.signals[passed_on]
                passed_on += 1
                for host in running:
                    host.send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            if now >= deadline or len(self.signals) > 1:
                for host in running:
                    host.send(signal.SIGKILL)
            time.sleep(WAIT_S)
        return [host.result() for host in self.hosts]

    def kill(self) -> None:
        """Kill the hosts that still run."""
        for host in self.hosts:
            host.send(signal.SIGKILL)
            host.process.wait()


def run_on_hosts(
    command: Sequence[str],
    *,
    hosts: int,
    rate: str = "none",
    burst: str = "256kb",
    congestion: str = "cubic",
    output: Output = "captured",
    grace: float = 10.0,
    environ: Mapping[str, str] | None = None,
    signals: list[int] | None = None,
) -> list[HostResult]:
    """Run a command on virtual hosts, as one job, and wait. Returns a result a host.

    The command finds in its environment HOST_INDEX, HOST_COUNT, the variables of a JAX job, VIRTUAL_HOSTS_INTERFACE and
    VIRTUAL_HOSTS_RATE; the hosts know one another as host0, host1, ... SIGINT, SIGTERM and SIGHUP are passed on to the
    hosts. Raises `UserError` for wrong arguments and where `unavailable` says why.

    Args:
        command: The program and its arguments.
        hosts: How many hosts.
        rate: See `parse_links`, as for burst and congestion.
        burst: Bytes that may leave a host at once.
        congestion: TCP's congestion control.
        output: "captured", or shown as it comes: "prefixed" of all hosts, "first" of host 0.
        grace: Seconds left to the other hosts when one has failed, and to all after a signal.
        environ: In place of `os.environ`.
        signals: A list that receives the signals, which otherwise take effect here when all is removed.
    """
    links = parse_links(rate, burst, congestion, hosts)
    check_command(command)
    if not grace >= 0:
        raise UserError(f"grace: {grace}; allowed: seconds >= 0")
    received: list[int] = [] if signals is None else signals
    with noted_signals(received):
        if reason := unavailable():
            raise UserError(reason)
        clean()
        job = _Job(new_name(), links, output, os.environ if environ is None else environ, received)
        try:
            build_network(job.name, links)
            job.begun = time.monotonic()
            for index in range(0 if received else hosts):
                job.start(command, index)
            results = job.watch(grace)
        finally:
            job.kill()
            remove([f"{job.name}-{role}" for role in (*(f"host{index}" for index in range(hosts)), "switch")])
    if signals is None and received:
        signal.raise_signal(received[0])
    return results


def exit_status(results: Sequence[HostResult]) -> int:
    """The status of the host that failed first by itself; 0 when none failed."""
    failed = [(result.seconds, result.status) for result in results if result.status and not result.killed]
    return min(failed)[1] if failed else 0
