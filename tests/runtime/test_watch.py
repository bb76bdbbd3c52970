"""The watch of a job, without a job: who is found at fault, what is compared, connections, digests of replicas."""

import errno
import json
import math
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faulty import flip
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from levels import others_slow
from strangers import TOKEN, admitted, attack, silent, while_polling

import jaxdist.trainer.train
from jaxdist import load_config, make_mesh, processes
from jaxdist.build import assemble
from jaxdist.checkpoint import Checkpoints
from jaxdist.config.schema import Config
from jaxdist.data import Source
from jaxdist.errors import UserError
from jaxdist.init import init_state
from jaxdist.mesh import AXES
from jaxdist.processes import Place
from jaxdist.runtime.network.connection import Connection, open_connection
from jaxdist.runtime.network.handshake import Door, Foreign
from jaxdist.runtime.start import heartbeat_s
from jaxdist.runtime.watch import blame, channel, progress, watchdog
from jaxdist.runtime.watch.blame import Beat, Failure
from jaxdist.runtime.watch.channel import Channel, listen_near
from jaxdist.runtime.watch.progress import FAILURE, PHASES, WARM, WINDOW, Breadcrumbs, Crumb, Pace
from jaxdist.runtime.watch.replica_check import ReplicaCheck, ReplicasDiffer, digest, odd_ones
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.specs import path_name
from jaxdist.train_step import TrainStep
from jaxdist.trainer.failures import same_program
from jaxdist.trainer.failures.same_program import facts_of_program, facts_of_start
from jaxdist.trainer.train import train


def beats(*each: tuple[int, int, str, float]) -> dict[int, Beat]:
    return {rank: Beat(*beat) for rank, beat in enumerate(each)}


WRITES = Beat(31, 8, "settle", 52.0, 0.0, 10, "writing", 55.5)


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        # Rank 1 is where rank 0 was before it began to wait.
        (beats((31, 8, "wait", 5.0), (25, 7, "data", 5.1)), (1,)),
        (beats((25, 7, "dispatch", 5.1), (31, 8, "wait", 5.0), (31, 8, "wait", 4.0)), (0,)),
        # Not yet.
        (beats((31, 8, "wait", 5.5), (25, 7, "data", 4.9)), ()),
        # The one that is behind may take its time: it compiles, reads a checkpoint, writes one.
        (beats((31, 8, "wait", 500.0), (25, 7, "compile", 500.0)), ()),
        (beats((31, 8, "wait", 500.0), (25, 7, "restore", 500.0)), ()),
        (beats((31, 8, "wait", 45.0), (25, 7, "save", 45.0)), ()),
        (beats((31, 8, "wait", 51.0), (25, 7, "save", 51.0)), (1,)),
        (beats((31, 8, "wait", 500.0), (25, 7, "first save", 500.0)), ()),
        (beats((31, 8, "wait", 500.0), (7, 1, "first batch", 500.0)), ()),
        (beats((31, 8, "wait", 500.0), (25, 7, FAILURE, 500.0)), ()),
        # It has taken 40 s before, and may take three times that.
        ({0: Beat(31, 8, "wait", 119.0), 1: Beat(25, 7, "save", 119.0, 40.0)}, ()),
        ({0: Beat(31, 8, "wait", 121.0), 1: Beat(25, 7, "save", 121.0, 40.0)}, (1,)),
        # Nobody is behind.
        (beats((31, 8, "wait", 6.0), (31, 8, "wait", 5.5)), (0, 1)),
        (beats((31, 8, "wait", 6.0), (31, 8, "wait", 0.5)), ()),
        # All wait for a save: whose own part of it is behind.
        ({0: Beat(31, 8, "settle", 51.0, 0.0, 11, "waiting for the other ranks"), 1: WRITES}, (1,)),
        ({0: Beat(31, 8, "settle", 49.0, 0.0, 11, "waiting for the other ranks"), 1: WRITES}, (1,)),
        ({0: WRITES, 1: WRITES}, (0, 1)),
        ({0: Beat(31, 8, "save", 51.0, 0.0, 8, "making its folder"), 1: Beat(31, 8, "save", 51.0, 0.0, 9, "")}, (0,)),
        ({0: Beat(31, 8, "first settle", 500.0, 0.0, 11, ""), 1: WRITES._replace(phase="first settle")}, ()),
        # Saves go on beside the steps, at their own pace.
        ({0: Beat(31, 8, "wait", 6.0, 0.0, 11, ""), 1: Beat(31, 8, "wait", 6.0, 0.0, 10, "")}, (0, 1)),
        ({0: Beat(31, 8, "settle", 51.0, 0.0, 11, ""), 1: WRITES._replace(phase=FAILURE)}, ()),
    ],
)
def test_who_is_behind(said: dict[int, Beat], ranks: tuple[int, ...]) -> None:
    assert blame.behind(said, 5.0) == ranks
    assert blame.behind(said, math.inf) == ()


