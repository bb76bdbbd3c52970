"""The source `huggingface`: saved datasets and Parquet files as examples, read without the package datasets."""

import json
from pathlib import Path
from typing import Any

import pytest
from data_files import write_parquet

from jaxdist.config.schema import DataConfig
from jaxdist.data import Source, load_source
from jaxdist.errors import UserError

ROWS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(40)]


def saved(folder: Path, rows: list[dict[str, Any]], *, files: int = 2) -> Path:
    """A folder as `save_to_disk` of datasets 3.6 writes it."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (extra parquet) is not installed")
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        table = arrow.Table.from_pylist(rows[i * len(rows) // files : (i + 1) * len(rows) // files])
        with arrow.OSFile(str(folder / name), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": None})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


def loaded(path: Path, **keys: Any) -> Source:
    return load_source(DataConfig(source="huggingface", path=str(path), seq_len=16, **keys))


def test_the_same_rows_give_the_same_data(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", [{**row, "other": b"\xff"} for row in ROWS])
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    columns = {name: [row[name] for row in ROWS] for name in ("prompt", "completion")}
    tables = write_parquet(tmp_path / "tables" / "a.parquet", **columns).parent
    saved(tmp_path / "dict" / "train", ROWS)
    held = saved(tmp_path / "dict" / "test", ROWS[:3], files=1)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    of_lines = load_source(DataConfig(source="jsonl", path=str(lines), seq_len=16))
    for path in (whole, tables, tmp_path / "dict"):
        source = loaded(path)
        assert source.info["sha256"] == of_lines.info["sha256"] and source.info["lines"] == of_lines.info["lines"]
    both = loaded(tmp_path / "dict", val_path=str(held))
    assert (both.info["train"], both.info["held_out"]) == (40, 3)


def test_what_is_no_dataset_is_one_line(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", ROWS, files=1)
    (tmp_path / "outside.arrow").write_bytes((folder / "data-00000-of-00001.arrow").read_bytes())

    def refused(said: str, path: Path = folder) -> None:
        with pytest.raises(UserError, match=said) as caught:
            loaded(path)
        assert "\n" not in str(caught.value) and str(caught.value).startswith("data.path: ")

    good = (folder / "state.json").read_text()
    for text, said in (
        ("{", "cannot be read"),
        ("[]", "no list under '_data_files'"),
        ('{"_data_files": ["a"]}', "no list under '_data_files'"),
        ('{"_data_files": [{"filename": "../outside.arrow"}]}', "is no file beside it"),
        ('{"_data_files": [{"filename": "b.arrow"}]}', "is no file beside it"),
        ('{"_data_files": []}', "no examples to train on"),
    ):
        (folder / "state.json").write_text(text)
        refused(said)
    (folder / "state.json").write_text(good)
    file = folder / "data-00000-of-00001.arrow"
    content = file.read_bytes()
    for bad in (content[:200], b"", b"\0" * 100, b"\xff" * 100):
        file.write_bytes(bad)
        refused("is no table, or damaged")
    saved(tmp_path / "e", [{"text": "a" * 77}], files=1)
    file = tmp_path / "e" / "data-00000-of-00001.arrow"
    ends = b"\0\0\0\0M\0\0\0"  # 0 and 77: where the text begins and ends
    content = file.read_bytes()
    at = content.rindex(ends)
    file.write_bytes(content[:at] + b"\0\0\0\0\xff\xff\xff\x7f" + content[at + 8 :])
    refused("is no table, or damaged", tmp_path / "e")
    refused("row 1: is no example .*bytes", saved(tmp_path / "b", [{"text": b"a"}], files=1))
    refused("row 1: holds nothing", saved(tmp_path / "c", [{"input": "a"}], files=1))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    refused("has no split train; give the folder of one: test", tmp_path / "d")
