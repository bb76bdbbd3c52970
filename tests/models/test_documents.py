"""`data.documents`: packed documents do not see each other, whatever the layout, and positions begin again."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from data_files import ids_file, loader
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import SEQ, VOCAB, Case, check_wide, initial, model_config
from levels import levels, others_slow

from jaxdist import UserError, build, load_config
from jaxdist.data.mixture import leaves_of, make_eval_loader
from jaxdist.data.sources.tokens import tokens
from jaxdist.data.text.packing import Documents, in_rows
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn.attention import PackedDocuments
from jaxdist.nn.attention.kernels import attention, cudnn_attention
from jaxdist.precision.policy import POLICIES
from jaxdist.trainer.batches.load import load_data
from jaxdist.trainer.resume import check_identity, identity

STARTS = st.sets(st.integers(1, 119), max_size=60).map(lambda found: np.array([0, *sorted(found)]))
CASES = [
    Case("gpt2", True, "zero3", 2, (2, 2, 2), sequence=True, documents=True),
    Case("gpt2", True, "ddp", 1, (1, 1, 1), documents=True),
    Case("llama", False, "zero2", 1, (2, 1, 2), remat="full", options=(("window", 3),), documents=True),
    Case("llama", False, "zero3", 2, (1, 2, 1), pipe=2, schedule="one_f_one_b", documents=True),
    Case("gpt2", False, "zero1", 4, (1, 1, 2), pipe=2, schedule="zero_bubble", documents=True),
    Case("gpt2", True, "zero3", 1, (1, 4, 1), prefetch=1, documents=True),
    Case("llama", True, "zero2", 2, (3, 1, 1), remat="sqrt", documents=True),
    Case("llama", False, "ddp", 1, (4, 1, 1), "deterministic", documents=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", levels(CASES, everyday=8, slow=3, common=1), ids=str)
def test_every_layout_is_like_one_device(case: Case) -> None:
    check_wide(case)


@pytest.mark.parametrize("style", others_slow(["gpt2", "llama"], "llama"))
def test_a_packed_document_is_like_one_alone(style: str) -> None:
    """The loss of each document in a row is its loss in a row of its own."""
    with jax.enable_x64(True):
        config = model_config(Case(style, True, "ddp", 1, (1, 1, 1)))
        model = gpt(config, max_length=SEQ, param_dtype=POLICIES["fp64"].param)
        params, ids = (
            initial(config, "fp64"),
            np.random.default_rng(3).integers(0, VOCAB, (1, SEQ + 1)).astype(np.int32),
        )
        cut, keys = 3, jax.random.split(jax.random.key(0), 1)

        def losses(inputs: Any, targets: Any, **more: Any) -> Any:
            batch = {"inputs": inputs, "targets": targets, "weights": np.ones(inputs.shape), **more}

            def run(params: Any) -> Any:
                h = model.embed(params["embed"], batch, keys)
                given = model.read_by_blocks(batch | {"keys": keys})
                for block in (jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]) for i in range(model.layers)):
                    h = model.block(block, h, *given)
                return model.logits(params["head"], params["embed"], h)

            return in_mesh(run, params)

        row, targets = ids[:, :-1], ids[:, 1:]
        starts = np.where(np.arange(SEQ) < cut, 0, cut).astype(np.int32)[None]
        packed = losses(row, targets, documents=starts)
        alone = [losses(row[:, part], targets[:, part]) for part in (slice(cut), slice(cut, None))]
        np.testing.assert_allclose(packed, np.concatenate(alone, axis=1), rtol=1e-12, atol=1e-14)
        assert not np.allclose(packed, losses(row, targets))


def in_mesh(run: Any, params: Any) -> Any:
    """The result of a function that runs on one device, inside a mesh of one."""
    mesh, specs = make_mesh(data=1), jax.P()
    return np.asarray(jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs))(params))


@settings(max_examples=30, deadline=None)
@given(STARTS, st.integers(1, 30), st.integers(0, 99), st.booleans())
def test_windows_say_where_documents_start(starts: np.ndarray, seq_len: int, step: int, shuffle: bool) -> None:
    made = loader(120, seq_len=seq_len, global_batch=4, documents=starts, apart=True, shuffle=shuffle)
    rows = made.host_rows(step % (made.batches or 100), slice(None))
    assert rows["documents"].dtype == np.int32 and rows.keys() == made.leaves.keys()
    for ids, found in zip(rows["inputs"], rows["documents"], strict=True):  # ids are positions
        for at, (position, first) in enumerate(zip(ids, found, strict=True)):
            start = max(int(each) for each in starts if each <= position)
            assert first == max(start - int(ids[0]), 0) <= at


def test_rows_say_where_documents_start() -> None:
    lengths = [3, 2, 4]
    ids = np.arange(1, 10, dtype=np.uint32)
    documents = Documents(ids, np.ones(9, bool), np.cumsum([0, *lengths]))
    rows = in_rows(documents, seq_len=6, packed=True, apart=True).read(np.array([0, 1]))
    assert rows["inputs"].tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0]]
    assert rows["documents"].tolist() == [[0, 0, 0, 3, 3, 5], [0, 0, 0, 0, 4, 4]]
    assert "documents" not in in_rows(documents, seq_len=6, packed=True).leaves


def test_positions_and_what_is_apart() -> None:
    documents = PackedDocuments(np.array([[0, 0, 2, 2, 4]], np.int32))  # type: ignore[arg-type]
    assert documents.positions().tolist() == [[0, 1, 0, 1, 0]]
    assert documents.apart()[0].sum(axis=1).tolist() == [3, 3, 3, 3, 4]


@pytest.mark.slow
def test_both_kernels_hide_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuDNN's kernel is given, computed by the plain one of jax."""
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: plain(*a, **k | {"implementation": "xla"}))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 6, 2, *more, 4)).astype(np.float32) for more in ((3,), (), ()))
    starts = np.array([[0, 0, 0, 3, 3, 5], [0, 0, 2, 2, 2, 2]], np.int32)
    documents = PackedDocuments(starts)  # type: ignore[arg-type]
    want = attention(q, k, v, None, dropout=0.0, documents=documents)
    got = cudnn_attention(q, k, v, documents=documents)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(want, attention(q, k, v, None, dropout=0.0))


