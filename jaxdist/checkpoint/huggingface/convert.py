"""Export to, and import from, Hugging Face folders: config.json beside tensors (docs/huggingface.md).

One stacked leaf at a time is in memory, and one of its tensors.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.checkpoint.huggingface.names import HEAD, PREFIXES, TABLES, Tensor, check_name, family, tensors
from jaxdist.checkpoint.huggingface.safetensors import FILE_BYTES, TensorEntry, TensorFiles, write
from jaxdist.checkpoint.reader import Stored
from jaxdist.config.rules.fields import Key, keys, show
from jaxdist.config.schema import DataConfig, ModelConfig
from jaxdist.errors import UserError
from jaxdist.specs import STACKED

CONFIG = "config.json"
# {key of config.json: (our key of section model, the default of transformers)}.
CONFIG_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    "gpt2": {
        "vocab_size": ("vocab", 50257),
        "n_embd": ("width", 768),
        "n_layer": ("layers", 12),
        "n_head": ("heads", 12),
        "n_inner": ("mlp_width", None),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "tie_word_embeddings": ("tied", True),
    },
    "llama": {
        "vocab_size": ("vocab", 32000),
        "hidden_size": ("width", 4096),
        "num_hidden_layers": ("layers", 32),
        "num_attention_heads": ("heads", 32),
        "num_key_value_heads": ("kv_heads", None),
        "intermediate_size": ("mlp_width", 11008),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "attention_bias": ("bias", False),
        "mlp_bias": ("bias", False),
        "tie_word_embeddings": ("tied", False),
    },
}
# Values of config.json that our models compute and no key of ours changes. The first of each is written.
FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {"hidden_act": ("silu", "swish")},
}
CONSTANT_BUFFERS = ("attn.bias", "attn.masked_bias", "rotary_emb.inv_freq")  # in older files; no parameters


def config_json(model: ModelConfig, *, positions: int, dtype: str) -> dict[str, Any]:
    """The config.json of a model, whose keys are all filled in. positions: the length of the longest sequence."""
    kind = family(model)
    found = {theirs: getattr(model, ours) for theirs, (ours, _) in CONFIG_KEYS[kind].items()}
    found |= {key: allowed[0] for key, allowed in FIXED[kind].items()}
    if kind == "gpt2":
        architecture = "GPT2LMHeadModel"
        found |= {"n_positions": positions} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    else:
        architecture = "LlamaForCausalLM"
        # rope_theta is for transformers before version 5, rope_parameters for later ones.
        found |= {
            "max_position_embeddings": positions,
            "head_dim": model.width // model.heads,
            "rope_theta": model.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        }
    # Without these keys transformers takes token 50256 or 2 for the end of a text, whatever the tokenizer.
    found |= {"bos_token_id": None, "eos_token_id": None}
    return {"architectures": [architecture], "model_type": kind, **found, "dtype": dtype, "torch_dtype": dtype}


def config_differences(found: dict[str, Any], model: ModelConfig, *, positions: int) -> list[str]:
    """The settings that a configuration lacks for the model of a config.json: ["model.width=768 (is 128)", ...].

    A larger `model.vocab` is allowed. Raises `UserError` for a model that no configuration makes.
    """
    check_name(model.name)
    kind, known = _check_kind(found), keys(type(model)) | keys(DataConfig)
    wanted = {ours: _value(found, theirs, known[ours], usual) for theirs, (ours, usual) in CONFIG_KEYS[kind].items()}
    wanted["mlp_width"] = 4 * wanted["width"] if wanted["mlp_width"] is None else wanted["mlp_width"]
    if wanted.get("kv_heads") is None:
        wanted["kv_heads"] = wanted["heads"]
    if model.vocab >= wanted["vocab"]:
        del wanted["vocab"]
    if kind == "llama":
        rope = _rotary(found)
        wanted["rope_theta"] = _value(rope, "rope_theta", known["rope_theta"], 10000.0)
        if found.get("attention_bias", False) is not found.get("mlp_bias", False):
            raise UserError(f"{CONFIG}: attention_bias and mlp_bias differ; allowed: both true, or both false")
    other = [
        f"model.{key}={json.dumps(value)} (is {json.dumps(getattr(model, key))})"
        for key, value in wanted.items()
        if getattr(model, key) != value
    ]
    if family(model) != kind:
        other.insert(0, f"model.style={kind} (is {family(model)})")
    if kind == "gpt2" and (length := _value(found, "n_positions", known["seq_len"], 1024)) != positions:
        other.append(f"data.seq_len={length} (is {positions})")
    head = found.get("head_dim")
    if not other and head not in (None, model.width // model.heads):
        raise UserError(
            f"{CONFIG}: head_dim is {show(head)}, which no configuration makes; allowed: hidden_size /"
            f" num_attention_heads, {model.width // model.heads}"
        )
    return other


def _check_kind(found: dict[str, Any]) -> str:
    """The model_type. Raises `UserError` for one that is not known, and for what `FIXED` does not allow it."""
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_KEYS:
        raise UserError(f"{CONFIG}: model_type is {show(kind)}; allowed: {', '.join(CONFIG_KEYS)}")
    for key, allowed in FIXED[kind].items():
        if found.get(key, allowed[0]) not in allowed:
            raise UserError(
                f"{CONFIG}: {key} is {show(found[key])}, which no configuration makes; allowed:"
                f" {', '.join(map(repr, allowed))}"
            )
    return kind


def _value(found: dict[str, Any], theirs: str, ours: Key, usual: Any) -> Any:
    """A value of config.json, of the type and in the range of our key. null is allowed where it is usual."""
    return replace(ours, optional=usual is None).check(found.get(theirs, usual), f"{CONFIG}: {theirs}")


def _rotary(found: dict[str, Any]) -> dict[str, Any]:
    """Where rope_theta is given, if anywhere. Raises `UserError` for other rotary positions than the plain ones."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else rope
    if not isinstance(rope, dict) or kind != "default":
        raise UserError(
            f"{CONFIG}: rotary positions of type {show(kind)}, which no configuration makes; allowed: default"
        )
    return next((each for each in (rope, found) if each.get("rope_theta") is not None), {})


