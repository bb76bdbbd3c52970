"""Records of runs for the tests of report.html."""

import math

import numpy as np

from jaxdist.observe.report import LayoutRow, Prediction, RemedyRow, RunRecord, Sent

MESH = {"pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
ENVIRONMENT = {
    "command": ["train.py", "<b>"],
    "versions": {"jax": "0.12"},
    "git": None,
    "mesh": MESH,
    "devices": {"cpu": 8},
    "data": {"name": "text", "unit": "bytes", "train": 10_855_127, "files": [f"{i}.py" for i in range(40)]},
    "baselines": {"uniform": 8.0, "gzip $x^$": 2.5},
    "state_bytes": {"parameters": 288 << 10},
}
LAYOUT = (
    LayoutRow("embed/tokens", (256, 128), "float32", (("tensor",), ("fsdp",)), 4, 32768, 131072),
    LayoutRow("blocks/mlp/up/kernel", (4, 128, 512), "float32", ((), ("fsdp",), ("tensor",)), 4, 262144, 1048576),
    LayoutRow("blocks/<i>&amp/scale", (), "bfloat16", (), 1, 2, 2),
)
PREDICTION = Prediction(
    LAYOUT,
    {"parameters": 288 << 10, "optimizer state": 576 << 10, "batch": 12 << 10, "temporary": 8 << 20},
    {"gradients": 288 << 10},
    (
        Sent(("tensor",), "activations", "psum", ("forward",), 12, 4e6, "inside a host"),
        Sent(("fsdp",), "parameters", "all_gather", ("forward", "recompute"), 35, 2e6, "inside a host"),
        Sent(("data", "fsdp"), "gradients of parameters", "psum", ("once a step",), 2, 1e5, "between hosts"),
    ),
)
REMEDIES = (
    RemedyRow("remat full", "memory.remat=full", "in use"),
    RemedyRow("twice the microbatches", "parallel.microbatches=2", "possible", "", 3 << 20, 1.0, 1.5),
    RemedyRow("the next ZeRO stage", "", "not here", "<script>no</script>"),
)
SETTINGS = {
    "model": {"name": "gpt", "layers": 4},
    "data": {"path": "s3://u:hunter2@b/x", "seq_len": 128, "global_batch": 32},
    "parallel": {"strategy": "zero3", "stages": []},
    "train": {"steps": 200},
}
DEFAULTS = {"model": {"name": "gpt", "layers": 12}, "parallel": {"strategy": "ddp", "stages": []}}


def records(count: int, every: int = 50, *, begun: float | None = 1_000_000.0, first: int = 1) -> list[dict]:
    """Lines of a run with 4,096 tokens a step. begun: when its process started; None: an old run, without times."""
    result: list[dict] = []
    now = begun
    for step in range(first, first + count):
        rate = 800.0 if step == first else 25000.0 + 10 * (step % 7)
        loss = 5.5 * math.exp(-step / 40) + 1
        line = {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": rate}
        if step % every == 0:
            line["eval/loss"] = loss + 0.1
        if now is not None:
            seconds = 4096 / rate
            spent = {"time/device": 0.8 * seconds, "time/data": 0.1 * seconds, "time/host": 0.1 * seconds}
            spent = {"time/start": 9.0} if step == first else spent
            spent |= {"time/eval": 0.5, "time/save": 0.25} if step % every == 0 else {}
            now += sum(spent.values())
            line |= {"step_s": seconds, "time": now, **spent}
        result.append(line)
    return result


def with_experts(lines: list[dict], blocks: int, experts: int, dropped: float = 0.0) -> list[dict]:
    """Lines of a run, given figures of experts. The first load is even, that of the last line but one is not."""
    for line in lines:
        line |= {
            "experts/max_load": 1.5,
            "experts/entropy": 0.9,
            "experts/balance_loss": 1.1,
            "experts/dropped": dropped,
        }
    load = np.ones((blocks, experts))
    lines[0]["arrays"] = {"experts/load": load.tolist()}
    load[1, :2] = 0.0, 3.0
    lines[-2]["arrays"] = {"experts/load": load.tolist()}
    return lines


def record(**changes) -> RunRecord:
    """A run of 200 steps with everything in it."""
    whole = RunRecord(
        "gpt & <friends>",
        settings=SETTINGS,
        defaults=DEFAULTS,
        environment=ENVIRONMENT,
        metrics=records(200),
        incidents=[{"step": 70, "what": "loss <b>jumped</b>", "action": "rolled back"}],
        checkpoints=[100, 200],
        samples="import os\n<script>alert(1)</script>\x1b[0m\x00 </pre>",
        prediction=PREDICTION,
        remedies=REMEDIES,
    )
    return whole._replace(**changes)
