"""Samples of fixed shapes: the sources `images` and `iterable`, their loader, their shuffling."""

import dataclasses
import importlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child
import numpy as np
import pytest
from data_files import config, sharding
from jax.sharding import NamedSharding

from jaxdist import load_config, make_mesh
from jaxdist.build import assemble
from jaxdist.config.schema import Config, DataConfig
from jaxdist.data import Part, Samples, Source, Stream, leaves_of, load_source, make_eval_loader, make_loader
from jaxdist.data.samples import ShuffledStream, sample_leaves
from jaxdist.data.sources.images import images
from jaxdist.data.sources.iterable import iterable
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.specs import BATCH_SPEC
from jaxdist.trainer.failures.out_of_memory import advise
from jaxdist.trainer.failures.same_program import facts_of_program
from jaxdist.trainer.resume import identity
from jaxdist.trainer.train import train

COUNT = 50


def arrays(count: int = COUNT) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"image": rng.integers(0, 256, (count, 4, 3), np.uint8), "label": np.arange(count)}


def image_file(path: Path, **changes: Any) -> Path:
    np.savez(path, **{**arrays(), **changes})
    return path


def image_folder(path: Path) -> Path:
    path.mkdir()
    for name, array in arrays().items():
        np.save(path / f"{name}.npy", array)
    return path


def loader_of(source: Source, *, batch: int = 8, seed: int = 0, **sizes: int) -> Any:
    return make_loader(source, seq_len=4, global_batch=batch, sharding=sharding(**(sizes or {"data": 1})), seed=seed)


def labels(loader: Any, steps: int) -> list[int]:
    return [int(each) for step in range(steps) for each in loader.batch(step)["label"]]


def test_images_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    """The same samples and split; rows belong together; both sides are all there is, and share nothing."""
    found = []
    for path in (image_file(tmp_path / "a.npz"), image_folder(tmp_path / "b")):
        source = images(config(path, held_out=0.2))
        assert isinstance(source.train, Samples) and isinstance(source.held_out, Samples)
        rows = [side.read(np.arange(side.size)) for side in (source.train, source.held_out)]
        assert [each["label"].dtype for each in rows] == [np.int32] * 2
        for each in rows:
            assert np.array_equal(each["image"], arrays()["image"][each["label"]])
        assert sorted(np.concatenate([each["label"] for each in rows])) == list(range(COUNT))
        assert len(rows[1]["label"]) == 10 and np.diff(rows[1]["label"]).max() > 1  # not the end alone
        found.append([each["label"].tolist() for each in rows])
        assert source.info["unit"] == "samples" and source.vocab == 0
    assert found[0] == found[1]
    assert images(config(tmp_path / "a.npz")).info["sha256"] == images(config(tmp_path / "b")).info["sha256"]
    other = arrays()["image"].copy()
    other[7, 1, 1] ^= 1
    before = images(config(tmp_path / "a.npz")).info["sha256"]
    assert images(config(image_file(tmp_path / "a.npz", image=other))).info["sha256"] != before


def test_every_image_once_an_epoch_on_any_devices(tmp_path: Path) -> None:
    source = images(config(image_file(tmp_path / "a.npz"), held_out=0.2))
    one, eight = (labels(loader_of(source, **sizes), 15) for sizes in ({"data": 1}, {"data": 2, "fsdp": 4}))
    assert one == eight and labels(loader_of(source, seed=1), 15) != one
    assert sorted(one[:40]) == sorted(one[40:80]) and one[:40] != one[40:80]  # 40 samples to train on
    batch = loader_of(source).batch(3)
    assert {leaf: (value.shape, value.dtype) for leaf, value in batch.items()} == {
        "image": ((8, 4, 3), np.uint8),
        "label": ((8,), np.int32),
        "weights": ((8,), np.float32),
    }
    assert np.array_equal(loader_of(source).host_rows(3, slice(2, 5))["label"], np.asarray(batch["label"])[2:5])