def _pieces(model: ModelConfig, *, positions: int) -> list[tuple[Tensor, Any, str]]:
    """(tensor, index, name) of every tensor in the order of the files. index: where it lies in our leaf, the number of
    its block or the whole leaf."""
    return [
        (each, index, each.name.format(index))
        for each in tensors(model, positions=positions)
        for index in (range(model.layers) if each.leaf.startswith(STACKED + ".") else [...])
    ]


def _by_leaf(pieces: list[tuple[Tensor, Any, str]]) -> Iterator[tuple[str, Iterator[tuple[Tensor, Any, str]]]]:
    """(our leaf, its pieces), so that one leaf at a time is in memory."""
    return groupby(pieces, lambda piece: piece[0].leaf)


def export(stored: Stored, output: Path, *, vocab: int | None = None, file_bytes: int = FILE_BYTES) -> str:
    """Write the parameters of a checkpoint to a new folder. Returns a line about it.

    vocab: the rows of the vocabulary to write; the others are padding. Raises `UserError` for a model that has no
    Hugging Face format.
    """
    if not {"model", "data"} <= stored.meta.keys():
        raise UserError(f"{stored.folder}: does not say which model it is of; allowed: checkpoints of scripts/train.py")
    check_name(stored.meta["model"].get("name", "gpt"))  # first: making the options of a dotted path imports it
    model, positions = ModelConfig(**stored.meta["model"]), stored.meta["data"]["seq_len"]
    found = stored.params()
    kept = model.vocab if vocab is None else vocab
    if not 1 <= kept <= model.vocab:
        raise UserError(f"--vocab: {kept}; allowed: 1 to {model.vocab}, the rows that the model has (model.vocab)")
    pieces = _pieces(model, positions=positions)
    assert {each.leaf for each, _, _ in pieces} == found.keys(), {each.leaf for each, _, _ in pieces} ^ found.keys()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} is there already; give a new folder")

    def shape(each: Tensor) -> tuple[int, ...]:
        return (kept, *each.shape[1:]) if each.leaf in TABLES else each.shape

    def arrays() -> Iterator[np.ndarray]:
        for leaf, group in _by_leaf(pieces):
            array = stored.param(leaf)
            yield from (each.take(array[index])[: shape(each)[0]] for each, index, _ in group)

    entries = [TensorEntry(name, str(found[each.leaf].dtype), shape(each)) for each, _, name in pieces]
    output.mkdir(parents=True, exist_ok=True)
    files = write(output, entries, arrays(), file_bytes=file_bytes)
    dtype = entries[0].dtype
    text = json.dumps(config_json(model.replace(vocab=kept), positions=positions, dtype=dtype), indent=2)
    (output / CONFIG).write_text(text + "\n", encoding="utf-8")  # last: a folder without it is not complete
    total = sum(entry.nbytes for entry in entries)
    said = f"{len(entries)} tensors, {total:,} bytes of {dtype} in {files} file{'s' * (files > 1)}"
    padding = model.vocab - kept
    return said + (f"; left out: the last {padding} of {model.vocab} rows of the vocabulary" if padding else "")


