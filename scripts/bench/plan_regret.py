"""How good is the planner's choice? Layouts timed on virtual hosts with slow links, beside what a calibration predicts.

    python scripts/bench/plan_regret.py [--rates 25mbit 100mbit 1gbit] [--rounds 5] --json OUT

On each rate one job calibrates, then compiles all layouts and times them by turns. The choice is that of the planner
among these layouts, by the calibration of the same job; regret is how much longer its measured step is than that of the
fastest. Needs root and network namespaces (scripts/virtual_hosts.py). There are two hosts, each with a core of its own.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config.arguments import COUNT, output_file
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.lab.network import unavailable
from jaxdist.lab.virtual_hosts import exit_status, run_on_hosts
from jaxdist.observe import measured_on

ROOT = Path(__file__).parents[2]
MODEL = (
    "model.layers=4",
    "model.width=128",
    "model.heads=4",
    "data.seq_len=64",
    "data.global_batch=32",
    "mesh={data: 1, fsdp: 1, tensor: 1}",
    "optimizer.name=adamw",
    "devices={platform: cpu, simulated: 1}",
    "parallel.min_shard_bytes=1024",
)
HOSTS = 2
BURST = 262144  # bytes of the shaped links (jaxdist.lab.network)
PIPE = ("mesh={pipe: 2}", "parallel.strategy=ddp")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "ddp": ("mesh={data: 2}", "parallel.strategy=ddp"),
    "ddp dots": ("mesh={data: 2}", "parallel.strategy=ddp", "memory.remat=dots"),
    "ddp full": ("mesh={data: 2}", "parallel.strategy=ddp", "memory.remat=full"),
    "ddp m4": ("mesh={data: 2}", "parallel.strategy=ddp", "parallel.microbatches=4"),
    "zero1": ("mesh={fsdp: 2}", "parallel.strategy=zero1"),
    "zero2 m2": ("mesh={fsdp: 2}", "parallel.strategy=zero2", "parallel.microbatches=2"),
    "zero3": ("mesh={fsdp: 2}", "parallel.strategy=zero3"),
    "zero3 full": ("mesh={fsdp: 2}", "parallel.strategy=zero3", "memory.remat=full"),
    "tensor": ("mesh={tensor: 2}", "parallel.strategy=ddp"),
    "tensor, sequence": ("mesh={tensor: 2}", "parallel.strategy=ddp", "parallel.sequence_parallel=true"),
    "pipe m4": (*PIPE, "parallel.schedule=one_f_one_b", "parallel.microbatches=4"),
    "pipe m8": (*PIPE, "parallel.schedule=one_f_one_b", "parallel.microbatches=8"),
    "pipe m4 zero bubble": (*PIPE, "parallel.schedule=zero_bubble", "parallel.microbatches=4"),
    "pipe m4 interleaved": (*PIPE, "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.microbatches=4"),
}


def config_of(name: str) -> Config:
    """The configuration of a layout."""
    return load_config(ROOT / "configs" / "quickstart.yaml", [*MODEL, *LAYOUTS[name]], planned=True)


def job(folder: Path, rounds: int, rate: str) -> int:
    """The work of one host: calibrate, then time all layouts by turns."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["HOST_INDEX"])]})  # before jax starts its threads
    import jax

    from jaxdist.build import assemble, mesh_of_config
    from jaxdist.init import init_state
    from jaxdist.plan.calibration.file import write_calibration
    from jaxdist.plan.calibration.measure import calibrate
    from jaxdist.plan.calibration.repeated import by_turns
    from jaxdist.plan.machines import rate_of_link
    from jaxdist.runtime.start import start
    from jaxdist.trainer.batches.load import load_data, loader_of

    config = start(config_of("ddp"))
    first = jax.process_index() == 0

    def say(text: str) -> None:
        if first:
            print(text, file=sys.stderr, flush=True)

    found = calibrate(
        config, declared=rate_of_link(rate, key="--rates"), burst=BURST, measured=measured_on(), progress=say
    )
    if first:
        write_calibration(found, folder / f"{rate}.json")
    programs, losses = {}, {}
    for name in LAYOUTS:
        began = time.perf_counter()
        config = config_of(name)
        mesh = mesh_of_config(config)
        parts = assemble(config, mesh)
        batch = loader_of(config, load_data(config), mesh).batch(0)
        held = [init_state(parts.model, parts.optimizer, mesh, parts.options)]
        step = parts.step.lower(held[0], batch).compile()

        def run(held: list[Any] = held, step: Any = step, batch: Any = batch) -> Any:
            held[0], metrics = step(held[0], batch)
            return metrics["loss"]

        losses[name] = float(run())
        programs[name] = run
        say(f"{name}: compiled in {time.perf_counter() - began:.1f} s, first loss {losses[name]:.6f}")
    timed = by_turns(programs, repetitions=rounds)
    if first:
        figures = {name: {**each._asdict(), "first_loss": losses[name]} for name, each in timed.items()}
        (folder / f"{rate}.measured.json").write_text(json.dumps(figures))
    return 0


