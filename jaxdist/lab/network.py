"""A laboratory for slow networks: one machine plays several hosts, and every link has the rate you say.

A host is a Linux network namespace with a UTS name, a PID namespace and an /etc/hosts of its own. `eth0` in it leads to
a bridge, which lies in one more namespace, out of reach of the machine's firewall, routes and interface names. A token
bucket (tbf) shapes each link in both directions; it adds no delay. Gloo binds the address of the host's name, hence the
UTS name and /etc/hosts: without them it would dial 127.0.0.1.

Nothing outlives a run. Its processes die with it, whatever kills it: the kernel sees to that (PR_SET_PDEATHSIG, and the
end of a PID namespace). Its namespaces are removed at its end; those of a run that was killed are removed by the next
run or by `clean`, for their names carry the process's id and start time.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from jaxdist.errors import UserError

MAX_HOSTS = 64
INTERFACE, NETWORK = "eth0", "10.88.0"  # no run sees another's, nor the machine's own network
PORT = 9999  # of the coordinator, on host 0
TAIL, POLL_S = 20, 0.01  # lines of output kept of each host where all of it is shown anyway; seconds
NAME = re.compile(r"vhosts-(\d+)-(\d+)-[0-9a-f]{6}-(?:host\d+|switch|probe)")  # PID, its start time, a random part
NAMESPACES, ETC = Path("/run/netns"), Path("/etc/netns")
# COMMAND is process 2 of its PID namespace: process 1 is deaf to signals that it does not handle. Process 1 is a shell
# that waits through signals; its trap is not inherited.
LAUNCH = ("setpriv", "--pdeathsig", "KILL", "unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
FIRST = 'trap : INT TERM; echo "$0" >/proc/sys/kernel/hostname || exit 125; "$@"; exit $?'

Output = Literal["prefixed", "first", "captured"]


class HostResult(NamedTuple):
    """How the command ended on one host.

    status: 0 to 255, 128 + n after signal n. killed: it did not end by itself, but was killed after the grace period.
    seconds: from the start of the job. tx_bytes, rx_bytes: sent and received through `eth0`, headers included. stdout,
    stderr: all of it where output is captured, else the last lines.
    """

    host: int
    status: int
    killed: bool
    seconds: float
    tx_bytes: int
    rx_bytes: int
    stdout: str
    stderr: str


class Link(NamedTuple):
    """What shapes the link of one host. rate: bits per second, or None for unshaped. text: the rate as it was given.
    burst: bytes that may leave at once. congestion: TCP's congestion control."""

    rate: int | None
    text: str
    burst: int
    congestion: str


def parse_links(rate: str, burst: str, congestion: str, hosts: int) -> list[Link]:
    """One link a host. Raises `UserError` for what makes no sense.

    rate: one for all or one a host, with commas between: a number and bit, kbit, mbit or gbit, or none. burst: a whole
    number and b, kb or mb.
    """
    if not 1 <= hosts <= MAX_HOSTS:
        raise UserError(f"hosts: {hosts}; allowed: 1 to {MAX_HOSTS}")
    size = re.fullmatch(r"(\d{1,9})(b|kb|mb)", burst)
    bucket = int(size[1]) * {"b": 1, "kb": 1 << 10, "mb": 1 << 20}[size[2]] if size else 0
    if not 2048 <= bucket <= 1 << 20:  # less would not hold one packet, more would last minutes on the slowest link
        raise UserError(f"burst: {burst!r}; allowed: 2kb to 1mb, a whole number and b, kb or mb")
    if not re.fullmatch(r"[a-z0-9_]{1,15}", congestion):
        raise UserError(f"congestion: {congestion!r} is no congestion control; allowed: a name such as cubic or reno")
    texts = rate.split(",")
    if len(texts) not in (1, hosts):
        raise UserError(f"rate: {rate!r} has {len(texts)} values for {hosts} hosts; allowed: one for all or one a host")
    links = [Link(_bits(text), text, bucket, congestion) for text in texts]
    return links if len(links) == hosts else links * hosts


def _bits(text: str) -> int | None:
    if text == "none":
        return None
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)(k|m|g)?bit", text)
    bits = round(float(match[1]) * {None: 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]) if match else 0
    if not 64_000 <= bits <= 100_000_000_000:
        raise UserError(f"rate: {text!r}; allowed: 64kbit to 100gbit, a number and bit, kbit, mbit or gbit; or none")
    return bits


def _call(*command: str) -> tuple[str, str]:
    """Run a command: (what it printed, why it failed or ""). Ctrl-C in a terminal does not reach it."""
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, stdin=subprocess.DEVNULL)
    said = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
    return done.stdout, said if done.returncode else ""


