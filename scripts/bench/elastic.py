"""Convergence at staleness 0 to 8, beside synchronous training by as many workers.

    python scripts/bench/elastic.py [--seeds 3] [--json OUT] [--svg OUT] [section.key=value ...]

In one process, without Ray: workers take turns, so that every push of s + 1 workers has staleness s, and go through
the rule, the servers and the jobs of `jaxdist elastic`. Once each push counts in full, and once with the outer learning
rate divided by the number of workers. Synchronous is the same with bound 0: the s + 1 workers push together, and the
mean of what they moved is a version. All rows do the same number of rounds in all, so the same work.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from datetime import date
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config.arguments import COUNT, output_file, picture_file
from jaxdist.config.load import load_config, to_yaml
from jaxdist.elastic.outer import Outer
from jaxdist.elastic.rule import BoundedStaleness
from jaxdist.elastic.server import Server
from jaxdist.elastic.worker import Worker
from jaxdist.errors import CommandParser, reports_mistakes

MODEL = """
model: {name: gpt, style: gpt2, layers: 1, width: 32, heads: 2}
data: {source: text, path: stdlib, seq_len: 32, global_batch: 16}
devices: {platform: cpu, simulated: 1}
train: {eval_every: 1, eval_batches: 16}
"""
STALENESS = (0, 1, 2, 4, 8)
FULL, DIVIDED, SYNCHRONOUS = KINDS = "asynchronous", "asynchronous, outer lr / (s + 1)", "synchronous"


class Case(NamedTuple):
    """A use of the mechanism: the optimizer inside, steps of a round, the rule outside, rounds in all."""

    optimizer: str
    period: int
    outer: Outer
    rounds: int


CASES = {
    "parameter server: SGD, period 1": Case("{name: sgd, lr: 0.3, momentum: 0.0}", 1, Outer("sgd", 1.0, 0.0), 450),
    "DiLoCo: AdamW, period 10, Nesterov": Case(
        "{name: adamw, lr: 3e-3, schedule: constant, warmup_steps: 0}", 10, Outer("nesterov", 0.7, 0.3), 90
    ),
}


def train(fresh: Worker, case: Case, *, workers: int, bound: int) -> tuple[np.ndarray, int]:
    """The parameters after the case's rounds, and the largest staleness."""
    events: list[dict[str, Any]] = []
    rule = BoundedStaleness(bound=bound, patience=1e9, log=events.append)
    server, names = Server(0, case.outer, None), [f"w{k}" for k in range(workers)]
    server.begin(fresh.numbers())
    jobs = {name: fresh.twin(name) for name in names}
    pulled = {name: (rule.pull(name, 0.0), server.read())[1] for name in names}
    for name in cycle(names):
        done = jobs[name].work(pulled[name])
        rule.push(name, done.clock, done.loss, 0.0)
        assert server.stage(name, done.moved) == "", "not finite: the learning rate is too large"
        while group := rule.commit():
            server.commit([push.worker for push in group])
            for push in group:
                rule.pull(push.worker, 0.0)
                pulled[push.worker] = server.read()
        if rule.pushes >= case.rounds:
            break
    stale = [push["staleness"] for event in events if event["event"] == "commit" for push in event["pushes"]]
    return server.read(), max(stale)


def measure(row: dict[str, Any], fresh: Worker, judge: Worker) -> None:
    """Add the held-out losses of a seed to the row of a case and a staleness."""
    case, staleness = CASES[row["case"]], row["staleness"]
    for kind, bound, divisor in ((FULL, staleness, 1), (DIVIDED, staleness, staleness + 1), (SYNCHRONOUS, 0, 1)):
        if kind == FULL or staleness:  # or else all are the same worker alone
            slower = case._replace(outer=case.outer._replace(lr=case.outer.lr / divisor))
            flat, seen = train(fresh, slower, workers=staleness + 1, bound=bound)
            assert seen == bound, (seen, row)
        row[kind].append(judge.evaluate(flat))
    print(f"{row['case']}, staleness {staleness}: {[round(row[kind][-1], 4) for kind in KINDS]}", flush=True)


def first_worker(case: Case, seed: int, overrides: list[str]) -> Worker:
    """A worker of a case, at its beginning."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(f"{MODEL}optimizer: {case.optimizer}\n", encoding="utf-8")
        text = to_yaml(load_config(path, [f"train.seed={seed}", *overrides]))
    worker = Worker("w0", text, case.period)
    worker.first()
    return worker


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The losses against staleness: a panel for each case, the mean of the seeds with their range."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxdist"
    import matplotlib.pyplot as plt

    titles = list(dict.fromkeys(row["case"] for row in rows))
    figure, axes = plt.subplots(1, len(titles), figsize=(4.6 * len(titles), 3.4), squeeze=False)
    for panel, title in zip(axes[0], titles, strict=True):
        own = [row for row in rows if row["case"] == title]
        xs = [row["staleness"] for row in own]
        for kind, mark in zip(KINDS, ("o-", "^-", "s--"), strict=True):
            means = [statistics.mean(row[kind]) for row in own]
            spread = [[m - min(r[kind]) for m, r in zip(means, own, strict=True)]]
            spread.append([max(r[kind]) - m for m, r in zip(means, own, strict=True)])
            panel.errorbar(xs, means, yerr=spread, fmt=mark, capsize=3, label=kind)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("staleness s, by s + 1 workers")
        panel.set_ylabel("held-out loss, nats a byte")
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for wrong arguments."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=COUNT, default=3)
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--svg", type=picture_file)
    parser.add_argument("--from", type=Path, dest="given", help="draw these results, and measure nothing")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    import jax

    if arguments.given is not None:
        draw(json.loads(arguments.given.read_text(encoding="utf-8"))["rows"], arguments.svg)
        return 0
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, jax {jax.__version__}"
    )
    rows: list[dict[str, Any]] = [
        {"case": title, "staleness": s, **{kind: [] for kind in KINDS}} for title in CASES for s in STALENESS
    ]
    cases = {title: case._asdict() | {"outer": case.outer._asdict()} for title, case in CASES.items()}
    for seed in range(arguments.seeds):
        for title, case in CASES.items():
            fresh = first_worker(case, seed, arguments.overrides)
            judge = fresh.twin("w0")
            for row in rows:
                if row["case"] == title:
                    measure(row, fresh, judge)
        if arguments.json:
            result = {"machine": machine, "seeds": seed + 1, "date": f"{date.today()}", "model": MODEL, "cases": cases}
            result["command"] = "python scripts/bench/elastic.py"
            arguments.json.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"| case | staleness | {' | '.join(KINDS)} |\n|---|---|---|---|---|")
    for row in rows:
        means = " | ".join(f"{statistics.mean(row[kind]):.3f}" for kind in KINDS)
        print(f"| {row['case']} | {row['staleness']} | {means} |")
    if arguments.svg:
        draw(rows, arguments.svg)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