def test_lines_name_rank_phase_step_and_time() -> None:
    said = beats((31, 8, "wait", 5.0), (25, 7, "data", 5.14))
    late = blame.stuck(said, (1,)).text
    assert late == "stuck: rank 1 in data of step 7 for 5.1 s; rank 0 in wait of step 8 for 5.0 s"
    assert "no rank is behind" in blame.stuck(said, (0, 1)).text
    save = {0: Beat(31, 8, "settle", 51.0, 0.0, 11, "waiting for the other ranks", 54.0), 1: WRITES}
    assert blame.stuck(save, (1,)).text == (
        "stuck: rank 1 in settle of step 8 for 52.0 s (the save: writing for 55.5 s); rank 0 in settle of step 8 for"
        " 51.0 s (the save: waiting for the other ranks for 54.0 s)"
    )
    assert "the storage, a collective or the devices hang" in blame.stuck(save, (0, 1)).text
    quiet = blame.silent(said, 1, 5.2).text
    assert quiet.startswith("silent: rank 1 has said nothing for 5.2 s, last in data of step 7")
    found = blame.gone(said, [1, 0])
    assert found.ranks == (1,)
    assert found.text == "gone: rank 1 was killed or has crashed, last in data of step 7 for 5.1 s; then rank 0"
    many = beats(*[(9, 2, "wait", 1.0)] * 40)
    assert len(blame.stuck(many, (3,)).text) < 400


def test_the_cause_is_named_and_not_its_symptoms() -> None:
    gloo = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    assert blame.is_symptom(gloo)
    assert not blame.is_symptom(RuntimeError("gloo"))
    assert not blame.is_symptom(ValueError("a bug"))
    bug, other = Failure("KeyError: 'x'", 1, False, 2.0), Failure("ValueError: Gloo", 1, True, 1.0)
    found = blame.failed({0: other, 2: bug})
    assert (found.ranks, found.text, found.status) == ((2,), "failed: rank 2: KeyError: 'x'", 75)
    assert blame.failed({0: other}).ranks == (0,)
    wrong = Failure("UserError: model.width: 3", 2, False, 3.0)
    assert blame.failed({0: wrong, 1: wrong}).text == "failed: ranks 0 and 1: UserError: model.width: 3"
    assert blame.failed({0: wrong}).status == 2


