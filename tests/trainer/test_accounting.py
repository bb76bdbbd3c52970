"""The seconds of a run, its MFU and what it sends, in metrics.jsonl: against the clock, and calculated by hand."""

import functools
import itertools
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from child import QUICK, environment

from jaxdist.build import assemble
from jaxdist.config.load import load_config
from jaxdist.mesh import abstract_mesh
from jaxdist.models.gpt import gpt
from jaxdist.observe import read_metrics
from jaxdist.plan.compiled.hardware import peak_flops
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.traced.flops import model_flops
from jaxdist.plan.traced.ledger import ledger
from jaxdist.precision.policy import POLICIES
from jaxdist.trainer.measures import step_figures
from jaxdist.trainer.measures.clock import Clock
from jaxdist.trainer.measures.step_figures import StepFigures
from jaxdist.trainer.train import train

ROOT = Path(__file__).parents[2]
SPENT = {f"time/{name}" for name in ("device", "data", "host", "eval", "save")}


def account(record: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in record.items() if key.startswith("time/")}


def test_flops_of_the_model_of_the_benchmark() -> None:
    """6 FLOPs a token for each weight of a product, and 12 L S d for attention (Chowdhery et al. 2022, appendix B)."""
    config = load_config(ROOT / "configs/quickstart.yaml")  # of scripts/bench/step.py
    rows, length = 4, config.data.seq_len
    model, ids = gpt(config.model, max_length=length), jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = {"inputs": ids, "targets": ids, "weights": jax.ShapeDtypeStruct((rows, length), jnp.float32)}
    known = config.model.resolved()
    weights = known.layers * 12 * known.width**2 + known.vocab * known.width  # the head multiplies by the table
    by_hand = rows * length * (6 * weights + 12 * known.layers * known.width * length)
    assert model_flops(model, model.shapes, (), batch) == by_hand


def test_mfu_of_the_model_of_the_benchmark_on_a_described_gpu() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", ["precision.policy=bf16", "data.global_batch=32"])
    gpu = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    mesh = SimpleNamespace(local_devices=[], devices=np.array([gpu] * 8), size=8)
    plan: Any = SimpleNamespace(mesh=mesh, parts=assemble(config, abstract_mesh()))
    figures = StepFigures(plan, pytest.fail)
    figures._read(None, batch_of(config, abstract_mesh()))
    # 4 blocks of width 128, 256 ids, 32 rows of 128 positions; a step of 2 ms on 8 x 989.4 TFLOP/s.
    by_hand = 32 * 128 * (6 * (4 * 12 * 128**2 + 256 * 128) + 12 * 4 * 128 * 128)
    assert figures.metrics(0.002)["mfu"] == pytest.approx(by_hand / (0.002 * 8 * 989.4e12), rel=1e-12)


@pytest.mark.slow
def test_a_run_that_ends_before_its_program_is_read_ends_with_0(tmp_path: Path) -> None:
    """What a step sends is read in a thread; where Python ended meanwhile, the process died in jaxlib."""
    pipeline = "mesh.pipe=2 mesh.data=2 mesh.fsdp=2 mesh.tensor=1 parallel.microbatches=2 parallel.schedule=zero_bubble"
    small = "model.layers=2 model.width=32 data.global_batch=8 data.seq_len=32 train.steps=3 train.sample_tokens=0"
    command = [sys.executable, "-m", "jaxdist.cli.main", "train", "quickstart", *pipeline.split(), *small.split()]
    command += ["observe.report=false", "train.eval_batches=1", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment() | QUICK, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_the_clock_takes_less_than_half_a_percent_of_a_step() -> None:
    """Of one of the quickstart's 160 ms, that is 800 us. It took 6 us."""
    clock, steps = Clock(4096), 500

    def seconds_a_step() -> float:
        began = time.perf_counter()
        for _ in clock.awaited(range(steps)):
            with clock.spending("device"):
                pass
            clock.finished()
            clock.line()
        return (time.perf_counter() - began) / steps

    assert min(seconds_a_step() for _ in range(5)) < 0.005 * 0.160


def test_flops_of_a_loss() -> None:
    shapes, batch = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)}, jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert model_flops(lambda params, x, keys: ((x @ params["w"]).sum(), 8), shapes, (), batch) == 3 * 2 * 8 * 16 * 4


