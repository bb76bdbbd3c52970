"""LoRA's adapters in PEFT's format, adapter_config.json beside adapter_model.safetensors; and merged into the model.

An adapter is laid out by the table of tensors of the model's family: B goes through the view of the kernel that it adds
to, with its rank in place of the kernel's inputs. Where one tensor of Hugging Face holds several of our projections, as
c_attn of GPT-2 does, their As are put together, and the Bs lie in blocks with zeros beside them. The product is the
same; the rank is the sum of theirs, and so is alpha.

Legend: I input width, R rank, O output width of a tensor of Hugging Face.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.checkpoint.block_order import settings_of_run
from jaxdist.checkpoint.huggingface.convert import model_of
from jaxdist.checkpoint.huggingface.family import Tensor, stacked_blocks
from jaxdist.checkpoint.huggingface.names import family, tensors
from jaxdist.checkpoint.huggingface.safetensors import SINGLE, TensorEntry, write
from jaxdist.checkpoint.reader import Stored
from jaxdist.errors import UserError

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MARK = ".lora."  # in the names of our parameters
# Where a projection lies in a kernel, by the names of `parts` of the layers; a layer without parts is one projection.
PLACES: Mapping[str, Any] = {
    "": ...,
    "q.": (..., slice(0, -2), slice(None)),
    "k.": (..., slice(-2, -1), slice(None)),
    "v.": (..., slice(-1, None), slice(None)),
    "gate.": (..., slice(0, 1), slice(None)),
    "up.": (..., slice(1, 2), slice(None)),
}
SHARED_EXPERTS = ".shared_experts."  # in names of modules
CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of the classes of transformers whose adapters are written


class StoredAdapter(NamedTuple):
    """An adapter of all blocks.

    - a: [blocks, I, R].
    - b: [blocks, R, *features], of the whole kernel: 0 beside the projection that it is of.
    - own: [1, *features], where that projection is.
    """

    a: np.ndarray
    b: np.ndarray
    own: np.ndarray


def has_adapters(stored: Stored) -> bool:
    """Whether a checkpoint is that of a run with LoRA."""
    return any(MARK in name for name in stored.params())


def _scale(stored: Stored) -> tuple[int, float]:
    """(rank, alpha) from the record of a checkpoint."""
    lora = settings_of_run(stored.meta).get("optimizer", {}).get("lora", {})
    if not {"rank", "alpha"} <= lora.keys():
        raise UserError(f"{stored.folder}: does not say alpha of its adapters; allowed: checkpoints of jaxdist train")
    return lora["rank"], lora["alpha"]


def _adapters(stored: Stored, layer: str) -> list[StoredAdapter]:
    """Those of a layer ("blocks.mlp.up"); an empty list for a layer without any."""
    names, found = Stored.params(stored), list[StoredAdapter]()
    prefixes = {name.removesuffix("a") for name in names if name.startswith(layer + MARK) and name.endswith(".a")}
    for part, place in PLACES.items():
        prefix = f"{layer}{MARK}{part}"
        if prefix not in prefixes:
            continue
        a, b = (Stored.param(stored, prefix + letter) for letter in "ab")
        features = names[f"{layer}.kernel"].shape[2:]
        whole, own = np.zeros((*b.shape[:2], *features), b.dtype), np.zeros((1, *features), bool)
        whole[place], own[place] = b, True
        found.append(StoredAdapter(a, whole, own))
    assert len(found) == len(prefixes), prefixes
    return found


class Merged(Stored):
    """A step of a run with LoRA, whose kernels are W + alpha / rank * A B, computed in float64, and which has no
    adapters."""

    def params(self) -> dict[str, Any]:
        """As of `Stored`, without the adapters."""
        return {name: leaf for name, leaf in super().params().items() if MARK not in name}

    def param(self, name: str) -> np.ndarray:
        """One parameter."""
        kernel = super().param(name)
        rank, alpha = _scale(self)
        for adapter in _adapters(self, name.removesuffix(".kernel")) if name.endswith(".kernel") else ():
            for i in range(len(kernel)):  # block by block: no stack of kernels in float64
                a, b = (each[i].astype(np.float64) for each in (adapter.a, adapter.b))
                kernel[i] = (kernel[i].astype(np.float64) + alpha / rank * np.tensordot(a, b, 1)).astype(kernel.dtype)
        return kernel


def _inputs_last(each: Tensor, features: tuple[int, ...]) -> bool:
    """Whether a tensor is [O, I], and not [I, O] as our kernels."""
    inputs = np.arange(2).reshape(2, *[1] * len(features))
    return bool(np.ascontiguousarray(each.view(np.broadcast_to(inputs, (2, *features)))).reshape(-1)[1] == 1)


def _factors(each: Tensor, adapters: list[StoredAdapter], block: int) -> tuple[np.ndarray, np.ndarray]:
    """(A [R, I], B [O, R]) of a tensor of Hugging Face, from all adapters that add to it."""
    downs, ups = [], []
    for adapter in adapters:
        a, b = adapter.a[block], adapter.b[block]
        last, rank = _inputs_last(each, b.shape[1:]), a.shape[1]
        outputs = each.shape[0 if last else 1]
        seen = each._replace(shape=(outputs, rank) if last else (rank, outputs)).take(b)
        downs.append(a.T)
        ups.append(seen if last else seen.T)
    return np.concatenate(downs), np.concatenate(ups, axis=1)


def export_adapter(stored: Stored, output: Path) -> str:
    """Write the adapters of a checkpoint to a new folder, as PEFT loads them. Returns a line about it.

    Raises `UserError` for a model whose Hugging Face class is no language model.
    """
    model, positions = model_of(stored)
    own, rank = family(model), _scale(stored)[0]
    if not own.architecture.endswith(CAUSAL):
        raise UserError(f"--adapter: {own.architecture} is no language model; allowed: --merged")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} is there already; give a new folder")
    arrays, ranks, transposed = dict[str, np.ndarray](), dict[str, int](), False
    blocks = stacked_blocks(model)
    for each in tensors(model, positions=positions):
        layer = each.leaf.removesuffix(".kernel")
        every = _adapters(stored, layer) if layer != each.leaf else []
        if not (adapters := [adapter for adapter in every if each.view(adapter.own).any()]):
            continue
        for row, block in enumerate(blocks):
            name = each.name.format(block).removesuffix(".weight")
            for letter, array in zip("AB", _factors(each, adapters, row), strict=True):
                arrays[f"base_model.model.{name}.lora_{letter}.weight"] = array
        ranks[each.name.partition("{}.")[2].removesuffix(".weight")] = rank * len(adapters)
        transposed = transposed or not _inputs_last(each, adapters[0].own.shape[1:])
    entries = [TensorEntry(name, str(array.dtype), array.shape) for name, array in arrays.items()]
    total = sum(entry.nbytes for entry in entries)
    output.mkdir(parents=True, exist_ok=True)
    write(output, entries, arrays.values(), file_bytes=total)
    (output / SINGLE).rename(output / ADAPTER_WEIGHTS)
    text = json.dumps(_config(stored, ranks=ranks, transposed=transposed) | _of_mixture(ranks, blocks), indent=2)
    (output / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")  # last: a folder without it is not complete
    return f"adapters of rank {rank} for {', '.join(ranks)}: {len(entries)} tensors, {total:,} bytes"


def _config(stored: Stored, *, ranks: dict[str, int], transposed: bool) -> dict[str, Any]:
    """The adapter_config.json. ranks: of each of Hugging Face's modules. transposed: whether tensors are [I, O]."""
    (rank, alpha), settings = _scale(stored), stored.meta.get("config", {})
    others = {name: each for name, each in ranks.items() if each != rank}
    base = settings.get("init.from")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if isinstance(base, str) else "",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": settings.get("optimizer.lora.dropout", 0.0),
        "target_modules": list(ranks),
        "rank_pattern": others,
        "alpha_pattern": {name: alpha * each / rank for name, each in others.items()},
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
        "use_rslora": False,
    }


def _of_mixture(ranks: Mapping[str, int], blocks: range) -> dict[str, Any]:
    """What the adapter_config.json of a mixture of experts has besides, or in place of what others have. blocks: those
    with adapters."""
    found = dict[str, Any]()
    if blocks.start:  # the blocks before have layers of the same names
        found |= {"layers_to_transform": list(blocks), "layers_pattern": "layers"}
    if shared := [name for name in ranks if SHARED_EXPERTS in name]:
        # PEFT takes modules of these names for routed experts, which transformers 5 has in one tensor. Of parameters it
        # drops no inputs; at inference nothing is dropped anyway.
        others = [name for name in ranks if name not in shared]
        parameters = [f"{name}.weight" for name in shared]
        found |= {"target_modules": others, "target_parameters": parameters, "lora_dropout": 0.0}
    return found
