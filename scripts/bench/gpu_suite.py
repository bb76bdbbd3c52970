"""Measure jaxdist on one GPU, part after part, and write everything into one JSON file.

    python scripts/bench/gpu_suite.py --json OUT [--parts runs,agree,...] [--limit-s 1800] [--tiny]

Each part is a process of its own with a limit, and its findings are written at once. So a part that fails or hangs
costs the others nothing. --tiny takes toy sizes, to rehearse the suite on CPUs, where its times mean nothing. Parts:

facts        the device, versions of packages
runs         the shipped configurations train, resume, generate and verify their checkpoints
agree        losses and gradient norms of three steps: GPU and CPU in fp32, attention, rematerialisation, float8
kernels      cuDNN's attention beside plain attention in fp32: outputs and gradients
tiles        the same of tiles of a ring, merged
same_bits    parallel.grad_sync.deterministic: parameters of several layouts
rates        matrix products by size, memory, elementwise work, attention
steps        `jaxdist bench` of GPT-2 355 M: rematerialisation, unrolled blocks, chunks of the loss
larger       the same of 1.3 B and of a Llama, bf16 and float8
race         scripts/bench/train.py: PyTorch, plain JAX and jaxdist in turns
profile      kernels of a step by time
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.gpu import PARTS
from harness.gpu.runs import NO_MEMORY, NOTHING
from harness.race import is_failure

from jaxdist.config.arguments import numeric, output_file
from jaxdist.errors import CommandParser, UserError, reports_mistakes

BEGAN = time.monotonic()
LEAST_S = 30.0  # a part is not begun with less


def in_own_process(name: str, arguments: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """The findings of a part, its exit status and its seconds. By the limit, it ends with all that it started."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--part", name, "--json", str(found)]
        environ = os.environ | {"TMPDIR": folder}  # what a killed part leaves goes with it
        process = subprocess.Popen(
            [*command, *(["--tiny"] if arguments.tiny else [])], start_new_session=True, env=environ
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:  # also where the suite is interrupted: nothing may stay on the GPU
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        result = json.loads(found.read_text(encoding="utf-8")) if found.exists() else None
    return {"exit_status": status, "seconds": round(time.monotonic() - began, 1), "found": result}


def run_all(arguments: argparse.Namespace) -> int:
    """All parts that the time allows. Exit status: 1 if one of them failed or was left out."""
    results: dict[str, Any] = {"command": sys.argv, "parts": {}}
    for name in arguments.parts.split(","):
        left_s = arguments.limit_s - (time.monotonic() - BEGAN)
        if left_s < LEAST_S:
            results["parts"][name] = {"left_out": f"{left_s:.0f} s left of --limit-s"}
        else:
            print(f"[{time.monotonic() - BEGAN:5.0f} s] {name} ...", flush=True)
            results["parts"][name] = in_own_process(name, arguments, left_s)
        print(f"[{time.monotonic() - BEGAN:5.0f} s] {name}: {json.dumps(results['parts'][name])[:400]}", flush=True)
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(part.get("exit_status") != 0 for part in results["parts"].values()))


@reports_mistakes
def main() -> int:
    """Exit status: 0; 1 where a part failed or was left out; 2 for a wrong command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=output_file, metavar="OUT", required=True)
    parser.add_argument("--parts", default=",".join(PARTS), help="in this order; default: all")
    parser.add_argument(
        "--limit-s", type=numeric(float, above=0), default=1800.0, help="seconds for everything; default: 1800"
    )
    parser.add_argument("--tiny", action="store_true", help="toy sizes, as on CPUs")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # run it in this process
    arguments = parser.parse_args()
    for name in arguments.parts.split(","):
        if name not in PARTS:
            raise UserError(f"--parts: {name!r} is not known; allowed: {', '.join(PARTS)}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # one GPU, also where there are several
    if arguments.part is None:
        if not arguments.tiny:
            check_backend()
        return run_all(arguments)
    out, aside, failed = Path(arguments.json), Path(f"{arguments.json}.part"), False
    for found in PARTS[arguments.part](arguments.tiny):  # grows: what a part had found when its time was up is there
        aside.write_text(json.dumps(found) + "\n", encoding="utf-8")
        aside.replace(out)
        failed = has_failed(found)
    return int(failed)


def has_failed(found: Any) -> bool:
    """Whether a command or a contender in the findings of a part has failed, but for want of the GPU's memory, or of a
    package."""
    if isinstance(found, list):
        return any(map(has_failed, found))
    if not isinstance(found, dict):
        return bool(found == NOTHING)
    failed = found.get("exit_status", 0) not in (0, NO_MEMORY) or "skipped" in found or found.get("differs")
    return bool(failed) or is_failure(found.get("failed", "")) or any(map(has_failed, found.values()))


def check_backend() -> None:
    """Raise `UserError` where jax finds no GPU: full sizes would take a CPU hours. In a process of its own, because the
    suite itself must not hold the GPU."""
    code = "import jax; print(jax.default_backend())"
    backend = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    if backend != "gpu":
        raise UserError(f"gpu_suite: jax runs on {backend or 'nothing'} here; allowed: a GPU, or --tiny to rehearse")


if __name__ == "__main__":
    sys.exit(main())