@pytest.mark.parametrize("place", ["file", "folder", "second name"])
def test_stacks_are_written_inside_the_run_directory(place: str, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Whoever can write there cannot lead them elsewhere, and a copy of hard links keeps its own."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (outside / "rank0.txt").write_text("kept")
    run.mkdir()
    if place == "folder":
        (run / "stacks").symlink_to(outside)
    else:
        (run / "stacks").mkdir()
        link = Path.symlink_to if place == "file" else Path.hardlink_to
        link(run / "stacks" / "rank0.txt", outside / "rank0.txt")
    watch = Watch()
    watch.folder = run
    watch._report(blame.Blame("stuck", (0,), "stuck: rank 0", 75))
    assert (outside / "rank0.txt").read_text() == "kept" and len(list(outside.iterdir())) == 1
    if place == "folder":
        assert "stacks not written: it is a symbolic link" in capfd.readouterr().err
    else:
        assert "test_stacks_are_written" in (run / "stacks" / "rank0.txt").read_text()


def test_limits() -> None:
    assert blame.limit_of(None, 0.0) == 60
    assert blame.limit_of(None, 30.0) == 300
    assert blame.limit_of(5.0, 30.0) == 5
    assert blame.limit_of(0.0, 30.0) == math.inf
    assert heartbeat_s(0) == 30  # nobody but JAX looks
    assert heartbeat_s(None) > 60 + 2
    assert heartbeat_s(600) > 602


def test_a_difference_is_one_line_with_the_odd_rank_and_both_values() -> None:
    same = {"a": "1", "b": "2"}
    assert blame.difference({0: same, 1: dict(same)}) is None
    odd = blame.difference({0: same, 1: same, 2: {"a": "1", "b": "3"}, 3: same})
    assert odd == "b: 3 on rank 2, but 2 on ranks 0, 1 and 3; allowed: the same on every rank"
    assert blame.difference({0: {"a": "0", "b": "3"}, 1: same, 2: same}) == (
        "a: 0 on rank 0, but 1 on ranks 1 and 2 (and 1 more that differ); allowed: the same on every rank"
    )
    assert blame.difference({1: {"a": "1"}, 0: same}) == (
        "b: nothing on rank 1, but 2 on rank 0; allowed: the same on every rank"
    )


def pace(**seconds: float) -> Pace:
    return Pace(20, dict.fromkeys(PHASES, 0.0) | seconds)


def test_slow_rank() -> None:
    fast, late = pace(data=0.1, host=0.1, wait=0.8), pace(data=0.9, host=0.1)
    line = blame.slow({0: fast, 1: late, 2: fast})
    assert line is not None
    assert "rank 1, 5.0 times" in line
    assert "in data; they wait for it 80% of the time (steps up to 20)" in line
    assert blame.slow({0: fast, 1: fast}) is None
    assert blame.slow({0: pace(data=0.01, wait=0.99), 1: pace(data=0.05, wait=0.95)}) is None  # little to gain
    assert blame.slow({0: late, 1: late}) is None
    assert blame.slow({0: pace(), 1: pace()}) is None


def test_breadcrumbs(monkeypatch: pytest.MonkeyPatch) -> None:
    now, paces = [0.0], list[Pace]()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    crumbs = Breadcrumbs(paces.append)

    def batches() -> Iterator[int]:
        while True:
            now[0] += 0.25
            yield 0

    for step, _ in enumerate(crumbs.steps(batches(), 7), start=8):
        assert (crumbs.last.step, crumbs.last.phase) == (step, "host")
        now[0] += 0.125
        crumbs.at_step("dispatch")
        assert crumbs.last.phase == ("dispatch" if step > 7 + WARM else "compile")
        now[0] += 0.5 if step > 7 + WARM else 100
        crumbs.enter("evaluation")
        now[0] += 50
        if step == 7 + WARM:
            assert crumbs.median_step == 0
        if step == 7 + WARM + WINDOW + 1:
            break
    (found,) = paces
    assert found.step == 7 + WARM + WINDOW
    assert {phase: seconds for phase, seconds in found.seconds.items() if seconds} == pytest.approx(
        {"data": 0.25 * WINDOW, "host": 0.125 * WINDOW, "dispatch": 0.5 * WINDOW}
    )
    assert crumbs.median_step == pytest.approx(0.875)


def test_a_phase_is_judged_by_the_longest_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    crumbs, seen = Breadcrumbs(), []
    for seconds in (40, 7, 60, 1):
        for phase, takes in (("save", seconds), ("settle", 2 * seconds), ("host", 500)):
            crumbs.enter(phase)
            seen += [(crumbs.last.phase, crumbs.last.longest)]
            now[0] += takes
    assert seen[::3] == [("first save", 0), ("save", 40), ("save", 40), ("save", 60)]
    assert seen[1::3] == [("first settle", 0), ("settle", 80), ("settle", 80), ("settle", 120)]
    assert set(seen[2::3]) == {("host", 0)}
    crumbs.enter("save")
    assert blame.beat_of(crumbs, now[0] + 3) == Beat(13, 0, "save", 3, 60)
    assert blame.beat_of(crumbs, now[0] - 1e-5).age == 0  # entered since the clock was read: no age is negative


def test_the_first_batch_may_take_its_time_and_again_after_a_rollback() -> None:
    crumbs, phases = Breadcrumbs(), list[str]()

    def batches() -> Iterator[int]:
        for i in range(2):
            phases.append(crumbs.last.phase)
            yield i

    for _ in range(2):
        list(crumbs.steps(batches(), 5))
    assert phases == ["first batch", "data"] * 2


class Store:
    """The coordinator's store, and address."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.client, self.coordinator_address = self, "127.0.0.1:1"

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert key not in self.kept, "set twice"
        self.kept[key] = value

    def key_value_increment(self, key: str, by: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + by
        return self.counts[key]

    def blocking_key_value_get(self, key: str, _: int) -> str:
        return self.kept[key]


FIRST = "jaxdist/channel/1/rank0"  # of a job's first run


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    for module in (channel, processes):
        monkeypatch.setattr(module, "job_state", lambda: store)
    return store


def until(channel: Channel, count: int, seconds: float = 5.0) -> list[tuple[int, Any]]:
    news: list[tuple[int, Any]] = []
    deadline = time.monotonic() + seconds
    while len(news) < count and time.monotonic() < deadline:
        news += channel.poll(0.05)
    return news


def spoke_of(hub: Channel, rank: int, processes: int) -> Channel:
    return while_polling(lambda: Channel(Place(rank, processes)), lambda: hub.poll(0.01))


def test_channel(store: Store) -> None:
    hub = Channel(Place(0, 3))
    spokes = [spoke_of(hub, rank, 3) for rank in (1, 2)]
    big = "x" * 300_000  # more than a socket takes at once
    for rank, spoke in enumerate(spokes, start=1):
        spoke.send(0, {"agreed": str(rank)})
    assert sorted((rank, message["agreed"]) for rank, message in until(hub, 2)) == [(1, "1"), (2, "2")]
    assert hub.connected == {1, 2}
    spokes[0].send(0, {"agreed": big})
    news: list[Any] = []
    while not news:
        spokes[0].poll(0.01)
        news += hub.poll(0.01)
    assert news == [(1, {"agreed": big})]
    hub.broadcast({"bye": True})
    assert [until(spoke, 1) for spoke in spokes] == [[(0, {"bye": True})]] * 2
    spokes[1].close()
    assert until(hub, 1) == [(2, None)]
    assert hub.connected == {1}
    hub.close()
    assert until(spokes[0], 1) == [(0, None)]
    spokes[0].close()


def test_a_job_may_train_again(store: Store) -> None:
    for run in (1, 2):
        hub = Channel(Place(0, 2))
        spoke = spoke_of(hub, 1, 2)
        spoke.send(0, {"agreed": str(run)})
        assert until(hub, 1) == [(1, {"agreed": str(run)})]
        spoke.close()
        hub.close()


@pytest.mark.parametrize("code", [errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETDOWN])
def test_a_host_that_vanished_is_gone(code: int) -> None:
    def fails(_: Any) -> Any:
        raise OSError(code, "")

    stream = SimpleNamespace(
        getpeername=str, setblocking=bool, setsockopt=lambda *_: None, send=fails, recv=fails, close=list
    )
    connection = Connection(cast("socket.socket", stream))
    connection.send({"n": 1})
    assert connection.open and connection.receive() == [] and not connection.open


def test_closing_does_not_wait_for_who_has_gone() -> None:
    own, other = socket.socketpair()
    connection = Connection(own)
    connection.send({"big": "x" * 10_000_000})  # more than a socket takes at once
    other.close()
    begun = time.monotonic()
    connection.close(5.0)
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize("noise", [b"noise\n", b"[]\n", b"\xff\n"])
def test_messages_before_noise_are_read(noise: bytes) -> None:
    own, other = socket.socketpair()
    connection = Connection(own)
    with other:
        other.sendall(b'{"status": "over"}\n' + noise + b'{"status": "again"}\n')
        assert connection.receive(1.0) == [{"status": "over"}]
    assert not connection.open and connection.receive() == []


def door_of(store: Store) -> tuple[Any, Door]:
    said = json.loads(store.kept[FIRST])
    return (said["host"], said["port"]), Door("watch", said["secret"], channel._MESSAGES)


def test_strangers_are_disconnected(store: Store) -> None:
    hub = Channel(Place(0, 3))
    where, _ = door_of(store)
    while_polling(lambda: attack(where), lambda: hub.poll(0.01) and pytest.fail("heard"))
    with silent(where, 300):
        spoke = spoke_of(hub, 2, 3)
        spoke.send(0, {"bye": True})
        assert until(hub, 1) == [(2, {"bye": True})]
    spoke.close()
    hub.close()


def test_who_says_that_it_is_a_rank_of_another_job(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    hub = Channel(Place(0, 3))
    first = spoke_of(hub, 1, 3)
    for hello in ({"hello": 1}, {"hello": 3}, {"bye": True}):
        other = admitted(*door_of(store), lambda: hub.poll(0.01))
        other.send(hello)
        assert other.receive(0.01) == [] and until(hub, 1, 0.2) == [] and hub.connected == {1}
        assert capfd.readouterr().err.count(" says that it is rank ") == 1
        other.close()
    first.close()
    hub.close()


def test_a_token_of_the_job_is_needed_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the coordinator can read its store."""
    monkeypatch.setenv("JAXDIST_TOKEN", TOKEN)
    hub = Channel(Place(0, 2))
    monkeypatch.setenv("JAXDIST_TOKEN", TOKEN[::-1])
    with pytest.raises(UserError, match=r"^watch: 127.* does not take this process's token; JAXDIST_TOKEN or --token"):
        spoke_of(hub, 1, 2)
    monkeypatch.setenv("JAXDIST_TOKEN", TOKEN)
    store.counts["jaxdist/channel/made/1"] = 0
    spoke_of(hub, 1, 2).close()
    hub.close()


def test_listens_on_the_coordinators_address_only() -> None:
    for host in ("127.0.0.1", "127.0.0.7", "localhost"):
        with listen_near(f"{host}:1234") as found:
            assert found.getsockname()[0] == ("127.0.0.1" if host == "localhost" else host)


def test_a_coordinator_that_listens_everywhere(store: Store) -> None:
    store.coordinator_address = "0.0.0.0:1234"
    hub = Channel(Place(0, 2))
    assert json.loads(store.kept[FIRST])["host"] == "0.0.0.0"
    store.coordinator_address = "localhost:1234"
    spoke = spoke_of(hub, 1, 2)
    spoke.send(0, {"bye": True})
    assert until(hub, 1) == [(1, {"bye": True})]
    spoke.close()
    hub.close()


def test_who_is_hung_up_on_calls_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of more than rank 0 lets call at once."""
    tries: list[Any] = []

    def call(*arguments: Any) -> Connection:
        tries.append(arguments)
        if len(tries) == 1:
            raise Foreign("it has hung up")
        return open_connection(*arguments)

    monkeypatch.setattr(channel, "open_connection", call)
    hub = Channel(Place(0, 2))
    spoke_of(hub, 1, 2).close()
    assert len(tries) == 2
    hub.close()


def test_no_way_to_rank_0(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    store.kept[FIRST] = json.dumps({"host": "127.0.0.1", "port": port, "secret": "x"})
    with pytest.raises(UserError, match=f"rank 1 cannot connect to rank 0 at 127.0.0.1:{port}"):
        Channel(Place(1, 2))


def test_a_watch_says_now_and_then_where_the_ranks_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On rank 0, every half a minute in which nothing moves; in steps that last long, less often."""
    now = [0.0]
    for module in (progress, watchdog):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    watch = Watch(0)  # there is no verdict
    watch._here, watch._heard = Place(0, 4), {1: 0.0, 2: 0.0, 3: 0.0}
    watch._channel = cast("Any", SimpleNamespace(poll=lambda _: [], connected={1, 2, 3}, broadcast=lambda _: None))
    watch._turned = -1.0
    watch.crumbs.enter("compile", 1)
    for rank in (1, 2, 3):
        watch._hear(rank, {"beat": [2, 1, "first batch" if rank == 1 else "compile", 2.0]}, 0.0)

    def said_by(second: int) -> list[str]:
        while now[0] < second:
            now[0] += 1
            watch._turn()
        return capfd.readouterr().err.splitlines()

    watch._beats[1] = (watch._beats[1][0]._replace(order=0), 0.0)
    assert said_by(29) == []
    assert said_by(31) == [
        "no step for 30 s: rank 1 in first batch of step 1 for 32.0 s; rank 0 in compile of step 1 for 30.0 s;"
        " ranks 2 and 3 in compile of step 1 for 32.0 s"
    ]
    assert len(said_by(61)) == 1 and len(said_by(91)) == 1
    watch.crumbs.enter("wait", 2)
    assert said_by(119) == []
    monkeypatch.setattr(Breadcrumbs, "median_step", 100.0)
    assert said_by(300) == [] and len(said_by(400)) == 1


def test_alone_a_process_says_where_it_is(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(watchdog, "UNMOVED_S", 0.3, raising=False)
    watch = Watch()
    with watch.opened({}):
        watch.crumbs.enter("first batch", 1)
    time.sleep(0.8)
    watch.close()
    first = capfd.readouterr().err.splitlines()[:1]
    assert first and re.fullmatch(r"no step for \d s: in first batch of step 1 for 0\.\d s", first[0])
    time.sleep(0.5)
    assert capfd.readouterr().err == ""


def test_alone_there_is_no_watch() -> None:
    watch = Watch(0.001)
    with watch.opened({"a": "1"}), pytest.raises(KeyError), watch.reporting():
        time.sleep(0.01)
        raise KeyError("own")
    watch.close()


TEXT = Source(np.zeros(100, np.uint8), np.zeros(100, np.uint8), 256, {"sha256": "5ha"})
TINY = ("model.layers=2", "model.width=16", "model.heads=2", "data.seq_len=16", "data.global_batch=8")


@pytest.mark.slow
def test_facts(tmp_path: Any) -> None:
    (tmp_path / "a.yaml").write_text("mesh: {data: 2, fsdp: 2, tensor: 2}\nparallel: {strategy: zero3}\n")

    def facts(*options: str) -> dict[str, str]:
        config = load_config(tmp_path / "a.yaml", [*TINY, *options])
        mesh = make_mesh(data=2, fsdp=2, tensor=2)
        return facts_of_start(config, {"jax": "1"}) | facts_of_program(config, assemble(config, mesh), mesh, TEXT)

    first = facts()
    assert first["version of jax"] == "1"
    assert first["mesh"] == "pipe=1 data=2 fsdp=2 expert=1 context=1 tensor=2"
    assert first["batch"] == "inputs int32[8, 16], targets int32[8, 16], weights float32[8, 16]"
    assert first["data (SHA-256)"] == "5ha"
    assert facts() == first  # nothing of the moment is in it
    other = facts("optimizer.b1=0.8")
    differ = {name for name in first if other[name] != first[name]}
    assert differ == {"optimizer.b1", "program of a step (SHA-256)"}


@pytest.mark.slow
def test_lowering_for_the_preflight_is_not_done_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "a.yaml").write_text("mesh: {data: 2, fsdp: 2, tensor: 2}\nparallel: {strategy: zero3}\n")
    config = load_config(tmp_path / "a.yaml", TINY)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    parts = assemble(config, mesh)
    seen: list[str] = []

    def listen(event: str, seconds: float, **about: Any) -> None:
        seen.append(f"{event} {about.get('fun_name')}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        facts_of_program(config, parts, mesh, TEXT)
        assert any("trace" in each and each.endswith("step") for each in seen), seen
        state = init_state(parts.model, parts.optimizer, mesh, parts.options)
        seen.clear()
        batch = {
            name: jax.device_put(np.zeros((8, 16), dtype), NamedSharding(mesh, P(("data", "fsdp"))))
            for name, dtype in (("inputs", np.int32), ("targets", np.int32), ("weights", np.float32))
        }
        parts.step.lower(state, batch)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [each for each in seen if "step" in each]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "float8_e4m3fn", "float64"]
)
def test_a_digest_sees_every_bit(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        bits = np.random.default_rng(0).integers(0, 256, (3, 5, jnp.dtype(dtype).itemsize), np.uint8)
        bits = bits & 1 if dtype == "bool" else bits
        first = int(digest(jnp.asarray(bits.view(jnp.dtype(dtype))[..., 0])))
        for bit in [0] if dtype == "bool" else range(8):
            for place in range(0, bits.size, 7):
                changed = bits.copy()
                changed.reshape(-1)[place] ^= 1 << bit
                assert int(digest(jnp.asarray(changed.view(jnp.dtype(dtype))[..., 0]))) != first
    assert int(digest(jnp.asarray(-0.0))) != int(digest(jnp.asarray(0.0)))


def test_odd_replica() -> None:
    table = np.zeros((8, 2), np.uint32)  # mesh data=4 tensor=2: the first leaf is split over tensor
    shape = [4 if axis == "data" else 2 if axis == "tensor" else 1 for axis in AXES]
    table[1::2, 0] = 7
    specs, names = [P("tensor"), P()], ["a", "b"]
    assert odd_ones(table, names, specs, shape) == []
    table[3, 0] = 8
    (found,) = odd_ones(table, names, specs, shape)
    assert found == ("a", (3,), True, 4)
    table[1, 0] = 8
    assert odd_ones(table, names, specs, shape) == [("a", (1, 3, 5, 7), False, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", others_slow(["ddp", "zero3"], "zero3"))
def test_a_flipped_bit_is_found_on_its_device(tmp_path: Any, strategy: str) -> None:
    (tmp_path / "a.yaml").write_text("mesh: {data: 4, fsdp: 2}\nparallel: {min_shard_bytes: 0}\n")
    config = load_config(tmp_path / "a.yaml", [*TINY, f"parallel.strategy={strategy}"])
    mesh = make_mesh(data=4, fsdp=2)
    parts = assemble(config, mesh)
    state = init_state(parts.model, parts.optimizer, mesh, parts.options)
    check = ReplicaCheck(parts.target, mesh)
    check(1, state)
    names = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for leaf in range(0, len(names), 9):
        for device in (0, 5):
            with pytest.raises(ReplicasDiffer, match=f"step 3: .* on device {device} of rank 0 .*differs") as error:
                check(3, flip(state, leaf, device))
            assert error.value.step == 3
            assert "\n" not in str(error.value)
    check(4, state)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Config]:
    """The configuration of a small run on two devices, without reports."""
    words = np.random.default_rng(0).choice(["def", "x", "+"], 3000)
    (tmp_path / "text.py").write_text(" ".join(words))
    (tmp_path / "a.yaml").write_text("mesh: {data: 2}\nobserve: {report: false}\n")
    options = [*TINY, f"data.path={tmp_path / 'text.py'}", "train.eval_every=0", "train.sample_tokens=0"]
    return lambda *more: load_config(tmp_path / "a.yaml", [*options, *more])


@pytest.mark.slow
def test_what_an_exception_closes_takes_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Config]
) -> None:
    """A save under way, the batch being made: no limit, and no progress that would blame the others."""
    made, seen = list[Watch](), list[tuple[str, Crumb]]()
    call, log = TrainStep.__call__, jaxdist.trainer.train.log_samples
    monkeypatch.setattr(jaxdist.trainer.train, "Watch", lambda *each: made.append(Watch(*each)) or made[-1])

    def note(what: str) -> None:
        seen.append((what, made[0].crumbs.last))

    def failing(self: TrainStep, state: Any, batch: Any) -> Any:
        if made[0].crumbs.last.step == 6:
            note("raise")
            raise RuntimeError("a bug of the user")
        return call(self, state, batch)

    def closed(self: Checkpoints) -> None:
        note("checkpoints")
        close(self)

    def batches(*each: Any) -> Iterator[Any]:
        try:
            yield from ahead(*each)
        finally:
            note("batches")

    def logged(*each: Any) -> None:
        note("samples")
        log(*each)

    close, ahead = Checkpoints.close, jaxdist.trainer.train.prefetch
    monkeypatch.setattr(TrainStep, "__call__", failing)
    monkeypatch.setattr(Checkpoints, "close", closed)
    monkeypatch.setattr(jaxdist.trainer.train, "prefetch", batches)
    monkeypatch.setattr(jaxdist.trainer.train, "log_samples", logged)
    with pytest.raises(RuntimeError, match="a bug of the user"):
        train(tiny("train.steps=9", "checkpoint.every=5", "observe.samples=true"), tmp_path / "run")
    *samples, raised, stopped, ended = seen
    assert [what for what, _ in (raised, stopped, ended)] == ["raise", "batches", "checkpoints"]
    assert {(crumb.phase, crumb.order) for _, crumb in (stopped, ended)} == {(FAILURE, raised[1].order)}
    assert [crumb.phase for _, crumb in samples] == ["compile"] * WARM + ["wait"] * 2  # it waits for all ranks


