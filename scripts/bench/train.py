"""A training step of GPT-2 or Llama by jaxdist, plain JAX, flax and optax, and PyTorch, in turns on ONE device.

    python scripts/bench/train.py [--sizes 124m,1.3b,350m] [--contenders jaxdist,...] [--steps 20] [--limit-s 570]
                                  [--json OUT] [--plot OUT]

Contenders, each a file of scripts/bench/harness/contenders/:

- jaxdist: with the settings that are fastest where memory is no matter; jaxdist_as_trained: with what a configuration
  takes that names the model, the batch and the precision alone
- pytorch: `torch.compile`; pytorch_autotuned: with mode="max-autotune" and its CUDA graphs, which takes minutes
- plain_jax; plain_flax: of GPT-2 alone

The same weights, batches and optimizer (AdamW after clipping); losses and the first gradient's norm must agree, or it
is an error. In each round every contender runs a burst of steps, and the figures are medians over rounds after a
warm-up. Each size has a process of its own, because what JAX once took of a GPU's memory it keeps. Results are printed
and written as they come. On CPUs: toy sizes and fp32, which says something about overhead and nothing about GPUs.

MFU = tokens/s x (6 N + 12 L d S) / peak: N parameters, L blocks, d width, S sequence; peak: dense bf16, of the data
sheet (`jaxdist/plan/compiled/hardware.py`; no MFU for a device that is not listed). fp32: no TF32 anywhere.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxdist.config.arguments import COUNT, numeric, output_file, picture_file
from jaxdist.errors import CommandParser, UserError, reports_mistakes

BEGAN = time.monotonic()
ON_GPU = "124m,1.3b,350m"  # the largest is measured before the time is up
# flax's own attention needs the most memory: it comes last
CONTENDERS = "jaxdist,jaxdist_as_trained,pytorch,plain_jax,plain_flax"


def say(text: str) -> None:
    """Now, not when a buffer is full."""
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One size, in this process."""
    import jax
    from harness.race import check_equal, describe, race, summary
    from harness.task import get_size, make_task, set_products

    from jaxdist.plan.compiled.hardware import gpu_of

    def left_s() -> float:
        return float(arguments.limit_s - (time.monotonic() - BEGAN))

    device, size = jax.devices()[0], get_size(name)
    gpu = device.platform == "gpu"
    precision = arguments.precision or ("bf16" if gpu else "fp32")
    if gpu and arguments.cache:  # what is compiled to know its memory is not compiled again to run it
        jax.config.update("jax_compilation_cache_dir", arguments.cache)
    products = set_products(precision)
    task = make_task(size, gpu=gpu, precision=precision)
    names = arguments.contenders.split(",")
    burst = arguments.burst or (2 if gpu else 1)
    options = {"steps": arguments.steps, "burst": burst, "left_s": left_s, "say": lambda text: say(f"{name}: {text}")}
    results, speed = race(task, names, **options)
    known = gpu_of(device.device_kind)
    return {
        "size": name,
        **describe(size),
        "precision": precision,
        "burst": burst,
        "device": device.device_kind,
        "peak_flops": known and known.bf16,
        "peak_source": known and known.source,
        "matmul_precision": products,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "contenders": [summary(result, size, known) for result in results],
        "speed_of_first_over": speed,
        "differs": differing(check_equal, results, precision),
    }


def differing(check: Any, results: Any, precision: str) -> str:
    """What does not agree, or "": the figures are written in both cases."""
    try:
        check(results, precision)
    except UserError as error:
        return str(error)
    return ""


