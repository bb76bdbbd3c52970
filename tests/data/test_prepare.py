"""`jaxdist.data.prepare`: what it writes, what an interrupted run leaves, and the source `tokens` on top of it."""

import hashlib
import importlib.util
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import config, folder_of
from pages import on_page

import jaxdist.data.prepare as module
from jaxdist.data import FileArray
from jaxdist.data.prepare import prepare
from jaxdist.data.source import Source, hash_fraction
from jaxdist.data.sources.tokens import tokens
from jaxdist.errors import UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
TEXTS = [f"document {i}, with words\n".encode() * (1 + i % 3) for i in range(40)]


def documents_of(out: Path, side: str) -> list[bytes]:
    ids, starts = (out / f"{side}.bin").read_bytes(), np.fromfile(out / f"{side}.index", "<u8").tolist()
    return [ids[a:b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]


def prepared(tmp_path: Path, **options: Any) -> Path:
    folder = folder_of(tmp_path / "texts", {f"{i:02}.txt": text for i, text in enumerate(TEXTS)})
    prepare([folder], tmp_path / "out", held_out=0.2, **options)
    return tmp_path / "out"


def test_files_manifest_and_what_the_source_makes_of_them(tmp_path: Path) -> None:
    out = prepared(tmp_path)
    train, val = documents_of(out, "train"), documents_of(out, "val")
    assert train == [text for text in TEXTS if hash_fraction(text) >= 0.2]  # whole documents, in the order of files
    assert val == [text for text in TEXTS if hash_fraction(text) < 0.2]
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["dtype"], manifest["vocab"], manifest["tokenizer"]) == ("uint8", 256, "bytes")
    assert (manifest["documents"], manifest["held_out"]["limit"]) == (40, 0.2)
    assert sorted(path.name for path in out.iterdir()) == sorted([*manifest["files"], "manifest.json"])
    for name, said in manifest["files"].items():
        content = (out / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (said["bytes"], said["sha256"])
    assert manifest["files"]["train.bin"]["tokens"] == sum(map(len, train))
    assert manifest["files"]["val.bin"]["documents"] == len(val)
    source = tokens(config(out))
    assert np.asarray(source.train).tobytes() == b"".join(train)
    assert np.asarray(source.held_out).tobytes() == b"".join(val)
    assert (source.vocab, source.info["unit"], source.train.dtype) == (256, "bytes", np.uint8)
    assert source.documents is None  # not asked for
    starts = tokens(config(out, packing="documents")).documents
    assert starts is not None
    assert [len(side) for side in starts] == [len(train), len(val)]


def test_lines_of_json_and_text_at_the_end_of_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"id": i, "body": f"täxt {i}"}) for i in range(30)]
    file = folder_of(tmp_path, {"a.jsonl": "\n".join([*lines[:10], "", *lines[10:], '{"body": ""}']).encode()})
    prepare([file / "a.jsonl"], tmp_path / "out", field="body", end="<|end|>", held_out=0.3)
    written = documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "val")
    assert sorted(written) == sorted(f"täxt {i}<|end|>".encode() for i in range(30))  # the empty one is left out