YAML = """
model: {layers: 1, width: 16, heads: 2, vocab: 120}
data: {source: tokens, path: %s, seq_len: 8, global_batch: 4, held_out: 0.2%s}
devices: {simulated: 1}
"""


def written(tmp_path: Path, more: str = "") -> Any:
    ids_file(tmp_path / "train.bin", range(120))
    np.array([0, 5, 30, 31, 90], "<u8").tofile(tmp_path / "train.index")
    (tmp_path / "a.yaml").write_text(YAML % (tmp_path, more))
    return tmp_path / "a.yaml"


def test_the_key(tmp_path: Path) -> None:
    """mask is the default of packed data, and changes nothing of others."""
    path = written(tmp_path)
    leaves = {}
    for overrides in ([], ["data.packing=documents"], ["data.packing=documents", "data.documents=join"]):
        config = load_config(path, overrides)
        source = load_data(config)
        sizes = {"seq_len": 8, "global_batch": 4}
        leaves[len(overrides)] = set(leaves_of(source, **sizes))
        held = make_eval_loader(source, sharding=data_sharding(), batches=None, **sizes)
        assert set(held.leaves) == set(held.host_rows(0, slice(None))) == leaves[len(overrides)]
    assert leaves[1] == leaves[0] | {"documents"} and leaves[2] == leaves[0]


def data_sharding() -> Any:
    return jax.sharding.NamedSharding(make_mesh(data=1, devices=jax.devices()[:1]), jax.P(("data",)))


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    """Older runs joined documents. One that packed none has nothing to say about it."""
    path = written(tmp_path)
    plain, packed = (load_config(path, [f"data.packing={each}"]) for each in ("none", "documents"))
    now = {each.data.packing: identity(each, tokens(each.data)) for each in (plain, packed)}
    older = {name: each | {"data": dict(each["data"])} for name, each in now.items()}
    for each in older.values():
        del each["data"]["documents"]
    assert check_identity(older["none"], now["none"], tmp_path) == {}
    with pytest.raises(UserError, match=r"^data\.documents: 'mask', but the run in .* was started with 'join'; set it"):
        check_identity(older["documents"], now["documents"], tmp_path)
    joined = load_config(path, ["data.packing=documents", "data.documents=join"])
    assert check_identity(older["documents"], identity(joined, tokens(joined.data)), tmp_path) == {}


def test_what_cannot_keep_them_apart_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, ", packing: documents")
    path.write_text(
        path.read_text().replace("{layers: 1, width: 16, heads: 2, vocab: 120}", "{name: outsider.model.tower}")
    )
    with pytest.raises(
        UserError, match=r"^data\.documents: 'mask' .* model\.name 'outsider\.model\.tower' .*; allowed: join"
    ):
        load_config(path)
    assert not load_config(path, ["data.documents=join"]).data.apart


@pytest.mark.parametrize("documents", ["mask", "join"])
def test_cudnn_has_a_mask_or_a_window(documents: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cuda_capability", lambda *given: "9.0")
    keys = [f"data.documents={documents}", "precision=bf16", "model.heads=1", "model.window=4", "model.style=llama"]
    config = load_config(written(tmp_path, ", packing: documents"), keys)
    kernel, why = build.attention_of(config, POLICIES["bf16"], make_mesh(data=1, devices=jax.devices()[:1]))
    assert (kernel, why) == (
        ("cudnn", None) if documents == "join" else ("xla", "cuDNN takes a mask or a window, not both")
    )
