"""The source `text`, and n-gram yardsticks."""

import itertools
import math
import os
import re
import sysconfig
import time
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import config, folder_of, many_files

from jaxdist.config.schema import DataConfig
from jaxdist.data import bigram_bits, trigram_bits
from jaxdist.data.source import fingerprint, held_out_files
from jaxdist.data.sources.text import text
from jaxdist.errors import UserError


def test_stdlib() -> None:
    begun = time.perf_counter()
    source = text(DataConfig())
    assert time.perf_counter() - begun < 5  # 0.15 s where nobody else is at work
    assert source.vocab == 256
    assert source.train.dtype == source.held_out.dtype == np.uint8
    assert 8e6 < source.train.size + source.held_out.size < 14e6
    assert 0.02 < source.held_out.size / source.train.size < 0.1
    assert source.info["train"] == source.train.size
    assert source.info["files"] > 10 * source.info["held_out_files"] > 0
    assert source.info["unit"] == "bytes"
    assert not source.train.flags.writeable
    assert b"def dataclass(" in source.train.tobytes() + source.held_out.tobytes()
    assert text(DataConfig()).info == source.info


def test_stdlib_is_the_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"ast.py": b"import ast\n", "json/_tests_helper.py": b"import json\n", "xml/sax/a.py": b"import xml\n"}
    dropped = (
        "site-packages/a.py",
        "dist-packages/a.py",
        "test/a.py",
        "ctypes/test/a.py",
        "lib2to3/tests/a.py",
        "idlelib/idle_test/a.py",
        "pydoc_data/topics.py",
        "_sysconfigdata__linux.py",
        "config-3.11/a.py",
        "__pycache__/a.py",
        "os.pyc",
        "LICENSE.txt",
    )
    folder_of(tmp_path, kept | dict.fromkeys(dropped, b"not wanted\n"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    source = text(config("stdlib"))
    assert sorted((source.train.tobytes() + source.held_out.tobytes()).splitlines(True)) == sorted(kept.values())
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(UserError, match=r"^data\.path: cannot read .*python311\.zip"):
        text(config("stdlib"))


def test_folder_is_split_by_file_and_stays_split(tmp_path: Path) -> None:
    files = many_files(60)
    before = text(config(folder_of(tmp_path, files), held_out=0.2))
    train, held = before.train.tobytes(), before.held_out.tobytes()
    for content in files.values():
        assert (content in train) != (content in held)
    assert len(train) + len(held) == sum(map(len, files.values()))
    assert (before.info["files"], before.info["held_out_files"]) == (train.count(b"<"), held.count(b"<"))
    after = text(config(folder_of(tmp_path, {"new.txt": b"<new> text\n", "part1/zzz": b"<zzz> more\n"}), held_out=0.2))
    for content in files.values():
        assert (content in train) == (content in after.train.tobytes())
    assert after.info["sha256"] != before.info["sha256"]


def test_folder_order_and_what_is_left_out(tmp_path: Path) -> None:
    kept = {"b.txt": b"bbbbbbbb", "a/z": b"zzzzzzzz", "a.txt": b"aaaaaaaa", "c/d/e.md": b"eeeeeeee"}
    dropped = {".hidden": b"hidden.. ", ".git/config": b"config.. ", "image.png": b"PNG\0......", "empty": b""}
    outside = folder_of(tmp_path / "outside", {"secret.txt": b"outside."})
    root = folder_of(tmp_path / "root", kept | dropped)
    (root / "link.txt").symlink_to(outside / "secret.txt")
    (root / "linked").symlink_to(outside, target_is_directory=True)
    (root / "loop").symlink_to(root, target_is_directory=True)
    os.mkfifo(root / "pipe")
    source = text(config(root))
    names = sorted(kept)
    chosen = held_out_files(names, 0.05)
    assert source.train.tobytes() == b"".join(kept[n] for n, held in zip(names, chosen, strict=True) if not held)
    assert source.held_out.tobytes() == b"".join(kept[n] for n, held in zip(names, chosen, strict=True) if held)
    assert source.info["lines"][0] == "1 binary file left out"
    late = folder_of(tmp_path / "late", {"x": b"x" * 8192 + b"\0", "y": b"y" * 99})  # NUL after the probe: text
    assert text(config(late)).info["train"] + text(config(late)).info["held_out"] == 8193 + 99


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    plain, marked = (folder_of(tmp_path / f"{len(mark)}", {"a": mark + b"x" * 200}) for mark in (b"", BOM_UTF8))
    for path in ("a", "."):
        assert text(config(plain / path)).info["sha256"] == text(config(marked / path)).info["sha256"]


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1.0])
@pytest.mark.parametrize("number", [2, 3, 20])
def test_both_sides_have_a_file(fraction: float, number: int) -> None:
    chosen = held_out_files(list(many_files(number)), fraction)
    assert any(chosen)
    assert not all(chosen)