def test_the_same_text_is_on_one_side_and_neither_side_is_empty(tmp_path: Path) -> None:
    twice = [b"a longer text", b"another text", b"a longer text"]
    folder_of(tmp_path, {f"{i}.txt": text for i, text in enumerate(twice)})
    fractions = sorted(hash_fraction(text) for text in twice)
    for held_out in (1e-9, 0.5):
        out = tmp_path / f"out{held_out}"
        manifest = prepare([tmp_path / f"{i}.txt" for i in range(3)], out, held_out=held_out)
        train, val = documents_of(out, "train"), documents_of(out, "val")
        assert train and val and not set(train) & set(val)
        assert sorted(train + val) == sorted(twice)
        assert fractions[0] < manifest["held_out"]["limit"] <= fractions[-1]
    manifest = prepare([tmp_path / "0.txt", tmp_path / "2.txt"], tmp_path / "one", held_out=0.25)
    assert documents_of(tmp_path / "one", "train") == [b"a longer t"] * 2
    assert documents_of(tmp_path / "one", "val") == [b"ext"] * 2
    assert manifest["held_out"]["fraction"] == 0.25


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_is_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    finish, seen = module._Side.finish, []

    def stop(self: Any) -> Any:
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        if self.name == "val":
            raise error
        return finish(self)

    monkeypatch.setattr(module._Side, "finish", stop)
    with pytest.raises(error):
        prepared(tmp_path)
    assert len(seen) == 2  # all ids had been written
    assert all("out" not in names and len(names) == 2 for names in seen)  # under another name, for who is killed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts"]


def test_what_another_is_writing_is_left_alone(tmp_path: Path) -> None:
    other = folder_of(tmp_path / f".out.{os.getpid()}.part", {"train.bin": b"ids"})
    with pytest.raises(UserError, match=r"^--out: cannot write .*\.part': File exists"):
        prepared(tmp_path)
    assert (other / "train.bin").read_bytes() == b"ids"


def damage(out: Path, name: str, change: Any) -> None:
    content = bytearray((out / name).read_bytes())
    change(content)
    (out / name).write_bytes(content)


