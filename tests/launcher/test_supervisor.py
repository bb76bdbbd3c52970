"""The launcher: what it starts, shows and logs, how it ends and restarts a job; and whole jobs under it."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import child
import pytest
import strangers
from jobs import wait_until
from levels import others_slow
from strangers import TOKEN, admitted

from jaxdist.errors import UserError
from jaxdist.files.launcher_notes import latest_step
from jaxdist.launcher import hosts as agents
from jaxdist.launcher.options import make_plan
from jaxdist.launcher.ranks import HostPlace, Outcome, share_of_cpus
from jaxdist.launcher.supervisor import Supervisor, exit_code, rank_environ
from jaxdist.runtime.join.roll_call import MissingPeers
from jaxdist.runtime.network.addresses import split_address
from jaxdist.runtime.network.connection import Connection
from jaxdist.runtime.network.handshake import Door
from jaxdist.runtime.run_folder import leave_stop_note, run_directory_of, safe_name
from jaxdist.trainer.train import run_directory

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
Environ = dict[str, str]


class Launcher:
    """A launcher that runs in a folder, and what it has printed."""

    def __init__(self, folder: Path, arguments: Sequence[str], environ: Environ, before: Sequence[str] = ()) -> None:
        self.folder = folder
        clean = {name: text for name, text in child.environment().items() if name not in ("RANK", "WORLD_SIZE")}
        with (folder / "out").open("ab") as out, (folder / "err").open("ab") as err:
            self.process = subprocess.Popen(
                [*before, *LAUNCH, *arguments],
                cwd=folder,
                env=clean | environ,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def out(self) -> str:
        return (self.folder / "out").read_text()

    def err(self) -> str:
        return (self.folder / "err").read_text()

    def where(self) -> tuple[str, int]:
        """The address given as --coordinator, at which it listens."""
        words = list(map(str, self.process.args))  # type: ignore[arg-type]
        where = split_address(words[words.index("--coordinator") + 1])

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(where) == 0

        wait_until(listens, f"something at {where}")
        return where

    def wait(self, seconds: float = 30) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"not ended after {seconds} s\n{self.out()}\n{self.err()}")

    def until(self, path: str, text: str = "", seconds: float = 30) -> str:
        """Wait until a file in the folder holds a text, and give what it holds."""
        file = self.folder / path

        def seen() -> str:
            said = file.read_text() if file.exists() else ""
            return said if text in said else ""

        return wait_until(
            seen,
            f"{text!r} in {path}",
            seconds,
            over=lambda: self.process.poll() is not None,
            logs=lambda: f"{self.process.poll()}\n{self.out()}\n{self.err()}",
        )


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """Launchers in one folder, of a shell script that every rank runs; none outlives the test."""
    started: list[Launcher] = []

    def begin(script: str, *options: str, environ: Environ | None = None, before: Sequence[str] = ()) -> Launcher:
        command = ["sh", "-c", script] if isinstance(script, str) else script
        started.append(Launcher(tmp_path, [*options, "--", *command, "--run-dir", "run"], environ or {}, before))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: Sequence[int], seconds: float = 10) -> bool:
    """Whether all have ended within a time."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


ABOUT = "env | grep -E '^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCH.*|JAX_.*)=' | sort"


