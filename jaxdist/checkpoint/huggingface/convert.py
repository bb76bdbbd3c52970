"""Export to, and import from, Hugging Face folders: config.json beside tensors (docs/huggingface.md).

One stacked leaf at a time is in memory, and one of its tensors.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxdist.checkpoint.huggingface.family import CONFIG, HEAD_DROPOUT, Family, Tensor, config_value, stacked_blocks
from jaxdist.checkpoint.huggingface.names import FAMILIES, check_name, family, name_of, tensors
from jaxdist.checkpoint.huggingface.safetensors import FILE_BYTES, TensorEntry, TensorFiles, tensor_name, write
from jaxdist.checkpoint.reader import Stored
from jaxdist.config.load import model_differences, settings_by_key, with_settings
from jaxdist.config.rules.fields import all_keys, keys, show
from jaxdist.config.schema import DataConfig, ModelConfig
from jaxdist.errors import UserError
from jaxdist.specs import STACKED


def config_json(model: ModelConfig, *, positions: int, dtype: str) -> dict[str, Any]:
    """The config.json of a model, whose keys are all filled in. positions: the length of the longest sequence."""
    own = family(model)
    values = settings_by_key(model)
    found = {theirs: values[ours] for theirs, (ours, _) in own.keys.items()}
    found |= {key: allowed[0] for key, allowed in own.fixed.items()} | own.written(model, positions)
    return {"architectures": [own.architecture], "model_type": own.kind, **found, "dtype": dtype, "torch_dtype": dtype}


def config_differences(found: dict[str, Any], model: ModelConfig, *, positions: int) -> list[str]:
    """The settings that a configuration lacks for the model of a config.json: ["model.width=768 (is 128)", ...].

    A larger `model.vocab` and shorter sequences are allowed. Raises `UserError` for a model that no configuration
    makes.
    """
    check_name(model.name)
    theirs = _check_kind(found)
    known = dict(all_keys(type(model)))
    if not {ours for ours, _ in theirs.keys.values()} <= known.keys():  # of another model
        return [f"a model of type {theirs.kind} (model.name is {model.name})"]
    wanted, other = _wanted(found, theirs, model, positions)
    if theirs.tables and model.vocab >= wanted["vocab"]:
        del wanted["vocab"]
    different = model_differences(wanted, model)
    if family(model).form != theirs.form:
        different.insert(0, f"model.style={theirs.form} (is {family(model).form})")
    if theirs.positions and (most := longest_of(found, theirs) or positions) < positions:
        other = [*other, f"data.seq_len={most} (is {positions})"]
    different += other
    if not different and (impossible := theirs.impossible(found, model)):
        raise UserError(f"{CONFIG}: {impossible}")
    return different


def _wanted(
    found: dict[str, Any], theirs: Family, model: ModelConfig, positions: int
) -> tuple[dict[str, Any], list[str]]:
    """The values that a config.json has for keys of the model, and other differences in words."""
    known = dict(all_keys(type(model))) | keys(DataConfig)
    values = {ours: config_value(found, key, known[ours], usual) for key, (ours, usual) in theirs.keys.items()}
    own, other = theirs.read(found, known, model, positions)
    return values | own, other


def longest_of(found: dict[str, Any], theirs: Family) -> int | None:
    """The length of the longest sequence by a config.json; None for models without sequences."""
    if theirs.length is None:
        return None
    length: int = config_value(found, theirs.length[0], keys(DataConfig)["seq_len"], theirs.length[1])
    return length


def model_of_config(found: dict[str, Any]) -> tuple[ModelConfig, int]:
    """The model of a config.json, `resolved`, and the length of its longest sequence; 1 for one without sequences.

    Raises `UserError` for a model that no configuration makes.
    """
    theirs = _check_kind(found)
    length = longest_of(found, theirs) or 1
    style = {"style": theirs.style} if theirs.style else {}
    model = ModelConfig(name_of(theirs), **style)
    for _ in range(2):  # what else a config.json means depends, for some, on keys that it has
        values = _wanted(found, theirs, model.resolved(), length)[0]
        model = with_settings(model, values)
    if wrong := config_differences(found, model.resolved(), positions=length):
        raise UserError(f"{CONFIG}: asks for {', '.join(wrong)}, which no configuration makes")
    return model.resolved(), length


def dropout_of_config(found: dict[str, Any], *, classifies: bool) -> float:
    """The `model.dropout` of a config.json. Raises `UserError` where it has several rates: a model here has one.

    classifies: whether the head does, which alone has a rate of its own.
    """
    theirs = _check_kind(found)
    known = dict(all_keys(type(ModelConfig(name_of(theirs)))))["dropout"]
    rates = {key: config_value(found, key, known, usual) for key, usual in theirs.dropout.items()}
    if not classifies:
        rates.pop(HEAD_DROPOUT, None)
    rates = {key: rate for key, rate in rates.items() if rate is not None} | dict.fromkeys(theirs.undropped, 0.0)
    rate: float = next(iter(rates.values()))
    if any(each != rate for each in rates.values()):
        said = ", ".join(f"{key} {each:g}" for key, each in rates.items())
        raise UserError(
            f"model.dropout: is not given, and {CONFIG} has more than one rate ({said}), where a model here has one for"
            f" all; give it: model.dropout={max(rates.values()):g}, or another number >= 0 and < 1; a"
            " run that was started before has its own in its config.yaml"
        )
    return rate


def _check_kind(found: dict[str, Any]) -> Family:
    """The family by model_type. Raises `UserError` for one that is not known, and for what is `fixed` otherwise."""
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"{CONFIG}: model_type is {show(kind)}; allowed: {', '.join(FAMILIES)}")
    for key, allowed in FAMILIES[kind].fixed.items():
        if found.get(key, allowed[0]) not in allowed:
            raise UserError(
                f"{CONFIG}: {key} is {show(found[key])}, which no configuration makes; allowed:"
                f" {', '.join(map(repr, allowed))}"
            )
    return FAMILIES[kind]


def _pieces(model: ModelConfig, *, positions: int) -> list[tuple[Tensor, Any, str]]:
    """(tensor, index, name) of every tensor in the order of the files. index: where it lies in our leaf, the row of its
    block or the whole leaf."""
    blocks = list(enumerate(stacked_blocks(model)))
    return [
        (each, row, each.name.format(block))
        for each in tensors(model, positions=positions)
        for row, block in (blocks if each.leaf.startswith(STACKED + ".") else [(..., ...)])
    ]


def _by_leaf(pieces: list[tuple[Tensor, Any, str]]) -> Iterator[tuple[str, Iterator[tuple[Tensor, Any, str]]]]:
    """(our leaf, its pieces), so that one leaf at a time is in memory."""
    return groupby(pieces, lambda piece: piece[0].leaf)


def recorded_model(given: dict[str, Any], where: str) -> ModelConfig:
    """The model of a record, `resolved`. Anyone may have written it. Raises `UserError`."""
    usual = ModelConfig(**{name: given[name] for name in ("name",) if name in given})
    known = {name: key for name, key in all_keys(type(usual)) if not key.nested}
    if unknown := sorted(given.keys() - known.keys()):
        raise UserError(
            f"{where} has a model with the key {show(unknown[0])}, which is not known here; use another run"
        )
    model: ModelConfig = with_settings(
        usual, {name: known[name].check(value, f"model.{name}") for name, value in given.items()}
    )
    return model.resolved()


def model_of(stored: Stored) -> tuple[ModelConfig, int]:
    """The model of a checkpoint, `resolved`, and the length of its sequences. Raises `UserError` for one that has no
    format."""
    model, data = (stored.meta.get(name) for name in ("model", "data"))
    if not isinstance(model, dict) or not isinstance(data, dict) or "seq_len" not in data:
        raise UserError(f"{stored.folder}: does not say which model it is of; allowed: checkpoints of scripts/train.py")
    check_name(model.get("name", "gpt"))  # first: making the options of a dotted path imports it
    return recorded_model(model, str(stored.folder)), data["seq_len"]


def export(
    stored: Stored,
    output: Path,
    *,
    vocab: int | None = None,
    ends: Mapping[str, int | None] = MappingProxyType({}),
    file_bytes: int = FILE_BYTES,
) -> str:
    """Write the parameters of a checkpoint to a new folder. Returns a line about it.

    vocab: the rows of the vocabulary to write; the others are padding. ends: the ids that begin and end a text, such as
    {"eos_token_id": 2}; without them config.json has null. Raises `UserError` for a model that has no Hugging Face
    format.
    """
    model, positions = model_of(stored)
    own, found = family(model), stored.params()
    tables, rows = own.tables, model.vocab or 0
    kept = rows if vocab is None else vocab
    if vocab is not None and not tables:
        raise UserError(f"--vocab: {vocab}, but model.name {model.name!r} has no vocabulary; leave it out")
    if tables and not 1 <= kept <= rows:
        raise UserError(f"--vocab: {kept}; allowed: 1 to {rows}, the rows that the model has (model.vocab)")
    pieces = _pieces(model, positions=positions)
    written = {each.leaf for each, _, _ in pieces} | {*own.zeros}
    assert written == found.keys(), written ^ found.keys()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} is there already; give a new folder")

    def shape(each: Tensor) -> tuple[int, ...]:
        return (kept, *each.shape[1:]) if each.leaf in tables else each.shape

    def arrays() -> Iterator[np.ndarray]:
        for leaf, group in _by_leaf(pieces):
            array = stored.param(leaf)
            yield from (each.take(array[index])[: shape(each)[0]] for each, index, _ in group)

    entries = [TensorEntry(name, str(found[each.leaf].dtype), shape(each)) for each, _, name in pieces]
    output.mkdir(parents=True, exist_ok=True)
    files = write(output, entries, arrays(), file_bytes=file_bytes)
    dtype = entries[0].dtype
    kept_model = model.replace(vocab=kept) if tables else model
    config = config_json(kept_model, positions=positions, dtype=dtype)
    text = json.dumps(config | {key: ends[key] for key in config.keys() & ends.keys()}, indent=2)
    (output / CONFIG).write_text(text + "\n", encoding="utf-8")  # last: a folder without it is not complete
    total = sum(entry.nbytes for entry in entries)
    said = f"{len(entries)} tensors, {total:,} bytes of {dtype} in {files} file{'s' * (files > 1)}"
    padding = rows - kept
    return said + (f"; left out: the last {padding} of {rows} rows of the vocabulary" if padding else "")


def actual_name(files: TensorFiles, name: str, own: Family) -> str:
    """The name in the files: a bare model, such as OpenAI's GPT-2, has no prefix in its names, and old files others."""
    others = [name.removesuffix(end) + other for end, other in own.aliases if name.endswith(end)]
    every = [each for usual in (name, *others) for each in (usual, usual.removeprefix(own.prefix))]
    return next((each for each in every if each in files.names), name.removeprefix(own.prefix))