def test_held_out_images_count_once(tmp_path: Path) -> None:
    source = images(config(image_file(tmp_path / "a.npz"), held_out=0.2))
    loader = make_eval_loader(source, seq_len=4, global_batch=8, sharding=sharding(data=8), batches=None)
    assert loader.batches == 2
    batches = [loader.batch(i) for i in range(2)]
    seen = [int(label) for batch in batches for label in np.asarray(batch["label"])[np.asarray(batch["weights"]) > 0]]
    assert isinstance(source.held_out, Samples)
    assert sorted(seen) == source.held_out.read(np.arange(10))["label"].tolist()
    with pytest.raises(IndexError):
        loader.batch(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": np.arange(COUNT - 1)}, r"image has 50 rows, label 49; give as many"),
        ({"image": np.zeros((0, 8, 8, 3), np.uint8)}, r"image has 0 rows; give 1 or more"),
        ({"label": np.full(COUNT, 2**40)}, "label holds integers that do not fit into int32"),
        ({"label": np.array(["a"] * COUNT)}, "label is of type <U1; allowed: numbers"),
        ({"label": np.array([{}] * COUNT)}, "holds something else than arrays of numbers"),
        ({"label": None}, "holds 'label', which is no array; write it again"),
    ],
)
def test_images_errors(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    given = {name: array for name, array in {**arrays(), **changes}.items() if array is not None}
    np.savez(path, **given, allow_pickle=True)
    if len(given) == 1:
        with zipfile.ZipFile(path, "a") as file:
            file.writestr("label", "1 2 3")
    with pytest.raises(UserError, match=message) as error:
        source = images(config(path))
        labels(loader_of(source), 20)
    assert "\n" not in str(error.value)


def test_images_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"no zip")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "b.npz", image=np.zeros((3, 2)))
    wrong = {
        "none.npz": "is no .npz file and no folder",
        "a.npz": "holds something else",
        "empty": "has no array 'image', only nothing",
        "b.npz": "has no array 'label', only image",
    }
    for name, message in wrong.items():
        with pytest.raises(UserError, match=f"^data.path: .*{message}"):
            images(config(tmp_path / name))


class Numbers:
    """Samples that are their own numbers; `begun` is where each reading began, `called` which were computed."""

    def __init__(self, size: int | None = 50, *, seekable: bool = False, sized: bool = True) -> None:
        self.size, self.begun, self.called = size, [], []  # type: ignore[var-annotated]
        if seekable:
            self.iter_from = self._iter_from
        if size is not None and sized:
            self.__class__ = Sized

    def _iter_from(self, first: int) -> Iterator[Any]:
        self.begun.append(first)
        number = first
        while self.size is None or number < self.size:
            yield lambda number=number: self._compute(number)
            number += 1

    def __iter__(self) -> Iterator[Any]:
        return self._iter_from(0)

    def _compute(self, number: int) -> dict[str, Any]:
        self.called.append(number)
        return {"label": number, "x": np.full(3, number, np.float64)}


class Sized(Numbers):
    def __len__(self) -> int:
        assert self.size is not None
        return self.size


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DataConfig]:
    """A configuration of the source `iterable` for an object."""
    (tmp_path / "users_data.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_data", raising=False)
    users_data = importlib.import_module("users_data")

    def make(made: Any, **changes: Any) -> DataConfig:
        name = f"data{len(vars(users_data))}"
        monkeypatch.setattr(users_data, name, made, raising=False)
        return config(f"users_data.{name}", source="iterable", buffer=16, **changes)

    return make


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("seekable", [True, False])
def test_a_stream_is_the_same_from_any_step_and_on_any_devices(
    given: Callable[..., DataConfig], sized: bool, seekable: bool
) -> None:
    """Four epochs of 50, batches of 8 over their ends; started in the middle, and backwards."""
    make = lambda: iterable(given(Numbers(seekable=seekable, sized=sized)))  # noqa: E731
    whole = labels(loader_of(make()), 25)
    assert [sorted(whole[start : start + 50]) for start in (0, 50, 100, 150)] == [list(range(50))] * 4
    assert whole[:50] != whole[50:100] and sorted(whole[:16]) == list(range(16)) != whole[:16]  # by sixteen
    assert labels(loader_of(make(), fsdp=8), 25) == whole
    for step in (3, 7, 20):
        assert [int(each) for each in loader_of(make()).batch(step)["label"]] == whole[8 * step : 8 * step + 8]
    backwards = loader_of(make())
    for step in (24, 13, 14, 2):
        assert [int(each) for each in backwards.batch(step)["label"]] == whole[8 * step : 8 * step + 8]
    assert labels(loader_of(make(), seed=1), 25) != whole


