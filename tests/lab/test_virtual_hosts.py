"""Virtual hosts: links have the rate they are given, jobs run on them, and nothing is left, however a run ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import child
import pytest
from jobs import wait_until
from levels import others_slow

from jaxdist.errors import UserError
from jaxdist.lab.network import ShapedLink, parse_links, unavailable
from jaxdist.lab.virtual_hosts import HostResult, exit_status, run_on_hosts
from jaxdist.runtime.join.environment import Job, find_job

pytestmark = pytest.mark.xdist_group("network")  # one after another: they measure time

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "virtual_hosts.py")]
ENVIRON = child.environment()  # conftest.py gives the tests themselves eight devices


@pytest.fixture(scope="module")
def network() -> None:
    if reason := unavailable():
        pytest.skip(reason)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(network: None) -> Iterator[Start]:
    """Starts the script; whatever happens, it does not outlive the test, nor do its namespaces."""
    started: list[subprocess.Popen[str]] = []

    def popen(*arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([*SCRIPT, *arguments], env=ENVIRON, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield popen
    for process in started:
        process.kill()
        process.communicate()
    subprocess.run([*SCRIPT, "--clean"], env=ENVIRON, capture_output=True, check=True)


def script(*arguments: str, prefix: tuple[str, ...] = (), path: str | None = None) -> tuple[int, str, str]:
    environ = ENVIRON if path is None else ENVIRON | {"PATH": path}
    done = subprocess.run([*prefix, *SCRIPT, *arguments], env=environ, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


def namespaces(pid: int) -> list[str]:
    """What there is of the run of this process."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    files = [path.name for path in Path("/etc/netns").glob("*")]
    return sorted({name for name in listed + files if name.startswith(f"vhosts-{pid}-")})


SLEEP = f"sleep 30.{os.getpid()}"  # long after the test


def sleepers() -> list[str]:
    """Processes that run `SLEEP`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[:2] == SLEEP.encode().split():
            found.append(path.parent.name)
    return found


SEND = """
import json, os, socket, time
from pathlib import Path
size = 2_000_000
if os.environ["HOST_INDEX"] == "0":
    connection, _ = socket.create_server(("", 7000)).accept()
    received, begun = len(connection.recv(1)), time.monotonic()
    while data := connection.recv(1 << 20):
        received += len(data)
    print(json.dumps({"received": received, "mbit": (received - 1) * 8e-6 / (time.monotonic() - begun)}))
if os.environ["HOST_INDEX"] == "1":
    counter = Path("/sys/class/net", os.environ["VIRTUAL_HOSTS_INTERFACE"], "statistics", "tx_bytes")
    before, connection = int(counter.read_text()), None
    while connection is None:
        try:
            connection = socket.create_connection(("host0", 7000))
        except ConnectionRefusedError:
            time.sleep(0.01)
    connection.sendall(bytes(size))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(json.dumps({"counted": int(counter.read_text()) - before}))