def check_model(
    files: TensorFiles, config: dict[str, Any], model: ModelConfig, *, positions: int
) -> tuple[int | None, list[str]]:
    """Raise `UserError` unless the files hold this model. Returns the rows of the vocabulary in the files, None of a
    model without one, and the dtypes of the tensors."""
    wrong = config_differences(config, model, positions=positions)
    own, kind = family(model), config["model_type"]
    hint = f"; {CONFIG} asks for {', '.join(wrong)}" if wrong else ""
    if own.form != FAMILIES[kind].form:
        raise UserError(f"{CONFIG}: model_type is {kind!r}{hint}")
    experts = model.moe.experts if own.zeros else 0
    for count, what in ((model.layers, "blocks"), (len(stacked_blocks(model)) * experts, "experts of blocks")):
        if count > len(files.names):  # a hostile number of them would take the memory of all their names
            raise UserError(f"{CONFIG}: asks for {count} {what}, and there are {len(files.names)} tensors{hint}")
    known, rows, dtypes, table = set(own.copies(model)), set[int](), set[str](), ""
    for each, _, usual in _pieces(model, positions=positions):
        name = actual_name(files, usual, own)
        known.add(name)
        if name not in files.names:
            raise UserError(f"{usual}: is not in the file, and this configuration has it{hint}")
        shape, wanted = files.shape(name), each.shape
        same = shape[1:] == wanted[1:] and each.leaf in (own.positions, *own.tables)
        cut = shape[0] >= wanted[0] if each.leaf == own.positions else shape[0] <= wanted[0]
        if shape != wanted and not (same and cut):
            raise UserError(f"{name}: is {list(shape)} in the file, this configuration makes it {list(wanted)}{hint}")
        if each.leaf in own.tables:
            rows, table = rows | {shape[0]}, name
        dtypes.add(files.dtype(name))
    if extra := sorted(name for name in files.names - known if not (own.ignored and name.endswith(own.ignored))):
        raise UserError(f"{tensor_name(extra[0])}: is in the file, and this configuration has no such parameter{hint}")
    if len(rows) > 1:
        raise UserError(f"{table}: embedding and head have {' and '.join(map(str, sorted(rows)))} rows in the file")
    if wrong:
        raise UserError(f"{CONFIG}: asks for {', '.join(wrong)}; set them, or choose another model")
    return next(iter(rows), None), sorted(dtypes)


