"""The command line in processes of its own: two of four simulated devices train like one of eight; signals, errors."""

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jobs import Environ, Processes, by_jax, free_port, torchrun
from levels import levels

from jaxdist import load_config, make_mesh, make_optimizer, state_target
from jaxdist.checkpoint import Checkpoints
from jaxdist.checkpoint.reader import Stored
from jaxdist.errors import UserError
from jaxdist.models.gpt import gpt
from jaxdist.observe import read_metrics
from jaxdist.runtime.join.environment import Job, find_job
from jaxdist.runtime.run_claim import LOCK, RunClaim
from jaxdist.state import TrainState
from jaxdist.trainer.train import train

pytestmark = pytest.mark.xdist_group("processes")  # runs and commands are shared by the tests of this file

ROOT = Path(__file__).parents[2]
SCRIPT = [str(ROOT / "scripts" / "train.py"), "--config", "tiny.yaml"]
YAML = """
model: {layers: 2, width: 16, heads: 2}
data: {path: text.py, seq_len: 16, global_batch: 8}
mesh: {data: 2, fsdp: 2, tensor: 2}
parallel: {strategy: zero3, min_shard_bytes: 0}
optimizer: {lr: 1e-2, schedule: constant}
train: {steps: 8, eval_every: 4, eval_batches: 1, sample_tokens: 4}
checkpoint: {every: 4}
devices: {platform: cpu, simulated: 4}
observe: {report: false}
"""


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Folders with the configuration and its text in them."""
    words = np.random.default_rng(0).choice(["def", "return", "x", "y", "0", "1", "+", ":"], 4000)

    def make() -> Path:
        folder = tmp_path_factory.mktemp("job")
        (folder / "tiny.yaml").write_text(YAML)
        (folder / "text.py").write_text(" ".join(words))
        return folder

    return make


@pytest.fixture
def processes(make_folder: Callable[[], Path]) -> Iterator[Processes]:
    made = Processes(make_folder())
    yield made
    made.kill()


def losses(run: Path) -> list[float]:
    records = read_metrics(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def alone(make_folder: Callable[[], Path]) -> list[float]:
    """The losses of eight steps on the eight devices of this process."""
    folder = make_folder()
    bare = ["train.eval_every=0", "train.sample_tokens=0", "checkpoint.every=0", "devices.simulated=8"]
    assert train(load_config(folder / "tiny.yaml", [f"data.path={folder / 'text.py'}", *bare]), folder / "run") == 0
    return losses(folder / "run")


@pytest.fixture(scope="module")
def pair(make_folder: Callable[[], Path]) -> Processes:
    """Four steps in two processes, started in different seconds, in the run directory that is the default."""
    processes, port = Processes(make_folder()), free_port()
    try:
        for rank in (0, 1):
            processes.add([*SCRIPT, "train.steps=4"], torchrun(port, rank))
            time.sleep(1.2)
        assert processes.wait(240) == [0, 0], processes.logs()  # CI has taken 40 s, a busy machine more than 60 s
    finally:
        processes.kill()
    return processes


def run_directory(processes: Processes) -> Path:
    (folder,) = (processes.folder / "runs").iterdir()
    return folder


def test_same_losses_as_one_process(pair: Processes, alone: list[float]) -> None:
    assert len(alone) == 8
    assert alone[-1] < alone[0] - 0.5
    np.testing.assert_allclose(losses(run_directory(pair))[:4], alone[:4], rtol=1e-6)


def test_only_process_0_speaks(pair: Processes) -> None:
    assert "step" in pair.out(0)
    assert "2 processes" in pair.out(0)
    assert pair.out(1) == "rank 1 of 2 joined; rank 0 prints"
    assert pair.err(0) == pair.err(1) == ""


@pytest.mark.slow
def test_interrupted_together_and_resumed(pair: Processes, alone: list[float], processes: Processes) -> None:
    """The same run goes on in a job described by JAX's variables; Ctrl-C reaches both processes, as in a terminal."""
    run, port = run_directory(pair), free_port()
    options = ["--run-dir", str(run), "train.steps=1000000", "checkpoint.every=0", "checkpoint.keep=1"]
    for rank in (0, 1):
        processes.add([*SCRIPT, *options], by_jax(port, rank))
    processes.wait_for_step(run / "metrics.jsonl", 10)
    for process in processes.running:
        process.send_signal(signal.SIGINT)
    assert processes.wait(30) == [75, 75], processes.logs()
    values = losses(run)
    np.testing.assert_allclose(values[:8], alone, rtol=1e-5)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"4", str(len(values))}  # two at least are kept
    assert f"stopped after step {len(values)};" in processes.out(0)
    assert "Traceback" not in processes.err(0) + processes.err(1)