def test_what_a_stream_reads_and_computes(given: Callable[..., DataConfig]) -> None:
    """A process computes its own rows only; a resumed one goes to its place at once, where the object can."""
    made = Numbers(seekable=True)
    loader = loader_of(iterable(given(made)))
    made.called.clear()
    rows = loader.host_rows(1, slice(2, 4))
    assert len(made.called) == 2 and made.called == rows["label"].tolist()
    made.begun.clear()
    loader_of(iterable(given(made))).batch(105)  # sample 840 is the 40th of its epoch, in the third sixteen
    assert made.begun[-1] == 32
    slow = Numbers()
    late = loader_of(iterable(given(slow)))
    slow.called.clear()
    late.batch(105)
    assert len(slow.called) == 8 and slow.begun[-1] == 0


def test_an_endless_stream(given: Callable[..., DataConfig]) -> None:
    found = labels(loader_of(iterable(given(Numbers(None)))), 10)
    assert [sorted(found[start : start + 16]) for start in range(0, 80, 16)] == [
        list(range(start, start + 16)) for start in range(0, 80, 16)
    ]


def test_numbers_of_the_other_byte_order(tmp_path: Path) -> None:
    """As files of other machines and formats have them."""
    image = np.arange(960, dtype=">f8").reshape(80, 4, 3)
    found = []
    for name, kind in (("other", ">"), ("usual", "=")):
        changed = {"image": image.astype(f"{kind}f4"), "label": np.arange(80, dtype=f"{kind}i4")}
        (tmp_path / name).mkdir()
        for leaf, array in changed.items():
            np.save(tmp_path / name / f"{leaf}.npy", array)
        found.append(images(config(tmp_path / name)).train.read(np.arange(8)))
    for leaf in found[0]:
        np.testing.assert_array_equal(found[0][leaf], found[1][leaf])


def test_a_batch_of_several_epochs() -> None:
    stream = Stream(
        3,
        sample_leaves({"label": 0}, where=""),
        lambda first: iter(range(first, 3)),
        lambda raw, number: {"label": np.asarray(raw, np.int32)},
        16,
    )
    read = ShuffledStream(stream, seed=0, across=32).read(np.arange(32))["label"]
    assert [sorted(read[start : start + 3]) for start in range(0, 30, 3)] == [[0, 1, 2]] * 10


def test_a_stream_that_changes_is_refused(given: Callable[..., DataConfig]) -> None:
    made = Numbers(sized=False)
    loader = loader_of(iterable(given(made)))
    loader.batch(6)
    made.size = 40
    with pytest.raises(UserError, match=r"^data.path: gives 40 samples in epoch 0, not 50"):
        labels(loader, 13)
    longer = Numbers()
    loader = loader_of(iterable(given(longer)))
    longer.__class__ = type("Lies", (Numbers,), {"__len__": lambda self: 30})
    with pytest.raises(UserError, match=r"^data.path: gives more than 30 samples in epoch 0"):
        labels(loader_of(iterable(given(longer))), 13)


def test_ids_and_weights_of_a_stream(given: Callable[..., DataConfig], tmp_path: Path) -> None:
    """What the training command takes; ids are checked against the object's `vocab`."""

    class Ids:
        vocab = 100
        worst = 99

        def __iter__(self) -> Iterator[np.ndarray]:
            yield from (np.arange(start, start + 5) for start in range(self.worst - 3))

    source = iterable(given(Ids()))
    batch = loader_of(source).batch(0)
    assert source.vocab == 100 and batch["inputs"].shape == batch["targets"].shape == batch["weights"].shape == (8, 4)
    assert np.array_equal(np.asarray(batch["inputs"]) + 1, batch["targets"])
    assert np.asarray(batch["inputs"]).dtype == np.int32
    Ids.worst = 101
    with pytest.raises(UserError, match=r"sample \d+ holds ids from \d+ to 1\d\d, and the object's vocab is 100"):
        for step in range(13):
            loader_of(iterable(given(Ids))).batch(step)


