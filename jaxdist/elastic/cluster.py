"""A Ray cluster: that of RAY_ADDRESS, or one that is started on this machine and ends with the program.

Ray itself waits for minutes where a cluster does not answer, and repeats an error of its own every second. So a cluster
is tried by a program of its own first (`jaxdist.elastic.probe`), which is ended after `PROBE_S`.
"""

import importlib
import importlib.metadata
import importlib.util
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from jaxdist.errors import UserError
from jaxdist.launcher.note_signals import noted_signals
from jaxdist.runtime.network.connection import reach

REACH_S, PROBE_S, FREE_S = 5.0, 15.0, 8.0  # for a connection, an answer of Ray's, and resources to become free
RAY_TELLS = "ray_listen_error_messages"  # the name of Ray's thread
ADDRESS, MODE, RAY_TOKEN = "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
OLDEST = (2, 60)  # of Ray; pyproject.toml has the same range
START_ONE = "start one on this machine by leaving RAY_ADDRESS unset"


class Cluster(NamedTuple):
    """A Ray cluster that this program has joined.

    - address: HOST:PORT of its head.
    - own: whether it runs on this machine only and ends with the program.
    - resources: all that it has, by Ray's names, as {"CPU": 8.0, "GPU": 1.0}.
    """

    address: str
    own: bool
    resources: dict[str, float]


class Asker(NamedTuple):
    """Who asks for resources, for errors.

    - name: the command or the option at fault.
    - fewer: how to need less of them.
    """

    name: str
    fewer: str


ELASTIC = Asker("elastic", "start fewer workers or servers")


@contextmanager
def cluster(
    *, cpus: float = 1, gpus: float = 0, address: str | None = None, asker: Asker = ELASTIC
) -> Iterator[Cluster]:
    """Join the Ray cluster at `address`, by default RAY_ADDRESS, or start one on this machine, and leave it at the end.

    A cluster of this machine has the CPUs that are asked for, whatever the machine has: its processes share them.
    It has a token of its own, sends no statistics, and nothing of it is left at the end.

    Args:
        cpus: The CPUs that all actors take together.
        gpus: The GPUs that they take together.
        address: HOST:PORT, "auto" (a cluster that runs on this machine), or "local".
        asker: Named in errors.

    Raises `UserError`, within 30 s, where Ray is missing, where the cluster does not answer, has another token or
    another version, or where it has too little. Raises `KeyboardInterrupt` once Ray has started if SIGINT, SIGTERM or
    SIGHUP came meanwhile.
    """
    address = address or os.environ.get(ADDRESS) or "local"
    ray = load_ray(secure=address == "local" or has_token())
    own = address == "local"
    folder = None
    if own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if os.environ[MODE].lower() == "token" and not has_token():
            os.environ[RAY_TOKEN] = secrets.token_hex(32)
        folder = tempfile.mkdtemp(prefix="jaxdist-ray-", dir="/tmp")  # short: paths of sockets have 107 characters
        options: dict[str, Any] = {"num_cpus": math.ceil(max(1, cpus)), "include_dashboard": False, "_temp_dir": folder}
    else:
        check_answers(address)
        options = {}
    try:
        with _signals_wait() as signals, warnings.catch_warnings():
            # Ray starts its processes by fork and exec: jax's warning of forks is about processes that go on in Python.
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
            context = ray.init(address=address, configure_logging=False, log_to_driver=False, **options)
        if signals:
            raise KeyboardInterrupt
        found = ray.cluster_resources()
        check_resources(ray, {"CPU": cpus, "GPU": gpus}, found, own, asker)
        with redirect_stdout(cast(TextIO, FirstSentences(sys.stdout))):
            yield Cluster(str(context.address_info["gcs_address"]), own, found)
    finally:
        with noted_signals([]):  # a second Ctrl-C would leave some of its processes
            ray.shutdown()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)  # what still writes there ends with its parent


class FirstSentences:
    """A stream in which what Ray itself tells, in a thread of its own, is cut to the first sentence: of a process that
    has died it goes on with 900 letters of identities and possible causes, and has no option for less."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As of any stream."""
        if threading.current_thread().name == RAY_TELLS:
            sentence, stop, _ = text.partition(". ")
            self._stream.write(sentence + stop.strip())
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _signals_wait() -> Iterator[list[int]]:
    """Signals that come while Ray starts are noted in the list: an exception in the midst of it leaves processes, and
    crashes this one at its end. So does the handler of SIGTERM that Ray puts in place, which is therefore kept out."""
    signals = list[int]()
    if threading.current_thread() is not threading.main_thread():  # no signal interrupts another one
        yield signals
        return
    with noted_signals(signals):
        put = signal.signal
        signal.signal = lambda number, handler: signal.getsignal(number)  # type: ignore[assignment]
        try:
            yield signals
        finally:
            signal.signal = put


