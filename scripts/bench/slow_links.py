"""How much faster do several hosts train when their network is slow? Measured on virtual hosts, beside the cost model.

    python scripts/bench/slow_links.py [-n 3] [--ratio 0.6875] [--steps 8] [--json OUT] [section.key=value ...]

First every host trains alone, all at the same time: the seconds of a step without communication. Then the network gets
the rate at which a ring all-reduce of the gradients takes `ratio` times as long (0.275 s to 0.4 s by default), and the
hosts train together, each on as many samples as before, plainly and with each remedy. Speed-up = samples a second of
all hosts together over those of one alone. Needs root and network namespaces (see scripts/virtual_hosts.py).
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config.arguments import COUNT, numeric, output_file
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.lab.network import unavailable
from jaxdist.lab.virtual_hosts import exit_status, run_on_hosts
from jaxdist.observe import measured_on

CONFIG = "configs/quickstart.yaml"
SCRIPT = str(Path(__file__).parents[1] / "train.py")
WARM_UP = 3  # steps that are not counted: compilation, first batches
ALWAYS = (
    "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "parallel.strategy=ddp", "train.eval_every=0", "checkpoint.every=0",
    "devices={platform: cpu, simulated: 1}", "observe.report=false", "observe.log_every=1000", "train.sample_tokens=0",
    "optimizer.warmup_steps=0",
)  # fmt: skip


class Remedy(NamedTuple):
    """A way of training: what it is called, its configuration, and how many batches make one step."""

    name: str
    overrides: tuple[str, ...]
    batches: int = 1


REMEDIES = (
    Remedy("native (gloo)", ()),
    Remedy("ring", ("parallel.grad_sync.algorithm=ring",)),
    Remedy("auto", ("parallel.grad_sync.algorithm=auto", "parallel.grad_sync.link={rate}")),
    Remedy("ring, bf16 wire", ("parallel.grad_sync.algorithm=ring", "parallel.grad_sync.wire_dtype=bfloat16")),
    Remedy("ring, int8 wire", ("parallel.grad_sync.algorithm=ring", "parallel.grad_sync.wire_dtype=int8")),
    Remedy("ring, accumulate x4", ("parallel.grad_sync.algorithm=ring", "parallel.microbatches=4"), batches=4),
    Remedy(
        "ring, bf16 wire, accumulate x4",
        ("parallel.grad_sync.algorithm=ring", "parallel.grad_sync.wire_dtype=bfloat16", "parallel.microbatches=4"),
        batches=4,
    ),
)
PLAIN = REMEDIES[1]


def parameter_count(config: Config) -> int:
    """Parameters of the model, without devices."""
    import math

    import jax

    from jaxdist import registry

    model = registry.load("jaxdist.models", config.model.name, key="model.name")(
        config.model, max_length=config.data.seq_len
    )
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.shapes))


def seconds_per_step(folder: Path, tokens: int) -> float:
    """Median over the counted steps of a run directory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(tokens / line["tokens_per_s"] for line in lines[WARM_UP:])


def train(hosts: int, rate: str, folder: Path, config: list[str], *, together: bool) -> None:
    """Run train.py on all hosts, as one job or as one job each. Raises `UserError` when a host fails."""
    command = [sys.executable, SCRIPT, "--config", CONFIG, "--run-dir", str(folder / "together"), *config]
    if not together:
        alone = "unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID; d=$1; shift; "
        alone += 'exec "$@" --run-dir "$d/alone$HOST_INDEX"'
        command = ["sh", "-c", alone, "sh", str(folder), sys.executable, SCRIPT, "--config", CONFIG, *config]
    results = run_on_hosts(command, hosts=hosts, rate=rate)
    if exit_status(results):
        failed = next(result for result in results if result.status)
        raise UserError(f"host {failed.host} ended with status {failed.status}: {failed.stderr.strip()[-500:]}")