def with_vocab(samples: list[Any]) -> Any:
    return type("Ids", (list,), {"vocab": 10})(samples)


def test_ids_in_a_dict(given: Callable[..., DataConfig]) -> None:
    """They are checked as others are; a target may be negative. What is no integer is no id."""
    source = iterable(given(with_vocab([{"inputs": [0, 9], "targets": [-100, 9]}] * 8)))
    assert source.vocab == 10 and np.asarray(loader_of(source).batch(0)["targets"]).tolist() == [[-100, 9]] * 8
    assert iterable(given([{"inputs": [0.5], "targets": [12]}])).vocab == 0


def test_held_out_samples_are_checked_too(given: Callable[..., DataConfig], tmp_path: Path) -> None:
    large, mixed = [{"a": [2**40]}], [{"a": [1]}, {"a": [0.5]}]
    for wrong, message in ((large, "sample 0: a holds integers"), (mixed, "sample 1 has")):
        with pytest.raises(UserError, match=f"^data.val_path: 'users_data.*{message}"):
            iterable(given([{"a": [1]}], val_path=given(wrong).path))
    np.savez(tmp_path / "b.npz", **{**arrays(), "label": np.full(COUNT, 2**40)})
    source = images(config(image_file(tmp_path / "a.npz"), val_path=str(tmp_path / "b.npz")))
    with pytest.raises(UserError, match=r"^data.val_path: label holds integers that do not fit into int32"):
        make_eval_loader(source, seq_len=4, global_batch=8, sharding=sharding(data=1), batches=1).batch(0)


def once() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (3, "is a int without __iter__"),
        ([], "gives no samples"),
        (once(), "can be read once only"),
        (["x"], r"sample 0 is a str of .*allowed: a dict"),
        ([{"a": "x"}], r"a is of type <U1; allowed: numbers"),
        ([[1, 2]], r"sample 0 is a list of int64\[2\]; allowed: a dict of arrays, or data.seq_len \+ 1 = 5"),
        ([[1, 2, 3, 4, 5]], "allowed: an attribute vocab"),
        ([{"a": [1]}, {"a": [1, 2]}], r"sample 1 has a \[2\], unlike the first"),
        ([{"a": [1]}, {"b": [1]}], r"sample 1 has b \[1\], unlike the first"),
        ([{"a": [1]}, {"a": [1.0]}], "sample 1 has a of type float64, unlike the first, int32; give all of one type"),
        ([{"a": [1]}, {"a": ["x"]}], "sample 1 has a of type <U1, unlike the first"),
        ([{"a": [[1], [1, 2]]}], "sample 0: a: is no array"),
        ([{"a": [1]}, {"a": [2**32 + 3]}], "sample 1: a holds integers that do not fit into int32"),
        ([{"a": [2**31]}], "sample 0: a holds integers that do not fit into int32"),
        ([{"a": np.uint8([1])}, {"a": np.uint64([256])}], "sample 1: a holds integers that do not fit into uint8"),
        ([{"inputs": [1, 2]}], "sample 0: inputs holds ids from 1 to 2, and the object's vocab is not given"),
        (with_vocab([{"inputs": [9, 10]}]), "sample 0: inputs holds ids from 9 to 10, .* is 10; allowed: an attribute"),
        (with_vocab([{"inputs": [-1]}]), "inputs holds ids from -1 to -1, .*; allowed: .* ids from 0 to vocab - 1"),
        (with_vocab([{"inputs": [0], "targets": [9]}, {"inputs": [0], "targets": [10]}]), "1: targets holds ids"),
    ],
)
def test_iterable_errors(given: Callable[..., DataConfig], made: Any, message: str) -> None:
    with pytest.raises(UserError, match="^data.path: 'users_data.*" + message) as error:
        loader_of(iterable(given(made))).batch(0)
    assert "\n" not in str(error.value)