def _do(*command: str) -> str:
    printed, failure = _call(*command)
    if failure:
        raise UserError(f"virtual hosts: `{' '.join(command)}` failed: {failure}")
    return printed


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" when it is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _new_name() -> str:
    pid = os.getpid()
    return f"vhosts-{pid}-{_start_time(pid)}-{secrets.token_hex(3)}"


def missing() -> str | None:
    """Why virtual hosts cannot run here, and what would help, in one line; None when they can."""
    if sys.platform != "linux":
        return f"virtual hosts need Linux (network namespaces, tbf); this is {sys.platform}"
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}
    for program, package in packages.items():
        if shutil.which(program) is None:
            return f"virtual hosts need the program `{program}`, which is not there; install the package {package}"
    if os.geteuid() != 0:
        return "virtual hosts need root, to make network namespaces; run this with sudo, or as root in a container"
    name = f"{_new_name()}-probe"
    denied = "lack the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN; in Docker, run the container with --privileged"
    inside = ("ip", "-n", name, "link", "add")
    bucket = ("root", "tbf", "rate", "1mbit", "burst", "16kb", "latency", "100ms")
    try:
        for command, reason in (
            (("ip", "netns", "add", name), "cannot make a network namespace: the kernel needs CONFIG_NET_NS"),
            ((*inside, "br0", "type", "bridge"), "cannot make a bridge: load its kernel module (modprobe bridge)"),
            (
                (*inside, "v0", "type", "veth", "peer", "name", "v1"),
                "cannot make a link: load its kernel module (modprobe veth)",
            ),
            (
                ("tc", "-n", name, "qdisc", "add", "dev", "v0", *bucket),
                "cannot shape a link: the kernel lacks tbf; load its module (modprobe sch_tbf)",
            ),
            (
                (*LAUNCH, "ip", "netns", "exec", name, "true"),
                "cannot start a process in a namespace: that takes util-linux 2.33 or newer",
            ),
        ):
            if failure := _call(*command)[1]:
                return f"virtual hosts {denied if 'not permitted' in failure else reason} ({failure})"
    finally:
        _remove([name])
    return None


def clean() -> int:
    """Remove what runs that are dead left behind; the number of namespaces removed."""
    found = {path.name: NAME.fullmatch(path.name) for folder in (NAMESPACES, ETC) for path in folder.glob("vhosts-*")}
    dead = [name for name, match in found.items() if match and _start_time(int(match[1])) != match[2]]
    _remove(dead)
    return len(dead)


def _remove(names: Sequence[str]) -> None:
    """Remove these namespaces, with every process in them. Another run may be removing the same ones."""
    for name in names:
        for pid in _call("ip", "netns", "pids", name)[0].split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        failure = _call("ip", "netns", "del", name)[1]
        shutil.rmtree(ETC / name, ignore_errors=True)
        if failure and (NAMESPACES / name).exists() and (failure := _call("ip", "netns", "del", name)[1]):
            if (NAMESPACES / name).exists():
                raise UserError(f"virtual hosts: the network namespace {name} cannot be removed: {failure}")
    with contextlib.suppress(OSError):  # not there, or others use it
        ETC.rmdir()


