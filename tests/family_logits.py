"""Logits of `transformers` for the models of `saved_runs`, stored so that tests need no torch.

    PYTHONPATH=.:tests python tests/family_logits.py

writes them anew: it exports each model with its random numbers, and transformers loads and runs the folder.
"""

import hashlib
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from saved_runs import LENGTH, MIXTURES, MODELS, config_of, random_params, save_run

from jaxdist.checkpoint.huggingface.convert import config_json, export
from jaxdist.checkpoint.huggingface.safetensors import SINGLE

STORED = Path(__file__).parent / "checkpoint" / "family_logits.json"
COLUMNS = (0, 77, 258)  # of the vocabulary


def tokens() -> np.ndarray:
    """Two texts."""
    return np.random.default_rng(1).integers(0, 259, (2, LENGTH)).astype(np.int32)


def digest(folder: Path) -> str:
    """Of the tensors of an exported folder."""
    return hashlib.sha256((folder / SINGLE).read_bytes()).hexdigest()


def exported(name: str, folder: Path) -> Path:
    """The folder of a model, as `export` writes it."""
    config = config_of(name)
    export(save_run(folder / f"{name}-run", config, random_params(config)), folder / name)
    return folder / name


def theirs(name: str, torch: Any, transformers: Any) -> Any:
    """A model of `transformers` with random numbers in every parameter, and in the biases of experts."""
    fields = config_json(config_of(name).model.resolved(), positions=LENGTH, dtype="float32")
    kind = fields.pop("model_type")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **fields)).eval()
    biases = [each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for parameter in [*model.parameters(), *biases]:
            parameter.normal_(std=0.3)
    return model


def stored() -> dict[str, Any]:
    """{name: sha256 of the tensors, logits [2, LENGTH, columns] by transformers}, and its version."""
    found: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Write the file."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    found: dict[str, Any] = {"transformers": transformers.__version__}
    with tempfile.TemporaryDirectory() as temporary:
        for name in MODELS | MIXTURES:
            folder = exported(name, Path(temporary))
            model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
            with torch.no_grad():
                logits = model(torch.tensor(tokens()).long()).logits.numpy()[..., COLUMNS]
            rounded = [[[float(f"{each:.8g}") for each in row] for row in text] for text in logits]
            found[name] = {"sha256": digest(folder), "kind": model.config.model_type, "logits": rounded}
            print(name, model.config.model_type, np.abs(logits).max())
    lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in found.items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