def test_a_function_and_a_class_and_held_out(given: Callable[..., DataConfig]) -> None:
    val = given(lambda: iter([{"label": 7}, {"label": 8}]))
    source = iterable(given(Sized, val_path=None))
    assert source.info["train"] == 50 and source.held_out is None
    with pytest.raises(UserError, match=r"^data.val_path: null, .* train.eval_every=0"):
        make_eval_loader(source, seq_len=4, global_batch=8, sharding=sharding(data=1), batches=1)
    with pytest.raises(UserError, match=r"^data.val_path: .* gives other samples"):
        iterable(given(Sized, val_path=val.path))
    source = iterable(given([{"label": 1}, {"label": 2}], val_path=val.path))
    made = make_eval_loader(source, seq_len=4, global_batch=8, sharding=sharding(data=1), batches=None).batch(0)
    assert sorted(np.asarray(made["label"])[np.asarray(made["weights"]) > 0]) == [7, 8]


def test_fingerprints_of_streams(given: Callable[..., DataConfig]) -> None:
    """What cannot be hashed whole: version, length and the first sample."""

    def sha(made: Any) -> str:
        return str(iterable(given(made)).info["sha256"])

    class Versioned(list):  # type: ignore[type-arg]
        version = "1"

    first = sha(Versioned([{"a": 1}, {"a": 2}]))
    assert sha(Versioned([{"a": 1}, {"a": 3}])) == first  # nobody looks at it
    others = [sha([{"a": 1}, {"a": 2}]), sha(Versioned([{"a": 0}, {"a": 2}])), sha(Versioned([{"a": 1}]))]
    Versioned.version = "2"
    assert first not in others and sha(Versioned([{"a": 1}, {"a": 2}])) not in [first, *others]


def test_the_buffer_belongs_to_the_identity_of_streams_alone(given: Callable[..., DataConfig], tmp_path: Path) -> None:
    fixed, streaming = images(config(image_file(tmp_path / "a.npz"))), iterable(given(Numbers()))
    assert "buffer" not in identity(Config(), fixed)["data"]
    mixed = fixed._replace(parts=(Part("a", 5000, fixed), Part("b", 5000, streaming)))
    parts = Config(data=DataConfig(mixture=("a 1 images a", "b 1 iterable b")))
    stream = Config(data=DataConfig(source="iterable"))
    found = [identity(*each)["data"]["buffer"] for each in ((stream, streaming), (parts, mixed))]
    assert found == [1024] * 2


def test_a_mixture_of_images(tmp_path: Path) -> None:
    for name, shift in (("a", 0), ("b", 1000)):
        np.savez(tmp_path / f"{name}.npz", image=arrays()["image"], label=np.arange(COUNT) + shift)
    mixture = (f"a 0.75 images {tmp_path / 'a.npz'}", f"b 0.25 images {tmp_path / 'b.npz'}")
    source = load_source(DataConfig(mixture=mixture))
    found = np.array(labels(loader_of(source), 50))
    assert (found >= 1000).sum() == 100 and source.info["train"] == 96
    with pytest.raises(
        UserError, match=r"^data.mixture: a holds image uint8\[4, 3\].*; sources of a mixture must be of one kind"
    ):
        load_source(DataConfig(mixture=(mixture[0], f"text 0.5 text {Path(__file__)}")))


YAML = """
model: {{layers: 1, width: 16, heads: 2, vocab: 128}}
data: {{source: {source}, path: {path}, seq_len: 4, global_batch: 8}}
train: {{steps: 2, eval_every: 0, sample_tokens: 0}}
checkpoint: {{every: 0}}
devices: {{platform: cpu}}
observe: {{report: false, console: plain}}
"""