"""


@pytest.mark.parametrize(
    "rate",
    others_slow(
        ["50mbit", "none,50mbit,none", "50mbit,none,none", "1gbit,50mbit,1gbit"], "50mbit", "1gbit,50mbit,1gbit"
    ),
)
def test_rate_of_a_link(network: None, rate: str) -> None:
    """Of both, of the sender's, of the receiver's; and the slowest link rules."""
    results = run_on_hosts([sys.executable, "-c", SEND], hosts=3, rate=rate, burst="16kb", environ=ENVIRON)
    assert exit_status(results) == 0, results
    at0, at1 = (json.loads(result.stdout) for result in results[:2])
    assert at0["received"] == 2_000_000
    assert at0["mbit"] == pytest.approx(50, rel=0.1)
    for counted in (at1["counted"], results[1].tx_bytes, results[0].rx_bytes):
        assert counted == pytest.approx(2_000_000, rel=0.05)
    for idle in (results[2].tx_bytes, results[2].rx_bytes, results[1].rx_bytes, results[0].tx_bytes):
        assert idle < 100_000
    assert 0.3 < results[1].seconds <= results[0].seconds + 0.1 < 3


def test_unshaped_is_faster(network: None) -> None:
    results = run_on_hosts([sys.executable, "-c", SEND], hosts=2, environ=ENVIRON)
    assert json.loads(results[0].stdout)["mbit"] > 500


ABOUT = """
import json, os, socket
pair = socket.create_server(("", 7000))
client = socket.create_connection((socket.gethostname(), 7000))
print(json.dumps({
    "name": socket.gethostname(), "address": socket.gethostbyname(socket.gethostname()), "environ": dict(os.environ),
    "interfaces": sorted(os.listdir("/sys/class/net")), "others": socket.gethostbyname("host1"),
}))
"""


def test_what_a_host_is(network: None) -> None:
    results = run_on_hosts(
        [sys.executable, "-c", ABOUT], hosts=3, rate="1gbit,none,20mbit", environ=ENVIRON | {"OWN": "1"}
    )
    assert exit_status(results) == 0, results
    for index, result in enumerate(results):
        about = json.loads(result.stdout)
        environ = about["environ"]
        assert about["name"] == f"host{index}"
        assert about["address"] == f"10.88.0.{index + 1}"
        assert about["others"] == "10.88.0.2"
        assert about["interfaces"] == [environ["VIRTUAL_HOSTS_INTERFACE"], "lo"]
        assert environ["VIRTUAL_HOSTS_RATE"] == ["1gbit", "none", "20mbit"][index]
        assert (environ["HOST_INDEX"], environ["HOST_COUNT"], environ["OWN"]) == (str(index), "3", "1")
        assert find_job(environ) == Job("10.88.0.1:9999", 3, index)
    assert namespaces(os.getpid()) == []


CONGESTION = """
import os, socket, threading
if os.environ["HOST_INDEX"] == "0":
    connection, _ = socket.create_server(("", 7000)).accept()
else:
    while True:
        try:
            connection = socket.create_connection(("host0", 7000))
            break
        except ConnectionRefusedError:
            pass
