"""JSON from elsewhere: what is refused, in one line, by every reader of such files."""

import codecs
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxdist.checkpoint.checksums import CHECKSUMS, check_files, record_of
from jaxdist.checkpoint.huggingface.safetensors import read_json
from jaxdist.config.json_reader import JSON_BYTES, JSON_DEPTH, parse_json, read_json_file
from jaxdist.data.manifest import entry_of
from jaxdist.data.prepare import Input, documents
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.plan.budget import read_budget
from jaxdist.runtime.join.rendezvous_file import read_meeting

DEEP = "[" * 100_000
REFUSED = {
    "deep": (DEEP, "nested more than 32 deep"),
    "deeper than allowed": ("[" * 33 + "]" * 33, "nested more than 32 deep"),
    "a key twice": ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' comes twice"),
    "infinity by its exponent": ('{"a": 1e400}', "1e400 is not a number"),
    "NaN": ('{"a": [NaN]}', "NaN is not a number"),
    "Infinity": ("-Infinity", "-Infinity is not a number"),
    "an integer of 65 bits": ("18446744073709551616", "18446744073709551616 is not a number"),
    "an integer of many digits": ("1" * 5000, "111 is not a number"),
    "half of a surrogate pair": ('{"\\udfff": 1}', "half of a surrogate pair"),
    "not UTF-8": (b'{"a": "\xff"}', "can't decode byte 0xff"),
    "nothing": ("", "Expecting value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    text, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        parse_json(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
    (tmp_path / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        read_json_file(tmp_path / "a.json")


def test_what_is_taken() -> None:
    values = {"a": [1, -(2**63), 2**64 - 1, 0.1, 1e300, None, True, "ä\U0001f600"], "b": {}}
    assert parse_json(json.dumps(values)) == parse_json(json.dumps(values).encode()) == values
    deepest = "[" * JSON_DEPTH + "]" * JSON_DEPTH
    assert parse_json(deepest) == json.loads(deepest)
    assert (
        parse_json('{"text": "a", "id": 123456789012345678901234567890, "score": NaN}', any_number=True)["text"] == "a"
    )


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):  # opening it would wait for ever
        read_json_file(tmp_path / "pipe")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(JSON_BYTES + 1)
    with pytest.raises(ValueError, match=f"larger than {JSON_BYTES} bytes"):
        read_json_file(tmp_path / "large.json")
    with pytest.raises(FileNotFoundError):
        read_json_file(tmp_path / "none")


READERS: dict[str, Callable[[Path], Any]] = {
    "a budget": read_budget,
    "a manifest": lambda path: entry_of(path.with_name("train.bin")),
    "config.json of Hugging Face": read_json,
    "metrics.jsonl": read_metrics,
}


@pytest.mark.parametrize(
    "text", [DEEP, '{"a": ' * 50 + "1" + "}" * 50, '{"step": 1, "step": 2}'], ids=["deep", "50 levels", "twice"]
)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_of_a_file_of_others_says_it_in_one_line(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text + "\n")
    with pytest.raises(UserError, match="nested more than|comes twice") as error:
        READERS[name](tmp_path / "manifest.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "line", ['"author": "x\\ud83d"', '"a": 1, "a": 2', '"a": ' + "[" * 50 + "]" * 50, '"a": 1e400, "b": NaN']
)
def test_a_line_of_a_corpus_may_hold_anything_beside_its_text(line: str, tmp_path: Path) -> None:
    """As corpora from elsewhere do; and a mark of the byte order before the first line."""
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "x", ' + line.encode() + b"}\n")
    assert [each.text for each in documents([Input(tmp_path / "a.jsonl", True, 1)], "text", set())] == [b"x"]


def test_a_line_of_a_corpus_that_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(DEEP + "\n")
    with pytest.raises(UserError, match="nested more than"):
        list(documents([Input(tmp_path / "a.jsonl", True, 1)], "text", set()))


def test_a_record_of_a_checkpoint_is_read_beside_any_numbers(tmp_path: Path) -> None:
    """`meta` of a loop of one's own holds the state of a random generator, or infinity."""
    (tmp_path / "meta").mkdir()
    meta = {"random": 2**100, "best": float("inf"), "jaxdist": {"checksums": 1, "loss": 2.5}}
    (tmp_path / "meta" / "metadata").write_text(json.dumps(meta))
    assert record_of(tmp_path) == {"checksums": 1, "loss": 2.5}


def test_readers_that_have_an_answer_for_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / CHECKSUMS).write_text(DEEP)
    assert check_files(tmp_path, 1).problem == f"{CHECKSUMS} cannot be read"
    (tmp_path / "meeting").write_text(DEEP[:4000])
    assert read_meeting(tmp_path / "meeting", "token") is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "loss": "low"}', "'loss' is of type str"),
        ('{"step": 1, "loss": true}', "'loss' is of type bool"),
        ('{"step": 1, "loss": {"a": 1}}', "'loss' is of type dict"),
        ('{"step": 1, "loss": null}', "'loss' is of type NoneType"),
        ('{"step": 1, "loss": ["low"]}', "'loss' is of type list"),
        ('{"step": 1, "samples": [1]}', "'samples' is of type list"),
        ('{"step": 1, "loss": [1]}', "'loss' is of type list"),
        ('{"step": 1, "loss/nonfinite": [1]}', "'loss/nonfinite' is of type list"),
        ('{"step": 1, "loss/nonfinite": ["nan"]}', "'loss/nonfinite' is of type list"),
        ('{"step": 1, "loss/nonfinite": 1}', "'loss/nonfinite' is of type int"),
        ('{"step": 1, "loss/nonfinite": "low"}', "'low'; allowed: nan, inf, -inf"),
        ('{"step": 1, "loss": 1e400}', "1e400 is not a number"),
        ('{"step": 99999999999999999999999}', "is not a number"),
        ('{"step": null}', "'step' is of type NoneType"),
        ('{"step": 1.0}', '"step" is missing or not a whole number'),
        ("[1]", "not a JSON object"),
    ],
)
def test_a_line_of_metrics_with_a_value_of_a_wrong_type(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 2.0}\n' + line + "\n")
    with pytest.raises(UserError, match=rf"metrics\.jsonl, line 2: not a line of metrics \(.*{message}"):
        read_metrics(path)
