"""End training runs at random instants, restart them, and compare: python scripts/bench/kills.py [--kills N]

A small run (dropout, microbatches, zero3, a checkpoint every 2 steps) is killed (kill -9) or asked to stop (SIGTERM)
again and again, in one process of 4 devices and in two of 2. Every second kill is aimed at a save. After each one: all
complete checkpoints are whole, none that was there is lost, the next start goes on from the newest, each step has the
loss of a run that was left alone, to the bit. After each SIGTERM: status 75 everywhere, and the last step saved, unless
there was none yet. Exit status 1 where that does not hold.
"""

import itertools
import json
import multiprocessing
import os
import random
import re
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config.arguments import COUNT, numeric, output_file
from jaxdist.errors import CommandParser, reports_mistakes

YAML = """
model: {layers: 2, width: 16, heads: 2, dropout: 0.1}
data: {path: TEXT, seq_len: 16, global_batch: 16}
mesh: {data: 2, fsdp: 2}
parallel: {strategy: zero3, min_shard_bytes: 0, microbatches: 2}
optimizer: {lr: 1e-2}
train: {steps: STEPS, eval_every: 0, sample_tokens: 0}
checkpoint: {every: 2}
devices: {platform: cpu}
observe: {report: false, console: plain}
"""
LAYOUTS = {"one": 1, "two": 2}  # processes, of 4 devices in all
DEADLINE_S = 300  # of one life
SAVE_S = 0.1  # a save of this model is killed within this time of its beginning
TEMPORARY = "*.orbax-checkpoint-tmp*"


class Broken(Exception):
    """What must hold does not."""


def train_in_child(environ: dict[str, str], config: Path, devices: int, run: Path, output: Path) -> None:
    """What scripts/train.py does; in a fork of a process that has read jax already."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environ)
    import jax

    from jaxdist.config.load import load_config
    from jaxdist.trainer.train import train

    status = train(load_config(config, [f"devices.simulated={devices}"]), run)
    # multiprocessing ends a process without the functions of atexit, by which JAX's processes wait for each other: the
    # first one would go, and the service with it, before the others have left.
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    sys.exit(status)


class Life:
    """One start of a run, until its processes have ended."""

    def __init__(self, folder: Path, run: Path, processes: int, context: Any) -> None:
        self.run, self.outputs = run, [folder / f"out{rank}" for rank in range(processes)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = []
        for rank, output in enumerate(self.outputs):
            output.write_bytes(b"")
            environ = {"XLA_FLAGS": f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"}
            if processes > 1:
                environ |= {
                    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                    "JAX_NUM_PROCESSES": str(processes),
                    "JAX_PROCESS_ID": str(rank),
                }
            self.processes.append(
                context.Process(target=train_in_child, args=(environ, folder / "run.yaml", 4 // processes, run, output))
            )
        self.started = time.monotonic()
        for process in self.processes:
            process.start()

    def alive(self) -> bool:
        """Whether all processes are."""
        if time.monotonic() > self.started + DEADLINE_S:
            self.kill()
            raise Broken(f"not ended after {DEADLINE_S} s\n{self.text()}")
        return all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        """kill -9, all of them."""
        for process in self.processes:
            process.kill()
            process.join()

    def statuses(self) -> list[int | None]:
        """Waits for the end of all processes."""
        while any(process.is_alive() for process in self.processes):
            self.alive()
            time.sleep(0.002)
        return [process.exitcode for process in self.processes]

    def text(self) -> str:
        """What they have printed."""
        return "\n".join(output.read_text(errors="replace") for output in self.outputs)


class Ending(NamedTuple):
    """How a life was ended. aim: "save" or "any" instant. step: the last recorded. saving: whether a save was under
    way. seconds: from the signal to the end."""

    signal: str
    aim: str
    step: int
    saving: bool
    seconds: float


def complete(run: Path) -> list[int]:
    """The steps of complete checkpoints."""
    folder = run / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def is_saving(run: Path) -> bool:
    """Whether a save is under way, or was at the end."""
    return any((run / "checkpoints").glob(TEMPORARY))


def losses(run: Path) -> list[tuple[float, float]]:
    """Of each step, that each has its line, once and in order, and the gradient's norm."""
    from jaxdist.observe import read_metrics

    records = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    if [record["step"] for record in records] != list(range(1, len(records) + 1)):
        raise Broken(f"steps in {run}: {[record['step'] for record in records]}")
    return [(record["loss"], record["grad_norm"]) for record in records]