def test_flops_are_traced_as_the_step_receives_parameters() -> None:
    """cuDNN's attention cannot be traced in float32: with it, metrics had no MFU, and `jaxdist bench` failed."""
    shapes, batch = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)}, jax.ShapeDtypeStruct((8, 16), jnp.float32)
    received = []

    def loss(params: Any, x: jax.Array, keys: jax.Array) -> tuple[jax.Array, int]:
        received.append(params["w"].dtype)
        return (x.astype(params["w"].dtype) @ params["w"]).sum(), 8

    assert model_flops(loss, shapes, (), batch, precision=POLICIES["bf16"]) == 3 * 2 * 8 * 16 * 4
    assert received == [jnp.bfloat16]


def test_flops_of_experts_whose_routers_stay_in_fp32() -> None:
    """A router refuses parameters in bfloat16, and the step gives it none."""
    config = load_config(ROOT / "configs/moe_quickstart.yaml", ["precision.policy=bf16"])
    parts, batch = assemble(config, abstract_mesh()), batch_of(config, abstract_mesh())
    given = (parts.model, parts.target.params, parts.target.model_state, batch)
    assert model_flops(*given, precision=parts.options.precision) == model_flops(*given) > 0


def test_peaks() -> None:
    """Dense figures of the makers' data sheets, by the type of the products."""
    found = {name: peak_flops("NVIDIA A100-SXM4-80GB", POLICIES[name]) for name in ("fp32", "bf16", "fp16")}
    assert found == {"fp32": 156e12, "bf16": 312e12, "fp16": 312e12}
    assert peak_flops("NVIDIA H100 80GB HBM3", POLICIES["fp8"]) == 1978.9e12
    assert peak_flops("cpu", POLICIES["bf16"]) is None


@pytest.mark.slow
def test_every_second_of_a_run_is_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations, saves and a resume among them. MFU and bytes sent are those of the program."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.py").write_text("def x(y):\n    return y + 1\n" * 400)
    (tmp_path / "tiny.yaml").write_text(
        f"model: {{layers: 2, width: 16, heads: 2}}\n"
        f"data: {{path: {tmp_path / 'text'}, seq_len: 16, global_batch: 8}}\n"
        "mesh: {fsdp: 2}\nparallel: {strategy: zero3, min_shard_bytes: 0}\ncheckpoint: {every: 4}\n"
        "train: {steps: 8, eval_every: 3, eval_batches: 2, sample_tokens: 0}\n"
        "devices: {platform: cpu}\nobserve: {console: plain, report: false}\n"
    )
    configure = functools.partial(load_config, tmp_path / "tiny.yaml")
    monkeypatch.setattr(step_figures, "peak_flops", lambda *_: 1e12)
    assert train(configure(), tmp_path / "run") == 0
    shutil.copy(tmp_path / "run" / "metrics.jsonl", tmp_path / "before.jsonl")
    assert train(configure(["train.steps=16"]), tmp_path / "run") == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 17))
    assert records[:8] == read_metrics(tmp_path / "before.jsonl")

    for session in (records[:8], records[8:]):
        assert set(account(session[0])) == {"time/start"}
        for before, after in itertools.pairwise(session):
            assert set(account(after)) == SPENT and min(account(after).values()) > -1e-6
            assert sum(account(after).values()) == pytest.approx(after["time"] - before["time"], rel=0.01)
            assert (after["time/eval"] > 1e-4) == ("eval/loss" in after)
        assert [record["step"] for record in session[1:] if record["time/save"] > 1e-4] == [session[4]["step"]]
    assert 0 < records[8]["time/start"] <= records[8]["time"] - records[7]["time"] + 0.01

    config = configure()
    mesh = abstract_mesh(fsdp=2)
    parts, batch = assemble(config, mesh), batch_of(config, mesh)
    flops = model_flops(parts.model, parts.target.params, (), batch)
    sent = ledger(parts.step, parts.target, batch).wire_bytes
    for record in records[6:8]:
        assert (
            record["mfu"] == pytest.approx(flops / (record["step_s"] * 2 * 1e12)) and record["sent_bytes"] == sent > 0
        )
