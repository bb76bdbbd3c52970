"""The cache of a teacher's logits, and what section distill refuses or leaves as it is."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxdist.build import assemble
from jaxdist.config.load import load_config
from jaxdist.data.loader import GlobalBatches
from jaxdist.distill.cache import CACHE_MANIFEST, check_cache, new_kept, open_cache, with_cached_logits, write_cache
from jaxdist.distill.model import IDS, LOGSUMEXP, VALUES
from jaxdist.errors import UserError
from jaxdist.mesh import abstract_mesh, make_mesh
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.specs import BATCH_SPEC

DATA = {"sha256": "a", "seed": 0}
KEPT = new_kept(teacher="t", temperature=2, data=DATA, samples=12, length=3, top_k=2, vocab=300)


def rows(k: np.ndarray) -> dict[str, np.ndarray]:
    grid = k[:, None] * 10 + np.arange(3)
    ids = np.stack([grid, grid + 1], -1)
    return {VALUES: ids / 8, IDS: ids, LOGSUMEXP: grid / 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_cache(tmp_path / "cache", KEPT, (rows(np.arange(start, start + 4)) for start in (0, 4, 8)))
    return tmp_path / "cache"


@pytest.mark.parametrize("size", [2, 6])
def test_samples_are_found_by_their_number(folder: Path, size: int) -> None:
    """In batches of any size."""
    mesh = make_mesh(fsdp=2)
    leaves = {"number": jax.ShapeDtypeStruct((size,), np.int32)}
    plain = GlobalBatches(
        lambda k: {"number": k.astype(np.int32)}, leaves, global_batch=size, sharding=NamedSharding(mesh, BATCH_SPEC)
    )
    batch = with_cached_logits(plain, folder, open_cache(folder)).batch(1)
    want = rows(np.arange(size, 2 * size))
    for name, leaf in want.items():
        np.testing.assert_array_equal(batch[name], leaf)
    assert batch[IDS].dtype == np.uint16


def test_other_caches_are_refused(folder: Path) -> None:
    fits: dict[str, Any] = {"folder": folder, "data": DATA, "temperature": 2.0, "vocab": 300}
    check_cache(KEPT, **fits)
    for key, value, text in (
        ("data", {**DATA, "seed": 1}, "is of other samples: seed differs"),
        ("temperature", 1.0, "distill.temperature: 1, but the logsumexps"),
        ("vocab", 256, "the teacher has a vocabulary of 300, the student of 256"),
    ):
        with pytest.raises(UserError, match=text):
            check_cache(KEPT, **fits | {key: value})
    with pytest.raises(UserError, match="is not empty"):
        write_cache(folder, KEPT, iter(()))


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"top_k": 0}, {"samples": 13}, {"dtype": "float8"}, {"data": 1}, {"top_k": 301}], ids=str
)
def test_a_strange_manifest_is_one_line(folder: Path, change: dict[str, Any]) -> None:
    path = folder / CACHE_MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=r"distill.cache: .*make it again with jaxdist distill"):
        open_cache(folder)


@pytest.mark.slow
def test_mixing_0_is_the_program_of_plain_training() -> None:
    """No teacher is read: there is none at this place."""
    sizes = ["model.layers=1", "model.width=16", "data.seq_len=8", "data.global_batch=4"]
    traced = []
    for more in ([], ["distill.teacher=nowhere", "distill.mixing=0"]):
        config = load_config("configs/distill_quickstart.yaml", [*sizes, *more])
        mesh = abstract_mesh(fsdp=2)
        parts = assemble(config, mesh)
        traced.append(str(parts.step.trace(parts.target, batch_of(config, mesh)).jaxpr))
    assert traced[0] == traced[1]


def test_no_teacher_there_is_one_line(tmp_path: Path) -> None:
    given = [f"distill.teacher={tmp_path / 'nowhere'}"]
    with pytest.raises(UserError, match=r"distill.teacher"):
        assemble(load_config("configs/distill_quickstart.yaml", given), abstract_mesh(fsdp=2))