def compared(folder: Path, rate: str) -> dict[str, Any]:
    """Predictions beside measurements on one rate."""
    from jaxdist.plan.calibration.file import read_calibration
    from jaxdist.plan.closed.leaves import Known
    from jaxdist.plan.machines import rate_of_link
    from jaxdist.plan.search.choose import predicted, tie_of
    from jaxdist.plan.search.cluster import calibrated_cluster
    from jaxdist.plan.search.space import layout_of

    measured = json.loads((folder / f"{rate}.measured.json").read_text())
    found = read_calibration(folder / f"{rate}.json")
    cluster, known, candidates = calibrated_cluster(found), Known(), {}
    for name in LAYOUTS:
        config = config_of(name)
        candidates[name] = predicted(layout_of(config), config, cluster, known)
    by_time = sorted(candidates.values(), key=lambda each: each.seconds.total)
    choice = next(name for name, each in candidates.items() if each == tie_of(by_time, cluster.spread).winner)
    times = {name: each["median"] for name, each in measured.items()}
    fastest = min(times, key=times.__getitem__)
    guesses = {name: each.seconds.total for name, each in candidates.items()}
    errors = [abs(guesses[name] / times[name] - 1) for name in times]
    assert found.between is not None
    return {
        "rate": rate,
        "link_measured_over_declared": found.between.bytes_per_s / rate_of_link(rate, key="--rates"),
        "spread": cluster.spread,
        "choice": choice,
        "fastest": fastest,
        "regret": times[choice] / times[fastest] - 1,
        "rank_of_choice": sorted(times, key=times.__getitem__).index(choice) + 1,
        "spearman": spearman([guesses[name] for name in times], list(times.values())),
        "median_error": statistics.median(errors),
        "layouts": {
            name: {"measured": measured[name], "predicted": guesses[name], "parts": candidates[name].seconds.parts()}
            for name in times
        },
        "calibration": json.loads((folder / f"{rate}.json").read_text()),
    }


def spearman(one: list[float], other: list[float]) -> float:
    """Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(each)).astype(float) for each in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


@reports_mistakes
def main() -> int:
    """Measure, print a table, and write the figures."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["25mbit", "100mbit", "1gbit"])
    parser.add_argument("--rounds", type=COUNT, default=5)
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job is not None:
        return job(given.job, given.rounds, given.rates[0])
    if (problem := unavailable()) is not None:
        raise UserError(f"virtual hosts: {problem}")
    if (cores := len(os.sched_getaffinity(0))) < HOSTS:
        raise UserError(f"each of {HOSTS} hosts needs a core, and there are {cores} here; use a larger machine")
    load, results = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for rate in given.rates:
            command = [sys.executable, __file__, "--job", str(folder), "--rounds", str(given.rounds), "--rates", rate]
            ended = run_on_hosts(command, hosts=HOSTS, rate=rate)
            if exit_status(ended):
                failed = [f"host {each.host} ended with status {each.status}: {each.stderr[-2000:]}" for each in ended]
                raise UserError("\n".join(failed))
            results.append(found := compared(folder, rate))
            if given.json:  # after each rate: a later one may fail
                whole = {"measured": measured_on(), "load_before": load, "rates": results}
                given.json.write_text(json.dumps(whole, indent=1) + "\n")
            print(
                f"{rate}: choice {found['choice']}, regret {found['regret']:.1%}, rank {found['rank_of_choice']} of"
                f" {len(LAYOUTS)}, Spearman {found['spearman']:.2f}, median error {found['median_error']:.0%}, link"
                f" {found['link_measured_over_declared']:.2f} of the declared rate, spread {found['spread']:.1%}"
            )
            for name, each in sorted(found["layouts"].items(), key=lambda item: item[1]["measured"]["median"]):
                seconds = each["measured"]["median"]
                print(f"  {name:24} {seconds:.3f} s, predicted {each['predicted']:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