@pytest.mark.slow
def test_a_corrupt_state_is_not_saved_and_ends_the_run(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = np.random.default_rng(0).choice(["def", "x", "+"], 3000)
    (tmp_path / "text.py").write_text(" ".join(words))
    (tmp_path / "a.yaml").write_text("mesh: {data: 4, fsdp: 2}\nobserve: {report: false}\n")
    options = [
        *TINY,
        f"data.path={tmp_path / 'text.py'}",
        "train.steps=9",
        "train.eval_every=0",
        "train.sample_tokens=0",
        "train.check_replicas_every=4",
        "checkpoint.every=3",
    ]
    config, folder, call, calls = load_config(tmp_path / "a.yaml", options), tmp_path / "run", TrainStep.__call__, [0]

    def spoiled(self: TrainStep, state: Any, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            with jax.transfer_guard("allow"):
                paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
                state = flip(state, paths.index("params.embed.tokens.table"), 5)
        return call(self, state, batch)

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "__call__", spoiled)
        assert train(config, folder) == 75
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["3"]
    begun = "stopped: corrupt state after step 6"
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(begun)]
    assert len(said) == 1
    assert "params." in said[0]
    assert "device 5 of rank 0 (data=2 fsdp=1) differs from its other 7 copies" in said[0]
    assert json.loads((folder / "incidents.jsonl").read_text())["step"] == 6
    assert train(config, folder) == 0