def flip(content: bytearray) -> None:
    content[len(content) // 2] ^= 1


def cut(content: bytearray) -> None:
    del content[-8:]


@pytest.mark.parametrize(
    ("name", "change", "changes", "message"),
    [
        ("train.bin", flip, {}, r"data\.path: .*train\.bin' is not the file .*another SHA-256"),
        ("val.bin", flip, {}, r"data\.path: .*val\.bin' is not the file"),
        ("val.bin", cut, {}, r"data\.path: .*val\.bin' is not the file .*bytes, not \d+"),
        ("val.bin", None, {}, r"data\.path: .*val\.bin' is in manifest\.json and does not exist"),
        ("train.index", flip, {"packing": "documents"}, r"data\.path: .*train\.index' is not the file"),
        ("val.index", None, {"packing": "documents"}, r"data\.path: .*val\.index' is in manifest\.json and does not"),
        ("manifest.json", cut, {}, r"data\.path: .*manifest\.json' is no manifest of format 1"),
        ("", None, {"token_dtype": "uint16"}, r"data\.token_dtype: 'uint16', but .*manifest\.json.*are uint8; allowed"),
    ],
)
def test_damage_is_found(tmp_path: Path, name: str, change: Any, changes: dict[str, Any], message: str) -> None:
    out = prepared(tmp_path)
    good = tokens(config(out))
    if name and change is None:
        (out / name).unlink()
    elif name:
        damage(out, name, change)
    with pytest.raises(UserError, match=f"^{message}") as caught:
        tokens(config(out, **changes))
    assert "\n" not in str(caught.value)
    if "another SHA-256" in message:
        on_page("docs/data.md", f"error: {caught.value}", {re.escape(str(out)): "data/python"})
    if name.endswith("index"):
        assert tokens(config(out)).info == good.info  # who does not ask for them does not need them


@pytest.mark.parametrize("chunk", [1 << 24, 64])
@pytest.mark.parametrize("side", ["train", "val"])
def test_ids_outside_the_vocabulary_of_the_manifest(
    side: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = prepared(tmp_path)
    ids = (out / f"{side}.bin").read_bytes()[:-1] + b"\xc8"  # 200, the last of all
    manifest = json.loads((out / "manifest.json").read_text()) | {"vocab": 200}
    manifest["files"][f"{side}.bin"]["sha256"] = hashlib.sha256(ids).hexdigest()
    (out / f"{side}.bin").write_bytes(ids)
    (out / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr("jaxdist.data.sources.tokens.CHUNK_BYTES", chunk)
    reads, pieces = [], FileArray.pieces
    monkeypatch.setattr(FileArray, "pieces", lambda self, nbytes: reads.append(self) or pieces(self, nbytes))
    with pytest.raises(UserError, match=rf"^data\.path: .*{side}\.bin' holds the id 200, and .*says vocab 200; allow"):
        tokens(config(out))
    assert len(reads) == 2  # once for each file
    (out / "manifest.json").write_text(json.dumps(manifest | {"vocab": 201}))
    assert tokens(config(out)).vocab == 201


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, r"format is 2; allowed: 1;"),
        ({"format": None}, r"format is null; allowed: 1;"),
        ({"dtype": ["uint8"]}, r"dtype is a list; allowed: uint8, uint16, uint32;"),
        ({"dtype": "int8"}, r"dtype is 'int8'; allowed"),
        ({"vocab": None}, r"vocab is null; allowed: an integer from 1 to 2147483648;"),
        ({"vocab": "256"}, r"vocab is '256'; allowed"),
        ({"vocab": 256.0}, r"vocab is 256.0; allowed"),
        ({"vocab": True}, r"vocab is true; allowed"),
        ({"vocab": 0}, r"vocab is 0; allowed"),
        ({"vocab": 2**31 + 1}, r"vocab is 2147483649; allowed"),
        ({"tokenizer": None}, r"tokenizer is null; allowed: text;"),
        ({"files": ["train.bin"]}, r"files is a list; allowed: a mapping;"),
        ({"files": {"train.bin": 1}}, r"bytes of 'train.bin' is null; allowed: an integer of 0 or more;"),
        ({"files": {"train.bin": {"bytes": "9", "sha256": "0" * 64}}}, r"bytes of 'train.bin' is '9'; allowed"),
        ({"files": {"train.bin": {"bytes": -9, "sha256": "0" * 64}}}, r"bytes of 'train.bin' is -9; allowed"),
        ({"files": {"train.bin": {"bytes": 9, "sha256": 0}}}, r"sha256 of 'train.bin' is 0; allowed: 64 hexa"),
        ({"files": {"train.bin": {"bytes": 9, "sha256": "\n"}}}, r"sha256 of 'train.bin' is '\\n'; allowed: 64 hexa"),
    ],
)
def test_a_field_of_a_wrong_type_or_range(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    out = prepared(tmp_path)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | changes))
    with pytest.raises(
        UserError, match=rf"^data\.path: .*manifest\.json' is no manifest of format 1: {message}"
    ) as caught:
        tokens(config(out))
    assert "\n" not in str(caught.value)
    (out / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match=r"is no manifest of format 1: it is a list; allowed: a mapping;"):
        tokens(config(out))


