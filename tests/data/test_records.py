"""Documents in record files: the sources `parquet` and `arrayrecord`."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import config as section
from data_files import sharding, write_parquet, write_records

from jaxdist.config.schema import DataConfig
from jaxdist.data import Source, load_source, make_loader
from jaxdist.data.source import hash_fraction
from jaxdist.data.sources.arrayrecord import arrayrecord
from jaxdist.data.sources.parquet import parquet
from jaxdist.errors import UserError

TEXTS = [f"document {i} with \N{SNOWMAN} " + "x" * (i % 7) for i in range(40)]
IDS = [[i, 1000 * i, 3, 4] + [5] * (i % 3) for i in range(40)]


def config(path: Path | str, **changes: Any) -> DataConfig:
    return section(path, **({} if "mixture" in changes else {"source": "parquet"}), **changes)


def documents(ids: Any, starts: Any) -> list[list[int]]:
    return [part.tolist() for part in np.split(np.asarray(ids), starts[1:])]


def check(source: Source, wanted: list[list[int]], *, unit: str, dtype: str, vocab: int) -> None:
    """All documents, each on one side, in order; the sides by the hash of the content."""
    assert source.documents is not None and source.info["unit"] == unit and source.vocab == vocab
    both = zip((source.train, source.held_out), source.documents, strict=True)
    sides = [documents(ids, starts) for ids, starts in both]
    assert sorted(sides[0] + sides[1]) == sorted(wanted) and len(sides[1]) >= 1
    assert [each for each in wanted if each in sides[0]] == sides[0]
    kind = "u1" if unit == "bytes" else "<u4"
    assert all((hash_fraction(np.array(each, kind).tobytes()) < 0.2) == (each in sides[1]) for each in wanted)
    for ids in (source.train, source.held_out):
        assert isinstance(ids, np.ndarray) and ids.dtype == dtype and not ids.flags.writeable
    assert make_loader(source, seq_len=4, global_batch=8, sharding=sharding(data=8), seed=0).batch(3)


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "string_view", "dictionary"])
def test_parquet_text(kind: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (extra parquet) is not installed")
    plain = arrow.array(TEXTS)
    made = plain.dictionary_encode() if kind == "dictionary" else plain.cast(getattr(arrow, kind)())
    path = write_parquet(tmp_path / "a.parquet", n=list(range(40)), text=made)
    source = parquet(config(path, held_out=0.2))
    check(source, [list(text.encode()) for text in TEXTS], unit="bytes", dtype="uint8", vocab=256)
    renamed = write_parquet(tmp_path / "b.parquet", body=TEXTS)
    assert parquet(config(renamed, held_out=0.2, column="body")).info["sha256"] == source.info["sha256"]
    with pytest.raises(UserError, match=r"^data.column: null, and .* has none of text, content, .*; allowed: body"):
        parquet(config(renamed))
    with pytest.raises(UserError, match=r"^data.column: 'none', but .* has no such column; allowed: body"):
        parquet(config(renamed, column="none"))


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed"])
def test_parquet_tokens(kind: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (extra parquet) is not installed")
    ids = [each[:4] for each in IDS] if kind == "fixed" else IDS
    made = {
        "list": arrow.list_(arrow.int64()),
        "large_list": arrow.large_list(arrow.uint16()),
        "fixed": arrow.list_(arrow.int32(), 4),
    }[kind]
    path = write_parquet(tmp_path / "a.parquet", tokens=arrow.array(ids, made))
    check(parquet(config(path, held_out=0.2)), ids, unit="tokens", dtype="uint16", vocab=39_001)


def test_a_folder_of_parquet_is_one_file(tmp_path: Path) -> None:
    """In order of names; hidden files and others left out; a change of one byte is another fingerprint."""
    whole = parquet(config(write_parquet(tmp_path / "whole.parquet", text=TEXTS), held_out=0.2))
    for name, texts in (("b/1.parquet", TEXTS[25:]), ("a/9.parquet", TEXTS[:25])):
        write_parquet(tmp_path / "f" / name, text=texts)
    write_parquet(tmp_path / "f" / ".hidden" / "x.parquet", text=["no"])
    (tmp_path / "f" / "readme.txt").write_text("no")
    parts = parquet(config(tmp_path / "f", held_out=0.2))
    assert np.array_equal(whole.train, parts.train) and whole.info["sha256"] == parts.info["sha256"]
    assert parts.info["files"] == 2
    write_parquet(tmp_path / "f" / "a/9.parquet", text=["Document" + TEXTS[0][8:], *TEXTS[1:25]])
    assert parquet(config(tmp_path / "f", held_out=0.2)).info["sha256"] != whole.info["sha256"]


def test_array_records(tmp_path: Path) -> None:
    text = write_records(tmp_path / "a.arrayrecord", [text.encode() for text in TEXTS])
    check(
        arrayrecord(config(text, held_out=0.2)),
        [list(text.encode()) for text in TEXTS],
        unit="bytes",
        dtype="uint8",
        vocab=256,
    )
    ids = write_records(tmp_path / "b.array_record", [np.array(each, "<u2").tobytes() for each in IDS])
    source = arrayrecord(config(ids, held_out=0.2, token_dtype="uint16"))
    check(source, IDS, unit="tokens", dtype="uint16", vocab=39_001)
    odd = write_records(tmp_path / "c.arrayrecord", [b"abcd" * 9, b"abc"])
    with pytest.raises(UserError, match=r"^data.token_dtype: 'uint16', but record 1 of .* has 3 bytes"):
        arrayrecord(config(odd, token_dtype="uint16"))


def test_held_out_files_and_one_document(tmp_path: Path) -> None:
    train, val = (
        write_parquet(tmp_path / f"{name}.parquet", text=texts)
        for name, texts in (("train", TEXTS), ("val", ["another text"]))
    )
    source = parquet(config(train, val_path=str(val)))
    assert isinstance(source.train, np.ndarray) and isinstance(source.held_out, np.ndarray)
    assert source.train.tobytes() == "".join(TEXTS).encode() and source.held_out.tobytes() == b"another text"
    one = parquet(config(write_parquet(tmp_path / "one.parquet", text=["a text of one document alone"]), held_out=0.4))
    assert isinstance(one.train, np.ndarray) and isinstance(one.held_out, np.ndarray)
    assert one.train.tobytes() + one.held_out.tobytes() == b"a text of one document alone"
    numbers = write_parquet(tmp_path / "ids.parquet", tokens=IDS)
    with pytest.raises(UserError, match=r"^data.val_path: .* holds tokens, data.path bytes"):
        parquet(config(train, val_path=str(numbers)))


def test_records_are_mixed_with_what_is_of_their_kind(tmp_path: Path) -> None:
    """And their first tokens are no targets with data.packing=documents."""
    path = write_parquet(tmp_path / "a.parquet", text=TEXTS)
    (tmp_path / "text.txt").write_text("some other text " * 50)
    mixture = (f"a 0.5 parquet {path}", f"b 0.5 text {tmp_path / 'text.txt'}")
    assert load_source(config("", mixture=mixture, held_out=0.2)).info["unit"] == "bytes"
    source = parquet(config(path, held_out=0.2))
    batch = make_loader(source, seq_len=4, global_batch=64, sharding=sharding(data=1), seed=0).batch(0)
    starts = np.asarray(batch["targets"])[np.asarray(batch["weights"]) == 0]
    assert starts.size and set(starts.tolist()) == {ord("d")}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a", None]}, r"^data.path: column 'text' of .* has nulls"),
        ({"text": [1.5, 2.5]}, r"^data.column: column 'text' of .* is of type double; allowed"),
        ({"text": [[1], [2, None]]}, r"^data.path: column 'text' of .* has nulls among its tokens"),
        ({"text": [[-1, 2, 3] * 9] * 9}, r"^data.path: .* holds the id -1; allowed: 0 to 2147483647"),
        ({"text": [[2**31, 2, 3] * 9] * 9}, r"^data.path: .* holds the id 2147483648"),
        ({"text": ["", ""]}, r"^data.path: no text and no tokens in"),
        ({"text": ["abc", "def"]}, r"^data.path: .* less than one window"),
    ],
)
def test_parquet_errors(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        parquet(config(write_parquet(tmp_path / "a.parquet", **columns)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("source", "suffix"), [(parquet, ".parquet"), (arrayrecord, ".arrayrecord")])
def test_damaged_and_missing_files(source: Any, suffix: str, tmp_path: Path) -> None:
    package = "pyarrow" if source is parquet else "array_record"
    pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / f"bad{suffix}").write_bytes(b"no records" * 100)
    (tmp_path / "folder").mkdir()
    for name, message in ((f"bad{suffix}", "or damaged"), ("none", "does not exist"), ("folder", f"holds no {suffix}")):
        with pytest.raises(UserError, match=f"^data.path: .*{message}") as error:
            source(config(tmp_path / name))
        assert "\n" not in str(error.value)
    good = (
        write_parquet(tmp_path / "a.parquet", text=TEXTS)
        if source is parquet
        else write_records(tmp_path / "a.arrayrecord", [text.encode() for text in TEXTS])
    )
    content = bytearray(good.read_bytes())
    good.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"^data.path: .*or damaged") as error:
        source(config(good))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "package", "extra"),
    [(parquet, "pyarrow", "parquet"), (arrayrecord, "array_record.python.array_record_module", "arrayrecord")],
)
def test_a_package_that_is_missing_is_named(
    source: Any, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"a.{extra}").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs the package \w+, .* pip install 'jaxdist\[{extra}\]'$"):
        source(config(tmp_path / f"a.{extra}"))
