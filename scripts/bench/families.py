"""Training from imported weights against `transformers` with torch: the same batches, the losses of each step.

    python scripts/bench/families.py [--steps 10] [--json OUT] [FAMILY ...]

Needs torch, transformers and safetensors. For each family a small model with random weights is saved by transformers
and imported. Both then train in float32: torch on one device, jaxdist on simulated devices, in two layouts. Printed is
the largest relative difference of a loss in any step.
"""

import argparse
import importlib
import json
import math
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxdist.config.arguments import COUNT, output_file
from jaxdist.config.schema import Config, DataConfig, MeshConfig, ModelConfig, ParallelConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.models.options.bert import Options as BertOptions
from jaxdist.models.options.vit import Options as VitOptions

VOCAB, IMAGE, LABELS = 260, 16, 10
SIZES: dict[str, Any] = {"layers": 4, "width": 32, "heads": 4, "vocab": VOCAB}
ENCODER: dict[str, Any] = {"layers": 4, "width": 32, "heads": 4, "dropout": 0.0}
GROUPED: dict[str, Any] = {**SIZES, "style": "llama", "kv_heads": 2, "mlp_width": 48}
SCALED: dict[str, Any] = {"rope_type": "llama3", "rope_factor": 4.0, "rope_positions": 40}
FAMILIES = {
    "GPT-2": ModelConfig(**SIZES),
    "Llama": ModelConfig(**GROUPED),
    "Llama 3.1, scaled rotary positions": ModelConfig(**GROUPED, **SCALED, rope_theta=100.0),
    "Mistral, window of 5 positions": ModelConfig(**GROUPED, window=5),
    "Mistral, heads of 16 (Nemo)": ModelConfig(**GROUPED, head_width=16),
    "Qwen2, tied": ModelConfig(**GROUPED, qkv_bias=True, tied=True),
    "Qwen3, heads of 16": ModelConfig(**GROUPED, qk_norm=True, head_width=16),
    "BERT, masked tokens": BertOptions(**ENCODER, name="bert", head="mlm", vocab=VOCAB),
    "ViT, 16 patches": VitOptions(**ENCODER, name="vit", image_size=IMAGE, patch_size=4, classes=LABELS),
}
TASKS = {"gpt": "ForCausalLM", "bert": "ForMaskedLM", "vit": "ForImageClassification"}  # {model.name: AutoModel...}
LAYOUTS = {
    "zero3, data=2 fsdp=2 tensor=2": (
        MeshConfig(data=2, fsdp=2, tensor=2),
        ParallelConfig(strategy="zero3", min_shard_bytes=0),
    ),
    "1F1B, pipe=2": (MeshConfig(pipe=2), ParallelConfig(strategy="ddp", schedule="one_f_one_b", microbatches=4)),
}
OPTIMIZERS = {
    "SGD": OptimizerConfig("sgd", lr=0.2, schedule="constant", clip_norm=0.0),
    "AdamW": OptimizerConfig("adamw", lr=3e-3, schedule="constant", clip_norm=0.0),
}
ROWS, LENGTH = 16, 16