def actual_name(files: TensorFiles, name: str, kind: str) -> str:
    """The name in the files. A bare model, such as OpenAI's GPT-2, has no prefix in its names."""
    return name if name in files.names else name.removeprefix(PREFIXES[kind])


def check_model(
    files: TensorFiles, config: dict[str, Any], model: ModelConfig, *, positions: int
) -> tuple[int, list[str]]:
    """Raise `UserError` unless the files hold this model. Returns the rows of the vocabulary in the files, and the
    dtypes of the tensors."""
    wrong = config_differences(config, model, positions=positions)
    kind = config["model_type"]
    hint = f"; {CONFIG} asks for {', '.join(wrong)}" if wrong else ""
    if family(model) != kind:
        raise UserError(f"{CONFIG}: model_type is {kind!r}{hint}")
    known, rows, dtypes = {HEAD} if model.tied else set(), set(), set()
    for each, _, usual in _pieces(model, positions=positions):
        name = actual_name(files, usual, kind)
        known.add(name)
        if name not in files.names:
            raise UserError(f"{usual}: is not in the file, and this configuration has it{hint}")
        shape, wanted = files.shape(name), each.shape
        padded = each.leaf in TABLES and shape[1:] == wanted[1:] and shape[0] <= wanted[0]
        if shape != wanted and not padded:
            raise UserError(f"{name}: is {list(shape)} in the file, this configuration makes it {list(wanted)}{hint}")
        rows |= {shape[0]} if each.leaf in TABLES else set()
        dtypes.add(files.dtype(name))
    if extra := sorted(name for name in files.names - known if not name.endswith(CONSTANT_BUFFERS)):
        raise UserError(f"{extra[0]}: is in the file, and this configuration has no such parameter{hint}")
    if len(rows) > 1:
        raise UserError(f"{HEAD}: embedding and head have {' and '.join(map(str, sorted(rows)))} rows in the file")
    if wrong:
        raise UserError(f"{CONFIG}: asks for {', '.join(wrong)}; set them, or choose another model")
    return rows.pop(), sorted(dtypes)


def load_params(
    files: TensorFiles, model: ModelConfig, shapes: dict[str, Any], *, positions: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Our parameters, as (name, array), from files that `check_model` has passed.

    shapes: of all parameters, with the dtypes that they get. Raises `UserError` for non-finite numbers, and for a head
    that is not the embedding though config.json says so.
    """
    kind = family(model)
    for leaf, group in _by_leaf(_pieces(model, positions=positions)):
        array = np.zeros(shapes[leaf].shape, shapes[leaf].dtype)
        for each, index, usual in group:
            name = actual_name(files, usual, kind)
            tensor = files.read(name)
            if not np.isfinite(tensor).all():
                raise UserError(f"{name}: holds numbers that are not finite; such a model cannot be trained")
            if leaf in TABLES:
                _fill(array, tensor)
            else:
                each.put(array[index], tensor)
        if leaf == TABLES[0] and model.tied and HEAD in files.names:
            if files.read(HEAD).tobytes() != tensor.tobytes():
                raise UserError(
                    f"{HEAD}: is not the embedding, though {CONFIG} says tie_word_embeddings; allowed: set"
                    " it to false there, and model.tied=false"
                )
        yield leaf, array


def _fill(table_VD: np.ndarray, rows_RD: np.ndarray) -> None:
    """Fill a table of the vocabulary. Rows that the file does not have become the mean of the others."""
    # Rows of zeros would be tokens of logit 0, often the likeliest. The mean adds at most log(V / R) to any loss: the
    # exponential of a mean is at most the mean of the exponentials.
    count = len(rows_RD)
    table_VD[:count] = rows_RD
    if count < len(table_VD):
        table_VD[count:] = rows_RD.mean(axis=0, dtype=np.float64)
