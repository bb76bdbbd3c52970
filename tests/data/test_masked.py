"""The sources `masked` and `lines`."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config.schema import DataConfig
from jaxdist.data import Samples, Source, load_source
from jaxdist.data.sources.lines import KINDS, kinds_of_lines
from jaxdist.errors import UserError

LENGTH = 40


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(
        np.random.default_rng(0).choice([97, 98, 99], 20_000, p=[0.5, 0.3, 0.2]).astype(np.uint8).tobytes()
    )
    return path


def masked(path: Path, **options: Any) -> Source:
    return load_source(DataConfig(source="masked", path=str(path), seq_len=LENGTH, **options))


def train_of(source: Source) -> Samples:
    assert isinstance(source.train, Samples)
    return source.train


def test_the_share_of_masked_random_and_kept(file: Path) -> None:
    source = masked(file)
    train = train_of(source)
    rows = train.read(np.arange(0, train.size, 3))
    chosen = rows["weights"] == 1
    assert (chosen.sum(axis=1) == round(0.15 * LENGTH)).all() and source.vocab == 257
    assert (rows["inputs"][~chosen] == rows["targets"][~chosen]).all() and (rows["targets"] < 256).all()
    hidden, targets = rows["inputs"][chosen], rows["targets"][chosen]
    assert (hidden == 256).mean() == pytest.approx(0.8, abs=0.01)
    assert ((hidden != 256) & (hidden != targets)).mean() == pytest.approx(0.1 * 255 / 256, abs=0.01)
    others = hidden[(hidden != 256) & (hidden != targets)]
    assert np.unique(others).size > 200  # any byte, not those of this text only
    assert np.ptp(chosen.mean(axis=0)) < 0.08  # everywhere in the window
    assert rows["inputs"].shape[1] == LENGTH and train.size == 10 * source.info["train"]


def test_a_masking_depends_on_the_sample_alone(file: Path) -> None:
    first, again = (train_of(masked(file)) for _ in range(2))
    numbers = np.array([7, 3000, 7, 1])
    whole, one = first.read(numbers), again.read(numbers[1:2])
    for leaf in whole:
        assert np.array_equal(whole[leaf][1:2], one[leaf]) and np.array_equal(whole[leaf][0], whole[leaf][2])
    windows = first.size // 10
    versions = first.read(3 + windows * np.arange(10))  # of a window
    assert len({row.tobytes() for row in versions["weights"]}) == 10
    assert len({row.tobytes() for row in versions["targets"]}) == 10  # other cuts
    source = masked(file, maskings=1)
    assert isinstance(source.held_out, Samples) and source.info["held_out"] == source.held_out.size
    pair = [source.held_out.read(np.arange(4)) for _ in range(2)]
    assert all(np.array_equal(pair[0][leaf], pair[1][leaf]) for leaf in pair[0])
    text = np.frombuffer(file.read_bytes(), np.uint8)
    assert np.array_equal(pair[0]["targets"].reshape(-1), text[-1000:][: 4 * LENGTH])  # the end is held out
    assert np.array_equal(train_of(source).read(np.arange(4))["targets"].reshape(-1), text[: 4 * LENGTH])


def test_what_is_masked_stays_so_with_any_numpy(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(97, 117)) * 50)
    train = train_of(load_source(DataConfig(source="masked", path=str(tmp_path / "text"), seq_len=20, mask_rate=0.4)))
    rows = train.read(np.array([5, 170]))
    assert [np.flatnonzero(row).tolist() for row in rows["weights"]] == [
        [2, 4, 5, 7, 8, 11, 15, 16],
        [0, 1, 8, 9, 13, 14, 16, 19],
    ]
    assert [row[row != target].tolist() for row, target in zip(rows["inputs"], rows["targets"], strict=True)] == [
        [256] * 8,
        [256, 256, 129, 159, 256, 256, 256, 256],
    ]


def test_options_of_masking(file: Path, tmp_path: Path) -> None:
    rows = train_of(masked(file, mask_rate=1.0, mask_token_rate=0.0, random_token_rate=0.0)).read(np.arange(5))
    assert (rows["weights"] == 1).all() and np.array_equal(rows["inputs"], rows["targets"])
    assert masked(file).info["sha256"] != masked(file, mask_rate=0.2).info["sha256"]
    assert masked(file, mask_token=300).vocab == 301
    with pytest.raises(UserError, match=r"^data.mask_token: 97 is a byte; allowed: 256 or more"):
        masked(file, mask_token=97)
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    ids = masked(tmp_path / "train.bin", masked_source="tokens", mask_token=103)
    rows = train_of(ids).read(np.arange(200))
    assert ids.vocab == 4000 and (rows["inputs"] == 103).mean() == pytest.approx(0.12, abs=0.02)


def test_the_unigram_is_the_yardstick_of_masked(file: Path) -> None:
    yardstick = masked(file).yardstick
    assert yardstick is not None
    text = np.frombuffer(file.read_bytes(), np.uint8)
    assert yardstick.compute() == {"unigram": (text[-1000:] == 97).mean()}


def test_of_a_long_text_an_even_part_is_counted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[np.ndarray] = []
    real = np.bincount
    monkeypatch.setattr(np, "bincount", lambda ids, **given: counted.append(ids) or real(ids, **given))
    monkeypatch.setattr("jaxdist.data.sources.masked._PIECES", 8)
    monkeypatch.setattr("jaxdist.data.sources.masked._PIECE", 100)
    yardstick = masked(file, held_out=0.03).yardstick
    assert yardstick is not None
    text = np.frombuffer(file.read_bytes(), np.uint8)
    assert yardstick.compute() == {"unigram": (text[-600:] == 97).mean()}
    assert [piece.size for piece in counted] == [100] * 8 + [600]
    assert np.array_equal(counted[0], text[:100]) and np.array_equal(counted[7], text[-700:-600])
    assert np.array_equal(counted[1], text[2757:2857])  # 19,300 / 7


CODE = b'''"""Docstring of the module.

