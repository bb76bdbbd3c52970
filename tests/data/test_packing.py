"""`data.packing`: targets in another document than their input do not count."""

from pathlib import Path

import numpy as np
from data_files import config, ids_file, loader, sharding
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.data.source import split_starts
from jaxdist.data.sources.tokens import tokens

STARTS = st.sets(st.integers(1, 119), max_size=120).map(lambda found: np.array([0, *sorted(found)]))


def document_of(position: int, starts: np.ndarray) -> int:
    """Which document a position is in, counted one start after the other."""
    return sum(int(start) <= position for start in starts)


@settings(max_examples=60, deadline=None)
@given(STARTS, st.integers(1, 30), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_against_a_slow_reference(starts: np.ndarray, seq_len: int, batch: int, step: int, shuffle: bool) -> None:
    made = loader(120, seq_len=seq_len, global_batch=batch, documents=starts, shuffle=shuffle)
    plain = loader(120, seq_len=seq_len, global_batch=batch, shuffle=shuffle)
    step = step % (made.batches or 100)
    rows, as_now = made.host_rows(step, slice(None)), plain.host_rows(step, slice(None))
    assert all(np.array_equal(rows[leaf], as_now[leaf]) for leaf in ("inputs", "targets"))  # ids are positions
    assert rows["weights"].dtype == np.float32
    for row in range(batch):
        for here, there, weight, usual in zip(*(x[row] for x in (*rows.values(), as_now["weights"])), strict=True):
            assert weight == (usual if document_of(here, starts) == document_of(there, starts) else 0)


def test_an_epoch_leaves_out_each_start_once() -> None:
    starts = np.array([0, 1, 7, 8, 30, 499, 900, 999])
    made = loader(1000, seq_len=9, global_batch=37, documents=starts, shuffle=False)
    rows = [made.host_rows(step, slice(None)) for step in range(made.batches or 0)]
    left_out = np.concatenate([each["targets"][(each["weights"] == 0) & (each["targets"] > 9)] for each in rows])
    assert sorted(set(left_out.tolist())) == [30, 499, 900, 999]
    assert sum(each["weights"].sum() for each in rows) == 999 - 7


def test_batches_do_not_depend_on_the_mesh() -> None:
    starts = np.arange(0, 1000, 5)
    rows = loader(seed=3, documents=starts).host_rows(4, slice(None))
    batch = loader(seed=3, documents=starts, sharding=sharding(data=2, fsdp=2)).batch(4)
    assert 0 < rows["weights"].mean() < 1
    for leaf, value in batch.items():
        np.testing.assert_array_equal(np.asarray(value), rows[leaf], strict=True)


def test_starts_of_both_parts_of_one_file(tmp_path: Path) -> None:
    ids_file(tmp_path / "train.bin", range(100))
    np.array([0, 40, 79, 80, 81, 95], "<u8").tofile(tmp_path / "train.index")
    source = tokens(config(tmp_path, held_out=0.2, packing="documents"))
    assert source.documents is not None
    assert [starts.tolist() for starts in source.documents] == [[0, 40, 79], [0, 1, 15]]
    assert [part.tolist() for part in split_starts(np.array([0, 5]), 3)] == [[0], [0, 2]]


def test_starts_are_a_part_of_the_fingerprint(tmp_path: Path) -> None:
    """Batches depend on them."""
    ids_file(tmp_path / "train.bin", range(100))
    found = set()
    for starts in ([0, 10], [0, 11]):
        np.array(starts, "<u8").tofile(tmp_path / "train.index")
        for packing in ("documents", "none"):
            found.add((packing, tokens(config(tmp_path, held_out=0.2, packing=packing)).info["sha256"]))
    assert sorted(packing for packing, _ in found) == ["documents", "documents", "none"]
