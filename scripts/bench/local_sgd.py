"""What does local SGD cost in held-out loss, and what does it save on a slow network? Two measurements:

    python scripts/bench/local_sgd.py losses [--seeds 3] [--every 1 10 50] [--rows 32] [--json OUT] [section.key=value]
    python scripts/bench/local_sgd.py hosts [-n 3] [--rate KBIT] [--json OUT] [section.key=value]

losses: the quickstart as four replicas that meet every H steps, by each outer optimizer, beside the same steps of ddp
and beside one replica alone, which learns from its own rows and never meets another. With --json each run is written as
it ends, and one that is there already is not repeated.
hosts: the same model on virtual hosts (root and network namespaces, see scripts/virtual_hosts.py): seconds a step of
one host alone, of ddp with a ring, and of local SGD with H = 10, beside computation + ring / H. Without a rate, it is
the one at which the ring takes 0.183 / 0.42 of the computation: the textbook's case of three hosts (docs/costs.md).
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxdist.config.arguments import COUNT, numeric, output_file
from jaxdist.config.shipped import find_config
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.lab.network import unavailable
from jaxdist.lab.virtual_hosts import exit_status, run_on_hosts
from jaxdist.observe import measured_on

CONFIG = find_config("quickstart")
TRAIN = [sys.executable, "-m", "jaxdist.cli.main", "train", "--config", CONFIG]
QUIET = ("observe.report=false", "train.sample_tokens=0", "checkpoint.every=0", "observe.log_every=1000")
REPLICAS, ROWS = 4, 32
EVALUATED = 1024  # windows of held-out text, about
RATIO = 0.183 / 0.42  # of the ring of three hosts to the computation of a host in docs/costs.md
AVERAGING = "sgd, lr 1"
OUTER = {
    AVERAGING: "{name: sgd, lr: 1.0, momentum: 0.0}",
    "nesterov, lr 1, momentum 0.3": "{name: nesterov, lr: 1.0, momentum: 0.3}",
    "nesterov, lr 1, momentum 0.5": "{name: nesterov, lr: 1.0, momentum: 0.5}",
    "nesterov, lr 0.7, momentum 0.9": "{name: nesterov, lr: 0.7, momentum: 0.9}",
}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def train(overrides: list[str]) -> dict[str, Any]:
    """The last line of metrics of a run. Raises `UserError` where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run([*TRAIN, "--run-dir", folder, *QUIET, *overrides], capture_output=True, text=True)
        if result.returncode:
            raise UserError(f"a run ended with status {result.returncode}: {result.stderr.strip()[-500:]}")
        return lines_of(Path(folder))[-1]