def _build(name: str, links: Sequence[Link]) -> None:
    """The switch, the hosts and the links between them."""
    switch = f"{name}-switch"
    _do("ip", "netns", "add", switch)
    _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _do("ip", "-n", switch, "link", "set", "bridge", "up")
    others = "".join(f"{NETWORK}.{index + 1} host{index}\n" for index in range(len(links)))
    for index, link in enumerate(links):
        host, port, address = f"{name}-host{index}", f"port{index}", f"{NETWORK}.{index + 1}"
        while not (ETC / host).is_dir():
            with contextlib.suppress(FileNotFoundError):  # another run removes ETC while that is empty
                (ETC / host).mkdir(parents=True)
        (ETC / host / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{others}")
        _do("ip", "netns", "add", host)
        _do("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host)
        _do("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _do("ip", "-n", host, "addr", "add", f"{address}/32", "dev", INTERFACE)
        _do("ip", "-n", host, "link", "set", INTERFACE, "up")
        _do("ip", "-n", host, "link", "set", "lo", "up")
        # On the route, as a namespace may not choose one that the machine has not allowed to all users.
        route = (f"{NETWORK}.0/24", "dev", INTERFACE, "src", address, "congctl", link.congestion)
        if failure := _call("ip", "-n", host, "route", "add", *route)[1]:
            there = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
            raise UserError(f"congestion: {link.congestion!r} failed ({failure}); this kernel has {', '.join(there)}")
        for namespace, device in ((host, INTERFACE), (switch, port)) if link.rate is not None else ():
            bucket = ("rate", f"{link.rate}bit", "burst", f"{link.burst}b", "latency", "100ms")
            _do("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


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
        """To all of the command's process group; SIGKILL ends whatever else it has started, too."""
        if self.process.poll() is None:
            self.killed |= number == signal.SIGKILL
            os.killpg(self.process.pid, number)

    def result(self) -> HostResult:
        for pump in self.pumps:
            pump.join()
        code = self.process.wait()
        now = _counters(self.namespace)
        return HostResult(
            self.index,
            code if code >= 0 else 128 - code,
            self.killed,
            self.seconds,
            now[0] - self.before[0],
            now[1] - self.before[1],
            "".join(self.kept["stdout"]),
            "".join(self.kept["stderr"]),
        )


def _counters(namespace: str) -> tuple[int, int]:
    folder = f"/sys/class/net/{INTERFACE}/statistics"
    tx, rx = _do("ip", "netns", "exec", namespace, "cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes").split()
    return int(tx), int(rx)


class _Job:
    """The hosts of a run while it runs. signals: those received by this process."""

    def __init__(
        self, name: str, links: Sequence[Link], output: Output, environ: Mapping[str, str], signals: list[int]
    ) -> None:
        self.name, self.links, self.output, self.environ, self.signals = name, links, output, environ, signals
        self.hosts: list[_Host] = []
        self.begun = 0.0
        self.lock = threading.Lock()

    def start(self, command: Sequence[str], index: int) -> None:
        """Start the command on one host."""
        job = {
            "HOST_INDEX": str(index),
            "HOST_COUNT": str(len(self.links)),
            "JAX_COORDINATOR_ADDRESS": f"{NETWORK}.1:{PORT}",
            "JAX_NUM_PROCESSES": str(len(self.links)),
            "JAX_PROCESS_ID": str(index),
            "VIRTUAL_HOSTS_INTERFACE": INTERFACE,
            "VIRTUAL_HOSTS_RATE": self.links[index].text,
        }
        namespace = f"{self.name}-host{index}"
        arguments = [*LAUNCH, "ip", "netns", "exec", namespace, "sh", "-c", FIRST, f"host{index}", *command]
        before = _counters(namespace)
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
        """Keep and show what a host prints, line by line."""
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
        """Until all have ended. Signals are passed on. After the first, or the first failure, the hosts have `grace`
        seconds to end by themselves; a second signal ends them at once."""
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
            time.sleep(POLL_S)
        return [host.result() for host in self.hosts]

    def kill(self) -> None:
        """Whatever still runs."""
        for host in self.hosts:
            host.send(signal.SIGKILL)
            host.process.wait()


@contextlib.contextmanager
def _noted(signals: list[int]) -> Iterator[None]:
    """Signals that end a process only leave a note. In a thread other than the main one they stay as they are."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda received, frame: signals.append(received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
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
    """Run a command on every one of `hosts` virtual hosts, as one job, and wait: a result a host.

    rate, burst, congestion: see `parse_links`. output: "captured", or shown as it comes: "prefixed" of all hosts,
    "first" of host 0. grace: seconds left to the other hosts when one has failed, and to all after a signal. environ:
    in place of `os.environ`. The command finds in its environment HOST_INDEX, HOST_COUNT, the variables of a JAX job,
    VIRTUAL_HOSTS_INTERFACE and VIRTUAL_HOSTS_RATE; the hosts know one another as host0, host1, ...

    SIGINT, SIGTERM and SIGHUP are passed on to the hosts. They take effect here when all is removed; or, where a list
    `signals` is given, they are put there and do not. Raises `UserError` for wrong arguments and for what `missing`
    says.
    """
    links = parse_links(rate, burst, congestion, hosts)
    if not command:
        raise UserError("command: none given; allowed: a program and its arguments, after --")
    if not grace >= 0:
        raise UserError(f"grace: {grace}; allowed: seconds >= 0")
    received: list[int] = [] if signals is None else signals
    with _noted(received):
        if reason := missing():
            raise UserError(reason)
        clean()
        job = _Job(_new_name(), links, output, os.environ if environ is None else environ, received)
        try:
            _build(job.name, links)
            job.begun = time.monotonic()
            for index in range(0 if received else hosts):
                job.start(command, index)
            results = job.watch(grace)
        finally:
            job.kill()
            _remove([f"{job.name}-{role}" for role in (*(f"host{index}" for index in range(hosts)), "switch")])
    if signals is None and received:
        signal.raise_signal(received[0])
    return results


def exit_status(results: Sequence[HostResult]) -> int:
    """That of the host that failed first, leaving out those that were killed on account of it; 0 when none failed."""
    failed = [(result.seconds, result.status) for result in results if result.status and not result.killed]
    return min(failed)[1] if failed else 0