print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
"""


def test_congestion_control(network: None) -> None:
    """Of the connecting and of the accepting side; reno is in every kernel."""
    results = run_on_hosts([sys.executable, "-c", CONGESTION], hosts=2, congestion="reno", environ=ENVIRON)
    assert [result.stdout for result in results] == ["reno\n", "reno\n"]
    with pytest.raises(UserError, match="^congestion: 'nonsense'.*this kernel has .*reno"):
        run_on_hosts(["true"], hosts=2, congestion="nonsense")
    assert namespaces(os.getpid()) == []


PSUM = """
import os
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxdist.mesh import count_hosts
from jaxdist.runtime.join.environment import find_job
from jaxdist.runtime.join.join import join_job
jax.config.update("jax_platforms", "cpu")
join_job(find_job(os.environ))
mesh = jax.make_mesh((3,), ("data",))
here = np.full((1, 250_000), 10.0 ** jax.process_index(), np.float32)
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), here)
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))(x)
print("sum", np.unique(total.addressable_data(0)).tolist(), "hosts", count_hosts())
"""


def test_psum_over_three_hosts(network: None) -> None:
    """An all-reduce of 1 MB sends 2 (P - 1) / P = 4/3 MB from every host. jaxdist knows them to be three."""
    results = run_on_hosts(["timeout", "60", sys.executable, "-c", PSUM], hosts=3, rate="200mbit", environ=ENVIRON)
    assert exit_status(results) == 0, results
    for result in results:
        assert result.stdout.splitlines()[-1] == "sum [111.0] hosts 3"
        assert 4 / 3 < result.tx_bytes / 1e6 < 1.6


FAIL = f'if [ $HOST_INDEX = 1 ]; then echo broken >&2; exit 5; fi; setsid {SLEEP} & trap "" TERM; {SLEEP}'


def test_failing_host_ends_the_others(network: None) -> None:
    results = run_on_hosts(["sh", "-c", FAIL], hosts=3, grace=0.5)
    assert [(result.status, result.killed) for result in results] == [(137, True), (5, False), (137, True)]
    assert exit_status(results) == 5
    assert results[1].stderr == "broken\n"
    assert 0.4 < results[0].seconds - results[1].seconds < 3
    assert sleepers() == []
    assert namespaces(os.getpid()) == []


def test_status_is_that_of_the_first_failure(network: None) -> None:
    command = "case $HOST_INDEX in 0) sleep 0.6; exit 3;; 1) sleep 0.2; kill -ABRT $$;; 2) exit 0;; esac"
    results = run_on_hosts(["sh", "-c", command], hosts=3, grace=5)
    assert [(result.status, result.killed) for result in results] == [(3, False), (134, False), (0, False)]
    assert exit_status(results) == 134
    assert exit_status([HostResult(0, 0, False, 1, 0, 0, "", "")]) == 0
    assert run_on_hosts(["no-such-program"], hosts=1)[0].status == 127


# Host 1 ends in the middle of a line, before host 0 speaks.
SPEAK = """
[ $HOST_INDEX = 1 ] || sleep 0.4
echo "out $HOST_INDEX"; echo "err $HOST_INDEX" >&2
[ $HOST_INDEX = 0 ] || printf "no end"
exit $HOST_INDEX
"""


def test_output_is_prefixed(network: None) -> None:
    status, out, err = script("-n", "2", "--rate", "none", "--", "sh", "-c", SPEAK)
    assert status == 1
    assert out.splitlines() == ["[host1] out 1", "[host1] no end", "[host0] out 0"]
    lines = sorted(err.splitlines())
    assert [line.partition(",")[0] for line in lines] == [
        "[host0] err 0",
        "[host0] exit 0",
        "[host1] err 1",
        "[host1] exit 1",
    ]
    assert "MB" in lines[1]


def test_quiet_shows_host_0(network: None) -> None:
    """Of the others, what those that failed said last."""
    status, out, err = script("-n", "2", "--rate", "none", "--quiet", "--", "sh", "-c", SPEAK)
    assert (status, out) == (1, "out 0\n")
    assert [line.partition(",")[0] for line in err.splitlines()] == [
        "err 0",
        "[host0] exit 0",
        "err 1",
        "[host1] exit 1",
    ]


def test_closed_output_ends_the_run(start: Start) -> None:
    process = start("-n", "1", "--rate", "none", "--", "sh", "-c", "while sleep 0.05; do echo more; done")
    assert process.stdout is not None
    assert process.stdout.readline() == "[host0] more\n"
    process.stdout.close()
    assert process.wait(5) == 143
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    assert namespaces(process.pid) == []


# A process in a session of its own, and one that handles signals and then ends by itself.
BUSY = f"setsid {SLEEP} & trap 'echo stopping; exit 75' INT TERM; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(start: Start, number: signal.Signals) -> None:
    """Output comes as it is printed: the signal is sent when both hosts have said that they are ready."""
    process = start("-n", "2", "--rate", "1gbit", "--", "sh", "-c", BUSY)
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"[host0] ready\n", "[host1] ready\n"}
    assert len(namespaces(process.pid)) == 3
    wait_until(lambda: len(sleepers()) == 2)
    assert not Path("/sys/class/net/port0").exists(), "the machine's own interfaces stay as they are"
    process.send_signal(number)
    out, err = process.communicate(timeout=5)
    assert process.returncode == 75
    assert sorted(out.splitlines()) == ["[host0] stopping", "[host1] stopping"]
    assert "[host1] exit 75," in err
    assert sleepers() == []
    assert namespaces(process.pid) == []


DEAF = "trap '' INT TERM; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize(("grace", "signals"), [("0.3", 1), ("60", 2)])
def test_deaf_hosts_are_killed(start: Start, grace: str, signals: int) -> None:
    """After the grace period, or at once by a second signal."""
    process = start("-n", "2", "--rate", "none", "--grace", grace, "--", "sh", "-c", DEAF)
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"[host0] ready\n", "[host1] ready\n"}
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    _, err = process.communicate(timeout=5)
    assert process.returncode == 130
    assert err.count("exit 137 (killed)") == 2
    assert namespaces(process.pid) == []


def test_signals_take_effect_after_a_call(network: None) -> None:
    call = (
        "import os, threading, signal; from jaxdist.lab.virtual_hosts import run_on_hosts\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        f"try:\n    run_on_hosts({SLEEP.split()}, hosts=1)\n"
        "except KeyboardInterrupt:\n    print('interrupted', os.getpid())"
    )
    done = subprocess.run([sys.executable, "-c", call], env=ENVIRON, capture_output=True, text=True, timeout=20)
    assert done.stdout.startswith("interrupted "), done
    assert namespaces(int(done.stdout.split()[1])) == []
    assert sleepers() == []


@pytest.mark.parametrize("way", ["clean", "run"])
def test_after_sigkill(start: Start, way: str) -> None:
    """The processes die with the run, the namespaces go with the next; those of a run that lives are left alone."""
    alive, dead = (start("-n", "2", "--rate", "1gbit", "--", "sh", "-c", BUSY) for _ in range(2))
    for process in (alive, dead):
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"[host0] ready\n", "[host1] ready\n"}
    wait_until(lambda: len(sleepers()) == 4)
    assert len(namespaces(dead.pid)) == 3
    dead.kill()
    dead.wait()
    wait_until(lambda: len(sleepers()) == 2)
    if way == "clean":
        status, out, err = script("--clean")
        assert (status, err) == (0, "")
        assert out.startswith("removed ")  # 3, unless another run has removed some
    else:
        assert exit_status(run_on_hosts(["true"], hosts=1)) == 0
    assert namespaces(dead.pid) == []
    assert len(namespaces(alive.pid)) == 3
    assert len(sleepers()) == 2
    assert alive.poll() is None


def test_imports_no_jax() -> None:
    code = "import sys, jaxdist.lab.virtual_hosts; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRON).returncode == 0


def test_links() -> None:
    two = parse_links("1.5mbit,none", "16kb", "cubic", 2)
    assert two == [ShapedLink(1_500_000, "1.5mbit", 16384, "cubic"), ShapedLink(None, "none", 16384, "cubic")]
    assert parse_links("2gbit", "1mb", "bbr", 3) == [ShapedLink(2_000_000_000, "2gbit", 1 << 20, "bbr")] * 3
    assert [parse_links(text, "4096b", "bbr", 1)[0].rate for text in ("64000bit", "64kbit")] == [64_000] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 0 --rate none -- true", "-n/--hosts: 0; allowed: an integer >= 1 and <= 64"),
        ("-n 65 --rate none -- true", "-n/--hosts: 65; allowed"),
        ("-n two --rate none -- true", "-n/--hosts: 'two'; allowed"),
        ("-n 2 -- true", "-n and --rate are required"),
        ("-n 2 --rate none", "command: none given"),
        ("-n 2 --rate none true", "command: 'true' has no -- before it"),
        ("-n 2 --rate fast -- true", "rate: 'fast'; allowed"),
        ("-n 2 --rate 200mbps -- true", "rate: '200mbps'; allowed"),
        ("-n 2 --rate 1kbit -- true", "rate: '1kbit'; allowed"),
        ("-n 2 --rate 1gbit,1gbit,1gbit -- true", "rate: '1gbit,1gbit,1gbit' has 3 values for 2 hosts"),
        ("-n 2 --rate none --burst 1kb -- true", "burst: '1kb'; allowed"),
        ("-n 2 --rate none --congestion a/b -- true", "congestion: 'a/b'"),
        ("-n 2 --rate none --grace -1 -- true", "--grace: -1; allowed"),
    ],
)
def test_wrong_arguments(arguments: str, message: str) -> None:
    status, out, err = script(*arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run without its capabilities")
@pytest.mark.parametrize("capability", ["net_admin", "sys_admin"])
def test_without_capabilities(network: None, capability: str) -> None:
    prefix = ("setpriv", f"--bounding-set=-{capability}")
    status, out, err = script("-n", "2", "--rate", "none", "--", "true", prefix=prefix)
    assert (status, out) == (2, "")
    assert err.startswith("error: virtual hosts lack the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN")
    assert err.count("\n") == 1


def test_without_programs(tmp_path: Path) -> None:
    status, out, err = script("-n", "2", "--rate", "none", "--", "true", path=str(tmp_path))
    assert (status, out) == (2, "")
    assert err == "error: virtual hosts need the program `ip`, which is not there; install the package iproute2\n"


def test_without_root_linux_or_tbf(network: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(UserError, match="need root.*sudo"):
            run_on_hosts(["true"], hosts=2)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(UserError, match="need Linux.*darwin"):
            run_on_hosts(["true"], hosts=2)
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2; exit 2\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UserError, match="modprobe sch_tbf.*qdisc kind is unknown"):
        run_on_hosts(["true"], hosts=2)
    assert namespaces(os.getpid()) == []