def in_own_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same, in another process; or why there is nothing."""
    left = arguments.limit_s - (time.monotonic() - BEGAN)
    if left < 30:
        return {"size": name, "skipped": f"{left:.0f} s left of --limit-s"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            sys.executable,
            __file__,
            "--sizes",
            name,
            "--contenders",
            arguments.contenders,
            "--steps",
            str(arguments.steps),
            "--limit-s",
            str(left - 5),
            "--json",
            str(out),
            "--burst",
            str(arguments.burst),
            "--cache",
            arguments.cache or folder,
        ]
        command += ["--precision", arguments.precision] if arguments.precision else []
        try:
            status = subprocess.run(command, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            return {"size": name, "skipped": "was not done within --limit-s"}
        if not out.exists():
            return {"size": name, "skipped": f"ended with exit status {status}"}
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["sizes"][0]
        return found


def table(result: dict[str, Any]) -> str:
    """What is printed of one size."""
    if "skipped" in result:
        return f"{result['size']}: {result['skipped']}"
    peak = f", peak {result['peak_flops'] / 1e12:.0f} TFLOP/s ({result['peak_source']})" if result["peak_flops"] else ""
    lines = [
        f"{result['size']}: {result['parameters']:,} parameters, {result['rows']} x {result['length']} tokens a step,"
        f" {result['precision']}, {result['device']}{peak}"
    ]
    for each in result["contenders"]:
        if "failed" in each:
            lines.append(f"  {each['name']:<18} {each['failed']}")
            continue
        mfu = "" if each["mfu"] is None else f"  MFU {100 * each['mfu']:5.1f} %"
        memory = "" if each["peak_bytes"] is None else f"  peak {each['peak_bytes'] / 2**30:6.2f} GiB"
        predicted = "" if each["predicted_bytes"] is None else f" (predicted {each['predicted_bytes'] / 2**30:.2f})"
        ratio = result["speed_of_first_over"].get(each["name"])
        beside = "" if ratio is None else f"  {result['contenders'][0]['name']} is {ratio:.3f} x as fast"
        lines.append(
            f"  {each['name']:<18} {each['step_s'] * 1e3:9.2f} ms  {each['tokens_per_s']:>11,.0f} tokens/s{mfu}{memory}"
            f"{predicted}  loss {each['first_loss']:.4f} to {each['last_loss']:.4f}{beside}"
        )
    lines += [f"  NOT EQUAL: {result['differs']}"] if result["differs"] else []
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: str) -> None:
    """Tokens a second of every contender, a panel a size."""
    from matplotlib.figure import Figure

    done = [result for result in results if "skipped" not in result]
    if not done:
        return
    figure = Figure(figsize=(4.2 * len(done), 3.4), layout="constrained")
    for axes, result in zip(figure.subplots(1, len(done), squeeze=False)[0], done, strict=True):
        raced = [each for each in result["contenders"] if "failed" not in each]
        bars = axes.bar([each["name"] for each in raced], [each["tokens_per_s"] for each in raced], color="#4477aa")
        labels = [f"{100 * each['mfu']:.1f} %" if each["mfu"] is not None else "" for each in raced]
        axes.bar_label(bars, labels)
        axes.set_title(f"{result['size']}, {result['device']}, {result['precision']}", fontsize=9)
        axes.set_ylabel("tokens/s (above the bars: MFU)")
        axes.tick_params(axis="x", labelsize=8)
    figure.savefig(path)


def write(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """What is known so far."""
    if arguments.json:
        text = json.dumps({"command": sys.argv, "cpus": os.cpu_count(), "sizes": results}, indent=2)
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    if arguments.plot:
        plot(results, arguments.plot)


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help=f"of harness.task.SIZES; on GPUs {ON_GPU}, else toy")
    parser.add_argument("--contenders", default=CONTENDERS, help="the first is compared with the others")
    parser.add_argument("--steps", type=COUNT, default=20, help="rounds that count")
    parser.add_argument(
        "--burst", type=numeric(int, at_least=0), default=0, help="steps of a round; 0: 2 on GPUs, else 1"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="bf16 on GPUs, else fp32")
    parser.add_argument(
        "--limit-s",
        type=numeric(float, above=0),
        default=570.0,
        help="seconds for everything; what is left out is said",
    )
    parser.add_argument("--cache", metavar="FOLDER", help="of compiled programs, on GPUs; a new one if left out")
    parser.add_argument("--json", type=output_file, metavar="OUT")
    parser.add_argument("--plot", type=picture_file, metavar="OUT")
    return parser.parse_args()


@reports_mistakes
def main() -> int:
    """Exit status 0; 1 where losses differ or nothing was measured; 2 for a wrong command line."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is on the same GPU
    arguments = arguments_of()
    from harness.task import get_size

    if arguments.sizes is None:
        arguments.sizes = ON_GPU if has_gpu() else "toy"
    names, results = arguments.sizes.split(","), []
    for name in names:
        get_size(name)
    for name in names:
        results.append(measure(name, arguments) if len(names) == 1 else in_own_process(name, arguments))
        write(results, arguments)
        if len(names) == 1 or "skipped" in results[-1]:
            print(table(results[-1]), flush=True)
    return int(any(not_done(result) for result in results))


def not_done(result: dict[str, Any]) -> bool:
    """Whether something is missing that could have been measured, or losses differ."""
    from harness.race import is_failure

    if "skipped" in result or result["differs"]:
        return True
    return any(is_failure(each.get("failed", "")) for each in result["contenders"])


def has_gpu() -> bool:
    """Asked in another process: one that has asked holds on to the GPU."""
    code = "import jax; raise SystemExit(jax.default_backend() != 'gpu')"
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