def pieces_of(
    files: TensorFiles, model: ModelConfig, like: dict[str, Any], *, positions: int
) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """Our parameters in pieces, as (name, number of a block or None, array), from files that `check_model` has passed.

    like: the parameters that are wanted, with shapes and dtypes. A table of the vocabulary may have more rows than the
        files, a table of positions fewer.

    Raises `UserError` for non-finite numbers, and for a copy of a parameter, such as a tied head, that differs from it.
    """
    own = family(model)
    repeated = {leaf: name for name, leaf in own.copies(model).items() if name in files.names}
    for leaf, group in _by_leaf(_pieces(model, positions=positions)):
        if leaf not in like:
            continue
        wanted, by_block = like[leaf], dict[Any, list[tuple[Tensor, str]]]()
        for each, index, usual in group:
            by_block.setdefault(index, []).append((each, actual_name(files, usual, own)))
        for index, tensors_of in by_block.items():
            shape = wanted.shape if index is ... else wanted.shape[1:]
            array = np.zeros(shape, wanted.dtype)
            for each, name in tensors_of:
                tensor = files.finite(name)
                if leaf in own.tables:
                    _fill(array, tensor)
                else:
                    each.put(array, tensor[: shape[0]] if leaf == own.positions else tensor)
                if leaf in repeated and files.read(repeated[leaf]).tobytes() != tensor.tobytes():
                    raise UserError(f"{repeated[leaf]}: {own.unequal.format(name)}")
            yield leaf, None if index is ... else index, array
    yield from ((leaf, None, np.zeros(like[leaf].shape, like[leaf].dtype)) for leaf in own.zeros if leaf in like)


def _fill(table_VD: np.ndarray, rows_RD: np.ndarray) -> None:
    """Fill a table of the vocabulary. Rows that the file does not have become the mean of the others."""
    # Rows of zeros would be tokens of logit 0, often the likeliest. The mean adds at most log(V / R) to any loss: the
    # exponential of a mean is at most the mean of the exponentials.
    count = len(rows_RD)
    table_VD[:count] = rows_RD
    if count < len(table_VD):
        table_VD[count:] = rows_RD.mean(axis=0, dtype=np.float64)