def wait_for_instant(life: Life, aim: str, longest: float, chance: random.Random) -> None:
    """Returns when it is time, or the run has ended. longest: seconds, that a life takes alone."""
    if aim == "any":
        until = life.started + chance.uniform(0, longest)
        while time.monotonic() < until and life.alive():
            time.sleep(0.002)
        return
    saves, before = chance.randint(1, 6), False
    while saves and life.alive():
        now = is_saving(life.run)
        saves -= now and not before
        before = now
        time.sleep(0.001)
    time.sleep(chance.uniform(0, SAVE_S))


def end(life: Life, name: str, aim: str, chance: random.Random) -> Ending:
    """Send the signal: to one process, chosen at random, and a moment later to the others where it is KILL."""
    first = chance.randrange(len(life.processes))
    begun = time.monotonic()
    if name == "KILL":
        life.processes[first].kill()
        time.sleep(chance.choice([0.0, chance.uniform(0, 0.3)]))
        life.kill()
    else:
        life.processes[first].terminate()
        life.statuses()
    recorded = (life.run / "metrics.jsonl").read_bytes().count(b"\n") if (life.run / "metrics.jsonl").exists() else 0
    return Ending(name, aim, recorded, is_saving(life.run), time.monotonic() - begun)


def check_stopped(life: Life, ending: Ending, resumed: int) -> None:
    """After SIGTERM, that came before the run was done."""
    if any(status != 75 for status in life.statuses()):
        raise Broken(f"statuses {life.statuses()} after SIGTERM\n{life.text()}")
    if "before the first step" in life.text():
        return
    found = re.search(r"stopped after step (\d+);", life.text())
    steps = {ending.step, int(found[1]) if found else -1, (complete(life.run) or [0])[-1]}
    if len(steps) != 1 or ending.step <= resumed:
        raise Broken(f"stopped after {found and found[1]}, recorded {ending.step}, saved {complete(life.run)}")


def check_run(run: Path, wanted: list[tuple[float, float]], before: list[int]) -> None:
    """Complete checkpoints are whole, the newest of `before` or a newer one is there; losses are those wanted."""
    from jaxdist.checkpoint.checksums import verify

    steps = complete(run)
    for step in steps:
        if problems := verify(run / "checkpoints" / str(step)):
            raise Broken(f"checkpoint of step {step}: {problems}")
    if before and (not steps or steps[-1] < before[-1] or len(steps) < min(2, len(before))):
        raise Broken(f"complete checkpoints were {before}, and are {steps}")
    found = losses(run)
    for step, (got, want) in enumerate(zip(found, wanted, strict=False), 1):
        if got != want:
            raise Broken(f"step {step}: loss and gradient norm {got}, alone {want}")


def check_resumed(life: Life, before: list[int]) -> int:
    """The step that a life went on from, which must be the newest of those complete before it; 0 if it did not
    get so far as to say."""
    said = life.text()
    if "damaged" in said:
        raise Broken(said)
    found = re.search(r"^resumed +after step (\d+)", said, re.MULTILINE)
    if found and int(found[1]) != before[-1]:
        raise Broken(f"went on after step {found[1]}, though {before} were there")
    if before and not found and "step " in said:
        raise Broken(f"did not go on, though {before} were there\n{said}")
    return int(found[1]) if found else 0


