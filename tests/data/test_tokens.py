"""The source `tokens`, and what every source must keep."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import config, folder_of, ids_file, sharding, write_parquet, write_records

from jaxdist import registry
from jaxdist.config.schema import DataConfig
from jaxdist.data import FileArray, Ids, Loader, Source, make_eval_loader, make_loader
from jaxdist.data.source import split_tail
from jaxdist.data.sources.tokens import tokens
from jaxdist.errors import UserError


def same(source: Source, train: Any, held_out: Any) -> bool:
    return bool(np.array_equal(source.train, train) and np.array_equal(source.held_out, held_out))


def test_tokens_in_a_folder(tmp_path: Path) -> None:
    ids_file(tmp_path / "train.bin", range(100))
    assert same(tokens(config(tmp_path, held_out=0.2)), range(80), range(80, 100))
    ids_file(tmp_path / "val.bin", range(500, 550))
    for path in (tmp_path, tmp_path / "train.bin"):
        source = tokens(config(path, held_out=0.2))
        assert same(source, range(100), range(500, 550))
        assert source.vocab == 550
    assert isinstance(source.train, FileArray)
    assert (source.info["unit"], source.info["train"], source.info["held_out"]) == ("tokens", 100, 50)
    other = ids_file(tmp_path / "other.bin", range(7))
    assert same(tokens(config(tmp_path, val_path=str(other))), range(100), range(7))
    assert same(tokens(config(other, held_out=0.5, seq_len=2)), range(4), range(4, 7))  # no val.bin for other names
    sha = source.info["sha256"]
    ids_file(tmp_path / "val.bin", [*range(500, 549), 9])
    assert tokens(config(tmp_path)).info["sha256"] != sha


def test_tokens_uint32_reach_the_batch(tmp_path: Path) -> None:
    path = ids_file(tmp_path / "ids", np.arange(70_000, 70_100), "uint32")
    source = tokens(config(path, token_dtype="uint32", held_out=0.2))
    assert source.vocab == 70_100
    made = Loader(source.train, seq_len=4, global_batch=8, sharding=sharding(data=8)).batch(0)
    assert int(made["inputs"].min()) >= 70_000
    np.testing.assert_array_equal(np.asarray(made["targets"]), np.asarray(made["inputs"]) + 1)


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        ("data.path", {"path": "none"}, "does not exist"),
        ("data.path", {"path": "folder"}, "train.bin' does not exist"),
        ("data.path", {"path": "empty"}, "is empty"),
        ("data.path", {"path": "odd"}, "has 101 bytes, not a multiple of 2"),
        ("data.path", {"path": "ids", "token_dtype": "uint32"}, "has 202 bytes, not a multiple of 4"),
        ("data.path", {"path": "ids", "seq_len": 10}, "5 held-out tokens, less than one window"),
        ("data.path", {"path": "ids", "seq_len": 100, "val_path": "ids2"}, "100 held-out tokens, less than one window"),
        ("data.path", {"path": "large", "token_dtype": "uint32"}, "holds the id 4294967295"),
        ("data.path", {"path": "holder"}, "not a regular file"),
        ("data.val_path", {"path": "ids", "val_path": "none"}, "does not exist"),
        ("data.val_path", {"path": "ids", "val_path": "ids"}, "is the training file"),
        ("data.val_path", {"path": "ids", "val_path": "odd"}, "not a multiple"),
        ("data.val_path", {"path": "ids", "val_path": "folder"}, "not a regular file"),
    ],
)
def test_tokens_errors(tmp_path: Path, key: str, changes: dict[str, Any], message: str) -> None:
    folder_of(tmp_path, {"empty": b"", "odd": b"x" * 101, "folder/readme": b"hello", "holder/train.bin/x": b"x"})
    ids_file(tmp_path / "ids", range(101))
    ids_file(tmp_path / "ids2", range(100))
    ids_file(tmp_path / "large", [2**32 - 1] * 99, "uint32")
    paths = {name: str(tmp_path / value) for name, value in changes.items() if name.endswith("path")}
    with pytest.raises(UserError, match=rf"^{key}: ") as caught:
        tokens(config(**{**changes, **paths}))
    caught.match(message)


@pytest.mark.parametrize("save", [np.save, np.savez])
def test_a_file_of_numpy_is_no_file_of_tokens(save: Any, tmp_path: Path) -> None:
    """Its header would be read as ids."""
    save(tmp_path / "tokens", np.arange(5000, dtype=np.int64))
    [file] = tmp_path.iterdir()
    with pytest.raises(UserError, match=r"^data\.path: '.*' is a NumPy file, .*; give one with ids alone"):
        tokens(config(file))


def some_data(name: str, folder: Path) -> DataConfig:
    """A little data for a source. Skips where its package is not installed."""
    if name == "images":
        np.savez(folder / "a.npz", image=np.zeros((90, 3, 3), np.uint8), label=np.arange(90))
        return config(folder / "a.npz")
    if name == "iterable":
        return config("test_tokens.NUMBERS", val_path="test_tokens.NUMBERS", source=name)
    if name == "parquet":
        return config(write_parquet(folder / "a.parquet", tokens=[[i, i + 1] * 9 for i in range(20)]), source=name)
    if name == "arrayrecord":
        return config(write_records(folder / "a.arrayrecord", [b"document %d" % i for i in range(20)]))
    if name == "masked":
        return config(ids_file(folder / "ids", np.arange(300) % 97), source=name, masked_source="tokens")
    if name == "lines":
        for i in range(9):
            (folder / f"{i}.py").write_text(f"{i}+1\n# {i}\n")  # of at most seq_len bytes
        return config(folder, source=name, held_out=0.3)
    if name == "jsonl":
        (folder / "a.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(100, 140)))
        return config(folder, source=name, packing="documents")
    if name == "huggingface":
        return config(write_parquet(folder / "a.parquet", text=[f"text {i}" for i in range(40)]), source=name)
    if name == "text":
        (folder / "text").write_text("some words\n" * 30)
        return config(folder / "text", source=name)
    if name == "digits":
        return config("sklearn.datasets.load_digits", source=name)
    return config(ids_file(folder / "ids", np.arange(300) % 97))


NUMBERS = [{"label": i, "x": [i, 0.5]} for i in range(40)]


@pytest.mark.parametrize("name", registry.names("jaxdist.data.sources"))
def test_every_source_keeps_the_contract(name: str, tmp_path: Path) -> None:
    data = some_data(name, tmp_path)
    source = registry.load("jaxdist.data.sources", name, key="data.source")(data)
    assert isinstance(source, Source)
    keys = {"name", "path", "unit", "train", "held_out", "files", "held_out_files", "sha256"}
    of_examples = name in ("jsonl", "huggingface")
    assert set(source.info) == keys | ({"lines", "examples"} if of_examples else set())
    assert (source.info["name"], source.info["path"]) == (name, data.path)
    versions = 10 if name == "masked" else 1  # of a window that is trained on
    assert (source.info["train"] * versions, source.info["held_out"]) == (source.train.size, source.held_out.size)
    again = registry.load("jaxdist.data.sources", name, key="data.source")(data)
    assert again.info == source.info and len(source.info["sha256"]) == 64
    made = make_loader(source, seq_len=4, global_batch=8, sharding=sharding(data=8), seed=0)
    held = make_eval_loader(source, seq_len=4, global_batch=8, sharding=sharding(data=8), batches=1)
    for batch in (made.batch(5), held.batch(0)):
        assert {leaf: (value.shape, value.dtype) for leaf, value in batch.items()} == {
            leaf: (like.shape, like.dtype) for leaf, like in made.leaves.items()
        }
    if not isinstance(source.train, Ids):
        assert source.train.leaves == source.held_out.leaves
        assert (source.documents is None) != of_examples  # which are put into rows, where a document may not fit
        return
    assert source.train.ndim == source.held_out.ndim == 1
    assert source.train.dtype == source.held_out.dtype
    assert max(int(np.asarray(side).max()) for side in (source.train, source.held_out)) < source.vocab
    with pytest.raises((ValueError, TypeError), match="read-only|does not support item assignment"):
        source.train[0] = 0


def test_split_tail_always_holds_something_out() -> None:
    assert [part.tolist() for part in split_tail(np.arange(5), 0.01)] == [[0, 1, 2, 3], [4]]
