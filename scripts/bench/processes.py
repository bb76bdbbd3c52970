"""The same losses from any number of processes and hosts: trained, and compared with one process.

    python scripts/bench/processes.py [--layouts zero3_tensor ddp ...] [--jobs 2 4 8 2hosts 4hosts] [--json OUT]

Eight devices in every job: 1 process x 8, 2 x 4, 4 x 2, 8 x 1, and as many virtual hosts as the name says, one process
each (these need root; they are left out, and said to be, where they cannot run). Every layout trains the quickstart's
model with a smaller batch, in fp32. Given: the largest relative difference of any step's loss from that of one process,
which is to stay below 1e-6; in deterministic mode the bits of every loss and gradient norm must be the same. Exit
status 1 where they are not. The processes find each other as torchrun's do.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxdist.config.arguments import COUNT, output_file
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.lab.network import unavailable
from jaxdist.lab.virtual_hosts import exit_status, run_on_hosts
from jaxdist.observe import measured_on, read_metrics

ROOT = Path(__file__).parents[2]
LIMIT, DEVICES, SECONDS = 1e-6, 8, 600
# Eight devices on a few busy cores keep each other waiting for longer than the 40 s after which XLA aborts.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
ALWAYS = (
    "data.global_batch=16",
    "data.seq_len=64",
    "train.eval_every=0",
    "train.sample_tokens=0",
    "checkpoint.every=0",
    "devices.platform=cpu",
    "observe.report=false",
)
PIPE = ("mesh={pipe: 2, data: 2, fsdp: 2, tensor: 1}", "parallel.schedule=one_f_one_b", "parallel.microbatches=4")
EXACT = ("parallel.grad_sync.deterministic=true", "optimizer.name=adamw", "optimizer.lr=3e-3", "model.dropout=0.1")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "zero3_tensor": (),  # the quickstart's own: data=2 fsdp=2 tensor=2
    "ddp": ("mesh={data: 8, fsdp: 1, tensor: 1}", "parallel.strategy=ddp"),
    "pipe": PIPE,
    "ddp_deterministic": ("mesh={data: 8, fsdp: 1, tensor: 1}", "parallel.strategy=ddp", *EXACT),
    "zero3_deterministic": ("mesh={data: 2, fsdp: 4, tensor: 1}", *EXACT),
}
JOBS = ("2", "4", "8", "2hosts", "4hosts")


def command(processes: int, folder: Path, overrides: list[str]) -> list[str]:
    """What every process runs."""
    run_dir = ["--run-dir", str(folder), f"devices.simulated={DEVICES // processes}"]
    return [
        sys.executable,
        str(ROOT / "scripts" / "train.py"),
        "--config",
        str(ROOT / "configs" / "quickstart.yaml"),
        *run_dir,
        *ALWAYS,
        *overrides,
    ]


def train(job: str, folder: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """The records of all steps. Raises `UserError` when the job fails."""
    hosts, count = job.endswith("hosts"), int(job.removesuffix("hosts"))
    flags = f"{os.environ.get('XLA_FLAGS', '')} {PATIENCE}".strip()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    arguments = command(count, folder, overrides)
    if hosts:
        results = run_on_hosts(["timeout", str(SECONDS), *arguments], hosts=count, environ=environ)
        failed = [result.stderr for result in results if result.status] if exit_status(results) else []
    else:
        failed = together(arguments, count, environ)
    if failed:
        raise UserError(f"{job}: the job failed: {failed[0].strip()[:1000]}")
    return read_metrics(folder / "metrics.jsonl")


def together(arguments: list[str], count: int, environ: dict[str, str]) -> list[str]:
    """Run `count` processes as one job: what those that failed said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(count):
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "RANK": str(rank)}
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        started.append(subprocess.Popen(arguments, env=environ | own, stdout=null, stderr=pipe, text=True))
    try:
        deadline = time.monotonic() + SECONDS
        said = [process.communicate(timeout=max(1, deadline - time.monotonic()))[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [text for process, text in zip(started, said, strict=True) if process.returncode]


def compared(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the losses are from those wanted, and whether all bits are the same."""
    pairs = [(got["loss"], want["loss"]) for got, want in zip(found, wanted, strict=True)]
    same = all(got[key] == want[key] for got, want in zip(found, wanted, strict=True) for key in ("loss", "grad_norm"))
    return {"largest_relative_difference": max(abs(got - want) / abs(want) for got, want in pairs), "same_bits": same}


def measure(arguments: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """A row a layout and job, with progress on stderr."""
    rows = []
    for layout in arguments.layouts:
        options = [f"train.steps={arguments.steps}", *LAYOUTS[layout]]
        alone = train("1", scratch / f"{layout}-1", options)
        for job in arguments.jobs:
            if job.endswith("hosts") and (reason := unavailable()):
                print(f"{layout} {job}: LEFT OUT: {reason}", file=sys.stderr)
                continue
            found = compared(train(job, scratch / f"{layout}-{job}", options), alone)
            exact = "deterministic" in layout
            holds = found["same_bits"] if exact else found["largest_relative_difference"] < LIMIT
            rows.append(
                {
                    "layout": layout,
                    "job": job,
                    "steps": len(alone),
                    "first_loss": alone[0]["loss"],
                    "last_loss": alone[-1]["loss"],
                    **found,
                    "holds": holds,
                }
            )
            print(f"{layout} {job}: {found}{'' if holds else '  FAILED'}", file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown: a line a layout, a column a job."""
    jobs = list(dict.fromkeys(row["job"] for row in rows))
    lines = ["| layout | " + " | ".join(jobs) + " |", "|---" * (len(jobs) + 1) + "|"]
    for layout in dict.fromkeys(row["layout"] for row in rows):
        cells = {row["job"]: row for row in rows if row["layout"] == layout}
        shown = [
            "-"
            if job not in cells
            else "same bits"
            if cells[job]["same_bits"]
            else f"{cells[job]['largest_relative_difference']:.1e}"
            for job in jobs
        ]
        lines.append(f"| {layout} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


@reports_mistakes
def main() -> int:
    """Exit status 0, 1 where losses differ, 2 for wrong arguments and where a job fails."""
    parser = CommandParser(description="The same losses from any number of processes and virtual hosts.")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--steps", type=COUNT, default=20)
    parser.add_argument("--json", type=output_file, metavar="OUT")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(arguments, Path(scratch))
    print(table(rows))
    if arguments.json:
        result = {**measured_on(), "limit": LIMIT, "devices": DEVICES, "rows": rows}
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
