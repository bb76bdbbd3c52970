"""Runs and steps as users start them, on one GPU: the commands of jaxdist, with what they print and write."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

JAXDIST = (sys.executable, "-m", "jaxdist")
AT_ONCE = 6  # processes, where times do not count
LIMIT_S = 300
NOTHING = "nothing was written"  # in place of findings
NO_MEMORY = "out of memory"  # in place of an exit status
CONFIG = "gpt_355m_h200"
ONE_GPU = (
    "mesh.fsdp=1",
    "parallel.strategy=ddp",
    "parallel.prefetch=0",
    "precision.reduce_dtype=null",
    "data.global_batch=32",
)
VARIANTS = (
    "memory.remat=dots model.scan_blocks=1",
    "memory.remat=full",
    "memory.remat=none",
    "memory.remat=none model.loss_chunk=0",
)
LARGE = ("model.width=2048", "data.seq_len=2048", "data.global_batch=8")
LLAMA = (
    *LARGE,
    "model.style=llama",
    "model.layers=16",
    "model.kv_heads=8",
    "model.mlp_width=5504",
    "model.vocab=32000",
    "model.tied=false",
)
TOY = (
    "model.layers=2",
    "model.width=64",
    "model.heads=2",
    "model.vocab=512",
    "data.seq_len=32",
    "data.global_batch=4",
    "devices={platform: auto, simulated: 1}",
)
TOY_LLAMA = ("model.style=llama", "model.kv_heads=1", "model.mlp_width=128")


def facts(tiny: bool) -> Iterator[dict[str, Any]]:
    """The device and the packages."""
    import importlib.metadata

    import jax

    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "orbax-checkpoint", "torch")
    found = {each.metadata["name"]: each.version for each in importlib.metadata.distributions()}
    device = jax.devices()[0]
    yield {
        "date": time.strftime("%Y-%m-%d"),
        "device": device.device_kind,
        "devices": jax.device_count(),
        "backend": jax.default_backend(),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "cpus": os.cpu_count(),
        "python": sys.version.split()[0],
        "packages": {name: found[name] for name in (*names, "nvidia-cudnn-cu13", "nvidia-nccl-cu13") if name in found},
    }


def _command(*words: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """The exit status of a command of jaxdist, its seconds, and the end of its output."""
    began = time.monotonic()
    try:
        done = subprocess.run([*JAXDIST, *words], capture_output=True, text=True, errors="replace", timeout=limit_s)
        status: int | str = done.returncode
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        status, output = "timed out", str(error.stdout)
    if status and any(each in output.lower() for each in ("out of memory", "resource_exhausted")):
        status = NO_MEMORY
    return {"exit_status": status, "seconds": round(time.monotonic() - began, 1), "output": output[-2000:]}


def _run(folder: Path, config: str, *settings: str) -> dict[str, Any]:
    """A short run of a shipped configuration, with its losses."""
    short = ("train.steps=24", "train.eval_every=12", "optimizer.warmup_steps=2", "checkpoint.every=12")
    result = _command("train", config, *short, *settings, "--run-dir", str(folder))
    lines = folder / "metrics.jsonl"
    if lines.exists():
        records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
        result["losses"] = [record["loss"] for record in records if "loss" in record]
    return result


def runs(tiny: bool) -> Iterator[dict[str, Any]]:
    """Runs of the shipped configurations, several at once; the quickstart then resumes, generates and is looked at."""
    small = ["model.width=32", "data.seq_len=32", "data.global_batch=8"] if tiny else []
    others: dict[str, tuple[str, ...]] = {}
    if not tiny:
        others = {f"{name}, as shipped": (name,) for name in ("bert_stdlib", "vit_digits", "resnet_digits")}
        others |= {
            "bf16, dots": ("quickstart", "precision=bf16", "memory.remat=dots"),
            "fp16": ("quickstart", "precision=fp16"),
            "offloaded": (
                "quickstart",
                "precision=bf16",
                "memory.offload.activations=true",
                "memory.offload.optimizer=true",
            ),
        }
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with ThreadPoolExecutor(1 if tiny else AT_ONCE) as pool:
            first = pool.submit(_run, folder / "quickstart", "quickstart", *small)
            waiting = {
                name: pool.submit(_run, folder / f"run{i}", *given) for i, (name, given) in enumerate(others.items())
            }
        out = {"quickstart": first.result()} | {name: each.result() for name, each in waiting.items()}
        yield out
        run = str(folder / "quickstart")
        for name, words in {
            "resumed": ("train", "quickstart", *small, "train.steps=30", "optimizer.warmup_steps=2", "--run-dir", run),
            "generate": ("generate", run, "--prompt", "def ", "--max-tokens", "16"),
            "report": ("report", run),
            "verify": ("checkpoint", "verify", run),
        }.items():
            out[name] = _command(*words)
            yield out


def _bench(settings: Sequence[str], *, tiny: bool) -> Any:
    """What `jaxdist bench` writes; or its exit status and the end of its output."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        _tokens(folder)
        out = folder / "out.json"
        toy = (*TOY, *(TOY_LLAMA if "model.style=llama" in settings else ())) if tiny else ()
        words = ("bench", CONFIG, *ONE_GPU, *settings, *toy, f"data.path={folder}", "--steps", "3" if tiny else "15")
        done = _command(*words, "--json", str(out))
        return json.loads(out.read_text(encoding="utf-8")) if out.exists() else done