def batches(model: ModelConfig, steps: int) -> list[dict[str, Any]]:
    """Two batches in turn, so that losses fall: random tokens or images, of whose targets a tenth does not count."""
    import numpy as np

    found: list[dict[str, Any]] = []
    for i in range(steps):
        rng = np.random.default_rng(i % 2)
        if model.name == "vit":
            image = rng.standard_normal((ROWS, IMAGE, IMAGE, 3)).astype(np.float32)
            label, weights = rng.integers(0, LABELS, ROWS).astype(np.int32), (rng.random(ROWS) < 0.9).astype(np.float32)
            found.append({"image": image, "label": label, "weights": weights})
            continue
        # Without token 0, which is padding for BERT: torch leaves it out of the embedding's gradient.
        ids = rng.integers(1, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
        weights = (rng.random((ROWS, LENGTH)) < 0.9).astype(np.float32)
        found.append({"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights})
    return found


def made(model: ModelConfig) -> Any:
    """A model of transformers with random numbers in every parameter, the scales of norms around 1."""
    import torch

    from jaxdist.checkpoint.huggingface.convert import config_json

    transformers: Any = importlib.import_module("transformers")
    fields = config_json(model.resolved(), positions=LENGTH, dtype="float32")
    kind = fields.pop("model_type")
    found = getattr(transformers, f"AutoModel{TASKS[model.name]}").from_config(
        transformers.AutoConfig.for_model(kind, **fields), attn_implementation="eager"
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            scale = any(part in name.lower() for part in ("norm", ".ln_")) and name.endswith("weight")
            parameter.normal_(std=0.1).add_(1.0 if scale else 0.0)
    return found.eval()  # no dropout


def torch_loss(model: Any, batch: dict[str, Any]) -> Any:
    """Of a batch, by torch: the mean of the targets that count."""
    import torch

    given = {name: torch.tensor(value) for name, value in batch.items()}
    if "image" in given:
        logits, targets = model(given["image"].permute(0, 3, 1, 2)).logits, given["label"]
    else:
        logits, targets = model(given["inputs"].long()).logits.flatten(0, 1), given["targets"].flatten()
    each = torch.nn.functional.cross_entropy(logits, targets.long(), reduction="none")
    return (each * given["weights"].flatten()).sum() / given["weights"].sum()


def torch_losses(theirs: Any, model: ModelConfig, optimizer: OptimizerConfig, steps: int) -> list[float]:
    """Of each step, by torch."""
    import torch

    def decays(name: str, parameter: Any) -> bool:  # ours has no dim of size 1 before the class token
        return parameter.ndim >= 2 and "cls_token" not in name

    named = list(theirs.named_parameters())
    matrices = [each for name, each in named if decays(name, each)]
    others = [each for name, each in named if not decays(name, each)]
    groups = [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if optimizer.name == "sgd":
        tx: Any = torch.optim.SGD(groups, lr=optimizer.lr, momentum=optimizer.momentum)
    else:
        tx = torch.optim.AdamW(groups, lr=optimizer.lr, betas=(optimizer.b1, optimizer.b2), eps=optimizer.eps)
    losses = []
    for batch in batches(model, steps):
        loss = torch_loss(theirs, batch)
        tx.zero_grad()
        loss.backward()
        tx.step()
        losses.append(loss.item())
    return losses


def own_losses(folder: Path, run_dir: Path, config: Config, steps: int) -> list[float]:
    """Of each step, by jaxdist, from the folder of transformers."""
    from dataclasses import asdict

    import jax
    from jax.sharding import NamedSharding

    from jaxdist.build import assemble
    from jaxdist.checkpoint import Checkpoints
    from jaxdist.cli.work.checkpoint import import_model
    from jaxdist.mesh import make_mesh
    from jaxdist.specs import BATCH_SPEC

    import_model(folder, config, run_dir)
    sizes = asdict(config.mesh)
    mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    parts = assemble(config, mesh)
    with Checkpoints(run_dir / "checkpoints", keep=1) as checkpoints:
        state: Any = checkpoints.restore(0, parts.target)
    losses = []
    for batch in batches(config.model, steps):
        state, metrics = parts.step(state, jax.device_put(batch, NamedSharding(mesh, BATCH_SPEC)))
        losses.append(float(metrics["loss"]))
    return losses


def compared(model: ModelConfig, steps: int) -> dict[str, dict[str, Any]]:
    """{"layout, optimizer": the losses of both, and their largest relative difference}."""
    found = {}
    for optimizer_name, optimizer in OPTIMIZERS.items():
        theirs = made(model)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(Path(folder) / "theirs", safe_serialization=True)
            want = torch_losses(theirs, model, optimizer, steps)
            for layout, (mesh, parallel) in LAYOUTS.items():
                data = DataConfig(path=__file__, seq_len=LENGTH, global_batch=ROWS)
                config = Config(model=model, data=data, mesh=mesh, parallel=parallel, optimizer=optimizer)
                got = own_losses(Path(folder) / "theirs", Path(folder) / layout, config, steps)
                worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
                found[f"{layout}, {optimizer_name}"] = {"jaxdist": got, "torch": want, "difference": worst}
    return found


@reports_mistakes
def main() -> int:
    """Exit status 0, 1 for a difference above 1e-5, or 2 for wrong arguments."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="as in the table; all, if left out")
    parser.add_argument("--steps", type=COUNT, default=10)
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    if unknown := [each for each in arguments.families if each not in FAMILIES]:
        raise UserError(f"FAMILY: {unknown[0]!r} is not known; allowed: {'; '.join(FAMILIES)}")
    import jax
    import torch

    transformers: Any = importlib.import_module("transformers")  # a run by hand needs it, and nothing else of jaxdist
    jax.config.update("jax_num_cpu_devices", 8)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    versions = f"jax {jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"8 simulated devices on {machine}, {versions}; {arguments.steps} steps of {ROWS} texts or images")
    columns = [f"{layout}: {name}" for layout in LAYOUTS for name in OPTIMIZERS]
    print(f"| family | losses | {' | '.join(columns)} |\n|{'---|' * (2 + len(columns))}")
    found: dict[str, Any] = {"versions": versions, "machine": machine}
    for family in arguments.families or FAMILIES:
        found[family] = each = compared(FAMILIES[family], arguments.steps)
        losses = each[f"{next(iter(LAYOUTS))}, AdamW"]["torch"]
        figures = [f"{each[f'{layout}, {name}']['difference']:.1e}" for layout in LAYOUTS for name in OPTIMIZERS]
        print(f"| {family} | {losses[0]:.3f} to {losses[-1]:.3f} | {' | '.join(figures)} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    worst = max(run["difference"] for each in found.values() if isinstance(each, dict) for run in each.values())
    return int(not worst <= 1e-5)


if __name__ == "__main__":
    sys.exit(main())