def load_ray(*, secure: bool = False) -> Any:
    """The module `ray`. secure: RAY_AUTH_MODE becomes "token" where it is not set. Raises `UserError` where Ray is
    missing or too old."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("elastic: needs Ray, which is not installed; install it by: pip install 'jaxdist[elastic]'")
    version = importlib.metadata.version("ray")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(
            f"elastic: Ray {version} is installed; allowed: {oldest} or newer; pip install 'jaxdist[elastic]'"
        )
    stale = secure and MODE not in os.environ and "ray" in sys.modules
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of tasks whose result nobody needs any more
    if secure:
        os.environ.setdefault(MODE, "token")  # Ray joins without it, and is refused, unless the variable says so
    import ray

    if stale:  # Ray reads its variables when it is imported
        importlib.import_module("ray._raylet").Config.initialize("")
    return ray


def has_token() -> bool:
    """Whether there is a token where Ray looks for one."""
    if os.environ.get(RAY_TOKEN) or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return True
    return (Path.home() / ".ray" / "auth_token").is_file()


def check_answers(address: str) -> None:
    """Raise `UserError` where no Ray of this program's version and token answers at an address."""
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16 or "//" in host:
            raise UserError(f"{ADDRESS}: {address!r}; allowed: HOST:PORT, auto or local, as 10.0.0.1:6379")
        try:
            reach(host.strip("[]"), int(port), REACH_S).close()
        except OSError as error:
            reason = error.strerror or str(error)
            what = f"{ADDRESS}: {address} cannot be reached: {reason}"
            raise UserError(f"{what}; check that Ray runs there, or {START_ONE}") from error
    status, said = probe(address)
    if status == 0:
        return
    if "InvalidAuthToken" in said or "authentication token" in said:
        mend = "give that of the cluster in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH (on its head: ray get-auth-token)"
        raise UserError(f"{ADDRESS}: {address} has another token, or RAY_AUTH_MODE is not that of the cluster; {mend}")
    if "ersion mismatch" in said:
        versions = " ".join(said[said.find("ersion mismatch") - 1 :].split())[:200]
        raise UserError(f"{ADDRESS}: {address} runs another Ray or Python: {versions}; install the same here")
    if status is None:
        what = f"{ADDRESS}: {address} has not answered as Ray does in {PROBE_S:g} s"
        raise UserError(f"{what}; check the address, or {START_ONE}")
    last = (said.strip().splitlines() or ["no reason given"])[-1][-200:]
    raise UserError(f"{ADDRESS}: {address} cannot be joined: {last}; check the address, or {START_ONE}")


def probe(address: str) -> tuple[int | None, str]:
    """Join a cluster in a program of its own. Returns its status, None if it was ended after `PROBE_S`, and what it has
    written."""
    command = [sys.executable, "-m", "jaxdist.elastic.probe", address]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired as late:
        return None, (late.stderr or b"").decode(errors="replace")
    return ended.returncode, ended.stderr.decode(errors="replace")


def check_resources(ray: Any, needed: Mapping[str, float], found: Mapping[str, float], own: bool, asker: Asker) -> None:
    """Raise `UserError` where a cluster lacks resources, or where they do not become free within `FREE_S`."""
    where = "this machine" if own else "the cluster"
    for name, amount in needed.items():
        if found.get(name, 0) < amount:
            raise UserError(
                f"{asker.name}: {where} has {found.get(name, 0):g} {name}s, and {amount:g} are needed; "
                f"{asker.fewer}, or join a larger cluster by {ADDRESS}"
            )
    deadline = time.monotonic() + FREE_S
    while short := {name: amount for name, amount in needed.items() if ray.available_resources().get(name, 0) < amount}:
        if time.monotonic() > deadline:
            name, amount = next(iter(short.items()))
            free = ray.available_resources().get(name, 0)
            raise UserError(
                f"{asker.name}: {where} has {free:g} of {found.get(name, 0):g} {name}s free, and {amount:g} are needed;"
                f" end another program there, or {asker.fewer}"
            )
        time.sleep(0.2)