def _tokens(folder: Path) -> None:
    """Random tokens as data.source=tokens reads them."""
    import numpy as np

    for name, count in (("train.bin", 1_000_000), ("val.bin", 100_000)):
        np.random.default_rng(0).integers(0, 500, count).astype(np.uint16).tofile(folder / name)


def steps(tiny: bool) -> Iterator[dict[str, Any]]:
    """GPT-2 355 M, 32 x 1024 tokens, bf16, by what is kept and by loop."""
    out: dict[str, Any] = {}
    for settings in ("memory.remat=dots", *VARIANTS)[: 2 if tiny else None]:  # each alone: one may find no memory
        out[settings] = _bench(settings.split(), tiny=tiny)
        yield out


def larger(tiny: bool) -> Iterator[dict[str, Any]]:
    """GPT-2 1.3 B and a Llama of 0.9 B, 8 x 2048 tokens, bf16 and float8."""
    out: dict[str, Any] = {}
    for name, settings in (("GPT-2 1.3 B", LARGE), ("Llama 0.9 B", LLAMA)):
        for more in ("memory.remat=dots", "memory.remat=none", "memory.remat=dots precision.policy=fp8")[
            : 1 if tiny else None
        ]:
            out[f"{name}: {more}"] = _bench([*settings, *more.split()], tiny=tiny)
            yield out


def race(tiny: bool) -> Iterator[dict[str, Any]]:
    """scripts/bench/train.py of each size; PyTorch with "max-autotune" too for the first, which takes it minutes."""
    script, out = str(Path(__file__).parents[2] / "train.py"), {}
    for size in ("toy",) if tiny else ("350m", "1.3b", "llama", "124m"):
        contenders = "jaxdist,plain_jax" if tiny else "jaxdist,jaxdist_as_trained,pytorch,plain_jax"
        limit_s = 240
        if size == "350m":
            contenders, limit_s = f"{contenders},pytorch_autotuned", 480
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "out.json"
            command = [sys.executable, script, "--sizes", size, "--contenders", contenders, "--json", str(found)]
            command += ["--steps", "3" if tiny else "12", "--limit-s", str(limit_s)]
            with contextlib.suppress(subprocess.TimeoutExpired):  # what it had measured is in its file
                subprocess.run(command, check=False, timeout=limit_s + 60)
            out[size] = json.loads(found.read_text(encoding="utf-8")) if found.exists() else NOTHING
        yield out


def profile(tiny: bool) -> Iterator[dict[str, Any]]:
    """Milliseconds a step and calls a step of the kernels of GPT-2 355 M, the longest first."""
    import jax

    from jaxdist.build import assemble
    from jaxdist.config.load import load_config
    from jaxdist.config.shipped import find_config
    from jaxdist.init import init_state
    from jaxdist.mesh import make_mesh
    from jaxdist.runtime.start import start
    from jaxdist.trainer.batches.load import load_data, loader_of

    out: dict[str, Any] = {}
    for name, more in (("scanned", ("model.scan_blocks=1",)), ("unrolled", ())):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            _tokens(folder)
            toy = TOY if tiny else ()
            settings = [*ONE_GPU, *toy, "memory.remat=dots", *more, f"data.path={folder}"]
            config = start(load_config(find_config(CONFIG), settings))
            mesh = make_mesh(devices=jax.devices()[:1])
            parts = assemble(config, mesh)
            batch = loader_of(config, load_data(config), mesh).batch(0)
            state = init_state(parts.model, parts.optimizer, mesh, parts.options)
            for _ in range(3):
                state, metrics = parts.step(state, batch)
            jax.block_until_ready(state)
            with jax.profiler.trace(str(folder)):
                for _ in range(4):
                    state, metrics = parts.step(state, batch)
                jax.block_until_ready((state, metrics))
            out[name] = _kernels(folder, steps=4)
            del state
        yield out


def _kernels(folder: Path, *, steps: int) -> list[tuple[str, float, float]]:
    """(name, milliseconds a step, calls a step) of the kernels in a trace; none of a trace on CPUs."""
    files = list(folder.rglob("*.trace.json.gz"))
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"] if files else []
    named = [event for event in events if event.get("name") in ("process_name", "thread_name")]
    processes = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in named if event["name"] == "thread_name"}
    found: dict[str, list[float]] = {}
    for event in events:
        lane = lanes.get((event.get("pid"), event.get("tid")), "")
        if event.get("ph") == "X" and "GPU" in processes.get(event["pid"], "") and "Stream" in lane:
            found.setdefault(event["name"], []).append(event["dur"])
    rows = [(name[:100], sum(each) / 1e3 / steps, len(each) / steps) for name, each in found.items()]
    return sorted(rows, key=lambda row: -row[1])[:60]