@pytest.mark.slow
def test_the_training_command_takes_ids_of_a_stream(
    given: Callable[..., DataConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = [np.arange(start, start + 5) for start in range(20)]
    path = given(type("Ids", (list,), {"vocab": 100})(made)).path
    (tmp_path / "a.yaml").write_text(YAML.format(source="iterable", path=path))
    assert train(load_config(tmp_path / "a.yaml", []), tmp_path / "run") == 0
    assert "iterable: 20 samples to train on" in capfd.readouterr().out


def test_the_training_command_refuses_images(tmp_path: Path) -> None:
    """In a line, before anything is compiled."""
    image_file(tmp_path / "a.npz")
    (tmp_path / "b.yaml").write_text(YAML.format(source="images", path=tmp_path / "a.npz"))
    with pytest.raises(UserError, match=r"^data.source: 'images' gives image, label, and model.name 'gpt' takes"):
        train(load_config(tmp_path / "b.yaml", []), tmp_path / "other")


PICTURES = ("model.name=picture_model.classifier", "precision.policy=fp32")


@pytest.fixture
def pictures(tmp_path: Path) -> Callable[..., Config]:
    """A configuration that trains somebody else's model on images."""
    image_file(tmp_path / "a.npz")
    (tmp_path / "a.yaml").write_text(YAML.format(source="images", path=tmp_path / "a.npz"))
    return lambda *options: load_config(tmp_path / "a.yaml", [*PICTURES, *options])


@pytest.mark.slow
def test_the_training_command_takes_images(
    pictures: Callable[..., Config], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a model of somebody else's: trained and evaluated, and counted by samples."""
    made = pictures("train.steps=4", "train.eval_every=2", "observe.report=true", "data.held_out=0.2")
    assert train(made, tmp_path / "run") == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if np.isfinite(record.get("eval/loss", np.nan))] == [2, 4]
    assert all(record["samples_per_s"] > 0 and "tokens_per_s" not in record for record in records)
    said, page = capfd.readouterr().out, (tmp_path / "run" / "report.html").read_text()
    assert "  samples/s " in said and "tokens" not in said
    assert "Samples seen</dt><dd>32<" in page and "samples per second" in page and "tokens per second" not in page


def test_what_processes_compare_is_of_the_samples(
    pictures: Callable[..., Config], given: Callable[..., DataConfig]
) -> None:
    """A step is lowered for the batches that it will get."""
    made, mesh = pictures("mesh.data=2"), make_mesh(data=2)
    parts, source = assemble(made, mesh), load_source(made.data)
    found = facts_of_program(made, parts, mesh, source)
    assert found["batch"] == "image uint8[8, 4, 3], label int32[8], weights float32[8]"
    sizes = {"seq_len": made.data.seq_len, "global_batch": 8}
    for each in (source, iterable(given(Numbers())), iterable(given(with_vocab([[1, 2, 3, 4, 5]])))):
        loader = make_loader(each, **sizes, sharding=NamedSharding(mesh, BATCH_SPEC), seed=0)
        batch = {leaf: (value.shape, value.dtype) for leaf, value in loader.batch(0).items()}
        assert batch == {leaf: (like.shape, like.dtype) for leaf, like in leaves_of(each, **sizes).items()}


def test_a_plan_refuses_samples(pictures: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> None:
    """Their shapes are in the data, which is not read for it. Short of memory, a run says so and does not fail anew."""
    made, mesh = pictures(), make_mesh(data=1)
    mixed = dataclasses.replace(made, data=DataConfig(mixture=("a 1 text a", "b 1 images b")))
    stream = dataclasses.replace(made, data=DataConfig(source="iterable", path="a.b"))
    for each in (made, mixed, stream):
        with pytest.raises(UserError, match=r"^data.source: '(images|iterable)' gives samples whose shapes") as error:
            batch_of(each, mesh)
        assert "\n" not in str(error.value)
    assert set(batch_of(Config(data=stream.data), mesh)) == {"inputs", "targets", "weights"}
    advise(made, Path(), "RESOURCE_EXHAUSTED", compiling=True)
    said = capsys.readouterr().err
    assert "out of memory: RESOURCE_EXHAUSTED\nwhat the step holds cannot be said: data.source" in said


@pytest.mark.slow
def test_the_example_classifies() -> None:
    example = Path(__file__).parents[2] / "docs" / "examples" / "classify.py"
    done = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, timeout=120, env=child.environment()
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"loss [0-9.]+, (\d+) of 200 held-out images right", done.stdout)
    assert found and int(found[1]) > 180, done.stdout