@pytest.mark.parametrize(
    ("plugins", "given", "tunables"),
    [
        ((), {}, "glibc.malloc.hugetlb=1"),
        (("json",), {}, None),  # any module that is there
        (("json",), {"JAX_PLATFORMS": "cpu"}, "glibc.malloc.hugetlb=1"),
        ((), {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_ranks_on_cpus_get_huge_pages(
    monkeypatch: pytest.MonkeyPatch, plugins: tuple[str, ...], given: dict[str, str], tunables: str | None
) -> None:
    monkeypatch.setattr("jaxdist.config.resolve.GPU_PLUGINS", plugins)
    for name in ("JAX_PLATFORMS", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    place = HostPlace(0, 1, 0, 2, "127.0.0.1", 1, "job")
    environ = rank_environ(place, local=0, procs=2, attempt=1, run_dir=None)
    assert environ.get("GLIBC_TUNABLES") == tunables


def test_environment_and_logs_of_the_ranks(launch: Callable[..., Launcher]) -> None:
    """What an outer launcher has set is not passed on."""
    outer = {"TORCHELASTIC_RUN_ID": "x", "JAX_PROCESS_ID": "7", "RANK": "9", "MASTER_PORT": "1"}
    job = launch(f"{ABOUT}; echo oops >&2", "-n", "2", environ=outer)
    assert job.wait() == 0, job.err()
    port = re.search(r"MASTER_PORT=(\d+)", job.out())
    assert port is not None and int(port[1]) > 1
    for rank in range(2):
        wanted = [
            f"LOCAL_RANK={rank}",
            "LOCAL_WORLD_SIZE=2",
            "MASTER_ADDR=127.0.0.1",
            port[0],
            f"RANK={rank}",
            "WORLD_SIZE=2",
        ]
        shown = [line.removeprefix(f"[{rank}] ") for line in job.out().splitlines() if line.startswith(f"[{rank}] ")]
        assert shown == wanted
        log = (job.folder / "run" / "logs" / f"rank{rank}.log").read_text().splitlines()
        assert log[0].startswith("=== attempt 1, ") and sorted(log[1:]) == sorted([*wanted, "oops"])
    assert sorted(job.err().splitlines()) == ["[0] oops", "[1] oops"]


LINES = """
import os, sys
for i in range(300):
    sys.stdout.write(f"{i} ")
    sys.stdout.flush()
    sys.stdout.write("x" * 200 + "\\n")
os.write(1, b"y" * 70000 + b"\\nend")
"""


def test_lines_are_not_torn(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    job = launch([sys.executable, "-c", LINES], "-n", "4")
    assert job.wait() == 0, job.err()
    lines = [re.fullmatch(r"\[(\d)\] (.*)", line) for line in job.out().splitlines()]
    for rank in "0123":
        found = [line[2] for line in lines if line is not None and line[1] == rank]
        assert found == [*(f"{i} {'x' * 200}" for i in range(300)), "y" * 65536, "y" * (70000 - 65536), "end"]
    assert len(lines) == 4 * 303


def test_started_without_jax_and_at_once() -> None:
    code = "import sys, jaxdist.launcher.supervisor as _; print(sorted({'jax', 'numpy', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=child.environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


SLEEP = "sh -c 'trap \"\" TERM; sleep 300 & echo $! >grandchild$RANK; wait' & echo $! >child$RANK; echo $$ >rank$RANK"


def pids(job: Launcher, ranks: Sequence[int] = (0, 1)) -> list[int]:
    names = [f"{kind}{rank}" for kind in ("rank", "child", "grandchild") for rank in ranks]
    return [int(job.until(name, "\n")) for name in names]


def test_a_lost_rank_ends_the_whole_tree(launch: Callable[..., Launcher]) -> None:
    """Rank 1 is killed; the other does not notice. Without restarts the job is resumable."""
    job = launch(f"{SLEEP}; wait", "-n", "2", "--max-restarts", "0", "--grace", "0.3")
    started = pids(job)
    os.kill(started[1], signal.SIGKILL)
    assert job.wait() == 75, job.err()
    assert gone(started, 0.5)
    assert "[launch] rank 1 failed first (SIGKILL); rank 0: SIGKILL (ended)" in job.err()


def test_a_killed_launcher_takes_all_with_it(launch: Callable[..., Launcher]) -> None:
    job = launch(f"{SLEEP}; wait", "-n", "2")
    started = pids(job)
    job.process.kill()
    assert gone(started)


def test_nothing_is_left_by_a_job_that_ends_well(launch: Callable[..., Launcher]) -> None:
    job = launch("sleep 300 & echo $! >child$RANK; sleep 0.1", "-n", "2")
    assert job.wait() == 0
    assert gone([int((job.folder / f"child{rank}").read_text()) for rank in range(2)], 0.5)


@pytest.mark.parametrize("end", others_slow(["well", "killed", "launcher killed"], "launcher killed"))
def test_what_a_rank_has_started_in_a_session_of_its_own_ends_too(end: str, launch: Callable[..., Launcher]) -> None:
    """Also what has a clean environment, unless the launcher itself is killed."""
    clean = "env -i PATH=$PATH" if end != "launcher killed" else ""
    stays = f"setsid sh -c 'sleep 300 & echo $! >child$RANK; wait' & RANK=$RANK {clean} setsid sh -c 'sleep 300' &"
    script = f"{stays} sleep 0.3; echo $! >last$RANK; [ {end[0]} = w ] || sleep 300"
    job = launch(script, "-n", "2", "--max-restarts", "0", "--grace", "0.2")
    started = [int(job.until(f"{kind}{rank}", "\n")) for kind in ("child", "last") for rank in range(2)]
    assert end == "well" or all(map(alive, started))
    if end == "launcher killed":
        job.process.kill()
    elif end == "killed":
        os.kill(int(Path(f"/proc/{started[2]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    assert job.wait() == {"well": 0, "killed": 75, "launcher killed": -9}[end]
    assert gone(started, 0.5 if end != "launcher killed" else 10)


def test_children_that_the_launcher_was_started_with_are_left_alone(launch: Callable[..., Launcher]) -> None:
    before = ["sh", "-c", 'sleep 300 & echo $! >before; exec "$@"', "sh"]
    job = launch("setsid sleep 0.1 & exit 0", "-n", "1", before=before)
    assert job.wait() == 0, job.err()
    pid = int((job.folder / "before").read_text())
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


STOPS = 'trap "echo $RANK stops; exit 75" TERM; echo ready >ready$RANK; while :; do sleep 0.02; done'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_one_signal_stops_the_ranks_together(number: signal.Signals, launch: Callable[..., Launcher]) -> None:
    job = launch(STOPS, "-n", "2")
    for rank in range(2):
        job.until(f"ready{rank}")
    job.process.send_signal(number)
    assert job.wait() == 75, job.err()
    assert sorted(job.out().splitlines()) == ["[0] 0 stops", "[1] 1 stops"]
    assert job.err().splitlines()[-1] == "[launch] stopped; the same command goes on"


def test_a_stop_waits_for_what_a_shell_has_started(launch: Callable[..., Launcher]) -> None:
    """SIGTERM ends the shell at once. The program that it waits for saves, and ends when that is done."""
    saves = (
        "import os, pathlib, signal, time\nrank = os.environ['RANK']\nasked = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\npathlib.Path('ready' + rank).write_text('ready')\n"
        "while not asked:\n    time.sleep(0.02)\ntime.sleep(1)\npathlib.Path('saved' + rank).write_text('x')"
    )
    job = launch(f'{sys.executable} -c "{saves}"; true', "-n", "2", "--grace", "0.2")
    for rank in range(2):
        job.until(f"ready{rank}", "ready")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.err()
    assert (job.folder / "saved0").exists() and (job.folder / "saved1").exists()
    assert job.err().splitlines()[-1] == "[launch] stopped; the same command goes on"


def test_a_second_signal_kills_what_a_shell_has_started(launch: Callable[..., Launcher]) -> None:
    stays = "(trap '' TERM; echo ready >ready$RANK; sleep 300 & echo $! >left$RANK; wait; wait)"
    job = launch(f"{stays}; true", "-n", "1", "--grace", "0.2")
    left = int(job.until("left0", "\n"))
    job.process.send_signal(signal.SIGTERM)
    job.until("err", "still running 1 s after SIGTERM, maybe to save: rank 0; another signal kills what runs")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 1
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


def test_signals_count_where_nobody_reads_the_output(tmp_path: Path) -> None:
    """Of a full pipe: the lines that a rank and the launcher write wait for a reader, the end does not."""
    script = "trap '' TERM; while :; do echo 0123456789012345678901234567890123456789; done"
    job = subprocess.Popen(
        [*LAUNCH, "-n", "1", "--grace", "0.2", "--", "sh", "-c", script, "--run-dir", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert job.stdout is not None
    try:
        log, sizes = tmp_path / "run" / "logs" / "rank0.log", list[int]()

        def is_full() -> bool:
            sizes.append(log.stat().st_size if log.exists() else 0)
            return sizes[-1] > 50_000 and sizes[-20:] == sizes[-1:] * 20

        wait_until(is_full, "a full pipe")
        job.send_signal(signal.SIGTERM)
        time.sleep(1.2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(20) == 1
    finally:
        job.stdout.close()
        job.kill()
        job.wait()


def test_ranks_that_stop_soon_are_not_said_to_run(launch: Callable[..., Launcher]) -> None:
    slow = 'trap "sleep 0.3; exit 75" TERM; echo ready >ready$RANK; while :; do sleep 0.02; done'
    job = launch(slow, "-n", "2", "--grace", "0")
    for rank in range(2):
        job.until(f"ready{rank}")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75
    assert [line for line in job.err().splitlines() if "[launch]" in line] == [
        "[launch] stopped; the same command goes on"
    ]


def test_nobody_is_asked_to_kill_what_is_killed_anyway(launch: Callable[..., Launcher]) -> None:
    """One rank fails after SIGTERM, the other would sleep: it is killed after the grace, without another signal."""
    fails = 'trap "[ $RANK = 1 ] && sleep 0.8 && exit 3" TERM; echo ready >ready$RANK; while :; do sleep 0.02; done'
    job = launch(fails, "-n", "2", "--grace", "1.2")
    for rank in range(2):
        job.until(f"ready{rank}")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 1
    assert "rank 1" in job.err() and "still running" not in job.err()


def test_a_second_signal_kills(launch: Callable[..., Launcher]) -> None:
    job = launch(f'trap "" TERM; {SLEEP}; wait; sleep 300', "-n", "2", "--grace", "0.3")
    started = pids(job)
    job.process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert job.process.poll() is None
    waits = "still running 1 s after SIGTERM, maybe to save: ranks 0 and 1; another signal kills what runs"
    assert job.err() == f"[launch] {waits}\n"
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 1
    assert gone(started, 0.5)
    end = "ranks 0 and 1 still ran after the first signal, and a second one killed all"
    assert job.err().splitlines()[-1] == f"[launch] stopped, but not all ranks with a checkpoint: {end}"


def test_a_signal_that_comes_twice_is_one(launch: Callable[..., Launcher]) -> None:
    """As from `timeout`, which signals a process and its group, or from a terminal that closes."""
    slow = 'trap "sleep 0.6; exit 75" TERM; echo ready >ready$RANK; while :; do sleep 0.02; done'
    job = launch(slow, "-n", "2")
    for rank in range(2):
        job.until(f"ready{rank}")
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
        job.process.send_signal(number)
        time.sleep(0.1)
    assert job.wait() == 75, job.err()
    assert job.err().splitlines()[-1] == "[launch] stopped; the same command goes on"


@pytest.mark.slow
def test_ranks_without_a_handler_yet_are_stopped(launch: Callable[..., Launcher]) -> None:
    """They are importing JAX: there is nothing to save."""
    job = launch("echo ready >ready$RANK; sleep 300", "-n", "2")
    for rank in range(2):
        job.until(f"ready{rank}")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.err()
    # By somebody else: a lost rank.
    job = launch("[ $RANK = 0 ] && kill -TERM $$; sleep 300", "-n", "2", "--max-restarts", "1", "--grace", "0.1")
    assert job.wait() == 1
    assert "rank 0 failed first (SIGTERM)" in job.err() and "given up after 1 restarts" in job.err()


def test_nohup_and_the_background(launch: Callable[..., Launcher]) -> None:
    """SIGHUP and SIGINT that the launcher was started to ignore stay ignored."""
    before = ["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh"]
    job = launch("echo >ready$RANK; while [ ! -e done ]; do sleep 0.05; done", "-n", "1", before=before)
    job.until("ready0")
    for number in (signal.SIGHUP, signal.SIGINT):
        job.process.send_signal(number)
    time.sleep(0.3)
    (job.folder / "done").touch()
    assert job.wait() == 0, job.err()


NOTE = '[ $RANK = 0 ] && : >"$JAXDIST_STOP_NOTE" && exit 75; trap "exit 75" TERM; while :; do sleep 0.02; done'


def test_a_run_that_was_asked_to_stop_is_not_started_again(launch: Callable[..., Launcher]) -> None:
    """Rank 0 says so, as at the end of train.max_hours; the other hears of it from the launcher. A note that a launcher
    outside has asked for is none of this one's."""
    outer = {"JAXDIST_STOP_NOTE": "outer", "JAXDIST_FREE_PORT": "1"}
    job = launch(NOTE, "-n", "2", "--grace", "0.2", environ=outer)
    assert job.wait() == 75, job.err()
    assert job.err().splitlines()[-1] == "[launch] stopped; the same command goes on" and "restart" not in job.err()
    assert not (job.folder / "outer").exists()
    assert sorted(path.name for path in (job.folder / "run" / "logs").iterdir()) == [
        "launch.log",
        "rank0.log",
        "rank1.log",
    ]


def test_status_75_alone_is_a_lost_rank(launch: Callable[..., Launcher]) -> None:
    job = launch("exit 75", "-n", "2", "--max-restarts", "1", "--backoff", "0")
    assert job.wait() == 1
    assert "given up after 1 restarts" in job.err()


def test_a_run_directory_that_was_moved(launch: Callable[..., Launcher]) -> None:
    """The ranks stop with 75, after a checkpoint where it is now; the command would begin anew at the old place."""
    job = launch("mv run moved; exit 75", "-n", "1", "--max-restarts", "2", "--backoff", "0.1")
    assert job.wait() == 75
    assert "stopped: the run directory is not at run any more; the ranks say where it is" in job.err()
    assert not (job.folder / "run").exists() and "attempt 2" not in job.err()


def test_a_note_that_cannot_be_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_stop_note({})
    leave_stop_note({"JAXDIST_STOP_NOTE": str(tmp_path / "note")})
    assert [path.name for path in tmp_path.iterdir()] == ["note"]
    leave_stop_note({"JAXDIST_STOP_NOTE": str(tmp_path / "no" / "note")})
    assert "No such file or directory; the launcher may start this run again" in capsys.readouterr().err


# Rank 0 finds its port taken in the first attempt.
TAKEN = """
import os, socket, sys
from jaxdist.errors import UserError
from jaxdist.runtime.network.addresses import split_address
from jaxdist.runtime.join import environment, join, roll_call
described = environment.find_job(os.environ)
taken = None
if os.environ["JAXDIST_ATTEMPT"] == "1":
    taken = socket.create_server(split_address(described.coordinator))
try:
    join._lead(described._replace(processes=1), 1, 5.0)
except roll_call.MissingPeers as error:
    sys.exit(print(f"error: {error}") or 75)
except UserError as error:
    sys.exit(print(f"error: {error}") or 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", others_slow(["launcher", "user"], "user"))
def test_a_lost_race_for_the_port(chosen: str, launch: Callable[..., Launcher], tmp_path: Path) -> None:
    """The launcher makes another choice; it does not overrule the user."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = ("--coordinator", f"127.0.0.1:{probe.getsockname()[1]}")
    script = f'[ $RANK = 1 ] && exit 0; exec "{sys.executable}" taken.py'
    (tmp_path / "taken.py").write_text(TAKEN)
    job = launch(script, "-n", "2", "--backoff", "0", *(own if chosen == "user" else ()))
    assert job.wait() == (2 if chosen == "user" else 0), job.out() + job.err()
    assert job.out().count("Address already in use") == 1


def test_a_wrong_configuration_is_not_tried_again(launch: Callable[..., Launcher]) -> None:
    job = launch("echo x >>starts; [ $RANK = 1 ] && exit 2; sleep 300", "-n", "2", "--grace", "0.2")
    assert job.wait() == 2
    assert (job.folder / "starts").read_text() == "x\n" * 2
    assert "rank 1 failed first (exit 2); rank 0: SIGKILL (ended); not started again" in job.err()


# Each attempt gets one step further, as long as there are steps in the file `steps`.
PROGRESS = """
[ $RANK = 0 ] || sleep 300
echo $MASTER_PORT $JAXDIST_JOB_ID $JAXDIST_ATTEMPT >>attempts
n=$(wc -l <attempts)
[ $n -le $(cat steps) ] && mkdir -p run/checkpoints/$n
exit 1
"""


@pytest.mark.slow
def test_restarts_count_from_the_last_progress(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    """Two restarts without progress are allowed: after three attempts with a checkpoint each, two more follow."""
    (tmp_path / "steps").write_text("3")
    job = launch(PROGRESS, "-n", "2", "--max-restarts", "2", "--grace", "0", "--backoff", "0.1")
    assert job.wait() == 1
    attempts = [line.split() for line in (tmp_path / "attempts").read_text().splitlines()]
    assert [each[2] for each in attempts] == ["1", "2", "3", "4", "5"]
    assert len({each[1] for each in attempts}) == 5
    assert latest_step(tmp_path / "run") == latest_step(tmp_path / "run" / "checkpoints") == 3
    told = re.findall(r"restart (\d) of 2 without a newer checkpoint than (.*)", job.err())
    assert told == [("1", "step 1"), ("1", "step 2"), ("1", "step 3"), ("2", "step 3")]
    assert "given up after 2 restarts without a newer checkpoint" in job.err()


@pytest.mark.slow
def test_back_off_doubles(launch: Callable[..., Launcher]) -> None:
    job = launch("date +%s.%N >>times; exit 1", "-n", "1", "--backoff", "0.25")
    assert job.wait() == 1
    times = [float(line) for line in (job.folder / "times").read_text().split()]
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert len(waits) == 3
    for wait, least in zip(waits, (0.25, 0.5, 1.0), strict=True):
        assert least < wait < least + 2


def test_a_signal_ends_the_back_off(launch: Callable[..., Launcher]) -> None:
    job = launch("exit 1", "-n", "1", "--backoff", "60")
    job.until("err", "restart 1 of 3")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(5) == 75


def test_fewer_processes(launch: Callable[..., Launcher]) -> None:
    """Local rank 3 never comes up, and 3 processes do not divide the batch: 2 remain."""
    script = (
        "echo $RANK $WORLD_SIZE >>starts; [ $RANK = 3 ] && exit 1; [ $WORLD_SIZE = 3 ] && exit 2;"
        " [ $WORLD_SIZE = 4 ] && sleep 300; exit 0"
    )
    job = launch(script, "-n", "4", "--min-procs", "2", "--max-restarts", "1", "--grace", "0.2", "--backoff", "0")
    assert job.wait() == 0, job.err()
    starts = sorted((job.folder / "starts").read_text().split("\n")[:-1], key=lambda line: line[::-1])
    assert [line[2] for line in starts].count("2") == 2 and [line[2] for line in starts].count("4") == 8
    assert "going on with 3 of 4 processes" in job.err() and "going on with 2 of 4 processes" in job.err()


def test_whoever_reads_has_gone(tmp_path: Path) -> None:
    """As in `... | head`: the ranks are told to stop."""
    command = [*LAUNCH, "-n", "2", "--", "sh", "-c", 'trap "exit 75" TERM; while :; do echo x; sleep 0.01; done']
    job = subprocess.Popen(command, cwd=tmp_path, env=child.environment(), stdout=subprocess.PIPE)
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(20) == 75


def test_a_full_disk_under_the_launchers_output_ends_nothing(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        job = [*LAUNCH, "-n", "2", "--log-dir", "logs", "--", "sh", "-c", "echo x; sleep 0.3; echo y"]
        ended = subprocess.run(job, cwd=tmp_path, env=child.environment(), stdout=full, stderr=full, check=False)
    assert ended.returncode == 0
    assert (tmp_path / "logs" / "rank1.log").read_text().endswith("\nx\ny\n")


def test_cpus_are_shared_out() -> None:
    assert [share_of_cpus([0, 4, 1, 5, 2], i, 2) for i in range(2)] == [[0, 4], [1, 5, 2]]
    assert share_of_cpus([0, 1], 0, 3) == []
    shares = [share_of_cpus(range(13), i, 5) for i in range(5)]
    assert [cpu for share in shares for cpu in share] == list(range(13))


@pytest.mark.parametrize("bind", [True, False])
def test_binding(bind: bool, launch: Callable[..., Launcher]) -> None:
    script = "import os; print(sorted(os.sched_getaffinity(0)))"
    job = launch([sys.executable, "-c", script], "-n", "2", *([] if bind else ["--no-bind"]))
    assert job.wait() == 0
    found = sorted(json.loads(line[4:]) for line in job.out().splitlines())
    own = sorted(os.sched_getaffinity(0))
    if bind and len(own) > 1:
        assert sorted(found[0] + found[1]) == own
    else:
        assert found == [own, own]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """Launchers of several hosts, each in a folder of its own, with one run directory; none outlives the test."""
    started: list[Launcher] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] % 30000 + 2000  # and the next one: below those that the kernel gives out

    def begin(
        node: int,
        script: str,
        *options: str,
        nnodes: int = 2,
        procs: int = 2,
        seconds: float = 20,
        before: Sequence[str] = (),
        environ: Environ | None = None,
    ) -> Launcher:
        folder = tmp_path / f"host{node}"
        folder.mkdir(exist_ok=True)
        place = ["--nnodes", str(nnodes), "--node-rank", str(node), "--coordinator", f"127.0.0.1:{port}"]
        command = ["-n", str(procs), *place, "--grace", "0.3", *options, "--", "sh", "-c", script]
        limits = {"JAXDIST_JOIN_TIMEOUT": str(seconds)}
        started.append(Launcher(folder, [*command, "--run-dir", "../run"], limits | (environ or {}), before))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait()


SAY = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $JAXDIST_JOB_ID $JAXDIST_ATTEMPT >>said$RANK"


def test_two_hosts_are_one_job(hosts: Callable[..., Launcher]) -> None:
    """Of two and of three processes; the second launcher comes first."""
    second = hosts(1, SAY, procs=3)
    time.sleep(0.3)
    first = hosts(0, SAY)
    assert [first.wait(), second.wait()] == [0, 0], first.err() + second.err()
    said = [
        (job.folder / f"said{rank}").read_text().split()
        for job, rank in [(first, 0), (first, 1), (second, 2), (second, 3), (second, 4)]
    ]
    assert [each[:3] for each in said] == [
        ["0/5", "0/2", "0"],
        ["1/5", "1/2", "0"],
        ["2/5", "0/3", "1"],
        ["3/5", "1/3", "1"],
        ["4/5", "2/3", "1"],
    ]
    assert len({each[3] for each in said}) == 1


@pytest.mark.parametrize("rank", others_slow([0, 3], 3))
def test_a_lost_rank_of_another_host_restarts_both(rank: int, hosts: Callable[..., Launcher]) -> None:
    """In the first attempt a rank fails, and only its own host can see that; in the second all end well."""
    script = f"{SAY}; [ $JAXDIST_ATTEMPT = 2 ] && exit 0; [ $RANK = {rank} ] && kill -9 $$; sleep 300"
    jobs = [hosts(node, script, "--backoff", "0") for node in range(2)]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].err() + jobs[1].err()
    assert f"rank {rank} failed first (SIGKILL)" in jobs[0].err() and "restart 1 of 3" in jobs[0].err()
    said = [(jobs[each // 2].folder / f"said{each}").read_text().split() for each in range(4)]
    assert [each[4::5] for each in said] == [["1", "2"]] * 4
    assert len({job for each in said for job in each[3::5]}) == 2


@pytest.mark.parametrize(("end", "status"), others_slow([("exit 2", 2), ("exit 1", 1)], ("exit 2", 2)))
def test_hosts_end_with_one_status(end: str, status: int, hosts: Callable[..., Launcher]) -> None:
    jobs = [
        hosts(node, f"[ $RANK = 2 ] && {end}; sleep 300", "--max-restarts", "1", "--backoff", "0") for node in range(2)
    ]
    assert [job.wait() for job in jobs] == [status, status], jobs[0].err() + jobs[1].err()
    assert f"host 0 says exit {status}" in jobs[1].err()


def test_a_signal_to_one_host_stops_both(hosts: Callable[..., Launcher]) -> None:
    """The ranks of a job stop together, as JAX's service agrees; here a file stands for it."""
    script = 'trap "touch ../stop" TERM; echo >ready$RANK; while [ ! -e ../stop ]; do sleep 0.05; done; exit 75'
    jobs = [hosts(node, script) for node in range(2)]
    for rank in range(4):
        jobs[rank // 2].until(f"ready{rank}")
    jobs[1].process.send_signal(signal.SIGTERM)
    assert [job.wait() for job in jobs] == [75, 75], jobs[0].err() + jobs[1].err()
    assert all(job.err().endswith("[launch] stopped; the same command goes on\n") for job in jobs)


def test_a_signal_to_one_host_whose_ranks_have_not_met_the_others(hosts: Callable[..., Launcher]) -> None:
    """Those of the other hosts would wait for them, and are told."""
    script = 'trap "exit 75" TERM; echo >ready$RANK; while :; do sleep 0.02; done'
    jobs = [hosts(node, script, nnodes=3, procs=1) for node in range(3)]
    for rank in range(3):
        jobs[rank].until(f"ready{rank}")
    jobs[1].process.send_signal(signal.SIGTERM)
    assert [job.wait(15) for job in jobs] == [75, 75, 75], [job.err() for job in jobs]
    assert all(job.err().endswith("[launch] stopped; the same command goes on\n") for job in jobs)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_job_of_two_hosts_that_was_asked_to_stop(rank: int, hosts: Callable[..., Launcher]) -> None:
    """One rank says so, to the launcher of its own host."""
    script = f'[ $RANK = {rank} ] && : >"$JAXDIST_STOP_NOTE"; exit 75'
    jobs = [hosts(node, script, "--backoff", "0") for node in range(2)]
    assert [job.wait() for job in jobs] == [75, 75], jobs[0].err() + jobs[1].err()
    assert "restart" not in jobs[0].err() and "attempt 2" not in jobs[0].err()
    assert all(job.err().endswith("[launch] stopped; the same command goes on\n") for job in jobs)


LIMIT = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]


def test_a_signal_when_the_others_have_just_been_told_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their launchers would wait for host 0, which has left."""
    monkeypatch.chdir(tmp_path)
    place, decided = HostPlace(0, 2, 0, 2, "127.0.0.1", 1, "job-1"), list[int | None]()
    signals: list[int] = []
    plan = make_plan(["-n", "1", "--", "sleep", "60", "--run-dir", "run"], {})
    with contextlib.closing(Supervisor(plan, signals)) as supervisor:
        supervisor.peers = agents.FirstHost.__new__(agents.FirstHost)
        monkeypatch.setattr(agents.FirstHost, "meet", lambda *_: signals.append(signal.SIGTERM) or place)
        stopped = Outcome({0: -signal.SIGTERM, 1: -signal.SIGTERM}, None, frozenset())
        monkeypatch.setattr(supervisor, "once", lambda place: stopped)
        monkeypatch.setattr(agents.FirstHost, "settle", lambda self, own, signals: own)
        monkeypatch.setattr(agents.FirstHost, "decide", lambda self, status: decided.append(status))
        monkeypatch.setattr(agents.FirstHost, "close", lambda _: None)
        assert supervisor.run() == 75
    assert decided == [75]


@pytest.mark.slow
def test_silent_connections_do_not_keep_a_job_from_beginning(hosts: Callable[..., Launcher]) -> None:
    """Many more of them than the launcher can have open. Nor does what strangers say."""
    first = hosts(0, SAY, before=LIMIT)
    strangers.attack(first.where())
    with strangers.silent(first.where(), 300):
        second = hosts(1, SAY)
        assert [first.wait(), second.wait()] == [0, 0], first.err() + second.err()
    assert first.err().count("has called and is hung up on") == 1


def test_silent_connections_do_not_keep_a_launcher_from_ending(hosts: Callable[..., Launcher]) -> None:
    first = hosts(0, SAY, before=LIMIT)
    with strangers.silent(first.where(), 300):
        time.sleep(0.3)
        first.process.send_signal(signal.SIGTERM)
        assert first.wait(10) == 75


def test_a_stranger_does_not_pass_for_a_host(hosts: Callable[..., Launcher]) -> None:
    """It says, in the words of the version before and of this one, that its ranks have ended well."""
    first = hosts(0, "sleep 0.5", seconds=1.5)
    hello = {"jaxdist": 2, "status": "hello", "node": 1, "nnodes": 2, "procs": 1, "launcher": "x"}
    ended = {"status": "ended", "statuses": {"2": 0}, "killed": [], "cause": None, "stopped": False}
    forged = [strangers.line(**hello), strangers.line(**ended)]
    assert strangers.say(first.where(), *forged) == [strangers.REFUSALS[0], b""]
    assert first.wait() == 75, first.out() + first.err()
    assert "host 1 of 2 did not come" in first.err() and "Traceback" not in first.err()


@pytest.mark.slow
def test_hosts_with_different_tokens(hosts: Callable[..., Launcher], tmp_path: Path) -> None:
    """One line on both sides; the launcher with the wrong one ends, the other waits for the right one."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    ask = 'echo "$JAXDIST_TOKEN/$JAXDIST_TOKEN_FILE" >token$RANK'
    first = hosts(0, ask, "--token-file", str(path))
    for wrong in ({}, {"JAXDIST_TOKEN": TOKEN[::-1]}):
        other = hosts(1, "true", environ=wrong)
        assert other.wait() == 2
        said = r"error: launcher: 127\.0\.0\.1:\d+ does not take this process's token; JAXDIST_TOKEN or --token-file"
        assert re.match(said, other.err()) and other.err().count("\n") == 1
        (other.folder / "err").unlink()
    second = hosts(1, ask, environ={"JAXDIST_TOKEN": TOKEN, "JAXDIST_TOKEN_FILE": ""})
    assert [first.wait(), second.wait()] == [0, 0], first.err() + second.err()
    told = [line for line in first.err().splitlines() if "[launch]" not in line]
    assert len(told) == 1 and "does not know this job's token; if it is a process of this job: JAXDIST_TOKEN" in told[0]
    assert (first.folder / "token1").read_text() == (second.folder / "token2").read_text() == f"{TOKEN}/\n"


def test_other_machines_reach_a_launcher_with_a_token_only(hosts: Callable[..., Launcher]) -> None:
    job = hosts(1, "true", "--coordinator", "192.0.2.1:29500")
    assert job.wait() == 2 and job.err().count("\n") == 1
    assert "launcher: 192.0.2.1 can be reached by other machines, and the job has no token; JAXDIST_TOKEN" in job.err()


def test_ranks_of_one_host_have_a_token_of_their_own(launch: Callable[..., Launcher]) -> None:
    found = set()
    for _ in range(2):
        job = launch("echo $JAXDIST_TOKEN >token$RANK", "-n", "2")
        assert job.wait() == 0
        tokens = {(job.folder / f"token{rank}").read_text() for rank in range(2)}
        assert len(tokens) == 1
        found |= tokens
    assert len(found) == 2 and all(len(each) == 65 for each in found)


@pytest.mark.slow
def test_a_host_that_does_not_say_how_its_ranks_ended(capfd: pytest.CaptureFixture[str]) -> None:
    """It knows the token, and says less, more, or of other ranks: it is hung up on, with a line."""
    ended = {"status": "ended", "statuses": {"1": 0, "2": 1}, "killed": [1], "cause": 2, "stopped": False}
    others: list[dict[str, object]] = [{"statuses": {}}, {"statuses": {"1": 0}}, {"statuses": {"0": 0, "1": 0}}]
    others += [{"killed": [0]}, {"cause": 3}]
    bad = [
        wrong for wrong in strangers.mutations(ended) if wrong.get("cause", 0) is not None and wrong.get("killed") != []
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = probe.getsockname()
    first = agents.FirstHost(where, TOKEN, nnodes=2, min_nodes=2, seconds=5, grace=0.1)
    for said in (*bad, *(ended | other for other in others), ended):
        host = admitted(where, Door("launcher", TOKEN, agents._MESSAGES), first.ready)
        host.send({"status": "hello", "node": 1, "nnodes": 2, "procs": 2, "launcher": "a"})
        assert first.meet(1, 1, []).world == 3
        host.send(said)
        outcome = first.settle(Outcome({0: 0}, None, frozenset()), [])
        assert outcome.elsewhere is (said is not ended) and host.open, said
        told = capfd.readouterr().err
        assert told.count("is hung up on") == told.count("\n") == int(said is not ended), (said, told)
        host.close()
        first.ready()
    assert outcome.statuses == {0: 0, 1: 0, 2: 1}
    first.close()


@pytest.mark.slow
def test_hosts_that_do_not_come(hosts: Callable[..., Launcher]) -> None:
    """Three hosts: without --min-nodes the missing one is named."""
    jobs = [hosts(node, "true", nnodes=3, seconds=1.5) for node in (0, 2)]
    assert [job.wait() for job in jobs] == [75, 75]
    assert re.search(r"error: host 1 of 3 did not come to 127\.0\.0\.1:\d+ in 1\.5 s", jobs[0].err())


def test_a_lost_host_is_done_without_and_taken_in_again(hosts: Callable[..., Launcher]) -> None:
    """Host 1 is killed as a whole: the job goes on with host 0 alone, then with both."""
    script = f"{SAY}; [ -e ../done ] && exit 0; while [ ! -e ../next$JAXDIST_ATTEMPT ]; do sleep 0.05; done; exit 1"
    options = ("--min-nodes", "1", "--backoff", "0")
    first, second = (hosts(node, script, *options, seconds=2.5) for node in range(2))
    second.until("said3", "\n")
    second.process.kill()
    first.until("said0", "\n0/2 ")
    assert "attempt 2, from step 0: 2 processes on 1 of 2 hosts" in first.err()
    again = hosts(1, script, *options, seconds=10)
    time.sleep(0.5)
    (first.folder.parent / "done").touch()
    (first.folder.parent / "next2").touch()
    assert [first.wait(), again.wait()] == [0, 0], first.err() + again.err()
    assert "attempt 3, from step 0: 4 processes on 2 of 2 hosts" in first.err()


def test_a_host_without_power_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not close its connection: the next attempt does without it, and another launcher takes its place. Where
    it lives, the same launcher may take it back at once."""
    monkeypatch.setattr(agents, "SETTLE_S", 0.1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = probe.getsockname()
    first = agents.FirstHost(where, TOKEN, nnodes=2, min_nodes=1, seconds=0.6, grace=0.1)
    failed, begun = Outcome({0: 1}, 0, frozenset()), time.monotonic()

    def host(launcher: str) -> Connection:
        connection = admitted(where, Door("launcher", TOKEN, agents._MESSAGES), first.ready)
        connection.send({"status": "hello", "node": 1, "nnodes": 2, "procs": 1, "launcher": launcher})
        return connection

    silent = host("a")
    assert first.meet(1, 1, []).nodes == 2
    assert first.settle(failed, []).elsewhere
    assert first.meet(1, 2, []).nodes == 1
    replacement = host("b")
    assert first.meet(1, 3, []).nodes == 2
    twin, again = host("c"), host("b")  # one that is given the same --node-rank; the same one, on a new connection
    assert first.meet(1, 4, []).nodes == 2 and first.ready()[1].launcher == "b"
    assert [said["status"] for said in twin.receive()] == ["refused"]
    assert [said["status"] for said in again.receive()] == ["start"]
    assert time.monotonic() - begun < 10
    for each in (first, silent, replacement, twin, again):
        each.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_what_is_no_host_0_is_not_called_all_the_time(answer: bytes) -> None:
    """Another program answers at --coordinator: it hangs up, or says what is no message."""
    calls = 0

    def serve() -> None:
        nonlocal calls
        with contextlib.suppress(OSError):  # closed
            while True:
                with server.accept()[0] as called:
                    calls += 1
                    called.recv(4096)
                    called.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        other = agents.OtherHost(server.getsockname(), TOKEN, node=1, nnodes=2, seconds=1.0)
        with pytest.raises(MissingPeers, match="host 0 cannot be reached"):
            other.meet(1, [])
        server.shutdown(socket.SHUT_RDWR)
    assert 2 <= calls <= 7  # one each 0.2 s


def test_a_line_to_a_host_that_is_silent_ends() -> None:
    """After half a minute: the kernel asks, on both sides."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = Connection(socket.create_connection(server.getsockname()), agents.LOST_S)
        get = connection.stream.getsockopt
        assert get(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, every, count, limit = (
            get(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        )
        assert idle + every * count <= 30 and limit == 30_000
        connection.close()


@pytest.mark.slow
def test_hosts_of_different_jobs(hosts: Callable[..., Launcher]) -> None:
    """Another number of hosts; a host's rank given twice. The job itself goes on waiting, then begins."""
    first = hosts(0, "sleep 1", nnodes=2)
    wrong = hosts(2, "true", nnodes=3)
    assert wrong.wait() == 2 and "host 0 was started for 2 hosts" in wrong.err()
    second = hosts(1, "sleep 1")
    assert [first.wait(), second.wait()] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "^command: none given"),
        (["--", "true"], "-n"),
        (["-n", "two", "--", "true"], "^-n/--procs: 'two'; allowed: an integer >= 1"),
        (["-n", "0", "--", "true"], "^-n/--procs: 0; allowed: an integer >= 1"),
        (["-n", "2", "--min-procs", "3", "--", "true"], "^--min-procs: 3; allowed: 1 to 2"),
        (["-n", "2", "--nnodes", "2", "--", "true"], "^--coordinator: not given"),
        (["-n", "2", "--nnodes", "2", "--node-rank", "2", "--", "true"], "^--node-rank: 2 of 2"),
        (["-n", "2", "--nnodes", "2", "--coordinator", "a:1", "--", "x"], "^--run-dir: not given"),
        (["-n", "2", "--coordinator", "host", "--", "true"], "^--coordinator: 'host' is no address"),
        (["-n", "2", "--max-restarts", "-1", "--", "true"], "^--max-restarts: -1"),
        (["-n", "2", "--grace", "nan", "--", "true"], "^--grace: nan"),
        (["-n", "2", "--token-file", "no/such", "--", "true"], "^--token-file: 'no/such' cannot be read: No such file"),
        (["-n", "2", "--nnodes", "2", "--min-procs", "1", "--coordinator", "a:1", "--", "x"], "^--min-procs: is for"),
    ],
)
def test_command_line_that_makes_no_sense(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make_plan(arguments, {})
    assert "\n" not in str(error.value)


def test_more_processes_than_the_system_allows(launch: Callable[..., Launcher]) -> None:
    job = launch("sleep 60", "-n", "40", before=["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"])
    assert job.wait() == 2
    assert re.search(r"^error: -n: 40 processes cannot be started: Too many open files; start fewer", job.err(), re.M)
    assert "Traceback" not in job.err()


def test_a_mistake_is_one_line(launch: Callable[..., Launcher]) -> None:
    job = launch("true", "-n", "0")
    assert job.wait() == 2
    assert job.err() == "error: -n/--procs: 0; allowed: an integer >= 1 and <= 100000\n"
    job = launch("true", "-n", "1", "--nnodes", "2", "--node-rank", "0", "--coordinator", "localhost")
    assert job.wait() == 2
    assert job.err().endswith("error: --coordinator: 'localhost' is no address; allowed: host:port of rank 0\n")
    job = launch(["no-such-program"], "-n", "1")
    assert job.wait() == 2
    assert "[0] error: 'no-such-program' cannot be run: No such file or directory" in job.err()


@pytest.mark.parametrize(
    ("command", "restarts"),
    [
        ("jaxdist train quickstart", 3),
        ("python -m jaxdist train quickstart", 3),
        ("python my.py doctor", 3),
        ("/usr/bin/jaxdist doctor", 0),
        ("python -m jaxdist eval run", 0),
    ],
)
def test_what_does_not_train_is_not_started_again(command: str, restarts: int) -> None:
    assert make_plan(["-n", "2", "--", *command.split()], {}).max_restarts == restarts
    assert make_plan(["-n", "2", "--max-restarts", "1", "--", *command.split()], {}).max_restarts == 1


def test_jobs_of_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["-n", "2", "--", "jaxdist", "train", "quickstart"]
    folders = [make_plan(command, {}, make=True).run_dir for _ in range(3)]
    assert len(set(folders)) == 3 and all(folder.is_dir() for folder in folders)


def test_run_directory_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_directory_of(["x", "--run-dir", "a", "--run-dir=b"], {}) == Path("b")
    assert run_directory_of(["x"], {"JAXDIST_RUN_DIR": "c"}) == Path("c")
    found = run_directory_of(["x", "--config", "configs/quick.yaml"], {})
    assert re.fullmatch(r"runs/quick-\d{8}-\d{6}", str(found))
    monkeypatch.setenv("JAXDIST_RUN_DIR", str(found))
    assert run_directory(None, "configs/quick.yaml") == found
    assert run_directory("own", "configs/quick.yaml") == Path("own")
    monkeypatch.setenv("HOME", "/home/own")
    assert run_directory("~/a", "") == run_directory_of(["x", "--run-dir=~/a"], {}) == Path("/home/own/a")


@pytest.mark.parametrize(
    "name",
    ["..", "...", "a/../../b", "\n", "\x1b[31mred", "-rf", "~", "$(touch x)", "a\0b", "é" * 300, "CON ", ".hidden", ""],
)
def test_names_stay_inside_their_folder(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", safe_name(name))
    found = run_directory_of(["train", "--config", f"/etc/{name}.yaml"], {})
    assert found.parts[0] == "runs" and len(found.parts) == 2 and re.fullmatch(r"[\w.-]+", found.parts[1])


def test_logs_do_not_follow_links(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    """Whoever may write into the run directory cannot lead the logs elsewhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").symlink_to(outside)
    job = launch("echo x", "-n", "1")
    assert job.wait() == 2 and "'run/logs' is a symbolic link" in job.err()
    (tmp_path / "run" / "logs").unlink()
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "rank0.log").symlink_to(outside / "precious")
    job = launch("echo x", "-n", "1")
    assert job.wait() == 2 and "it is a symbolic link" in job.err()
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"precious": "kept"}
    (tmp_path / "file").write_text("kept")
    job = launch("echo x", "-n", "1", "--log-dir", "file")
    assert job.wait() == 2 and "--log-dir: 'file' cannot be made: File exists" in job.err()


def test_a_signal_that_says_nothing_has_its_likely_cause() -> None:
    assert exit_code(-signal.SIGBUS).startswith(
        "SIGBUS: a file that it maps into memory, of data or of a package, became"
    )
    assert [exit_code(status) for status in (1, -signal.SIGKILL, -99)] == ["exit 1", "SIGKILL", "signal 99"]