@pytest.mark.slow
def test_signals_stop_a_run_that_can_go_on(make_folder: Callable[[], Path]) -> None:
    """Ctrl-C, then SIGTERM; in float64, which has to be turned on before JAX starts its devices."""
    folder = make_folder()
    run, stopped = folder / "run", 0
    one = ["mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "parallel.strategy=ddp", "precision=fp64"]
    for number in (signal.SIGINT, signal.SIGTERM):
        processes = Processes(folder)
        processes.add([*SCRIPT, "--run-dir", "run", *one, "train.steps=1000000", "checkpoint.every=0"], {})
        try:
            processes.wait_for_step(run / "metrics.jsonl", stopped + 3)
            processes.running[0].send_signal(number)
            assert processes.wait(10) == [75], processes.logs()
        finally:
            processes.kill()
        assert processes.err(0) == ""
        assert len(losses(run)) > stopped
        stopped = len(losses(run))
        assert f"stopped after step {stopped};" in processes.out(0)
        assert (run / "checkpoints" / str(stopped)).is_dir()
    assert any(float(np.float32(value)) != value for value in losses(run)), "float64"


@pytest.mark.slow
def test_sigterm_to_one_process_stops_both(processes: Processes) -> None:
    port = free_port()
    for rank in (0, 1):
        processes.add([*SCRIPT, "--run-dir", "run", "train.steps=1000000"], torchrun(port, rank))
    processes.wait_for_step(processes.folder / "run" / "metrics.jsonl", 5)
    processes.running[1].send_signal(signal.SIGTERM)
    assert processes.wait(30) == [75, 75], processes.logs()
    steps = sorted(int(path.name) for path in (processes.folder / "run" / "checkpoints").iterdir())
    assert steps[-1] == len(losses(processes.folder / "run"))


@pytest.mark.slow
def test_another_run_has_the_directory(processes: Processes) -> None:
    """All processes say so and end."""
    port = free_port()
    with RunClaim(processes.folder / "run"):
        (processes.folder / "run" / "kept").touch()
        for rank in (0, 1):
            processes.add([*SCRIPT, "--run-dir", "run"], torchrun(port, rank))
        assert processes.wait(60) == [2, 2], processes.logs()
        assert {path.name for path in (processes.folder / "run").iterdir()} == {"kept", LOCK}
    for rank in (0, 1):
        assert processes.err(rank).startswith("error: --run-dir: 'run' belongs to a run under way, process ")
        assert processes.err(rank).count("\n") == 1


@pytest.mark.slow
def test_the_directory_of_two_processes_is_moved(processes: Processes) -> None:
    port, old, new = free_port(), processes.folder / "run", processes.folder / "new"
    for rank in (0, 1):
        options = ["--run-dir", "run", "train.steps=1000000", "train.eval_every=0", "checkpoint.every=0"]
        processes.add([*SCRIPT, *options], torchrun(port, rank))
    processes.wait_for_step(old / "metrics.jsonl", 5)
    old.rename(new)
    assert processes.wait(30) == [75, 75], processes.logs()
    assert [path.name for path in (new / "checkpoints").iterdir()] == [str(len(losses(new)))] and not old.exists()
    assert f"warning: the run directory was moved from run to {new}\n" in processes.out(0)


@pytest.mark.slow
def test_each_process_has_a_run_directory_of_its_own(processes: Processes) -> None:
    """As on hosts that share no storage: said before the first step, not by checkpoints without their shards."""
    port = free_port()
    hurried = (
        "import sys; from jaxdist.checkpoint import arguments; arguments._VISIBLE_S, arguments._NOTICE_S = 2, 1\n"
        "from jaxdist.cli.runs.train import main; sys.exit(main(sys.argv[1:], 'train.py'))"
    )
    for rank in (0, 1):
        here = processes.folder / f"host{rank}"
        here.mkdir()
        for name in ("tiny.yaml", "text.py"):
            shutil.copy(processes.folder / name, here)
        processes.add(["-c", hurried, *SCRIPT[1:], "--run-dir", "run"], torchrun(port, rank), here)
    assert processes.wait(90) == [2, 2], processes.logs()
    first, second = (processes.folder / f"host{rank}" / "run" / "checkpoints" for rank in (0, 1))
    waits = f"rank 1 waits up to 2 s to see what rank 0 has made in {second}\n"
    line = f"error: checkpoints: what rank 0 has made in {first} was not seen within 2 s by rank 1 (rank 1 looked in"
    for rank, before in enumerate(("", waits)):
        assert processes.err(rank).startswith(f"{before}{line} {second}); "), processes.logs()
    assert not first.exists() and not second.exists()


def test_parameters_that_differ_between_processes(processes: Processes) -> None:
    """As made with a seed of each process's own. jax alone prints both arrays behind a long traceback."""
    code = """
import os, jax, jaxdist, jax.numpy as jnp, optax
from jaxdist.runtime.join.environment import find_job
from jaxdist.runtime.join.join import join_job
join_job(find_job(os.environ))
mesh = jaxdist.make_mesh(data=jax.device_count())
params = {"same": jnp.ones((4, 2)), "layer": {"w": jnp.full((4, 2), float(jax.process_index()))}}
try:
    jaxdist.init_state(params, optax.sgd(0.1), mesh)
except jaxdist.UserError as error:
    print(error)
"""
    port = free_port()
    for rank in (0, 1):
        processes.add(["-c", code], torchrun(port, rank))
    assert processes.wait(60) == [0, 0], processes.logs()
    for rank in (0, 1):
        assert "layer.w: its values differ between the processes, or are NaN; allowed: " in processes.out(rank)


RESTORE = """
import jax, jax.numpy as jnp, numpy as np, sys
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jax.sharding import NamedSharding, PartitionSpec
from jaxdist import make_mesh
from jaxdist.checkpoint import Checkpoints, SaveFailed
from jaxdist.state import TrainState
mesh = make_mesh(fsdp=2)
place = lambda spec: NamedSharding(mesh, PartitionSpec(*spec))
target = TrainState(
    jax.ShapeDtypeStruct((), jnp.int32, sharding=place(())),
    {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=place(("fsdp",)))},
    (),
)
with Checkpoints(sys.argv[1], keep=2) as checkpoints:
    state = checkpoints.restore(1, target)
    (shard,) = state.params["w"].addressable_shards
    print(np.asarray(shard.data).tolist())
    try:
        checkpoints.save(2, state, {})
    except SaveFailed as error:
        print(error)
"""


@pytest.mark.slow
def test_two_processes_restore_from_a_folder_that_can_only_be_read(processes: Processes) -> None:
    disk, port = processes.folder / "disk", free_port()
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a file system: a read-only one is NOT tested here")
    try:
        with Checkpoints(disk, keep=2) as checkpoints:
            checkpoints.save(1, TrainState(jnp.int32(1), {"w": jnp.arange(8.0)}, ()), {})
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for rank in (0, 1):
            processes.add(["-c", RESTORE, str(disk), f"127.0.0.1:{port}", str(rank)], {})
        assert processes.wait() == [0, 0], processes.logs()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    said = ["Read-only file system", "another process could not"]
    for rank, (why, first) in enumerate(zip(said, (0, 4), strict=True)):
        shard = [float(number) for number in range(first, first + 4)]
        assert processes.out(rank).splitlines() == [str(shard), f"checkpoint of step 2 was not saved: {why}"]


@pytest.mark.slow
def test_error_in_one_process_ends_it_at_once(processes: Processes) -> None:
    """Its peer says so, with the same status."""
    port, tokens = free_port(), ["data.source=tokens", "data.path=own"]
    for rank, largest in ((0, 200), (1, 300)):
        here = processes.folder / f"host{rank}"
        (here / "own").mkdir(parents=True)
        (here / "tiny.yaml").write_text(YAML)
        np.full(1000, largest, "<u2").tofile(here / "own" / "train.bin")
        processes.add([*SCRIPT, "--run-dir", str(processes.folder / "run"), *tokens], torchrun(port, rank), here)
    assert processes.running[1].wait(20) == 2, processes.logs()
    assert processes.err(1).startswith("error: model.vocab: 256 is too small")
    assert processes.err(1).count("\n") == 1
    assert processes.wait(60)[0] == 2, processes.logs()
    assert processes.err(0).startswith("failed: rank 1: UserError: model.vocab: 256 is too small")


@pytest.mark.slow
def test_taken_port(processes: Processes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        processes.add([*SCRIPT, "--run-dir", "run"], torchrun(port, 0))
        assert processes.wait() == [2], processes.logs()
    assert f"port {port}:" in processes.err(0)
    assert processes.err(0).count("\n") == 1


READ_A_BATCH = """
import json
from jaxdist.config.load import load_config
from jaxdist.data import Loader
from jaxdist.mesh import make_mesh
from jaxdist.runtime.start import start
config = start(load_config("tiny.yaml"))
import numpy as np
from dataclasses import asdict
from jax.sharding import NamedSharding
from jaxdist.specs import BATCH_SPEC
sharding = NamedSharding(make_mesh(**asdict(config.mesh)), BATCH_SPEC)
loader = Loader(np.arange(5000), seq_len=16, global_batch=8, sharding=sharding)
read, real = set(), loader.host_rows
def host_rows(step, rows):
    read.update(range(8)[rows])
    return real(step, rows)
loader.host_rows = host_rows
shape = loader.batch(0)["inputs"].shape
print(json.dumps({"read": sorted(read), "shape": shape}))
"""


@pytest.mark.slow
def test_each_process_reads_its_own_rows(processes: Processes) -> None:
    port = free_port()
    for rank in (0, 1):
        processes.add(["-c", READ_A_BATCH], by_jax(port, rank))
    assert processes.wait() == [0, 0], processes.logs()
    said = [json.loads(processes.out(rank).splitlines()[-1]) for rank in (0, 1)]
    assert said == [{"read": [0, 1, 2, 3], "shape": [8, 16]}, {"read": [4, 5, 6, 7], "shape": [8, 16]}]


TORCH = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}
JAX = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        (TORCH | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        (TORCH, Job("node1:29500", 4, 3)),
        (JAX, Job("node1:1234", 4, 3)),
        (TORCH | JAX, Job("node1:1234", 4, 3)),
        # torchrun's own store is on MASTER_PORT.
        (TORCH | {"TORCHELASTIC_RUN_ID": "none"}, Job("node1:29501", 4, 3, name="none")),
        # One process a GPU, unless the launcher lets each see one only, or JAX is told.
        (TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Job("node1:29500", 4, 3, (1,))),
        (TORCH | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, Job("node1:29500", 4, 3)),
        (TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "5"}, Job("node1:29500", 4, 3)),
        (JAX | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, Job("node1:1234", 4, 3, None)),
        (
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "2"},
            Job(None, None, None, (2,), detect=True),
        ),
        # One process a node drives all of its GPUs.
        (
            {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"},
            Job(None, None, None, (), detect=True),
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            Job(None, 2, None, (1,), detect=True),
        ),
    ],
)
def test_job_in_the_environment(environ: Environ, job: Job | None) -> None:
    assert find_job(environ) == job


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCH | {"RANK": "4"}, "rank 4 of a job of 4 processes"),
        (TORCH | {"RANK": "-1"}, "^RANK: '-1'"),
        (TORCH | {"WORLD_SIZE": "four"}, "^WORLD_SIZE: 'four'"),
        (TORCH | {"MASTER_PORT": "70000"}, "'node1:70000'"),
        ({key: value for key, value in TORCH.items() if key != "MASTER_PORT"}, "^MASTER_PORT: not set"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "node1"}, "'node1'"),
        ({"JAX_COORDINATOR_ADDRESS": "node1:1234"}, "JAX_NUM_PROCESSES is not"),
        ({key: value for key, value in JAX.items() if key != "JAX_PROCESS_ID"}, "^JAX_PROCESS_ID: not set"),
    ],
)
def test_job_that_makes_no_sense(environ: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        find_job(environ)
    assert "\n" not in str(error.value)


SAME_BITS = (
    "parallel.grad_sync.deterministic=true",
    "model.dropout=0.1",
    "train.steps=10",
    "train.eval_every=0",
    "mesh.data=1",
    "mesh.fsdp=1",
    "mesh.tensor=1",
    "train.sample_tokens=0",
    "checkpoint.every=0",
)


def trained_words(folder: Path) -> np.ndarray:
    """All 32-bit words of the last checkpoint's parameters and optimizer state."""
    config = load_config(folder / "tiny.yaml", [*SAME_BITS, f"data.path={folder / 'text.py'}"])
    optimizer = make_optimizer(config.optimizer, steps=config.train.steps, deterministic=True)
    target = state_target(gpt(config.model, max_length=config.data.seq_len), optimizer, make_mesh())
    with Checkpoints(folder / "run" / "checkpoints", keep=1) as checkpoints:
        state = checkpoints.restore(config.train.steps, target)
    return np.concatenate([np.asarray(leaf).ravel().view(np.uint32) for leaf in jax.tree.leaves(state)])


@pytest.mark.exhaustive  # slow runs save and restore one, below
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble"])
def test_a_pipeline_across_two_processes_has_the_losses_of_one(make_folder: Callable[[], Path], schedule: str) -> None:
    """Each process is a stage of 4 devices."""
    options = ["mesh.pipe=2", "mesh.tensor=1", f"parallel.schedule={schedule}", "parallel.microbatches=2"]
    found = []
    for count in (1, 2):
        job, port = Processes(make_folder()), free_port()
        try:
            for rank in range(count):
                devices = f"devices.simulated={8 // count}"
                job.add([*SCRIPT, "--run-dir", "run", *options, devices], torchrun(port, rank) if count > 1 else {})
            assert job.wait(240) == [0] * count, job.logs()
        finally:
            job.kill()
        records = read_metrics(job.folder / "run" / "metrics.jsonl")
        found.append([record[key] for record in records for key in ("loss", "eval/loss") if key in record])
    assert len(found[0]) == 10
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.slow
def test_a_pipeline_of_two_processes_is_saved_and_restored(make_folder: Callable[[], Path]) -> None:
    """Two processes, a stage of two chunks each; then one process without a pipeline; then two with uneven stages. The
    losses of one process from beginning to end."""
    fixed = ["model.layers=4", "train.eval_every=0", "train.sample_tokens=0", "parallel.microbatches=2"]
    plain = ["mesh.data=1", "mesh.fsdp=4", "mesh.tensor=1", "devices.simulated=4"]
    pipe = ["mesh.pipe=2", "mesh.tensor=1", "mesh.data=1", "devices.simulated=2"]
    chunks = [*pipe, "parallel.schedule=interleaved", "parallel.chunks=2"]
    uneven = [*pipe, "parallel.schedule=one_f_one_b", "parallel.stages=[1,3]"]
    found = []
    for runs in ([(1, 8, plain)], [(2, 4, chunks), (1, 6, plain), (2, 8, uneven)]):
        folder = make_folder()
        for count, steps, layout in runs:
            job, port = Processes(folder), free_port()
            try:
                for rank in range(count):
                    options = [*fixed, *layout, f"train.steps={steps}", "checkpoint.every=0"]
                    job.add([*SCRIPT, "--run-dir", "run", *options], torchrun(port, rank) if count > 1 else {})
                assert job.wait(240) == [0] * count, job.logs()
            finally:
                job.kill()
        found.append([record["loss"] for record in read_metrics(folder / "run" / "metrics.jsonl")])
    assert len(found[1]) == 8
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.slow
def test_same_bits_in_one_process_and_in_two(make_folder: Callable[[], Path]) -> None:
    """As users compile: with the compiler's default optimisation. One device, then 2 processes with 2 devices each."""
    zero3 = ("parallel.strategy=zero3", "mesh.fsdp=2", "mesh.data=2")
    jobs: list[Processes] = []
    try:
        for options, count in ((("parallel.strategy=ddp", "devices.simulated=1"), 1), (zero3, 2)):
            job, port = Processes(make_folder()), free_port()
            jobs.append(job)
            devices = [] if count == 1 else ["devices.simulated=2"]
            for rank in range(count):
                environ = torchrun(port, rank) if count > 1 else {}
                job.add([*SCRIPT, "--run-dir", "run", *SAME_BITS, *options, *devices], environ | {"XLA_FLAGS": ""})
            assert job.wait(240) == [0] * count, job.logs()
    finally:
        for job in jobs:
            job.kill()
    wanted, want = trained_words(jobs[0].folder), read_metrics(jobs[0].folder / "run" / "metrics.jsonl")
    assert len(want) == 10
    for job in jobs[1:]:
        got = read_metrics(job.folder / "run" / "metrics.jsonl")
        for key in ("loss", "grad_norm"):
            assert [record[key] for record in got] == [record[key] for record in want]
        assert (trained_words(job.folder) != wanted).sum() == 0


SLOW_EVALUATION = """
import sys, threading, time
from jaxdist.config.load import load_config
from jaxdist.trainer.evaluation import Evaluator
from jaxdist.trainer.train import train
def hang(self, params):
    open("hanging", "w").close()
    time.sleep(600)
if sys.argv[1] == "evaluation":
    Evaluator.__call__ = hang
else:
    from jaxdist.checkpoint import checksums
    checksums.seal = lambda folder, step: hang(None, None)
config = load_config("tiny.yaml", [*sys.argv[2:], "train.steps=1000000", "train.eval_every=3", "checkpoint.every=2"])
from pathlib import Path
sys.exit(train(config, Path("run")))
"""


@pytest.mark.parametrize(("count", "where"), levels([(2, "evaluation"), (1, "evaluation"), (1, "save")], slow=2))
def test_a_second_signal_ends_at_once(processes: Processes, count: int, where: str) -> None:
    """Whatever the main thread is doing; the save under way is not taken for one. The first signal alone waits."""
    port, devices = free_port(), ["mesh.tensor=1", f"devices.simulated={4 // count}"]
    for rank in range(count):
        processes.add(["-c", SLOW_EVALUATION, where, *devices], torchrun(port, rank) if count > 1 else {})
    checkpoints = processes.folder / "run" / "checkpoints"
    processes.until((processes.folder / "hanging").exists, where)
    last = processes.running[-1]
    last.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert all(each.poll() is None for each in processes.running), "the first one asks only"
    if where == "evaluation":
        processes.until((checkpoints / "2").exists, "the save that was under way")
    last.send_signal(signal.SIGTERM)
    assert processes.wait(10) == [75] * count, processes.logs()
    assert "ended at once by a second signal, SIGTERM" in processes.err(count - 1)
    steps = sorted(path.name for path in checkpoints.iterdir() if path.name.isdigit())
    assert steps == (["2"] if where == "evaluation" else [])


@pytest.mark.parametrize(("count", "stuck"), levels([(2, True), (2, False), (1, False)], slow=2))
def test_a_signal_before_the_first_step_ends_at_once(processes: Processes, count: int, stuck: bool) -> None:
    """While the first step is compiled: there is nothing to save, and no need to wait for the compiler. Where another
    process does not answer, the second signal does."""
    port = free_port()
    plant = (
        "import jaxdist.train_step as c; real = c.TrainStep.__call__;"
        "\n"
        "def call(*a): open('compiling', 'w').close(); return real(*a)\n"
        "c.TrainStep.__call__ = call\n"
    )
    run = (
        "import sys; from pathlib import Path; from jaxdist.config.load import load_config\n"
        "from jaxdist.trainer.train import train; sys.exit(train(load_config('tiny.yaml', ['mesh.tensor=1', "
        f"'devices.simulated={4 // count}']), Path('run')))"
    )
    for rank in range(count):
        processes.add(["-c", plant + run], torchrun(port, rank) if count > 1 else {})
    processes.until((processes.folder / "compiling").exists, "the first step")
    if stuck:
        processes.running[1].send_signal(signal.SIGSTOP)
        processes.running[0].send_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert processes.running[0].poll() is None
        processes.running[0].send_signal(signal.SIGTERM)
        assert processes.running[0].wait(20) == 75
        assert "ended at once by a second signal, SIGTERM" in processes.err(0)
        return
    processes.running[-1].send_signal(signal.SIGTERM)
    assert processes.wait(20) == [75] * count, processes.logs()
    assert "ended by SIGTERM before the first step" in processes.err(count - 1)
    assert not (processes.folder / "run" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_process_behind_in_its_first_step_stops_with_the_others(processes: Processes) -> None:
    """Where one has taken a step there is something to save, and all take as many."""
    port = free_port()
    plant = (
        "import time; from jaxdist.runtime.watch.stop import StopSignal as s; real = s.requested\n"
        "def late(self, step):\n    time.sleep(1.5 if step == 1 else 0); return real(self, step)\n"
        "import os; s.requested = late if os.environ['RANK'] == '1' else real\n"
    )
    options = ["mesh.tensor=1", "devices.simulated=2", "train.max_hours=1e-6", "train.steps=1000"]
    run = (
        "import sys; from pathlib import Path; from jaxdist.config.load import load_config\n"
        f"from jaxdist.trainer.train import train; sys.exit(train(load_config('tiny.yaml', {options}), Path('run')))"
    )
    for rank in range(2):
        processes.add(["-c", plant + run], torchrun(port, rank))
    assert processes.wait(120) == [75, 75], processes.logs()
    saved = [path.name for path in (processes.folder / "run" / "checkpoints").iterdir()]
    assert saved == [str(len(losses(processes.folder / "run")))] and saved != ["0"]


@pytest.mark.exhaustive  # slow runs change layouts in one process, in tests/trainer/test_resume.py
def test_processes_change_samples_and_bits_do_not(make_folder: Callable[[], Path]) -> None:
    """Deterministic, with dropout: 8 devices in one process, 2 in two, 4 in one; zero3, ddp, zero3."""
    same = [
        "parallel.grad_sync.deterministic=true",
        "observe.samples=true",
        "train.eval_every=0",
        "model.dropout=0.1",
        "train.sample_tokens=0",
        "mesh.tensor=1",
        "checkpoint.every=0",
    ]
    legs = [
        (1, ["train.steps=2", "devices.simulated=8", "mesh.data=2", "mesh.fsdp=4"]),
        (2, ["train.steps=4", "devices.simulated=1", "mesh.data=2", "mesh.fsdp=1", "parallel.strategy=ddp"]),
        (1, ["train.steps=6", "devices.simulated=4", "mesh.data=1", "mesh.fsdp=4", "parallel.microbatches=2"]),
    ]
    alone = (1, ["train.steps=6", "devices.simulated=1", "mesh.data=1", "mesh.fsdp=1", "parallel.strategy=ddp"])
    exact = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # the older code generator rounds otherwise by layout
    found = []
    for plan in ([alone], legs):
        folder = make_folder()
        for count, options in plan:
            job, port = Processes(folder), free_port()
            try:
                for rank in range(count):
                    environ = exact | (torchrun(port, rank) if count > 1 else {})
                    job.add([*SCRIPT, "--run-dir", "run", *same, *options], environ)
                assert job.wait(240) == [0] * count, job.logs()
            finally:
                job.kill()
        run = folder / "run"
        stored = Stored(run / "checkpoints" / "6")
        words = {name: stored.param(name).tobytes() for name in stored.params()}
        log = (run / "samples.jsonl").read_text().splitlines()
        found.append((losses(run), log, words, jax.tree.map(np.ndarray.tobytes, stored.rest()["opt_state"])))
    assert len(found[0][1]) == 6 and len({row for line in found[0][1] for row in json.loads(line)["samples"]}) == 48
    for name, alone_, changed in zip(("losses", "samples", "parameters", "moments"), *found, strict=True):
        assert alone_ == changed, name
