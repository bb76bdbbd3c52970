"""The source `digits`: scikit-learn's images, always split alike."""

import subprocess
import sys
from typing import Any

import child
import numpy as np
import pytest
from data_files import config, sharding

from jaxdist.data import make_eval_loader, make_loader
from jaxdist.data.sources.digits import digits

SAID = "data.source: 'digits' needs the package scikit-learn, which is not installed; pip install 'jaxdist[examples]'"


@pytest.fixture(scope="module")
def source() -> Any:
    pytest.importorskip("sklearn", reason="scikit-learn (extra examples) is not installed: its digits are not read")
    return digits(config("stdlib", source="digits", held_out=0.2))


@pytest.mark.slow
def test_all_digits_are_on_one_side(source: Any) -> None:
    """1,438 to train on, 359 held out, all of them scikit-learn's; the commonest held out is 46 of these."""
    from sklearn.datasets import load_digits

    rows = [side.read(np.arange(side.size)) for side in (source.train, source.held_out)]
    assert [len(each["label"]) for each in rows] == [1438, 359]
    assert {(name, leaf.dtype.name, leaf.shape[1:]) for name, leaf in rows[1].items()} == {
        ("image", "float32", (8, 8, 1)),
        ("label", "int32", ()),
    }
    whole = np.concatenate([each["image"] for each in rows])[..., 0]
    assert whole.min() == -1 and whole.max() == 1
    known = load_digits()
    pairs = lambda images, labels: sorted((*image.ravel(), label) for image, label in zip(images, labels, strict=True))  # noqa: E731
    labels = np.concatenate([each["label"] for each in rows])
    assert pairs((whole + 1) * 8, labels) == pairs(known.images, known.target)
    counts = np.bincount(rows[1]["label"], minlength=10)
    assert counts.max() == 46 and counts.min() > 20  # docs/data.md
    assert source.labels == 10 and source.yardstick.measure == "of held-out digits right"
    commonest = np.bincount(rows[0]["label"]).argmax()
    assert source.yardstick.compute() == {"majority": counts[commonest] / 359}
    assert f"{100 * counts[commonest] / 359:.1f}" == "7.8"


def test_batches_and_fingerprint(source: Any) -> None:
    again = digits(config("elsewhere", source="digits", held_out=0.2))
    assert again.info == source.info and source.info["unit"] == "samples" and source.vocab == 0
    loader = make_loader(source, seq_len=1, global_batch=64, sharding=sharding(data=2), seed=0)
    assert loader.batch(0)["image"].shape == (64, 8, 8, 1) and float(loader.batch(3)["weights"].sum()) == 64
    held = make_eval_loader(source, seq_len=1, global_batch=64, sharding=sharding(data=2), batches=8)
    assert sum(float(held.batch(i)["weights"].sum()) for i in range(held.batches or 0)) == 359


@pytest.mark.slow
def test_without_scikit_learn_it_is_one_line() -> None:
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "from jaxdist.config.schema import DataConfig\nfrom jaxdist.data import load_source\n"
        "load_source(DataConfig(source='digits'))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=child.environment(), capture_output=True, text=True)
    assert done.stderr.strip().endswith(f"UserError: {SAID}"), done.stderr
