"""The sources `masked` and `lines`."""

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
    with pytest.raises(UserError, match=r"^data.path: b.py is no Python file for this Python \(.*\); leave it out"):
        kinds_of_lines(b"x = (", "b.py")


def test_lines_of_a_folder(tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"{i}.py").write_bytes(CODE)
    (tmp_path / "notes.txt").write_text("no Python")
    source = load_source(DataConfig(source="lines", path=str(tmp_path), seq_len=24, held_out=0.3))
    train = train_of(source)
    held = source.info["held_out_files"]
    assert 0 < held < 6 and train.size == (6 - held) * 19 and source.info["held_out"] == held * 19
    rows = train.read(np.arange(19))
    assert [KINDS[label] for label in rows["label"]] == WANTED.split()
    assert bytes(rows["inputs"][3].astype(np.uint8)) == b"x = 1  # behind code" + bytes(4)
    assert (rows["attention_mask"].sum(axis=1) == [min(24, len(line)) for line in CODE.split(b"\n") if line]).all()
    assert (rows["inputs"][rows["attention_mask"] == 0] == 0).all()
    assert source.yardstick is not None
    found = source.yardstick.compute()
    assert found["majority"] == pytest.approx(11 / 19) and 0.9 < found.get("bag of words", 1) <= 1
    few = load_source(DataConfig(source="lines", path=str(tmp_path), seq_len=24, files=2))
    assert few.info["files"] == few.info["held_out_files"] == 1 and few.info["sha256"] != source.info["sha256"]
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.py").write_text("x = 1")
    with pytest.raises(UserError, match=r"holds 1 Python files \(\.py\); allowed: 2 or more"):
        load_source(DataConfig(source="lines", path=str(tmp_path / "one"), seq_len=24))