def judged(rank: int, now: float, *, gone: Any = (), failures: Any = (), heard: Any = ()) -> Any:
    """What the watch of a rank of three makes of losses and silences. The beats: rank 1 is behind, in data."""
    watch = Watch(5.0)
    watch._here, watch._gone, watch._failures = Place(rank, 3), list(gone), dict(failures)
    watch._heard = dict(heard)
    found = watch._judge_losses(beats((31, 8, "wait", 9.0), (25, 7, "data", 9.0), (31, 8, "wait", 9.0)), now)
    return found and (found.kind, found.ranks)


def test_losses_are_judged_by_their_cause() -> None:
    symptom, bug = Failure("ValueError: Gloo", 1, True, 10.1), Failure("KeyError: 'x'", 1, False, 10.1)
    assert judged(0, 10.0) is None
    # A rank is killed, another one's collective fails of it: the first to go is named, once all had time to be heard.
    assert judged(0, 10.2, gone=[(2, 10.0)], failures={1: symptom}) is None
    assert judged(0, 10.6, gone=[(2, 10.0)], failures={1: symptom}) == ("gone", (2,))
    assert judged(0, 10.6, gone=[(2, 10.0), (1, 10.2)]) == ("gone", (2,))
    # A bug before a process went is the cause, one after it is not.
    assert judged(0, 10.7, gone=[(2, 10.2)], failures={1: bug}) == ("failed", (1,))
    assert judged(0, 10.7, gone=[(2, 10.0)], failures={1: bug}) == ("gone", (2,))
    assert judged(0, 10.7, failures={0: symptom, 1: bug}) == ("failed", (1,))
    # All that is known is a symptom: a rank that is silent or behind is its cause, else it is what it is.
    assert judged(0, 11.0, failures={0: symptom}, heard={1: 11.0, 2: 11.0}) is None
    assert judged(0, 12.2, failures={0: symptom}, heard={1: 12.2, 2: 9.0}) == ("silent", (2,))
    assert judged(0, 12.2, failures={0: symptom}, heard={1: 12.2, 2: 12.2}) == ("stuck", (1,))
    assert judged(0, 12.2, failures={1: symptom}, heard={1: 12.2, 2: 12.2}) == ("failed", (1,))
    # Of the others a rank knows nothing but that rank 0 is gone, or silent when something has failed.
    assert judged(2, 10.0, gone=[(0, 10.0)]) == ("gone", (0,))
    assert judged(2, 10.2, failures={2: symptom}, heard={0: 10.0}) is None
    assert judged(2, 12.2, failures={2: symptom}, heard={0: 10.0}) == ("silent", (0,))
    assert judged(2, 12.2, failures={2: bug}, heard={0: 10.0}) is None


def test_a_rank_that_would_train_on_its_cpu_differs_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose driver is not there, in a job on GPUs; where all are alike, nothing differs."""
    facts = []
    for there in (True, False):
        monkeypatch.setattr(same_program, "expected_backend", lambda devices: "gpu")
        monkeypatch.setattr(same_program, "has_gpus", lambda there=there: there)
        facts.append(facts_of_start(load_config(Path(__file__).parents[2] / "configs" / "quickstart.yaml"), {}))
    assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {"NVIDIA GPUs"}