def start(folder: Path, layout: str, run: Path) -> Life:
    """Start or resume a run, by forks of one process, that saves importing jax each time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jaxdist.trainer.train"])
    return Life(folder, run, LAYOUTS[layout], context)


def one_life(
    life: Life, name: str, aim: str, longest: float, chance: random.Random, before: list[int]
) -> Ending | None:
    """A life ended by a signal, or None if it had ended by then. before: the complete checkpoints that it found."""
    wait_for_instant(life, aim, longest, chance)
    ending = end(life, name, aim, chance) if life.alive() else None
    resumed = check_resumed(life, before)
    if ending is not None and name == "TERM" and any(life.statuses()):
        check_stopped(life, ending, resumed)
    return ending


def campaign(folder: Path, layout: str, plan: list[str], steps: int, chance: random.Random) -> list[Ending]:
    """Runs in one layout, one after the other, ended by the signals of `plan`; the last one is left to its end."""
    folder.mkdir()
    text = " ".join(chance.choice(["def", "return", "x", "y", "0", "1", "+", ":"]) for _ in range(4000))
    (folder / "text.py").write_text(text)
    (folder / "run.yaml").write_text(YAML.replace("TEXT", str(folder / "text.py")).replace("STEPS", str(steps)))
    alone = start(folder, layout, folder / "alone")
    if any(alone.statuses()):
        raise Broken(alone.text())
    longest, wanted = time.monotonic() - alone.started, losses(folder / "alone")
    endings: list[Ending] = []
    aims = {name: itertools.cycle(["save", "any"]) for name in plan}
    runs, done = itertools.count(), True
    while len(endings) < len(plan) or not done:
        if done:
            run = folder / f"run{next(runs)}"
        before = complete(run)
        life = start(folder, layout, run)
        ending = None
        if len(endings) < len(plan):
            name = plan[len(endings)]
            ending = one_life(life, name, next(aims[name]), longest, chance, before)
        statuses = life.statuses()
        done = not any(statuses)
        if ending is None and not done:
            raise Broken(f"statuses {statuses}, though left alone\n{life.text()}")
        check_run(run, wanted, before)
        if done and losses(run) != wanted:
            raise Broken(f"{len(losses(run))} steps, alone {len(wanted)}")
        if ending is not None:
            endings.append(ending)
            print(
                f"{layout}: {len(endings)}/{len(plan)}, {ending.signal} after {time.monotonic() - life.started:.1f} s"
                f" at step {ending.step}{', during a save' * ending.saving}; statuses {statuses}",
                flush=True,
            )
    return endings


@reports_mistakes
def main() -> int:
    """Exit status: 0 all held, 1 something did not, 2 wrong arguments."""
    parser = CommandParser(description="Kill and restart small training runs; compare with one left alone.")
    parser.add_argument(
        "--kills", type=numeric(int, at_least=0), default=200, metavar="N", help="kill -9 this often (default 200)"
    )
    parser.add_argument(
        "--terms", type=numeric(int, at_least=0), default=20, metavar="N", help="SIGTERM this often (default 20)"
    )
    parser.add_argument("--layouts", default="one,two", help="one: a process of 4 devices; two: 2 of 2")
    parser.add_argument("--steps", type=COUNT, default=60, help="of a run (default 60)")
    parser.add_argument("--seed", type=numeric(int, at_least=0), default=0, help="of the instants")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="where to write what happened")
    arguments = parser.parse_args()
    layouts = arguments.layouts.split(",")
    if unknown := set(layouts) - set(LAYOUTS):
        parser.error(f"--layouts: {', '.join(sorted(unknown))}; allowed: {', '.join(LAYOUTS)}")
    endings: dict[str, list[Ending]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, layout in enumerate(layouts):
            chance = random.Random(f"{arguments.seed} {layout}")
            plan = ["KILL"] * len(range(i, arguments.kills, len(layouts)))
            plan += ["TERM"] * len(range(i, arguments.terms, len(layouts)))
            chance.shuffle(plan)
            try:
                endings[layout] = campaign(Path(folder) / layout, layout, plan, arguments.steps, chance)
            except Broken as error:
                print(f"BROKEN, {layout}: {error}", file=sys.stderr)
                return 1
    every = [ending for each in endings.values() for ending in each]
    kills = [ending for ending in every if ending.signal == "KILL"]
    slowest = max((ending.seconds for ending in every if ending.signal == "TERM"), default=0.0)
    print(
        f"{len(kills)} kills, {sum(ending.saving for ending in kills)} of them during a save: 0 complete checkpoints"
        f" lost; {len(every) - len(kills)} SIGTERM, the slowest took {slowest:.1f} s; every loss as if left alone,"
        " to the bit"
    )
    if arguments.json is not None:
        found = {layout: [ending._asdict() for ending in each] for layout, each in endings.items()}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
