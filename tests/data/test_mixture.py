"""Mixtures of sources: proportions, order, epochs of each, what is refused, and a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import config, folder_of, ids_file, sharding
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.config.load import load_config
from jaxdist.data import BLOCK, Loader, Part, Source, load_source, make_loader
from jaxdist.data.mixture import block_counts, block_order
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.trainer.resume import check_identity, identity
from jaxdist.trainer.train import train


@given(st.lists(st.integers(1, 60), min_size=2, max_size=7))
@settings(max_examples=60, deadline=None)
def test_no_source_is_a_sample_ahead_or_behind(counts: list[int]) -> None:
    order = block_order(counts)
    assert np.bincount(order, minlength=len(counts)).tolist() == counts  # exact over a block
    had = np.cumsum(order[:, None] == np.arange(len(counts)), axis=0)
    due = np.arange(1, order.size + 1)[:, None] * np.array(counts) / order.size
    assert np.abs(had - due).max() <= 1 - 1 / (2 * len(counts) - 2) + 1e-9


def test_counts_of_a_block() -> None:
    assert block_counts([0.7, 0.2, 0.1]) == [7000, 2000, 1000]
    assert block_counts([7, 3]) == [7000, 3000]
    assert block_counts([1, 1, 1]) == [3334, 3333, 3333]
    assert block_counts([9999, 1]) == [9999, 1]
    with pytest.raises(AssertionError, match="one source is no mixture"):
        block_order([5])


def test_order_is_pinned() -> None:
    """If this fails, runs under way would go on with other data after an update."""
    assert block_order([5, 3, 2]).tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 1, 0]


def part(name: str, samples: int, first: int, size: int, documents: Any = None) -> Part:
    """A source whose ids are `first` + their positions."""
    ids = np.arange(first, first + size, dtype=np.uint32)
    return Part(name, samples, Source(ids, ids, first + size, {}, documents))


def mixture(*parts: Part, seq_len: int = 7, global_batch: int = 8, **sizes: int) -> Any:
    nothing = np.zeros(0, np.int32)
    source = Source(nothing, nothing, 1, {}, None, parts)
    return make_loader(source, seq_len=seq_len, global_batch=global_batch, sharding=sharding(**sizes), seed=3)


def test_each_source_has_its_own_epochs_whatever_batch_and_mesh() -> None:
    parts = part("a", 7500, 0, 500, (np.arange(0, 500, 9),) * 2), part("b", 2500, 1000, 100)
    small = mixture(*parts, data=1)
    rows = [small.host_rows(step, slice(None)) for step in range(60)]
    whole = {leaf: np.concatenate([each[leaf] for each in rows]) for leaf in rows[0]}
    large = mixture(*parts, global_batch=96, data=2, fsdp=2, tensor=2)
    for step in range(5):
        for leaf, value in large.batch(step).items():
            np.testing.assert_array_equal(np.asarray(value), whole[leaf][step * 96 : (step + 1) * 96], strict=True)
    starts, is_b = whole["inputs"][:, 0], whole["inputs"][:, 0] >= 1000
    assert is_b.sum() == 120  # of 480
    for mine, size in ((starts[~is_b], 500), (starts[is_b] - 1000, 100)):
        count = Loader(np.arange(size), seq_len=7, global_batch=1, sharding=sharding(data=1)).windows.count
        for epoch in range(mine.size // count):
            assert len(set((mine[epoch * count : (epoch + 1) * count] // 7).tolist())) >= count - 1  # each window once
            assert len(set(mine[epoch * count : (epoch + 1) * count].tolist())) == count
    assert np.array_equal(whole["targets"], whole["inputs"] + 1)
    assert np.array_equal(whole["weights"] == 0, (whole["targets"] % 9 == 0) & ~is_b[:, None])  # packing, of a alone
    with pytest.raises(IndexError):
        small.host_rows(-1, slice(None))


def test_far_into_a_run() -> None:
    made = mixture(part("a", 9000, 0, 500), part("b", 1000, 1000, 100), data=1)
    chosen, own = made.choose(np.arange(3 * BLOCK - 5, 3 * BLOCK + 50))
    for i, counts in enumerate((9000, 1000)):
        numbers = own[chosen == i]
        assert np.array_equal(numbers, numbers[0] + np.arange(numbers.size))  # none twice, none left out
        assert numbers[0] == 3 * counts - (chosen[:5] == i).sum()


def test_equal_sources_are_not_read_in_step() -> None:
    made = mixture(part("a", 5000, 0, 500), part("b", 5000, 1000, 500), global_batch=100, data=1)
    first = made.host_rows(0, slice(None))["inputs"][:, 0]
    assert not np.array_equal(first[first < 1000], first[first >= 1000] - 1000)


def mixed(tmp_path: Path, **changes: Any) -> Any:
    folder_of(tmp_path, {"text/a": b"abcdefgh" * 40, "text/b": b"ijklmnop" * 40, "more/c": b"0123456789" * 50})
    items = f"a 3 text {tmp_path / 'text'}", f"b 1 text {tmp_path / 'more'}"
    return config("stdlib", **{"mixture": items, **changes})


def test_loading(tmp_path: Path) -> None:
    data = mixed(tmp_path)
    source = load_source(data)
    assert [(each.name, each.samples) for each in source.parts] == [("a", 7500), ("b", 2500)]
    assert (source.vocab, source.info["unit"], source.info["name"]) == (256, "bytes", "mixture of a (0.75), b (0.25)")
    assert source.info["train"] == sum(each.source.train.size for each in source.parts)
    shas = {source.info["sha256"]}
    (tmp_path / "more" / "c").write_bytes(b"0123456789" * 49 + b"012345678X")
    shas.add(load_source(data).info["sha256"])
    assert len(shas) == 2
    ids = ids_file(tmp_path / "ids", np.arange(300))
    with pytest.raises(UserError, match=r"^data\.mixture: a holds bytes, b holds tokens"):
        load_source(mixed(tmp_path, mixture=(f"a 1 text {tmp_path / 'text'}", f"b 1 tokens {ids}")))


@pytest.mark.parametrize(
    ("mixture", "others", "message"),
    [
        ("[a 1 text]", (), r"data\.mixture\[0\]: 'a 1 text'; allowed: NAME WEIGHT SOURCE PATH"),
        ("[a 1 text ., b x text .]", (), r"data\.mixture\[1\]: 'b x text \.'; allowed"),
        ("[a 1 text ., b -1 text .]", (), r"data\.mixture\[1\]: 'b -1 text \.'; allowed"),
        ("[nonfinite 1 text ., b 1 text .]", (), r"data\.mixture\[0\]: .*; allowed"),
        ("[a/b 1 text ., b 1 text .]", (), r"data\.mixture\[0\]: .*; allowed"),
        ("[a 1 text ., b 1 token .]", (), r"data\.mixture\[1\]: 'token' is not known; .*did you mean 'tokens'"),
        ("[a 1 text .]", (), r"data\.mixture: sources named a; allowed: two or more"),
        ("[a 1 text ., a 2 text .]", (), r"data\.mixture: sources named a, a; allowed: .* different names"),
        ("[a 1 text ., b 0.00001 text .]", (), r"data\.mixture: weight 1e-05 of b is too small; allowed: at least"),
        ("[a 0 text ., b 0 text .]", (), r"data\.mixture: weight 0 of a is too small"),
        ("[a 1 text ., b 1 text none/there]", (), r"data\.path: 'none/there' does not exist"),
        ("[a 1 text ., b 1 text .]", ("data.path=.",), r"data\.path: '\.' has no effect beside data\.mixture; allowed"),
        ("[a 1 text ., b 1 text .]", ("data.source=tokens",), r"data\.source: 'tokens' has no effect"),
        ("[a 1 text ., b 1 text .]", ("data.val_path=.",), r"data\.val_path: '\.' has no effect .* allowed: null"),
    ],
)
def test_what_is_refused(tmp_path: Path, mixture: str, others: tuple[str, ...], message: str) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    with pytest.raises(UserError, match=f"^{message}"):
        load_config(tmp_path / "empty.yaml", [f"data.mixture={mixture}", "devices.platform=cpu", *others])


YAML = """
model: {layers: 1, width: 16, heads: 2}
data: {seq_len: 16, global_batch: 4, mixture: [a 3 text %s, b 1 text %s]}
mesh: {data: 1}
train: {steps: 4, eval_every: 2, eval_batches: 1, sample_tokens: 0}
checkpoint: {every: 2}
devices: {platform: cpu}
observe: {console: plain, report: false}
"""


@pytest.mark.slow
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed(tmp_path)
    (tmp_path / "tiny.yaml").write_text(YAML % (tmp_path / "text", tmp_path / "more"))
    settings_of = load_config(tmp_path / "tiny.yaml")
    assert train(settings_of, tmp_path / "run") == 0
    assert load_config(tmp_path / "run" / "config.yaml") == settings_of
    assert "mixture of a (0.75), b (0.25)" in capsys.readouterr().out
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["eval/loss"] == pytest.approx(0.75 * last["eval/loss/a"] + 0.25 * last["eval/loss/b"])
    assert last["eval/loss/a"] != last["eval/loss/b"]
    assert "eval/bits_per_byte" in last
    now = identity(settings_of, load_source(settings_of.data))
    older = {**now, "data": {key: value for key, value in now["data"].items() if key not in ("mixture", "packing")}}
    with pytest.raises(UserError, match=r"^data\.mixture: \[\['a', 7500\], \['b', 2500\]\], but .* started with \[\]"):
        check_identity(older, now, tmp_path)