def predicted_seconds(size: int, hosts: int, sync: GradSync, rate: str) -> float:
    """Of the all-reduce of `size` fp32 gradients, by the cost model: bucket by bucket."""
    from jaxdist.collectives import Group, get_algorithm, make_link
    from jaxdist.collectives.compression import encoded_bytes

    name = "ring" if sync.algorithm == "native" else sync.algorithm
    group = replace(Group.of(hosts), link=make_link(rate))
    itemsize = {"bfloat16": 2.0, "int8": encoded_bytes(1 << 20) / (1 << 20)}.get(sync.wire_dtype or "", 4.0)
    bucket = max(1, int(sync.bucket_mb * 2**20) // 4)
    sizes = [min(bucket, size - start) for start in range(0, size, bucket)]
    costs = [get_algorithm(name).cost("all_reduce", length, group).scaled(itemsize) for length in sizes]
    return sum(cost.seconds(make_link(rate)) for cost in costs)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs, with progress on stderr."""
    base = load_config(CONFIG, [*ALWAYS, *arguments.overrides])
    batch, tokens, size = base.data.global_batch, base.data.global_batch * base.data.seq_len, parameter_count(base)
    hosts, steps = arguments.hosts, [f"train.steps={WARM_UP + arguments.steps}"]
    rows: list[dict[str, Any]] = []

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        say(f"{hosts} hosts alone, at the same time")
        alone = Path(scratch) / "alone"
        train(hosts, "none", alone, [*ALWAYS, *arguments.overrides, *steps], together=False)
        compute = statistics.mean(seconds_per_step(alone / f"alone{host}", tokens) for host in range(hosts))
        kbit = round(2 * (hosts - 1) / hosts * size * 4 * 8 / (arguments.ratio * compute) / 1000)
        rate = f"{kbit}kbit"
        say(f"  {compute:.3f} s a step; network: {rate}")
        for i, remedy in enumerate(REMEDIES):
            overrides = [text.replace("{rate}", rate) for text in remedy.overrides]
            overrides += [
                f"data.global_batch={batch * hosts * remedy.batches}",
                f"mesh.data={hosts}",
                f"devices.simulated={hosts}",
            ]
            sync = load_config(CONFIG, [*ALWAYS, *arguments.overrides, *overrides]).parallel.grad_sync
            overrides[-1] = "devices.simulated=1"
            folder = Path(scratch) / str(i)
            train(hosts, rate, folder, [*ALWAYS, *arguments.overrides, *overrides, *steps], together=True)
            seconds = seconds_per_step(folder / "together", tokens * hosts * remedy.batches)
            expected = compute * remedy.batches + predicted_seconds(size, hosts, sync, rate)
            ideal = hosts * remedy.batches * compute
            rows.append(
                {
                    "remedy": remedy.name,
                    "seconds": seconds,
                    "predicted_seconds": expected,
                    "speed_up": ideal / seconds,
                    "predicted_speed_up": ideal / expected,
                }
            )
            say(f"  {remedy.name}: {seconds:.3f} s, {ideal / seconds:.2f} x ({ideal / expected:.2f} x predicted)")
    return {
        **measured_on(),
        "hosts": hosts,
        "rate": rate,
        "ratio": arguments.ratio,
        "compute_seconds": compute,
        "parameters": size,
        "steps": arguments.steps,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """As Markdown."""
    lines = ["| | seconds a step | predicted | speed-up | predicted |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        lines.append(
            f"| {row['remedy']} | {row['seconds']:.3f} | {row['predicted_seconds']:.3f} | {row['speed_up']:.2f} x | "
            f"{row['predicted_speed_up']:.2f} x |"
        )
    return "\n".join(lines)


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for wrong arguments and where there are no virtual hosts."""
    parser = CommandParser(description="Training on virtual hosts with a slow network, against prediction.")
    parser.add_argument("-n", "--hosts", type=numeric(int, at_least=2), default=3)
    parser.add_argument(
        "--ratio", type=numeric(float, above=0), default=0.275 / 0.4, help="communication : computation of the ring"
    )
    parser.add_argument("--steps", type=COUNT, default=8, help="steps that are counted, after 3 that are not")
    parser.add_argument("--json", type=output_file, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    if reason := unavailable():
        raise UserError(reason)
    result = measure(arguments)
    print(f"{result['hosts']} hosts, {result['rate']}, {result['compute_seconds']:.3f} s of computation a step")
    print(table(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
