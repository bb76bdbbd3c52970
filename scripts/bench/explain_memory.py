"""The memory of a step as `explain` estimates it, and in closed form, beside what the compiler takes, for random
configurations.

    python scripts/bench/explain_memory.py [--count 50] [--seed 0] [--json OUT] [--again JSON]

Small GPTs in fp32 on 8 simulated CPU devices: random meshes, strategies, pipelines, remat modes and optimizers. (In
bf16 XLA:CPU keeps wide copies, which other devices do not.) A line for each: compiled peak / estimate, compiled peak /
closed form, and what it is. --again: closed forms anew for the configurations of such a file, compiled peaks from it.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxdist.errors import CommandParser, UserError, reports_mistakes

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
DEVICES = 8
OPTIMIZERS = ("adamw", "adamw", "sgd", "lion", "adafactor", "muon")


def drawn(rng: random.Random) -> list[str]:
    """Overrides of the quickstart: a random configuration, which may not be allowed."""
    pick, mesh = rng.choice, dict.fromkeys(("pipe", "data", "fsdp", "tensor"), 1)
    for _ in range(3):
        mesh[pick(list(mesh))] *= 2
    chosen: dict[str, Any] = {f"mesh.{axis}": size for axis, size in mesh.items()}
    chosen |= {
        "model.style": pick(("gpt2", "llama")),
        "model.layers": pick((4, 8)),
        "model.width": pick((64, 128, 256)),
        "model.vocab": pick((256, 1024, 4096)),
        "data.seq_len": pick((64, 128, 256)),
        "data.global_batch": pick((16, 32, 64)),
        "parallel.strategy": pick(("ddp", "zero1", "zero2", "zero3")),
        "parallel.microbatches": pick((1, 2, 4)),
        "memory.remat": pick(("none", "dots", "full", "sqrt")),
        "optimizer.name": pick(OPTIMIZERS),
        "parallel.prefetch": pick((0, 0, 1)),
    }
    if mesh["pipe"] > 1:
        schedule = pick(("gpipe", "one_f_one_b", "interleaved", "zero_bubble"))
        chosen |= {"parallel.schedule": schedule, "parallel.chunks": 2 if schedule == "interleaved" else 1}
        chosen |= {"parallel.microbatches": pick((4, 8)), "parallel.prefetch": 0}
    return [f"{key}={value}" for key, value in chosen.items()]


def measured(overrides: list[str]) -> dict[str, Any]:
    """Estimate and compiled peak of one configuration. Raises `UserError` if it is not allowed."""
    from jaxdist.config.load import load_config
    from jaxdist.plan.explain import COMPILED_PEAK, ESTIMATED_PEAK, NOT_HERE, explain

    begun = time.perf_counter()
    config = load_config(QUICKSTART, overrides, planned=True)
    found = explain(config).memory  # on a mesh without devices
    del found[NOT_HERE]  # which is made of what is measured here
    found[COMPILED_PEAK] = explain(config, compiled=True).memory[COMPILED_PEAK]
    ratio = found[COMPILED_PEAK] / found[ESTIMATED_PEAK]
    return {"overrides": " ".join(overrides), "memory": found, "ratio": ratio, "seconds": time.perf_counter() - begun}


def summary(ratios: list[float]) -> dict[str, Any]:
    """Of quotients compiled / estimate: the spread, and how many are within 5 %."""
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    near = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
    spread = {"least": min(ratios), "tenth": tenths[0], "median": statistics.median(ratios), "ninetieth": tenths[-1]}
    return {"configurations": len(ratios), "within 5 %": near, **spread, "most": max(ratios)}


def closed(found: dict[str, Any], known: Any) -> dict[str, Any]:
    """`found`, with the closed form of its configuration. known: a `jaxdist.plan.closed.leaves.Known`."""
    from jaxdist.config.load import load_config
    from jaxdist.plan.closed.memory.peak import PEAK, memory_of
    from jaxdist.plan.explain import COMPILED_PEAK

    config = load_config(QUICKSTART, found["overrides"].split(), planned=True)
    memory = memory_of(config, known)
    begun = time.process_time()
    memory_of(config, known)
    again = time.process_time() - begun
    ratio = found["memory"][COMPILED_PEAK] / memory[PEAK]
    return found | {"closed": memory, "closed_ratio": ratio, "closed_seconds": again}


def configurations(count: int, seed: int, again: Path | None) -> Iterator[dict[str, Any]]:
    """Random configurations with their estimates and compiled peaks, or those of a file."""
    if again:
        yield from json.loads(again.read_text())["configurations"]
        return
    rng, found = random.Random(seed), 0
    while found < count:
        try:
            yield measured(drawn(rng))
            found += 1
        except UserError:  # such a one does not exist: draw again
            continue


@reports_mistakes
def main() -> int:
    """Print a line for each configuration, and the summary."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", type=Path)
    arguments = parser.parse_args()
    import jax

    from jaxdist.plan.closed.leaves import Known

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    found, known = list[dict[str, Any]](), Known()
    for each in configurations(arguments.count, arguments.seed, arguments.again):
        found.append(each := closed(each, known))
        ratios = f"{each['ratio']:.3f} {each['closed_ratio']:.3f}"
        print(f"{ratios} ({each['seconds']:.0f} s)  {each['overrides']}", flush=True)
    sums = {"summary": summary([each["ratio"] for each in found])}
    sums["summary, closed"] = summary([each["closed_ratio"] for each in found])
    print(json.dumps(sums))
    if arguments.json:
        command = f"scripts/bench/explain_memory.py --count {arguments.count} --seed {arguments.seed}"
        head: dict[str, Any] = {"command": command, "date": time.strftime("%Y-%m-%d")}
        head |= {"jax": jax.__version__, "jaxlib": version("jaxlib"), "python": platform.python_version()}
        if arguments.again:
            old = json.loads(arguments.again.read_text())
            head |= {name: old[name] for name in head} | {"closed forms": time.strftime("%Y-%m-%d")}
        arguments.json.write_text(json.dumps(head | sums | {"configurations": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