def test_without_manifest_the_index_is_looked_at(tmp_path: Path) -> None:
    out = prepared(tmp_path)
    with_manifest = tokens(config(out, packing="documents"))
    (out / "manifest.json").unlink()
    options = {"token_dtype": "uint8", "packing": "documents"}
    without = tokens(config(out, **options))
    assert without.info | {"unit": "bytes"} == with_manifest.info  # a run goes on whether or not there is a manifest
    assert without.documents is not None and with_manifest.documents is not None
    assert all(map(np.array_equal, without.documents, with_manifest.documents))
    for starts in ([1, 2], [0, 5, 5], [0, 10**9], [], [0, 9, 3]):
        np.array(starts, "<u8").tofile(out / "val.index")
        with pytest.raises(UserError, match=r"^data\.path: .*val\.index' is no index of val\.bin"):
            tokens(config(out, **options))
    (out / "val.index").unlink()
    with pytest.raises(UserError, match=r"^data\.packing: 'documents' needs the document starts of .*val\.bin'"):
        tokens(config(out, **options))
    assert isinstance(tokens(config(out, token_dtype="uint8")), Source)


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({}, {"inputs": ["none"]}, "INPUT: .*none' does not exist"),
        ({"a/.hidden": b"text", "a/b": b"\0"}, {"inputs": ["a"]}, "INPUT: too little text for two sides in .*a/b"),
        ({"a": b"1"}, {}, "INPUT: too little text"),
        ({"a.npy": b"1\0"}, {}, r"INPUT: .*a\.npy' is binary; allowed: text in UTF-8, .* 8 KiB; leave it out$"),
        ({"a": "日本語".encode("utf-16")}, {}, "INPUT: .*a' is text in UTF-16; .*; convert: iconv -f UTF-16"),
        ({"a.jsonl": b'{"text": 1}\n'}, {}, r"INPUT: .*a\.jsonl, line 1: holds no text under 'text'"),
        ({"a.jsonl": b'{"text": "b"}\n[1]'}, {}, r"INPUT: .*a\.jsonl, line 2: holds no text"),
        ({"a.jsonl": b'\n{"text": '}, {}, r"INPUT: .*a\.jsonl, line 2: is not a line of JSON"),
        ({"a.jsonl": b'{"text": "\\ud800"}'}, {}, r"INPUT: .*a\.jsonl, line 1: is not a line of JSON with valid text"),
        ({"a": b"text"}, {"held_out": 0.6}, "--held-out: 0.6 is out of range"),
        ({"a": b"text", "out/x": b""}, {}, "--out: .*out' exists"),
        ({"a": b"text"}, {"out": "a/out"}, "--out: cannot write .*a/.*': Not a directory"),
    ],
)
def test_errors(tmp_path: Path, files: dict[str, bytes], options: dict[str, Any], message: str) -> None:
    folder_of(tmp_path, files)
    before = sorted(tmp_path.rglob("*"))
    inputs = [tmp_path / name for name in options.pop("inputs", [name for name in files if name.startswith("a")])]
    with pytest.raises(UserError, match=f"^{message}") as caught:
        prepare(inputs, tmp_path / options.pop("out", "out"), **options)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(tmp_path, {f"{i}.txt": text for i, text in enumerate(TEXTS)})
    given = [str(path) for path in sorted(tmp_path.glob("*.txt"))]
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *given, "--out", str(tmp_path / "out")])
    for status, words in ((0, ["train.bin", "data.source=tokens"]), (2, ["error: --out"])):
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        printed = capsys.readouterr()
        assert left.value.code == status
        assert all(word in printed.out + printed.err for word in words)
    assert len(SCRIPT.read_text().splitlines()) <= 40


def test_binary_files_of_a_folder_are_counted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in", {"a": b"a text", "b": b"another", "c": b"1\0", "d": "日本".encode("utf-16")})
    manifest = prepare([folder], tmp_path / "out", held_out=1e-9)  # which reads all files twice
    assert manifest["binary_files_left_out"] == 2
    assert module.summary(manifest, tmp_path / "out")[-2] == "2 binary files left out"
    manifest = prepare([folder / "a", folder / "b"], tmp_path / "two")
    assert "left out" not in "".join(module.summary(manifest, tmp_path / "two"))


def test_without_the_package_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"^--tokenizer: .*which is not installed; pip install 'jaxdist\[hf\]'"):
        prepare([folder_of(tmp_path, {"a": b"text"})], tmp_path / "out", tokenizer="t.json")


def words_without_unknown(package: Any) -> Any:
    return package.Tokenizer(package.models.WordLevel({"text": 0, "</s>": 1}))


def merged_bytes(package: Any) -> Any:
    """Bytes, in whose vocabulary a line break is spelled "Ċ"; and "ab" is one id."""
    vocab = {each: i for i, each in enumerate([*sorted(package.pre_tokenizers.ByteLevel.alphabet()), "ab"])}
    model = package.Tokenizer(package.models.BPE(vocab, [("a", "b")]))
    model.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.add_special_tokens(["<end>"])
    model.add_tokens([package.AddedToken("word", single_word=True)])  # none right after a letter
    return model


