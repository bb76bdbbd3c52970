"""The virtual network of the laboratory: one machine plays several hosts, and every link has a rate of its own.

A host is a Linux network namespace with a UTS name, a PID namespace and an /etc/hosts of its own. Its interface `eth0`
leads to a bridge, which lies in one more namespace, out of reach of the machine's firewall, routes and interface names.
A token bucket (tbf) shapes each link in both directions; it adds no delay. Gloo binds the address of the host's name:
without UTS name and /etc/hosts it would dial 127.0.0.1.

Nothing outlives a run. Its processes die with it, whatever kills it: the kernel sees to that (PR_SET_PDEATHSIG, and the
end of a PID namespace). Its namespaces are removed at its end. Those of a run that was killed are removed by the next
run or by `clean`: their names hold the process's id and start time.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdist.errors import UserError

MAX_HOSTS = 64
INTERFACE, SUBNET = "eth0", "10.88.0"  # no run sees another's, nor the machine's own network
NAME = re.compile(r"vhosts-(\d+)-(\d+)-[0-9a-f]{6}-(?:host\d+|switch|probe)")  # PID, its start time, a random part
NAMESPACES, ETC = Path("/run/netns"), Path("/etc/netns")
# A command on a host begins so. Its processes die with the program that starts them.
START = ("setpriv", "--pdeathsig", "KILL", "unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


class ShapedLink(NamedTuple):
    """The link of one host."""

    rate: int | None  # bits per second, or None for a link that is not shaped
    text: str  # the rate as it was given
    burst: int  # bytes that may leave at once
    congestion: str  # TCP's congestion control


def parse_links(rate: str, burst: str, congestion: str, hosts: int) -> list[ShapedLink]:
    """The links of the hosts. Raises `UserError`.

    Args:
        rate: One rate for all or one a host, with commas between: a number and bit, kbit, mbit or gbit, or none.
        burst: A whole number and b, kb or mb.
        congestion: A name, such as cubic.
        hosts: How many there are.
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
    links = [ShapedLink(_bits(text), text, bucket, congestion) for text in texts]
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
    """Run a command, which Ctrl-C in a terminal does not reach: (its output, why it failed or "")."""
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


def new_name() -> str:
    """A name for a run's namespaces, without their roles."""
    pid = os.getpid()
    return f"vhosts-{pid}-{_start_time(pid)}-{secrets.token_hex(3)}"


def unavailable() -> str | None:
    """A line that says why virtual hosts cannot run here and how to mend it; None when they can."""
    if sys.platform != "linux":
        return f"virtual hosts need Linux (network namespaces, tbf); this is {sys.platform}"
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}
    for program, package in packages.items():
        if shutil.which(program) is None:
            return f"virtual hosts need the program `{program}`, which is not there; install the package {package}"
    if os.geteuid() != 0:
        return "virtual hosts need root, to make network namespaces; run this with sudo, or as root in a container"
    name = f"{new_name()}-probe"
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
                (*START, "ip", "netns", "exec", name, "true"),
                "cannot start a process in a namespace: that takes util-linux 2.33 or newer",
            ),
        ):
            if failure := _call(*command)[1]:
                return f"virtual hosts {denied if 'not permitted' in failure else reason} ({failure})"
    finally:
        remove([name])
    return None


def clean() -> int:
    """Remove the namespaces that dead runs have left behind. Returns how many."""
    found = {path.name: NAME.fullmatch(path.name) for folder in (NAMESPACES, ETC) for path in folder.glob("vhosts-*")}
    dead = [name for name, match in found.items() if match and _start_time(int(match[1])) != match[2]]
    remove(dead)
    return len(dead)


def remove(names: Sequence[str]) -> None:
    """Remove these namespaces and every process in them. Another run may be removing the same ones."""
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


def build_network(name: str, links: Sequence[ShapedLink]) -> None:
    """Make the switch, the hosts and the links between them."""
    switch = f"{name}-switch"
    _do("ip", "netns", "add", switch)
    _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _do("ip", "-n", switch, "link", "set", "bridge", "up")
    others = "".join(f"{SUBNET}.{index + 1} host{index}\n" for index in range(len(links)))
    for index, link in enumerate(links):
        host, port, address = f"{name}-host{index}", f"port{index}", f"{SUBNET}.{index + 1}"
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
        # Set on the route: a namespace may not choose a default that the machine has not allowed to all users.
        route = (f"{SUBNET}.0/24", "dev", INTERFACE, "src", address, "congctl", link.congestion)
        if failure := _call("ip", "-n", host, "route", "add", *route)[1]:
            there = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
            raise UserError(f"congestion: {link.congestion!r} failed ({failure}); this kernel has {', '.join(there)}")
        for namespace, device in ((host, INTERFACE), (switch, port)) if link.rate is not None else ():
            bucket = ("rate", f"{link.rate}bit", "burst", f"{link.burst}b", "latency", "100ms")
            _do("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


def byte_counts(namespace: str) -> tuple[int, int]:
    """Bytes that a host has sent and received."""
    folder = f"/sys/class/net/{INTERFACE}/statistics"
    tx, rx = _do("ip", "netns", "exec", namespace, "cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes").split()
    return int(tx), int(rx)