def cases(every: list[int], outers: list[str], rows: int) -> dict[str, list[str]]:
    """{name of a row: its overrides}. All are evaluated once, after the last step. rows: of a batch of all replicas."""
    common = ["mesh.fsdp=1", "mesh.tensor=1", "parallel.strategy=ddp", f"train.eval_every={math.lcm(*every) * 100}"]
    # Evaluation batches have as many rows as those of training: so all are evaluated on the same windows.
    batches = max(1, EVALUATED // rows)
    replicas = [*common, f"mesh.data={REPLICAS}", f"data.global_batch={rows}", f"train.eval_batches={batches}"]
    alone = ["mesh.data=1", f"data.global_batch={rows // REPLICAS}", f"train.eval_batches={batches * REPLICAS}"]
    found = {"ddp": replicas, "one replica alone": [*common, *alone]}
    for H in every:
        for name in outers:
            found[f"H={H}, {name}"] = [*replicas, f"parallel.local.every={H}", f"parallel.local.outer={OUTER[name]}"]
    return found


def losses(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs, with progress on stderr."""
    out, runs = Path(arguments.json) if arguments.json else None, dict[str, dict[str, float]]()
    if out is not None and out.exists():
        before = json.loads(out.read_text(encoding="utf-8"))
        for name, now in (("rows", arguments.rows), ("overrides", arguments.overrides)):
            if before.get(name) != now:
                raise UserError(f"--json: {out} has runs with {name} {before.get(name)}, not {now}; name another file")
        runs = before["losses"]
    outers = [name for name in OUTER if not arguments.outer or any(part in name for part in arguments.outer)]
    result: dict[str, Any] = {}
    for seed in range(arguments.seeds):
        for name, overrides in cases(arguments.every, outers, arguments.rows).items():
            if str(seed) not in (known := runs.setdefault(name, {})):
                known[str(seed)] = train([*overrides, f"train.seed={seed}", *arguments.overrides])["eval/loss"]
                print(f"seed {seed}, {name}: {known[str(seed)]:.4f}", file=sys.stderr, flush=True)
            result = {
                **measured_on(),
                "overrides": arguments.overrides,
                "replicas": REPLICAS,
                "rows": arguments.rows,
                "losses": runs,
            }
            if out is not None:
                out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def losses_table(result: dict[str, Any]) -> str:
    """As Markdown: means over seeds, beside ddp's with the same seeds."""
    lines = ["| | held-out loss | beside ddp | least, most |", "|---|---|---|---|"]
    base = result["losses"]["ddp"]
    for name, found in result["losses"].items():
        more = [100 * (found[seed] / base[seed] - 1) for seed in found if seed in base]
        spread = f"{min(more):+.2f} %, {max(more):+.2f} %"
        lines.append(f"| {name} | {statistics.mean(found.values()):.4f} | {statistics.mean(more):+.2f} % | {spread} |")
    return "\n".join(lines)


def on_hosts(count: int, rate: str, overrides: list[str], *, every: int = 0, alone: bool = False) -> float:
    """Seconds a step on virtual hosts: see `seconds_a_step`."""
    given = [*QUIET, "devices={platform: cpu, simulated: 1}", "train.eval_every=0", "optimizer.warmup_steps=0"]
    given += ["mesh.fsdp=1", "mesh.tensor=1", "parallel.strategy=ddp", *overrides]
    if every:
        given += [f"parallel.local.every={every}", "parallel.local.algorithm=ring"]
    with tempfile.TemporaryDirectory() as scratch:
        if alone:
            run = "unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID; d=$1; shift; "
            run += 'exec "$@" --run-dir "$d/$HOST_INDEX"'
            command = ["sh", "-c", run, "sh", scratch, *TRAIN, *given, "mesh.data=1", f"data.global_batch={ROWS}"]
        else:
            command = [
                *TRAIN,
                "--run-dir",
                f"{scratch}/0",
                *given,
                f"mesh.data={count}",
                "parallel.grad_sync.algorithm=ring",
            ]
            command.append(f"data.global_batch={ROWS * count}")
        results = run_on_hosts(command, hosts=count, rate=rate)
        if exit_status(results):
            failed = next(result for result in results if result.status)
            raise UserError(f"host {failed.host} ended with status {failed.status}: {failed.stderr.strip()[-500:]}")
        times = [[line["time"] for line in lines_of(folder)] for folder in sorted(Path(scratch).iterdir())]
    return seconds_a_step(times, every or 3)


def seconds_a_step(times: list[list[float]], first: int) -> float:
    """The mean over runs, from when all have made `first` steps (they have compiled) to when the first of them ends.

    Runs that do not wait for each other begin and end at different times, and all share the processor.
    """
    begin, end = max(run[first] for run in times), min(run[-1] for run in times)
    found = []
    for run in times:
        inside = [time for time in run if begin <= time <= end]
        steps = (len(inside) - 1) // first * first  # whole rounds
        if steps < first:
            raise UserError(f"--steps: only {len(inside)} steps of a run lie beside all others; allowed: more steps")
        found.append((inside[steps] - inside[0]) / steps)
    return statistics.mean(found)


def hosts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step of each way, and what the ring of one all-reduce takes by its formula."""
    if reason := unavailable():
        raise UserError(reason)
    count, steps, every = arguments.hosts, [*arguments.overrides], 10
    size = parameters(arguments.overrides)
    sent = 2 * (count - 1) / count * size * 4 * 8  # bits

    def computation() -> float:
        return on_hosts(count, "none", [*steps, f"train.steps={arguments.steps}"], alone=True)

    first = computation()
    kbit = arguments.rate or round(sent / (RATIO * first) / 1000)
    rate, ring = f"{kbit}kbit", sent / (kbit * 1000)
    print(f"computation {first:.3f} s, ring {ring:.3f} s at {rate}", file=sys.stderr, flush=True)
    ddp = on_hosts(count, rate, [*steps, f"train.steps={arguments.steps}"])
    print(f"ddp {ddp:.3f} s", file=sys.stderr, flush=True)
    # Whole rounds, or the outer step that ends a run would be counted beside too few steps.
    local = on_hosts(count, rate, [*steps, f"train.steps={every * arguments.rounds}"], every=every)
    again = computation()  # others may use the machine: before and after
    alone, spread = (first + again) / 2, abs(again - first) / (first + again)
    expected = alone + ring / every
    return {
        **measured_on(),
        "hosts": count,
        "rate": rate,
        "parameters": size,
        "overrides": arguments.overrides,
        "computation": {"before": first, "after": again, "spread": spread},
        "seconds": {"alone": alone, "ring": ring, "ddp": ddp, "H=10": local},
        "expected": {"ddp": alone + ring, "H=10": expected},
        "speed_up": {"ddp": count * alone / ddp, "H=10": count * alone / local},
    }


def parameters(overrides: list[str]) -> int:
    """Parameters of the model, without devices."""
    from jaxdist.build import assemble
    from jaxdist.config.load import load_config
    from jaxdist.mesh import abstract_mesh

    config = load_config(CONFIG, ["mesh={}", *overrides])
    return int(assemble(config, abstract_mesh()).model.parameters)


def hosts_table(result: dict[str, Any]) -> str:
    """As Markdown."""
    lines = ["| | seconds a step | computation + its share of the ring | speed-up |", "|---|---|---|---|"]
    for name, expected in result["expected"].items():
        seconds, ratio = result["seconds"][name], result["speed_up"][name]
        lines.append(f"| {name} | {seconds:.3f} | {expected:.3f} ({seconds / expected - 1:+.1%}) | {ratio:.2f} x |")
    return "\n".join(lines)


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for wrong arguments and where there are no virtual hosts."""
    parser = CommandParser(description="Local SGD beside ddp: losses, and seconds on a slow network.")
    parser.add_argument("what", choices=("losses", "hosts"))
    parser.add_argument("--seeds", type=COUNT, default=3)
    parser.add_argument("--every", type=COUNT, nargs="+", default=[1, 10, 50], metavar="H")
    parser.add_argument("--outer", nargs="+", metavar="NAME", help="rows whose outer optimizer has this in its name")
    parser.add_argument(
        "--rows", type=COUNT, default=ROWS, help="of a batch, which four replicas share; a multiple of 4"
    )
    parser.add_argument("-n", "--hosts", type=numeric(int, at_least=2), default=3)
    parser.add_argument("--rate", type=COUNT, help="of each host's link, in kbit")
    parser.add_argument(
        "--steps", type=COUNT, default=41, help="of a host alone and of ddp; the first 3 are not counted"
    )
    parser.add_argument(
        "--rounds", type=numeric(int, at_least=3), default=12, help="of local SGD on hosts; two of them are not counted"
    )
    parser.add_argument("--json", type=output_file, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    words = sys.argv[1:]
    settings = [word for word in words if "=" in word and not word.startswith("-")]  # else --every would take them
    arguments = parser.parse_intermixed_args([word for word in words if word not in settings])
    arguments.overrides += settings
    if arguments.rows < REPLICAS or arguments.rows % REPLICAS:
        raise UserError(
            f"--rows: {arguments.rows} rows are not shared evenly by {REPLICAS} replicas; allowed: 4, 8, ..."
        )
    result = losses(arguments) if arguments.what == "losses" else hosts(arguments)
    print(losses_table(result) if arguments.what == "losses" else hosts_table(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