def test_far_more_held_out_than_asked_for(tmp_path: Path) -> None:
    """Files are held out whole: of a few, one may be nearly everything."""
    sizes = {"a.txt": 200_000, "b.txt": 100_000, "c.txt": 8_833}
    source = text(config(folder_of(tmp_path / "few", {name: b"x" * size for name, size in sizes.items()})))
    share = source.held_out.size / sum(sizes.values())
    assert source.info["lines"] == [
        f"warning: {share:.0%} of the bytes are held out, and data.held_out is 0.05: files are held out whole, by a"
        " hash; give more files of like size, or one file, whose end is held out"
    ]
    assert "lines" not in text(config(tmp_path / "few" / "a.txt")).info
    assert "lines" not in text(config(folder_of(tmp_path / "like", many_files(99)))).info


def test_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    content = bytes(range(200))
    one = text(config(folder_of(tmp_path, {"one.txt": content[1:]}) / "one.txt", held_out=0.1))
    assert (one.train.tobytes(), one.held_out.tobytes()) == (content[1:181], content[181:])
    assert (one.info["files"], one.info["held_out_files"]) == (1, 1)
    folder = text(config(tmp_path, held_out=0.1))
    assert folder.train.tobytes() == one.train.tobytes()
    assert folder.info["sha256"] == one.info["sha256"]
    assert text(config(tmp_path, seq_len=1, held_out=0.015)).held_out.size == 2


