"""Random configurations for plans: drawn from all that is shipped, on tiny models; what is refused is drawn again."""

import random
from pathlib import Path
from typing import Any

from jaxdist import registry
from jaxdist.config.load import load_config
from jaxdist.config.rules.remat import MODES, NAMES
from jaxdist.config.schema import Config
from jaxdist.errors import UserError

FILE = Path(__file__).parent / "plan" / "tiny.yaml"
STRATEGIES, SCHEDULES = (registry.names(f"jaxdist.parallel.{kind}") for kind in ("strategies", "schedules"))
ALGORITHMS = registry.names("jaxdist.collectives.algorithms")


def tiny(*overrides: str) -> Config:
    """A configuration of a tiny model, as a plan reads it."""
    return load_config(FILE, [*overrides], planned=True)


def random_config(rng: random.Random) -> tuple[Config, list[str]]:
    """(a valid configuration, its overrides)."""
    while True:
        overrides = [f"{key}={value}" for key, value in drawn(rng).items()]
        try:
            return tiny(*overrides), overrides
        except UserError:
            continue


def drawn(rng: random.Random) -> dict[str, Any]:
    """Keys and values, which may not go together."""
    pick, chance = rng.choice, lambda share: rng.random() < share
    sizes = {"pipe": pick([1, 1, 1, 2, 4]), "data": pick([1, 1, 2]), "fsdp": pick([1, 2, 2, 4])}
    sizes |= {"expert": pick([1, 1, 1, 2]), "context": pick([1, 1, 1, 2, 4]), "tensor": pick([1, 1, 2, 4])}
    pipe = sizes["pipe"]
    schedule = pick([*SCHEDULES, "accumulate", "accumulate"] if pipe == 1 else SCHEDULES)
    chunks = pick([1, 2]) if schedule == "interleaved" else 1
    layers, stages = pick([2, 2, 3, 4]) if chunks == 1 else pick([4, 8]), []
    if pipe > 1 and chance(0.3):
        stages = [rng.randint(1, 3) for _ in range(pipe * chunks)]
        layers = sum(stages)
    split = chance(0.35)
    found = {f"mesh.{axis}": size for axis, size in sizes.items()} | {
        "parallel.strategy": pick(STRATEGIES),
        "parallel.schedule": schedule,
        "parallel.chunks": chunks,
        "parallel.stages": stages,
        "parallel.microbatches": pick([1, 1, 2, 4, 8]),
        "parallel.min_shard_bytes": pick([0, 0, 1024, 32768]),
        "parallel.prefetch": pick(["null", 0, 1]),
        "parallel.reshard_after_forward": pick(["true", "true", "false"]),
        "parallel.pipeline_cond": pick(["true", "true", "false"]),
        "parallel.sequence_parallel": str(split).lower(),
        "parallel.collective_matmul": str(split and chance(0.4)).lower(),
        "memory.remat": pick([*MODES, "none", f"[{','.join(rng.sample(NAMES, 2))}]"]),
        "precision.policy": pick(["fp32", "fp32", "bf16", "fp16", "O1", "O2", "bf16_pure"]),
        "optimizer.name": pick(["sgd", "sgd", "sgd", "adamw", "muon"]),
        "model.layers": layers,
    }
    if chance(0.4):
        found |= {"parallel.grad_sync.algorithm": pick(ALGORITHMS)}
        found |= {"parallel.grad_sync.wire_dtype": pick(["null", "null", "bfloat16", "int8"])}
        found |= {"parallel.grad_sync.link": pick(["auto", "200mbit", "nvlink"])}
    if chance(0.3):
        found |= {"parallel.grad_sync.bucket_mb": pick([0.005, 0.02, 0.0001])}
    if chance(0.08):
        found |= {"parallel.grad_sync.deterministic": "true", "parallel.grad_sync.virtual_shards": pick([8, 16])}
    if chance(0.15):
        found |= {"parallel.batch_split": 2}
    if chance(0.1):
        found |= {"optimizer.freeze": pick(["[embed.*]", "[*norm*]", "[blocks.mlp.*]"])}
    return found | {"gpt": _gpt, "bert": _bert, "vit": _vit}[pick(["gpt"] * 6 + ["bert", "vit"])](rng, sizes)


def _gpt(rng: random.Random, sizes: dict[str, int]) -> dict[str, Any]:
    pick = rng.choice
    found = {
        "model.style": pick(["gpt2", "llama"]),
        "model.kv_heads": pick(["null", 2]),
        "model.tied": pick(["null", "true", "false"]),
        "model.dropout": pick([0.0, 0.0, 0.1]),
        "model.loss_chunk": pick(["null", 0, 48]),
        "parallel.context": pick(["auto", "all_to_all", "gather", "ring"]),
    }
    if sizes["expert"] > 1 or rng.random() < 0.25:
        found |= {
            "model.moe.experts": 4,
            "model.moe.dispatch": pick(["dropless", "capacity"]),
            "model.moe.group": 8,
            "model.moe.pieces": pick([1, 2]),
            "model.moe.shared": pick([0, 1]),
            "model.moe.dense": pick([0, 0, 1]),
            "model.moe.balance_loss": pick([0.0, 0.01]),
            "model.moe.z_loss": pick([0.0, 0.01]),
        }
    lora = {"optimizer.lora.rank": 4, "optimizer.lora.targets": "[all-linear]"}
    return found | (lora if rng.random() < 0.1 else {})


def _bert(rng: random.Random, sizes: dict[str, int]) -> dict[str, Any]:
    return {"model.name": "bert", "data.source": "masked", "data.path": "x", "model.dropout": rng.choice([0.0, 0.1])}


def _vit(rng: random.Random, sizes: dict[str, int]) -> dict[str, Any]:
    image = {"image_size": 16, "patch_size": 4, "classes": 16}
    whole = {"parallel.sequence_parallel": "false", "parallel.collective_matmul": "false"}
    return {"model.name": "vit", "data.source": "digits"} | whole | {f"model.{key}": x for key, x in image.items()}
