"""LoRA's adapters in PEFT's format, and merged into the model: the same products, the same logits."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from levels import others_slow
from saved_runs import LENGTH, NEEDS, config_of, logits, random_params, restored, save_run

from jaxdist.checkpoint.huggingface.convert import export
from jaxdist.checkpoint.huggingface.peft import Merged, export_adapter
from jaxdist.checkpoint.reader import Stored
from jaxdist.cli.work.checkpoint import export_as, import_model
from jaxdist.config.schema import Config
from jaxdist.config.sections.optimizer import LoraConfig, OptimizerConfig
from jaxdist.errors import UserError

FILES = ("model.safetensors", "adapter_model.safetensors")
TARGETS: dict[str, tuple[str, ...]] = {
    "gpt2-tied": ("c_attn", "c_proj", "c_fc"),
    "llama-untied": ("all-linear",),
    "llama-bias": ("q_proj", "v_proj", "up_proj"),
}


def lora_run(folder: Path, name: str, **changes: Any) -> tuple[Config, Any, Stored]:
    """A checkpoint with random adapters."""
    lora = LoraConfig(rank=2, alpha=3.0, targets=TARGETS[name])
    config = config_of(name, model={"layers": 2}, optimizer=OptimizerConfig(lora=lora), **changes)
    params = random_params(config)
    return config, params, save_run(folder / "run", config, params)


def without_adapters(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {name: without_adapters(part) for name, part in tree.items() if name != "lora"}


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, by the description of the format and not by jaxdist."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    header.pop("__metadata__")
    found = {}
    for name, each in header.items():
        start, stop = each["data_offsets"]
        assert each["dtype"] == "F32"
        found[name] = np.frombuffer(rest[start:stop], np.float32).reshape(each["shape"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", others_slow(["gpt2-tied", "llama-untied", "llama-bias"], "gpt2-tied"))
def test_the_adapter_is_what_merging_adds(name: str, tmp_path: Path) -> None:
    """By PEFT's definition: scaling B A, transposed where its `fan_in_fan_out` says so."""
    config, params, stored = lora_run(tmp_path, name)
    plain = replace(config, optimizer=OptimizerConfig())
    export(save_run(tmp_path / "base", plain, without_adapters(params)), tmp_path / "base_hf")
    export(Merged(stored.folder), tmp_path / "merged")
    export_adapter(stored, tmp_path / "adapter")
    base, merged = (read(tmp_path / each / FILES[0]) for each in ("base_hf", "merged"))
    adapter, said = (
        read(tmp_path / "adapter" / FILES[1]),
        json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()),
    )
    assert (
        base.keys() == merged.keys()
        and (tmp_path / "base_hf" / "config.json").read_text() == (tmp_path / "merged" / "config.json").read_text()
    )
    for tensor, weight in base.items():
        module = tensor.removesuffix(".weight")
        target = [each for each in said["target_modules"] if module.endswith(f".{each}")]
        if not target or not tensor.endswith(".weight"):
            np.testing.assert_array_equal(merged[tensor], weight)
            continue
        a, b = (adapter.pop(f"base_model.model.{module}.lora_{letter}.weight") for letter in "AB")
        rank, alpha = (
            said[f"{kind}_pattern"].get(target[0], said[usual])
            for kind, usual in (("rank", "r"), ("alpha", "lora_alpha"))
        )
        assert a.shape[0] == b.shape[1] == rank
        delta = alpha / rank * b.astype(np.float64) @ a.astype(np.float64)
        want = weight + (delta.T if said["fan_in_fan_out"] else delta)
        assert np.abs(delta).max() > 0.1
        np.testing.assert_allclose(merged[tensor], want, rtol=1e-6, atol=1e-6)
    assert not adapter  # no tensor that PEFT would not look for
    count = {"gpt2-tied": 4, "llama-untied": 7, "llama-bias": 3}
    assert len(said["target_modules"]) == count[name]


def tokens(vocab: int = 259) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab, (3, LENGTH)).astype(np.int32)


@NEEDS
@pytest.mark.parametrize("name", ["gpt2-tied", pytest.param("llama-untied", marks=pytest.mark.slow)])
def test_merged_and_unmerged_logits_agree(name: str, tmp_path: Path) -> None:
    config, params, stored = lora_run(tmp_path, name)
    export(Merged(stored.folder), tmp_path / "merged")
    plain = replace(config, optimizer=OptimizerConfig())
    import_model(tmp_path / "merged", plain, tmp_path / "again")
    want = logits(config, params, tokens())
    got = logits(plain, restored(tmp_path / "again", plain).params, tokens())
    error = np.abs(got - want).max() / np.abs(want).max()
    print(f"{name}: logits up to {np.abs(want).max():.2f}, largest relative difference {error:.1e}")
    assert error < 1e-6
    base = logits(plain, without_adapters(params), tokens())
    assert np.abs(base - want).max() > 0.1  # the adapters do something


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", TARGETS)
def test_peft_loads_the_export(name: str, tmp_path: Path) -> None:
    """The base in transformers, and the adapter in PEFT: the logits are ours."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="PEFT is not installed: whether it loads the export was NOT checked")
    config, params, stored = lora_run(tmp_path, name)
    plain = replace(config, optimizer=OptimizerConfig())
    export(save_run(tmp_path / "base", plain, without_adapters(params)), tmp_path / "base_hf")
    export_adapter(stored, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base_hf")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    want = logits(config, params, tokens())
    with torch.no_grad():
        got = model(torch.tensor(tokens(), dtype=torch.long)).logits.numpy()
        merged = model.merge_and_unload()(torch.tensor(tokens(), dtype=torch.long)).logits.numpy()
    for found in (got, merged):
        error = np.abs(found - want).max() / np.abs(want).max()
        print(f"{name}: logits up to {np.abs(want).max():.2f}, largest relative difference {error:.1e}")
        assert error < 1e-5


def test_what_is_refused(tmp_path: Path) -> None:
    _, params, stored = lora_run(tmp_path, "gpt2-tied")
    plain = save_run(tmp_path / "plain", config_of("gpt2-tied", model={"layers": 2}), without_adapters(params))
    ways = {"adapter": False, "merged": False, "vocab": None}
    for run, way, message in (
        (stored, {}, "holds a model and LoRA's adapters; give --merged"),
        (plain, {"adapter": True}, "--adapter: .* has no adapters; leave it out"),
        (plain, {"merged": True}, "--merged: .* has no adapters; leave it out"),
        (stored, {"adapter": True, "vocab": 7}, "--vocab: 7, but adapters have no vocabulary"),
    ):
        with pytest.raises(UserError, match=message):
            export_as(run, tmp_path / "none", Namespace(**ways | way))
    assert not (tmp_path / "none").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="--output: .* is there already"):
        export_adapter(stored, tmp_path / "full")