def test_sha_changes_with_content_name_and_boundaries(tmp_path: Path) -> None:
    variants = [
        {"a": b"12345678", "b": b"abcdefgh"},
        {"a": b"12345678", "b": b"abcdefgX"},
        {"a": b"12345678a", "b": b"bcdefgh"},
        {"a": b"12345678", "c": b"abcdefgh"},
    ]
    shas = [text(config(folder_of(tmp_path / str(i), files))).info["sha256"] for i, files in enumerate(variants)]
    assert len(set(shas)) == 4
    assert all(len(sha) == 64 for sha in shas)
    again = text(config(folder_of(tmp_path / "again", variants[0]))).info
    assert again["sha256"] == shas[0]
    assert fingerprint([("a", 4, [b"12", b"34"])]) == fingerprint([("a", 4, [b"1234"])])
    assert fingerprint([("a", 2, [b"bc"]), ("d", 1, [b"e"])]) != fingerprint([("a", 1, [b"b"]), ("cd", 1, [b"e"])])


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "none", "does not exist"),
        ({}, ".", "no text in"),
        ({"a": b"\0", ".b": b"text of a hidden file", "c": b""}, ".", "no text in"),
        ({"a": b""}, "a", "is empty"),
        ({"a": b"1\0"}, "a", "a' is binary; allowed: text in UTF-8, .*; .* data.source=tokens data.token_dtype=uint8$"),
        ({"a": "text".encode("utf-32")}, "a", "a' is binary"),
        ({"a": "text".encode("utf-16")}, "a", "a' is text in UTF-16; .* iconv -f UTF-16"),
        ({"a": BOM_UTF16_LE + "日本語の文".encode("utf-16-le")}, "a", "a' is text in UTF-16; .* iconv -f UTF-16"),
        ({"a": BOM_UTF16_BE + "日本語の文".encode("utf-16-be")}, ".", "no text in"),
        ({"a": b"12345678"}, "a", r"1 held-out bytes, less than one window of data.seq_len \+ 1 = 5"),
        ({"a": b"123456789", "b": b"12"}, ".", "less than one window"),
        ({"a": b"12"}, "a/b", "data.path: .*(does not exist|cannot read)"),
    ],
)
def test_text_errors(tmp_path: Path, files: dict[str, bytes], path: str, message: str) -> None:
    folder_of(tmp_path, files)
    with pytest.raises(UserError, match=r"^data\.path: ") as caught:
        text(config(tmp_path / path))
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_of(tmp_path, many_files(12) | {"locked.txt": b"locked file"})
    opened = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "locked.txt":
            raise PermissionError(13, "Permission denied")  # as for a user who is not root, but without a file name
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"^data\.path: cannot read .*locked\.txt': Permission denied"):
        text(config(root))
    monkeypatch.undo()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a regular file nor a folder"):
        text(config(tmp_path / "pipe"))
    scandir = os.scandir

    def locked(path: Any) -> Any:
        if str(path).endswith("part1"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(UserError, match=r"^data\.path: cannot read .*part1': Permission denied"):
        text(config(root))


# N-grams


def test_bigram_against_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    train, held_out = rng.integers(0, 5, 300).astype(np.uint8), rng.integers(0, 6, 80).astype(np.uint8)
    total = 0.0
    for a, b in itertools.pairwise(held_out.tolist()):
        pairs = list(itertools.pairwise(train.tolist()))
        both, first = pairs.count((a, b)), sum(pair[0] == a for pair in pairs)
        total -= math.log2((both + 0.1) / (first + 0.1 * 6))
    assert bigram_bits(train, held_out, 6) == pytest.approx(total / 79, rel=1e-12)
    whole = bigram_bits(train, held_out, 6), trigram_bits(train, held_out, 6)
    monkeypatch.setattr("jaxdist.data.ngram._CHUNK", 7)  # counting in pieces changes nothing
    assert (bigram_bits(train, held_out, 6), trigram_bits(train, held_out, 6)) == whole


def test_bigram_closed_form() -> None:
    constant = np.zeros(1001, np.uint16)
    expected = -math.log2((1000 + 0.5) / (1000 + 0.5 * 64))
    assert bigram_bits(constant, constant[:10], 64, smoothing=0.5) == pytest.approx(expected, rel=1e-12)
    nothing = np.zeros(1, np.uint16)
    assert bigram_bits(nothing, constant[:9] + 1, 64) == pytest.approx(6)  # never seen: uniform, log2 64
    assert math.isnan(bigram_bits(constant, constant, 4097))


def test_trigram_against_counting() -> None:
    rng = np.random.default_rng(1)
    train, held_out = rng.integers(0, 3, 60).tolist(), rng.integers(0, 4, 40).tolist()

    def probability(context: tuple[int, ...] | None, last: int) -> float:
        if context is None:
            return 1 / 4
        size = len(context)
        after = [train[i + size] for i in range(len(train) - size) if tuple(train[i : i + size]) == context]
        below = probability(context[1:] if size else None, last)
        kinds = len(set(after))
        return (after.count(last) + kinds * below) / (len(after) + kinds) if after else below

    bits = [-math.log2(probability((a, b), c)) for a, b, c in zip(held_out, held_out[1:], held_out[2:], strict=False)]
    got = trigram_bits(np.asarray(train, np.uint8), np.asarray(held_out, np.uint8), 4)
    assert got == pytest.approx(np.mean(bits), rel=1e-12)
    assert sum(probability((1, 2), c) for c in range(4)) == pytest.approx(1)
    assert math.isnan(trigram_bits(np.zeros(9, np.uint16), np.zeros(9, np.uint16), 257))


def test_yardsticks_of_the_standard_library() -> None:
    source = text(DataConfig())
    bigram = bigram_bits(source.train, source.held_out, source.vocab)
    trigram = trigram_bits(source.train, source.held_out, source.vocab)
    assert 3.2 < bigram < 4.0  # 3.55 for Python 3.11, 3.56 for 3.12
    assert 2.2 < trigram < bigram - 0.5  # 2.49 and 2.55
