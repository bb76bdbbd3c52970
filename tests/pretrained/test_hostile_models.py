"""A model from someone else as the start of a run: whatever its files hold, the answer is one line, and comes soon."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from saved_runs import NEEDS, config_of, random_params, save_run

from jaxdist.build import assemble
from jaxdist.checkpoint.checksums import CHECKSUMS
from jaxdist.checkpoint.huggingface.convert import export
from jaxdist.checkpoint.huggingface.safetensors import INDEX, SINGLE
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.mesh import make_mesh
from jaxdist.pretrained import open_pretrained

pytestmark = [NEEDS, pytest.mark.xdist_group("hostile_models")]  # the folder is shared
NAME, LAST = "gpt2-tied", "transformer.ln_f.bias"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and the same as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("origin")
    stored = save_run(folder / "run", config_of(NAME), random_params(config_of(NAME)))
    export(stored, folder / "hf")
    return folder


@cache
def target_of() -> Any:
    """What the parameters are loaded into."""
    return assemble(config_of(NAME), make_mesh()).target.params


def attempt(folder: Path, target: Any) -> str:
    """What is said when the folder is opened and loaded."""
    with pytest.raises(UserError) as error, open_pretrained(folder, key="init.from") as found:
        found.load(target, say=lambda line: None)
    return str(error.value)


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    fields, rest = header_of(content)
    change(fields)
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + rest


def entry(**values: Any) -> Callable[[bytes], bytes]:
    """Other values in the header of the tensor `LAST`."""
    return lambda content: with_header(content, lambda fields: fields[LAST].update(values))


def overlapping(content: bytes) -> bytes:
    """Two tensors at the same bytes."""

    def change(fields: dict[str, Any]) -> None:
        fields[LAST]["data_offsets"] = fields["transformer.ln_f.weight"]["data_offsets"]

    return with_header(content, change)


def renamed(name: str) -> Callable[[bytes], bytes]:
    def change(fields: dict[str, Any]) -> None:
        fields[name] = fields.pop(LAST)

    return lambda content: with_header(content, change)


def infinite(content: bytes) -> bytes:
    return content[:-4] + np.float32(np.inf).tobytes()


FILES = {
    "truncated": (lambda content: content[:-1], "not a file of safetensors"),
    "a header alone": (lambda content: content[:100], "not a file of safetensors"),
    "a header of 2^60 bytes": (lambda content: struct.pack("<Q", 2**60) + content[8:], "not a file of safetensors"),
    "more at the end": (lambda content: content + b"\0" * 8, "not a file of safetensors"),
    "no JSON": (lambda content: content[:8] + b"!" + content[9:], "not a file of safetensors"),
    "overlapping": (overlapping, "not a file of safetensors"),
    "offsets beyond": (entry(data_offsets=[2**40, 2**40 + 128]), "not a file of safetensors"),
    "offsets backwards": (entry(data_offsets=[128, 0]), "not a file of safetensors"),
    "a size that overflows": (entry(shape=[2**33, 2**33]), "not a file of safetensors"),
    "negative sizes": (entry(shape=[-8, -4]), "not a file of safetensors"),
    "wrong shape": (entry(shape=[4, 8]), f"{LAST}: is [4, 8] in the file, this configuration makes it [32]"),
    "wrong type": (entry(dtype="I32"), "is of type I32 in the file; allowed: F64, F32"),
    "another name": (renamed("transformer.ln_f.shift"), f"{LAST}: is not in the file"),
    "a name of two lines": (renamed("a\nb\x1b[2J" + "c" * 5000), f"{LAST}: is not in the file"),
    "infinite": (infinite, "holds numbers that are not finite"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_file_is_one_line(case: str, origin: Path, tmp_path: Path) -> None:
    change, message = FILES[case]
    (tmp_path / "config.json").write_bytes((origin / "hf" / "config.json").read_bytes())
    (tmp_path / SINGLE).write_bytes(change((origin / "hf" / SINGLE).read_bytes()))
    said = attempt(tmp_path, target_of())
    assert message in said and said.isprintable() and len(said) < 1000, said


def test_an_odd_name_beside_the_right_ones_is_one_line(origin: Path, tmp_path: Path) -> None:
    """In a message that names it."""

    def change(fields: dict[str, Any]) -> None:
        end = max(each["data_offsets"][1] for name, each in fields.items() if name != "__metadata__")
        fields["a\nb\x1b[2J" + "c" * 5000] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}

    (tmp_path / "config.json").write_bytes((origin / "hf" / "config.json").read_bytes())
    (tmp_path / SINGLE).write_bytes(with_header((origin / "hf" / SINGLE).read_bytes(), change))
    said = attempt(tmp_path, target_of())
    assert "is in the file, and this configuration has no such parameter" in said
    assert said.isprintable() and len(said) < 1000, said
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes((tmp_path / SINGLE).read_bytes())
    said = attempt(alone, target_of())
    assert "does not fit this model" in said and said.isprintable() and len(said) < 2000, said


INDICES = [
    ({LAST: "../secret.safetensors"}, "names the file '../secret.safetensors'; allowed: files *.safetensors beside it"),
    ({LAST: "/tmp/secret.safetensors"}, "names the file '/tmp/secret.safetensors'"),
    ({LAST: "model.bin"}, "names the file 'model.bin'"),
    ({LAST: "pipe.safetensors"}, "pipe.safetensors: is no regular file"),
    ({LAST: "folder.safetensors"}, "folder.safetensors: is no regular file"),
    ({"odd": SINGLE}, "has no tensor 'odd'"),
    ({LAST: SINGLE}, "config.json: asks for 4 blocks, and there are 1 tensors"),
]


@pytest.mark.parametrize(("where", "message"), INDICES)
def test_an_index_leads_nowhere_else(where: dict[str, str], message: str, origin: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (folder / "config.json", folder / SINGLE, tmp_path / "secret.safetensors"):
        path.write_bytes((origin / "hf" / (path.name if path.parent == folder else SINGLE)).read_bytes())
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "folder.safetensors").mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    said = attempt(folder, target_of())
    assert message in said and said.isprintable(), said


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"n_layer": 10**9}, "asks for 1000000000 blocks, and there are 52 tensors"),
    ({"n_layer": 5}, "transformer.h.4.ln_1.weight: is not in the file"),
    ({"n_embd": 2**30}, "wte.weight: is [259, 32] in the file"),
    ({"n_embd": -8}, "n_embd: -8 is out of range"),
    ({"n_positions": 2**30}, "wpe.weight: is [12, 32] in the file"),
    ({"vocab_size": 2**40}, "config.json"),
    ({"n_layer": None}, "n_layer"),
    ({"model_type": "odd\nname"}, "model_type is"),
]


@pytest.mark.parametrize(("change", "message"), CONFIGS)
def test_a_config_json_of_wrong_sizes_is_one_line(
    change: dict[str, Any], message: str, origin: Path, tmp_path: Path
) -> None:
    found = json.loads((origin / "hf" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(found | change))
    (tmp_path / SINGLE).write_bytes((origin / "hf" / SINGLE).read_bytes())
    said = attempt(tmp_path, target_of())
    assert message in said and said.isprintable() and len(said) < 1000, said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b"\xff\xfe"),
        ("config.yaml", b"model: [1]"),
        ("config.yaml", b"model: {layers: !!python/object:os.system x}"),
        ("config.yaml", None),
        ("config.json", b"\xff\xfe"),
        ("config.json", b"{" * 10000),
        ("config.json", None),
    ],
)
def test_an_architecture_from_elsewhere_is_one_line(name: str, content: bytes | None, tmp_path: Path) -> None:
    """None: a pipe, which is not waited for."""
    place = tmp_path / "place"
    place.mkdir()
    if content is None:
        os.mkfifo(place / name)
    else:
        (place / name).write_bytes(content)
    (tmp_path / "mine.yaml").write_text(f"model: {{from: {place}}}\n")
    with pytest.raises(UserError) as error:
        load_config(tmp_path / "mine.yaml")
    assert str(place) in str(error.value) and "\n" not in str(error.value)


METAS: list[tuple[str, Any]] = [
    ("model", {"layers": "x"}),
    ("model", {"odd": 1}),
    ("model", [1]),
    ("model", {"name": "no_such_module.model"}),
    ("data", [1]),
    ("train", [1]),
]


@pytest.mark.parametrize(("section", "value"), METAS)
def test_a_record_of_a_run_is_one_line(section: str, value: Any, origin: Path, tmp_path: Path) -> None:
    """Whoever can write a checkpoint can write what it says of itself."""
    shutil.copytree(origin / "run", tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "3"
    (step / CHECKSUMS).unlink()
    meta = step / "meta" / "metadata"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {section: value}))
    with pytest.raises(UserError) as error, open_pretrained(tmp_path / "run", key="init.from", ema=section == "train"):
        pass
    assert "\n" not in str(error.value)


def test_a_whole_folder_loads(origin: Path) -> None:
    """The folder of which all these are copies."""
    with open_pretrained(origin / "hf", key="init.from") as found:
        params = found.load(target_of(), say=lambda line: None)
    want = random_params(config_of(NAME))
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(want)))
