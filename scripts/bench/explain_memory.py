"""The memory of a step as `explain` estimates it, and in closed form, beside what the compiler takes, for random
configurations.

    python scripts/bench/explain_memory.py [--count 50] [--seed 0] [--gpu h200] [--json OUT] [--again JSON]

Small GPTs in fp32 on 8 simulated CPU devices: random meshes, strategies, pipelines, remat modes and optimizers. (In
bf16 XLA:CPU keeps wide copies, which other devices do not.) A line for each: compiled peak / estimate, compiled peak /
closed form, and what it is. --gpu: GPTs of 0.1 to 1 billion parameters, each in a random one of the layouts that
`jaxdist plan` tries on 8 GPUs, compiled ahead of time (jaxdist[aot]); those that do not fit are drawn again. --again:
closed forms anew for the configurations of such a file, compiled peaks from it.
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

from jaxdist.config.arguments import COUNT, numeric, output_file
from jaxdist.errors import CommandParser, UserError, reports_mistakes

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART, FOR_GPUS = CONFIGS / "quickstart.yaml", CONFIGS / "gpt_355m_h200.yaml"
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


def drawn_for_gpus(rng: random.Random) -> list[str]:
    """Overrides of a configuration for GPUs: a random model, in a random layout of those that the planner tries."""
    from jaxdist.config.load import load_config
    from jaxdist.plan.changes import typed
    from jaxdist.plan.search.space import layouts

    pick = rng.choice
    width = pick((768, 1024, 2048))
    model: dict[str, Any] = {
        "model.style": pick(("gpt2", "llama")),
        "model.layers": pick((8, 16)),
        "model.width": width,
        "model.heads": width // 64,
        "model.vocab": pick((32000, 50304)),
        "data.seq_len": pick((512, 1024, 2048)),
        "data.global_batch": pick((32, 64)),
        "optimizer.name": pick(("adamw", "adamw", "sgd", "lion")),
        "precision.policy": pick(("bf16", "bf16", "fp32")),
        "precision.reduce_dtype": "null",
    }
    overrides = [f"{key}={value}" for key, value in model.items()]
    config = load_config(FOR_GPUS, overrides, planned=True)
    family = pick(list(layouts(config, DEVICES, per_host=DEVICES, halves=False)))
    layout = {key: "null" if value is None else value for key, value in pick(family).values.items()}
    return overrides + [typed(key, value) for key, value in layout.items() if value != ()]


def loaded(overrides: list[str], gpu: str | None) -> Any:
    """The configuration of these overrides. Raises `UserError` if it is not allowed."""
    from jaxdist.config.load import load_config
    from jaxdist.plan.search.space import with_prefetch

    if not gpu:
        return load_config(QUICKSTART, overrides, planned=True)
    return with_prefetch(load_config(FOR_GPUS, overrides, planned=True), gpu=True)


def compiled_for(config: Any, gpu: str) -> int:
    """The peak of a step that is compiled ahead of time. Raises `UserError` if it is more than the memory."""
    from jaxdist.plan.compiled import ahead_of_time, hardware
    from jaxdist.runtime.compiler import compiling_for

    kind = hardware.get_gpu(gpu)
    description = ahead_of_time.target_config(kind, ahead_of_time.plugin_library())
    mesh = ahead_of_time.mesh_of(config, description, hosts=1, gpus_per_host=DEVICES)
    with compiling_for(config, "gpu"):
        planned = ahead_of_time.compile_ahead(config, kind, mesh, (kind.rates, kind.realistic))
    if planned.footprint.peak > kind.usable:
        raise UserError(f"it takes {planned.footprint.peak:,} bytes")
    return planned.footprint.peak


def measured(overrides: list[str], gpu: str | None) -> dict[str, Any]:
    """Estimate and compiled peak of one configuration. Raises `UserError` if it is not allowed, or does not fit."""
    from jaxdist.plan.explain import COMPILED_PEAK, ESTIMATED_PEAK, NOT_HERE, explain

    begun = time.perf_counter()
    config = loaded(overrides, gpu)
    found = explain(config).memory  # on a mesh without devices
    del found[NOT_HERE]  # which is made of what is measured here
    found[COMPILED_PEAK] = compiled_for(config, gpu) if gpu else explain(config, compiled=True).memory[COMPILED_PEAK]
    ratio = found[COMPILED_PEAK] / found[ESTIMATED_PEAK]
    return {"overrides": " ".join(overrides), "memory": found, "ratio": ratio, "seconds": time.perf_counter() - begun}


def summary(ratios: list[float]) -> dict[str, Any]:
    """Of quotients compiled / estimate: the spread, and how many are within 5 %."""
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    near = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
    spread = {"least": min(ratios), "tenth": tenths[0], "median": statistics.median(ratios), "ninetieth": tenths[-1]}
    return {"configurations": len(ratios), "within 5 %": near, **spread, "most": max(ratios)}


def closed(found: dict[str, Any], known: Any, gpu: str | None) -> dict[str, Any]:
    """`found`, with the closed form of its configuration. known: a `jaxdist.plan.closed.leaves.Known`."""
    from jaxdist.plan.closed.memory.peak import PEAK, memory_of
    from jaxdist.plan.explain import COMPILED_PEAK

    config = loaded(found["overrides"].split(), gpu)
    memory = memory_of(config, known)
    begun = time.process_time()
    memory_of(config, known)
    again = time.process_time() - begun
    ratio = found["memory"][COMPILED_PEAK] / memory[PEAK]
    return found | {"closed": memory, "closed_ratio": ratio, "closed_seconds": again}


def configurations(count: int, seed: int, gpu: str | None, again: Path | None) -> Iterator[dict[str, Any]]:
    """Random configurations with their estimates and compiled peaks, or those of a file."""
    if again:
        yield from json.loads(again.read_text())["configurations"]
        return
    rng, found = random.Random(seed), 0
    while found < count:
        try:
            yield measured(drawn_for_gpus(rng) if gpu else drawn(rng), gpu)
            found += 1
        except UserError:  # such a one does not exist: draw again
            continue


@reports_mistakes
def main() -> int:
    """Print a line for each configuration, and the summary."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=COUNT, default=50, help="of configurations")
    parser.add_argument("--seed", type=numeric(int, at_least=0), default=0, help="of what is drawn")
    parser.add_argument("--gpu", help="the GPU that is compiled for, such as h200")
    parser.add_argument("--json", type=output_file, metavar="OUT")
    parser.add_argument("--again", type=Path, metavar="JSON", help="a file of this script")
    arguments = parser.parse_args()
    if arguments.again:  # what was drawn for GPUs stands for overrides of another configuration
        arguments.gpu = json.loads(arguments.again.read_text()).get("gpu")
    import jax

    from jaxdist.plan.closed.leaves import Known

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    found, known = list[dict[str, Any]](), Known()
    for each in configurations(arguments.count, arguments.seed, arguments.gpu, arguments.again):
        found.append(each := closed(each, known, arguments.gpu))
        ratios = f"{each['ratio']:.3f} {each['closed_ratio']:.3f}"
        print(f"{ratios} ({each['seconds']:.0f} s)  {each['overrides']}", flush=True)
    sums = {"summary": summary([each["ratio"] for each in found])}
    sums["summary, closed"] = summary([each["closed_ratio"] for each in found])
    print(json.dumps(sums))
    if arguments.json:
        command = f"scripts/bench/explain_memory.py --count {arguments.count} --seed {arguments.seed}"
        command += f" --gpu {arguments.gpu}" if arguments.gpu else ""
        head: dict[str, Any] = {"command": command, "date": time.strftime("%Y-%m-%d")}
        head |= {"gpu": arguments.gpu} if arguments.gpu else {}
        head |= {"jax": jax.__version__, "jaxlib": version("jaxlib"), "python": platform.python_version()}
        if arguments.again:
            old = json.loads(arguments.again.read_text())
            head |= {name: old[name] for name in head} | {"closed forms": time.strftime("%Y-%m-%d")}
        arguments.json.write_text(json.dumps(head | sums | {"configurations": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
