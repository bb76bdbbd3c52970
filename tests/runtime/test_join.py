"""How processes find each other: what describes the job, the roll call, the file; without JAX but at the end."""

import contextlib
import ipaddress
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child
import pytest
import strangers
from levels import others_slow
from pages import on_page

from jaxdist.errors import UserError
from jaxdist.runtime.join import join as joining
from jaxdist.runtime.join import rendezvous_file, roll_call
from jaxdist.runtime.join.environment import Job, find_job, local_gpus
from jaxdist.runtime.join.roll_call import Meeting, MissingPeers, answer_roll, join_timeout, take_roll
from jaxdist.runtime.network.addresses import format_address, listen
from jaxdist.runtime.network.connection import open_connection
from jaxdist.runtime.rank_names import name_ranks

Environ = dict[str, str]
TCP = {"JAXDIST_INIT_METHOD": "tcp://node1:29500"}
FILE = {"JAXDIST_INIT_METHOD": "file:///shared/job"}
OWN = {"JAXDIST_NUM_PROCESSES": "4", "JAXDIST_RANK": "3"}
TORCH = {"MASTER_ADDR": "node9", "MASTER_PORT": "1", "WORLD_SIZE": "8", "RANK": "5"}
SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_ID": "5000", "SLURM_STEP_ID": "2"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
ON_A = Job(f"a:{61440 + 2178}", 4, 3, name="5000.2")
JOBSET = {"JOBSET_NAME": "big", "REPLICATED_JOB_NAME": "w", "JOB_COMPLETION_INDEX": "1", "PODS_PER_JOB": "2"}


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (TCP | OWN | TORCH, Job("node1:29500", 4, 3)),
        (TCP | TORCH, Job("node1:29500", 8, 5)),
        (FILE | OWN, Job(None, 4, 3, file="/shared/job")),
        (FILE | OWN | {"JAXDIST_NUM_PROCESSES": "1", "JAXDIST_RANK": "0"}, None),
        (TCP | SLURM, Job("node1:29500", 4, 3)),
        (TCP | MPI, Job("node1:29500", 2, 1)),
        (TCP | {"JAXDIST_NUM_PROCESSES": "3", "JOB_COMPLETION_INDEX": "2"}, Job("node1:29500", 3, 2)),
        (TCP | OWN | {"JAXDIST_INIT_METHOD": "tcp://[fd00::2]:7"}, Job("[fd00::2]:7", 4, 3)),
        # The port is of the number of the job and the step; the host the first of the step.
        (SLURM | {"SLURM_STEP_NODELIST": "a7"}, Job(f"a7:{61440 + 80002 % 4096}", 4, 3, name="5000.2")),
        (SLURM | {"SLURM_STEP_NODELIST": "a[007-015,020],b"}, Job(f"a007:{61440 + 2178}", 4, 3, name="5000.2")),
        (SLURM | {"SLURM_STEP_NODELIST": "a,b[1-2]"}, Job(f"a:{61440 + 2178}", 4, 3, name="5000.2")),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[1-2]node[1-8]"}, Job(f"rack1node1:{61440 + 2178}", 4, 3, name="5000.2")),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1-4,9]-ib,m[1-2]"}, Job(f"n1-ib:{61440 + 2178}", 4, 3, name="5000.2")),
        (
            SLURM | {"SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"},
            Job(f"a:{61440 + 2178}", 4, 3, (1,), name="5000.2"),
        ),
        (
            MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.1.0.1:34911"},
            Job(f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 2, 1, name="1531576320"),
        ),
        (
            MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::1,2620::2]:43370"},
            Job("[fe80::1]:61441", 2, 1, name="4096"),
        ),
        (MPI, Job(None, 2, None, detect=True)),
        # mpirun in a SLURM allocation: SLURM's variables are of mpirun's daemons.
        (SLURM | MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.1.0.1:1"}, Job("10.1.0.1:61441", 2, 1, name="4096")),
        (SLURM | {"PMI_SIZE": "4", "PMI_RANK": "3", "SLURM_STEP_NODELIST": "a"}, ON_A),
        (TCP | SLURM | {"PMI_SIZE": "8", "PMI_RANK": "5"}, Job("node1:29500", 8, 5)),
        (TORCH | {"TORCHELASTIC_RUN_ID": "r"}, Job("node9:2", 8, 5, name="r")),
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "JAX_PROCESS_ID": "0"}, None),
        ({"NUM_PROCESSES": "4", "PROCESS_ID": "1"}, None),
        (JOBSET, Job("big-w-0-0.big:55527", 2, 1)),
        (
            JOBSET | {"JOB_INDEX": "2", "REPLICATED_JOB_REPLICAS": "3", "JOBSET_PORT": "99", "JOBSET_SUBDOMAIN": "net"},
            Job("big-w-0-0.net:99", 6, 5),
        ),
        # An indexed Job tells its pods their index only.
        (
            {"MASTER_ADDR": "j-0.j", "MASTER_PORT": "9", "WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "2"},
            Job("j-0.j:9", 4, 2),
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "j-0.j:9", "JAX_NUM_PROCESSES": "4", "JOB_COMPLETION_INDEX": "2"},
            Job("j-0.j:9", 4, 2),
        ),
        ({"JOB_COMPLETION_INDEX": "2"}, None),
    ],
)
def test_job_in_the_environment(environ: Environ, job: Job | None) -> None:
    assert find_job(environ) == job


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TCP, "^--init-method: .*--num-processes and --rank"),
        (OWN | {"JAXDIST_INIT_METHOD": "http://a:1"}, "^--init-method: 'http://a:1'; allowed: tcp://"),
        (OWN | {"JAXDIST_INIT_METHOD": "file://shared/job"}, "is relative"),
        (OWN | {"JAXDIST_INIT_METHOD": "tcp://a"}, "^coordinator: 'a'"),
        (TCP | OWN | {"JAXDIST_RANK": "4"}, "^rank 4 of a job of 4"),
        (JOBSET | {"JOB_COMPLETION_INDEX": "2"}, "^PODS_PER_JOB: 2, but this is pod 2"),
        ({name: text for name, text in JOBSET.items() if name != "PODS_PER_JOB"}, "^PODS_PER_JOB: not set in the envi"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "^MASTER_ADDR: not set, though RANK is 0 and WORLD_SIZE 2; set it and MASTER_",
        ),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "^PMI_SIZE: 4, but nothing says where process 0 is.*--init-method"),
        (SLURM | {"PMI_SIZE": "8", "PMI_RANK": "1", "SLURM_STEP_NODELIST": "a"}, "^PMI_SIZE: 8, but nothing says"),
        ({"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "1"}, "^MV2_COMM_WORLD_SIZE: 4, but nothing says"),
        ({"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}, "^JAX_NUM_PROCESSES: 4, but nothing says"),
        (OWN, "^JAXDIST_NUM_PROCESSES: 4, but nothing says"),
        ({"WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "1"}, "^WORLD_SIZE: 4, but nothing says"),
        ({"COORDINATOR_ADDRESS": "a", "NUM_PROCESSES": "4", "PROCESS_ID": "1"}, "^NUM_PROCESSES: 4, but nothing says"),
        (TORCH | {"RANK": ""}, "^RANK: not set in the environment, though WORLD_SIZE is; allowed"),
        (TORCH | {"MASTER_PORT": ""}, "^MASTER_PORT: not set in the environment, though WORLD_SIZE is; allowed"),
        (TORCH | {"MASTER_PORT": "x"}, "^MASTER_PORT: 'x' in the environment is no port; allowed"),
        ({"JAX_COORDINATOR_ADDRESS": "a:9", "JAX_NUM_PROCESSES": "2"}, "^JAX_PROCESS_ID: not set .*JAX_NUM_PROCESSES"),
        ({name: text for name, text in JOBSET.items() if name != "REPLICATED_JOB_NAME"}, "^REPLICATED_JOB_NAME"),
    ],
)
def test_job_that_makes_no_sense(environ: Environ, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        find_job(environ)
    assert "\n" not in str(error.value)


def local(rank: int, size: int, **more: str) -> Environ:
    """The environment of a rank by torchrun, and by `jaxdist launch`."""
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)} | more


def task(rank: int, tasks: str, **more: str) -> Environ:
    """The environment of a SLURM task."""
    return {"SLURM_LOCALID": str(rank), "SLURM_STEP_TASKS_PER_NODE": tasks} | more


@pytest.mark.parametrize(
    ("gpus", "environ", "own"),
    [
        # As many processes as GPUs, one process, several GPUs a process.
        (8, local(3, 8), (3,)),
        (8, {}, ()),
        (8, local(0, 1), ()),
        (8, local(0, 2), (0, 1, 2, 3)),
        (8, local(1, 2), (4, 5, 6, 7)),
        (8, {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (6, 7)),
        # Indices are those among the visible GPUs.
        (8, local(1, 4, CUDA_VISIBLE_DEVICES="4,5,6,7"), (1,)),
        (8, local(1, 2, CUDA_VISIBLE_DEVICES="4,5,6,7"), (2, 3)),
        (8, local(1, 4, CUDA_VISIBLE_DEVICES="5"), ()),
        # SLURM: one task a node, eight, two; nodes with unequal numbers; GPUs that SLURM has bound to tasks.
        (8, task(0, "1(x2)"), ()),
        (8, task(5, "8(x12)"), (5,)),
        (8, task(1, "2(x2)"), (4, 5, 6, 7)),
        (8, task(1, "4(x2),2", SLURM_NODEID="2"), (4, 5, 6, 7)),
        (8, task(1, "4(x2),2", SLURM_NODEID="1"), (2, 3)),
        (8, task(3, "4", SLURM_GPUS_PER_TASK="2", CUDA_VISIBLE_DEVICES="0,1"), ()),
        (8, task(3, "4", SLURM_TRES_PER_TASK="gres:gpu:2", CUDA_VISIBLE_DEVICES="0,1"), ()),
        (8, task(1, "2", SLURM_TRES_PER_TASK="cpu:4"), (4, 5, 6, 7)),
        (8, task(1, "2", SLURM_GPU_BIND="none"), (4, 5, 6, 7)),
        (8, task(1, "2", SLURM_GPU_BIND="single:4"), ()),
        (8, task(1, "2", SLURM_GPU_BIND="verbose"), (4, 5, 6, 7)),
        (8, task(1, "2", SLURM_GPU_BIND="verbose,closest"), ()),
        (8, task(5, "8", SLURM_GPUS_PER_TASK="1", SLURM_GPU_BIND="none"), (5,)),
        (8, task(3, "4", SLURM_TRES_BIND="gres/gpu:per_task:2", CUDA_VISIBLE_DEVICES="0,1"), ()),
        # Ranks of torchrun in one SLURM task, which has all GPUs.
        (8, local(3, 8) | task(0, "1", SLURM_GPUS_PER_TASK="8"), (3,)),
        (8, local(1, 2, CUDA_VISIBLE_DEVICES="0,1,"), (1,)),
        # No GPUs, or too few: the local rank, which JAX refuses on GPUs and does not read on CPUs.
        (0, local(1, 2), (1,)),
        (1, local(1, 2), (1,)),
        (8, local(1, 2, JAX_LOCAL_DEVICE_IDS="1"), None),
    ],
)
def test_gpus_of_a_process(gpus: int, environ: Environ, own: tuple[int, ...] | None, tmp_path: Path) -> None:
    for name in (*(f"nvidia{i}" for i in range(gpus)), "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert local_gpus(environ, tmp_path) == own


def test_gpus_that_are_left_idle_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert local_gpus(local(0, 3, CUDA_VISIBLE_DEVICES="0,1,2,3", JAX_PLATFORMS="cpu"), tmp_path) == (0,)
    shares = [local_gpus(local(rank, 3, CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7"), tmp_path) for rank in (0, 0, 1, 2)]
    assert shares == [(0, 1), (0, 1), (2, 3), (4, 5)]
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("2 of the 8 GPUs of this host are idle: its 3 processes have 2 each")


def test_names_of_ranks() -> None:
    assert name_ranks({3}) == "rank 3"
    assert name_ranks([5, 1, 2]) == "ranks 1, 2 and 5"
    assert name_ranks([9, *range(1, 8)]) == "ranks 1-7 and 9"
    assert name_ranks(range(0, 40, 2), most=12) == "ranks 0, 2, 4, 6, 8, 10 and 14 more"
    assert name_ranks([*range(8), *range(10, 40, 2)], most=4, noun="host") == "hosts 0-7, 10 and 14 more"


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e9"])
def test_timeout_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match="^JAXDIST_JOIN_TIMEOUT: "):
        join_timeout({"JAXDIST_JOIN_TIMEOUT": text})


class Call:
    """A part of a roll call in a thread: its result, or what it raised."""

    def __init__(self, part: Callable[[], Any]) -> None:
        self.result: Any = None

        def run() -> None:
            try:
                self.result = part()
            except (UserError, MissingPeers) as error:
                self.result = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def get(self) -> Any:
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.result


def call(where: Any, rank: int, processes: int = 4, seconds: float = 5.0, key: str = "k", token: str = "") -> Call:
    meeting = Meeting(*where, key, token)
    return Call(lambda: answer_roll(lambda: meeting, rank=rank, processes=processes, seconds=seconds))


def take(server: socket.socket, processes: int = 4, seconds: float = 5.0) -> Call:
    meeting = Meeting(*server.getsockname(), "k", "")
    return Call(lambda: take_roll(server, processes=processes, meeting=meeting, seconds=seconds))


@contextlib.contextmanager
def nobody_listens() -> Iterator[Any]:
    """An address that refuses connections, and that no other program is given; `listen` can take it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()


def serve(where: Any) -> socket.socket:
    """What comes after the roll call, at the same place."""
    return socket.create_server(where)


def test_all_come_in_any_order() -> None:
    server = listen("127.0.0.1", 0, 1)
    where = server.getsockname()
    first = call(where, 3)
    process_0 = take(server)
    others = [call(where, rank) for rank in (1, 2)]
    assert process_0.get() is None
    with serve(where):  # the port is free again at once
        assert [each.get() for each in (first, *others)] == [where] * 3


def test_process_0_comes_last() -> None:
    with nobody_listens() as where:
        early = call(where, 1, processes=2)
        time.sleep(0.3)
        assert take(listen(*where, 1), processes=2).get() is None
        with serve(where):
            assert early.get() == where


def test_missing_ranks_are_named_to_all() -> None:
    server = listen("127.0.0.1", 0, 1)
    here = call(server.getsockname(), 2, processes=6)
    began = time.monotonic()
    process_0 = take(server, processes=6, seconds=0.6)
    for each in (process_0, here):
        assert isinstance(each.get(), MissingPeers)
        assert re.match(r"ranks 1 and 3-5 of 6 did not come to 127\.0\.0\.1:\d+ within 0\.6 s", str(each.get()))
    assert 0.5 < time.monotonic() - began < 5


def test_process_0_is_missing() -> None:
    with nobody_listens() as where:
        error = call(where, 1, seconds=0.4).get()
    assert isinstance(error, MissingPeers)
    assert f"process 0 cannot be reached at 127.0.0.1:{where[1]} (Connection refused)" in str(error)


def test_process_0_is_stuck() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = call(silent.getsockname(), 1, seconds=0.4).get()
    assert isinstance(error, MissingPeers) and "no process 0 that waits for this one" in str(error)


def test_rank_given_twice() -> None:
    server = listen("127.0.0.1", 0, 1)
    where = server.getsockname()
    process_0, *twins = take(server), call(where, 1), call(where, 1)
    assert isinstance(twins[0].get(), UserError)
    for each in (process_0, *twins, call(where, 2), call(where, 3)):
        assert isinstance(each.get(), UserError)
        assert str(each.get()).startswith("rank 1 is given twice: to process ")
        assert str(os.getpid()) in str(each.get())


@pytest.mark.parametrize(
    ("rank", "processes", "text"),
    [
        (1, 5, "rank 1 (process {pid} on {host}) was started for 5 processes, rank 0 for 4"),
        (0, 4, "rank 0 is given twice: to this process and to process {pid} on {host}"),
        (4, 4, "rank 4 (process {pid} on {host}) of a job of 4 processes; allowed: 0 to 3"),
    ],
)
def test_a_process_that_cannot_be_of_this_job(
    rank: int, processes: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "LINGER_S", 15.0)  # it ends when all know
    server = listen("127.0.0.1", 0, 1)
    where = server.getsockname()
    process_0, early, wrong = take(server), call(where, 2), call(where, rank, processes)
    wanted = text.format(pid=os.getpid(), host=repr(socket.gethostname()))
    assert str(wrong.get()).startswith(wanted)
    late = [call(where, 3), *([call(where, 1)] if rank != 1 else [])]
    for each in (process_0, early, wrong, *late):
        assert isinstance(each.get(), UserError) and str(each.get()).startswith(wanted), each.get()


def test_process_0_does_not_wait_long_for_those_who_do_not_know_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "LINGER_S", 0.3)
    server = listen("127.0.0.1", 0, 1)
    began = time.monotonic()
    process_0, wrong = take(server, seconds=60), call(server.getsockname(), 1, 5)
    assert isinstance(wrong.get(), UserError) and isinstance(process_0.get(), UserError)
    assert 0.3 < time.monotonic() - began < 5


def test_another_job_is_not_joined() -> None:
    server = listen("127.0.0.1", 0, 1)
    where = server.getsockname()
    process_0, stray = take(server, processes=2), call(where, 1, processes=2, seconds=0.6, key="other")
    assert isinstance(stray.get(), MissingPeers) and "its name is not the same" in str(stray.get())
    own = call(where, 1, processes=2)
    assert process_0.get() is None
    with serve(where):
        assert own.get() == where


def test_who_goes_is_missed_again_and_noise_is_ignored() -> None:
    server = listen("127.0.0.1", 0, 1)
    where = server.getsockname()
    process_0 = take(server, processes=3, seconds=10)
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 9000, b"[" * 4000 + b"\n", b'{"jaxdist": 1}\n', b""):
        with socket.create_connection(where) as connection:
            connection.sendall(noise)
    silent = socket.create_connection(where)
    gone = open_connection(*where, 5.0, Meeting(*where, "k", "").door())
    gone.send({"key": "k", "rank": 1, "processes": 3, "host": "h", "pid": 1})
    assert gone.receive(3.0)[0]["status"] == "waiting"  # it is known
    gone.close()
    own = [call(where, 1, processes=3), call(where, 2, processes=3)]  # its number is free again
    assert process_0.get() is None
    with serve(where):
        assert [each.get() for each in own] == [where] * 2
    silent.close()


def test_strangers_do_not_disturb_the_roll_call() -> None:
    server = listen("127.0.0.1", 0, 1)
    where = server.getsockname()
    process_0 = take(server, processes=3, seconds=20)
    with strangers.silent(where, 300):
        here = call(where, 1, processes=3)
        strangers.attack(where)
        own = call(where, 2, processes=3)
        assert process_0.get() is None
    with serve(where):
        assert [each.get() for each in (here, own)] == [where] * 2


def test_a_wrong_token_is_one_line_on_both_sides(capfd: pytest.CaptureFixture[str]) -> None:
    """The process that has it ends at once; the job waits for the right one."""
    server = listen("127.0.0.1", 0, 1)
    where = server.getsockname()
    process_0, wrong = take(server, processes=2), call(where, 1, processes=2, token=strangers.TOKEN)
    said = f"127.0.0.1:{where[1]} does not take this process's token; JAXDIST_TOKEN or --token-file must be the same"
    assert isinstance(wrong.get(), UserError) and said in str(wrong.get())
    on_page("docs/multihost.md", f"error: {wrong.get()}", {re.escape(f"127.0.0.1:{where[1]}"): "10.0.0.7:29500"})
    own = call(where, 1, processes=2)
    assert process_0.get() is None
    with serve(where):
        assert own.get() == where
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert re.match(
        r"roll call: 127\.0\.0\.1:\d+ has called and is hung up on: it does not know this job's token; if it", told
    )


def test_other_machines_reach_the_roll_call_with_a_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = (
        r"^roll call: .* can be reached by other machines, and the job has no token; JAXDIST_TOKEN or --token-file must"
    )
    with pytest.raises(UserError, match=needs):
        joining._follow(Job("192.0.2.1:9", 2, 1), 1, 2, 5.0)
    with nobody_listens() as where, monkeypatch.context() as patched:  # stands for an address that others reach
        patched.setattr("jaxdist.runtime.network.connection.ipaddress.IPv4Address.is_loopback", False)
        with pytest.raises(UserError, match=needs):
            joining._lead(Job(format_address(*where), 2, 0), 2, 5.0)
        patched.setenv("JAXDIST_TOKEN", strangers.TOKEN)
        with pytest.raises(MissingPeers):
            joining._lead(Job(format_address(*where), 2, 0), 2, 0.1)


def test_port_and_address_of_process_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^coordinator: 127\.0\.0\.1:{port}: port {port}: Address already in use"):
            listen("127.0.0.1", port, 1)
    with pytest.raises(UserError, match=r"^coordinator: 192\.0\.2\.99:1 .* is no address of this machine"):
        listen("192.0.2.99", 1, 1)
    with pytest.raises(UserError, match=r"^coordinator: the host of nowhere\.invalid:1 is not known"):
        listen("nowhere.invalid", 1, 0.1)
    for everywhere in ("0.0.0.0", "::"):
        with pytest.raises(UserError, match="is all addresses of a machine"):
            listen(everywhere, 1, 1)
    with listen("localhost", 0, 1) as server:
        assert server.getsockname()[0] in ("127.0.0.1", "::1")


def test_stale_file_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier job has left leads to a dead port, then to another service; process 0 comes last, with a new
    file. It is gone afterwards."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    path = tmp_path / "job"
    stale = listen("127.0.0.1", 0, 1)
    rendezvous_file.announce(path, stale, "", "")
    old = rendezvous_file.read_meeting(path, "")
    assert old is not None and path.stat().st_mode & 0o777 == 0o600
    stale.close()
    jobs = [Job(None, 3, rank, file=str(path)) for rank in range(3)]
    early = Call(lambda: joining._follow(jobs[1], 1, 3, 10))
    time.sleep(0.2)
    with socket.create_server((old.host, old.port)):  # by now another program's
        time.sleep(0.2)
    others = [Call(lambda: joining._follow(jobs[2], 2, 3, 10))]
    bound = joining._lead(jobs[0], 3, 10)
    with serve(("127.0.0.1", int(bound.rpartition(":")[2]))):
        assert [each.get() for each in (early, *others)] == [bound] * 2
    assert list(tmp_path.iterdir()) == []


def test_file_of_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes 0 by one file, one file for two jobs, a folder that is not there."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    path = tmp_path / "job"
    job = Job(None, 2, 0, file=str(path))
    first = Call(lambda: joining._lead(job, 2, 1.5))
    while rendezvous_file.read_meeting(path, "") is None:
        time.sleep(0.01)
    with pytest.raises(UserError, match="another process 0 gathers its job already, at 127"):
        joining._lead(job, 2, 5)
    monkeypatch.setenv("JAXDIST_JOB_ID", "b")
    other = Call(lambda: joining._follow(job, 1, 2, 0.5))
    assert isinstance(other.get(), MissingPeers)
    assert isinstance(first.get(), MissingPeers) and not path.exists()
    with pytest.raises(UserError, match="cannot be written: No such file"):
        joining._lead(Job(None, 2, 0, file=str(tmp_path / "no" / "job")), 2, 5)


def test_a_file_is_a_token_and_a_strange_file_none(tmp_path: Path) -> None:
    """Its secret is not sent, and who does not know it is not let in; with a token of the job both are needed."""
    path = tmp_path / "job"
    with listen("127.0.0.1", 0, 1) as server:
        meeting = rendezvous_file.announce(path, server, "k", strangers.TOKEN)
        content = json.loads(path.read_text())
        assert len(content["secret"]) == 64 and meeting.token == strangers.TOKEN + content["secret"]
        assert rendezvous_file.read_meeting(path, strangers.TOKEN) == meeting
        assert content["secret"] not in meeting.key
        bad = [f"{json.dumps(wrong)}\n" for wrong in strangers.mutations(content) if type(wrong.get("key")) is not str]
        for text in (*bad, "[" * 4096, "", "[]", "\0"):
            path.write_text(text)
            assert rendezvous_file.read_meeting(path, "") is None


def test_own_address_is_one_of_this_machine() -> None:
    with listen(rendezvous_file.own_address(), 0, 1) as server:
        assert format_address(*server.getsockname()[:2])


LISTENING = """
import json, os, sys
import jax
jax.config.update("jax_platforms", "cpu")
from jaxdist.runtime.join.environment import find_job
from jaxdist.runtime.join.join import join_job
from jaxdist.runtime.join.roll_call import MissingPeers
from jaxdist.errors import UserError
try:
    join_job(find_job(os.environ))
except MissingPeers as error:
    sys.exit(print(error) or 75)
except UserError as error:
    sys.exit(print(error) or 2)
from jax.experimental import multihost_utils
import numpy as np
assert multihost_utils.process_allgather(np.ones(1)).sum() == jax.process_count()
inodes = set()
for each in os.listdir("/proc/self/fd"):
    try:
        inodes.add(os.readlink(f"/proc/self/fd/{each}"))
    except OSError:
        pass
found = []
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            found.append(f"{name} {fields[1]}")
multihost_utils.process_allgather(np.ones(1))
print("LISTENS", json.dumps(sorted(found)))
"""


def start(environ: Environ, folder: Path) -> subprocess.Popen[str]:
    clean = {name: text for name, text in child.environment().items() if name not in TORCH}
    return subprocess.Popen(
        [sys.executable, "-c", LISTENING],
        env=clean | environ,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("host", others_slow(["127.0.0.1", "own", "detected"], "detected"))
def test_only_the_chosen_address_listens(host: str, tmp_path: Path) -> None:
    """Of a job by a file, and of one that JAX has to find out, as that of an old Open MPI. Gloo chooses for itself: the
    address of the host's name."""
    wanted, rank_of = rendezvous_file.own_address() if host == "own" else "127.0.0.1", "JAXDIST_RANK"
    method = {"JAXDIST_INIT_METHOD": f"file://{tmp_path / 'job'}", "JAXDIST_NUM_PROCESSES": "2", "MASTER_ADDR": wanted}
    if host == "detected":
        with socket.socket() as probe:
            probe.bind((wanted, 0))
            port = str(probe.getsockname()[1])
        method = {"OMPI_MCA_orte_hnp_uri": f"4096.0;usock;tcp://{wanted}:9", "OMPI_COMM_WORLD_SIZE": "2"}
        method, rank_of = method | {"JAX_COORDINATOR_PORT": port}, "OMPI_COMM_WORLD_RANK"
        assert find_job(method | {rank_of: "0"}) == Job(None, 2, None, detect=True)
    started = [start(method | {rank_of: str(rank)}, tmp_path) for rank in range(2)]
    try:
        ended = [process.communicate(timeout=60) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], ended
    named = socket.gethostbyname(socket.gethostname())
    sockets = [json.loads(re.search(r"LISTENS (.*)", out)[1]) for out, _ in ended]
    for found, allowed in zip(sockets, ({wanted, named}, {named}), strict=True):
        assert {of_kernel(each) for each in found} <= allowed, found
    assert wanted in {of_kernel(each) for each in sockets[0]}


@pytest.mark.parametrize(
    "environ",
    others_slow(
        [
            SLURM,
            SLURM | {"SLURM_STEP_NODELIST": "a", "SLURM_JOB_ID": "none", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
        ],
        SLURM,
    ),
)
def test_a_launcher_that_tells_too_little(environ: Environ, tmp_path: Path) -> None:
    job = start(environ, tmp_path)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 2 and out.count("\n") == 1, (out, err)
    assert re.match(r"the launcher of this job leaves out what JAX needs \(.*\); give --init-method", out)


def of_kernel(entry: str) -> str:
    """The address in /proc/net/tcp or tcp6, of words in the byte order of the machine."""
    words = re.findall("[0-9A-F]{8}", entry.split()[1].partition(":")[0])
    found = ipaddress.ip_address(b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words))
    return str(getattr(found, "ipv4_mapped", None) or found)