@pytest.mark.parametrize(
    ("make", "end", "allowed"),
    [
        (None, "<|no|>", "'<end>';"),
        (None, "<|no|> x", "'<end>';"),
        (None, "cat", "'<end>';"),
        (words_without_unknown, "<|no|>", "none, for it has none;"),
        (words_without_unknown, "</s>", "none, for it has none;"),
        *((merged_bytes, end, "'<end>';") for end in ("Ċ", "b", "ab", "\n", "word")),
    ],
)
def test_an_end_that_is_no_token(tmp_path: Path, make: Any, end: str, allowed: str) -> None:
    package = pytest.importorskip("tokenizers", reason="jaxdist[hf] is not installed")
    given, file = [folder_of(tmp_path / "in", {"a": b"text and more"})], tmp_path / "t.json"
    if make is None:
        word_tokenizer(file)
    else:
        make(package).save(str(file))
    told = rf"^--end: {re.escape(repr(end))} is no added token of .*t\.json'; allowed: {re.escape(allowed)}"
    with pytest.raises(UserError, match=told):
        prepare(given, tmp_path / "out", tokenizer=str(file), end=end)
    assert not (tmp_path / "out").exists()


def word_tokenizer(path: Path) -> Path:
    """A tokenizer file: words at blanks; it would cut texts to 2 ids and pad them to 9."""
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [
                    {
                        "id": 700,
                        "content": "<end>",
                        "single_word": False,
                        "lstrip": False,
                        "rstrip": False,
                        "normalized": False,
                        "special": True,
                    }
                ],
                "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
                "padding": {
                    "strategy": {"Fixed": 9},
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "the",
                },
                "normalizer": None,
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "post_processor": None,
                "decoder": None,
                "model": {
                    "type": "WordLevel",
                    "vocab": {"the": 0, "cat": 1, "sat": 2, "?": 3, "<end>": 700},
                    "unk_token": "?",
                },
            }
        )
    )
    return path


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="jaxdist[hf] is not installed")
def test_a_tokenizer_file(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "words.json")
    folder = folder_of(tmp_path / "in", {"a": b"the cat sat", "b": b"the dog sat on the cat", "c": b"cat cat"})
    manifest = prepare([folder], tmp_path / "out", tokenizer=str(path), end="<end>")
    assert (manifest["tokenizer"], manifest["dtype"], manifest["vocab"]) == ("words.json", "uint16", 701)
    assert manifest["tokenizer_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    source = tokens(config(tmp_path / "out", seq_len=2, packing="documents"))
    assert (source.info["unit"], source.vocab) == ("tokens", 701)
    assert source.documents is not None
    sides = zip((source.train, source.held_out), source.documents, strict=True)
    found = [part.tolist() for ids, starts in sides for part in np.split(ids, starts[1:])]
    assert sorted(found) == sorted([[0, 1, 2, 700], [0, 3, 2, 3, 0, 1, 700], [1, 1, 700]])
    path.rename(folder_of(tmp_path / "hf", {"a": b""}) / "tokenizer.json")
    again = prepare([folder], tmp_path / "again", tokenizer=str(tmp_path / "hf"), end="<end>")
    assert again["files"] == manifest["files"] and again["tokenizer"] == "tokenizer.json"
    path = tmp_path / "hf" / "tokenizer.json"
    latin = folder_of(tmp_path / "latin", {"a": "é".encode("latin-1") * 9})
    with pytest.raises(UserError, match=r"^INPUT: .*latin/a: is not UTF-8"):
        prepare([latin], tmp_path / "other", tokenizer=str(path))
    with pytest.raises(UserError, match=r"^--tokenizer: .* holds no tokenizer"):
        prepare([folder], tmp_path / "other", tokenizer=str(folder / "a"))