More of it.
"""

x = 1  # behind code
# a comment
text = """
# no comment
"""

class A:
    # another
    """Docstring of the class."""

    def f(self):
        "short"
        return (  # open
            # inside
            "no docstring"
        )


async def g():
    """no docstring""" + x
'''
WANTED = """docstring docstring docstring code comment code code code code comment docstring code docstring code comment
code code code code"""


def test_the_kinds_of_lines() -> None:
    found = kinds_of_lines(CODE, "a.py")
    assert [KINDS[label] for _, label in found] == WANTED.split()
    assert [line for line, _ in found] == [line for line in CODE.split(b"\n") if line]


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_the_kinds_of_lines_with_other_ends(end: bytes) -> None:
    assert kinds_of_lines(CODE.replace(b"\n", end), "a.py") == kinds_of_lines(CODE, "a.py")
    mixed = CODE.replace(b"\n", end, 5)
    assert kinds_of_lines(mixed, "a.py") == kinds_of_lines(CODE, "a.py")


ODD = {
    "open": b"x = (",
    "encoding": b"# coding: no-such-encoding\nx = 1\n",
    "deep": b"x = " + b"-" * 20_000 + b"1\n",
    "long": b"x = " + b"+".join([b"1"] * 20_000) + b"\n",
}


@pytest.mark.parametrize("case", ODD)
def test_a_file_that_is_no_python_is_one_line(case: str) -> None:
    with pytest.raises(
        UserError, match=r"^data.path: b.py is no Python file for this Python \(.+\); leave it"
    ) as error:
        kinds_of_lines(ODD[case], "b.py")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"x = 1\n# caf\xe9\n", b"if 1:\n    x=1\n  \\\n\ny=1\n"])
def test_a_file_that_tokenize_alone_refuses_is_no_traceback(content: bytes) -> None:
    """As some versions of Python do."""
    try:
        assert kinds_of_lines(content, "b.py")
    except UserError as error:
        assert str(error).startswith("data.path: b.py is no Python file for this Python (")


def test_binary_python_files_are_counted(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.py").write_text(f"x = {name}\n")
    (tmp_path / "g.py").write_bytes("x = 1\n".encode("utf-16"))
    (tmp_path / "h.pyc").write_bytes(b"\0")  # not read anyway
    source = load_source(DataConfig(source="lines", path=str(tmp_path), seq_len=20, held_out=0.3))
    assert source.info["lines"][0] == "1 binary file left out"


def test_lines_that_training_has_are_not_held_out(tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"{i}.py").write_text(f"shared = 1\nstart_of_a_long_line = {i}\nx = {i}\n")
    given: dict[str, Any] = {"source": "lines", "path": str(tmp_path), "held_out": 0.3}
    source = load_source(DataConfig(**given, seq_len=20))
    train, held = train_of(source), source.held_out
    assert isinstance(held, Samples) and held.size == source.info["held_out"]
    texts = [
        {bytes(row.astype(np.uint8)) for row in side.read(np.arange(side.size))["inputs"]} for side in (train, held)
    ]
    assert held.size == source.info["held_out_files"] == len(texts[1])  # one line, `x = `, of each file
    assert not texts[0] & texts[1] and train.size == 3 * source.info["files"]
    for i in range(6):
        (tmp_path / f"{i}.py").write_text("shared = 1\n")
    with pytest.raises(UserError, match=r"gives no lines held out that are not among those to train on; give files"):
        load_source(DataConfig(**given, seq_len=20))


@pytest.mark.slow
def test_lines_of_a_folder(tmp_path: Path) -> None:
    own = lambda i: re.sub(rb"(?m)(.)$", b"\\1 #%d" % i, CODE)  # noqa: E731
    for i in range(6):
        (tmp_path / f"{i}.py").write_bytes(own(i))
    (tmp_path / "notes.txt").write_text("no Python")
    source = load_source(DataConfig(source="lines", path=str(tmp_path), seq_len=40, held_out=0.3))
    train = train_of(source)
    held = source.info["held_out_files"]
    assert 0 < held < 6 and train.size == (6 - held) * 19 and source.info["held_out"] == held * 19
    rows = train.read(np.arange(19))
    assert [KINDS[label] for label in rows["label"]] == WANTED.split()
    assert bytes(rows["inputs"][3].astype(np.uint8))[:-1].rstrip(b"\0")[:-1] == b"x = 1  # behind code #"
    assert (rows["attention_mask"].sum(axis=1) == [3 + len(line) for line in CODE.split(b"\n") if line]).all()
    assert (rows["inputs"][rows["attention_mask"] == 0] == 0).all()
    assert source.yardstick is not None
    found = source.yardstick.compute()
    assert found["majority"] == pytest.approx(11 / 19) and 0.9 < found.get("bag of words", 1) <= 1
    few = load_source(DataConfig(source="lines", path=str(tmp_path), seq_len=40, files=2))
    assert few.info["files"] == few.info["held_out_files"] == 1 and few.info["sha256"] != source.info["sha256"]
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.py").write_text("x = 1")
    with pytest.raises(UserError, match=r"holds 1 Python files \(\.py\); allowed: 2 or more"):
        load_source(DataConfig(source="lines", path=str(tmp_path / "one"), seq_len=40))
