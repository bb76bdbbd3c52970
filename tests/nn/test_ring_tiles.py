"""The tiles of a ring by cuDNN. Its kernels do not run here: plain JAX computes what they are documented to compute."""

import itertools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from levels import levels

from jaxdist.build import attention_of
from jaxdist.config.load import load_config
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import abstract_mesh, make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn.context import cudnn_tiles
from jaxdist.nn.context.cudnn_tiles import CUDNN_TILES, UNSEEN
from jaxdist.nn.context.dropout_masks import kept_pairs, places_of
from jaxdist.nn.context.ring import ring_attention
from jaxdist.nn.context.tiles import XLA_TILES, TileKernel, TileMask, TileResult, WholeResult, merged
from jaxdist.nn.dropout import dropout_heads
from jaxdist.precision.policy import precision_of
from jaxdist.step import make_train_step

QUERIES, KEYS, KV_HEADS, GROUPS, WIDTH = 6, 10, 2, 3, 8
Given = tuple[jax.Array, jax.Array, jax.Array]


def random(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def plain_scores(q: jax.Array, k: jax.Array, bias: jax.Array, *, causal: bool, scale: float) -> jax.Array:
    """[B, heads, S, T] of q [B, S, heads, K] and k [B, T, n, K]; each n has the next heads / n of the heads."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = jnp.einsum("BShK,BThK->BhST", q, k) * scale
    later = jnp.triu(jnp.ones(scores.shape[-2:], bool), 1)
    return jnp.where(later, -jnp.inf, scores + bias) if causal else scores + bias


class Emulated:
    """A primitive, by plain JAX in the dtype that it is given."""

    def __init__(self, which: str) -> None:
        self.which = which

    def bind(self, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, *rest: jax.Array, **given: Any) -> Any:
        empty, saved = rest[:6], rest[6:]
        assert all(each.size == 0 for each in empty) and {each.dtype for each in (k, v, bias, *empty)} == {q.dtype}
        assert given["variadic_args"] == (bias.size > 0, False) and not given["dropout_rate"]
        assert (
            given["layout"] == cudnn_tiles.fused.AttentionLayout.BTNH.value and given["sliding_window_length"] is None
        )
        assert not bias.size or not any(size % 2 for size in bias.shape[2:])  # or cuDNN's check would refuse it
        causal, groups = given["mask_type"] is cudnn_tiles.fused.MaskType.CAUSAL, q.shape[2] // k.shape[2]
        bias = bias if bias.size else jnp.zeros((), q.dtype)
        scores = plain_scores(q, k, bias, causal=causal, scale=given["scale"])
        values = jnp.repeat(v, groups, axis=2)
        if self.which == "fwd":
            assert given["is_training"] and not saved
            lse = jax.nn.logsumexp(scores, axis=-1)
            return jnp.einsum("BhST,BThK->BShK", jnp.exp(scores - lse[..., None]), values), lse
        lse, out, dout = saved
        assert lse.dtype == jnp.float32 and {out.dtype, dout.dtype} == {q.dtype}
        weights = jnp.exp(scores - lse[..., None])
        delta = (out * dout).sum(-1).transpose(0, 2, 1)[..., None]
        dscores = weights * (jnp.einsum("BShK,BThK->BhST", dout, values) - delta) * given["scale"]
        by_group = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)  # noqa: E731
        dk, dv = jnp.einsum("BhST,BShK->BThK", dscores, q), jnp.einsum("BhST,BShK->BThK", weights, dout)
        return jnp.einsum("BhST,BThK->BShK", dscores, jnp.repeat(k, groups, axis=2)), by_group(dk), by_group(dv)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for which, name in zip(("fwd", "bwd"), cudnn_tiles.PRIMITIVES, strict=True):
        monkeypatch.setattr(cudnn_tiles.fused, name, Emulated(which))
    monkeypatch.setitem(UNSEEN, "float32", UNSEEN["bfloat16"])


def made(queries: int, keys: int, seed: int) -> Given:
    q = random(2, queries, KV_HEADS, GROUPS, WIDTH, seed=seed)
    return q, random(2, keys, KV_HEADS, WIDTH, seed=seed + 1), random(2, keys, KV_HEADS, WIDTH, seed=seed + 2)


def documents(queries: int, keys: int) -> jax.Array:
    """Unseen keys, of which the first query sees none."""
    found = np.random.default_rng(7).random((2, queries, keys)) < 0.3
    found[:, 0] = True
    return jnp.asarray(found)


MASKS = {
    "all": (QUERIES, KEYS, TileMask()),
    "causal": (QUERIES, QUERIES, TileMask(causal=True)),
    "documents": (QUERIES, KEYS, TileMask(unseen_BST=documents(QUERIES, KEYS))),
    "odd": (5, 7, TileMask(unseen_BST=documents(5, 7))),
    "odd causal": (5, 5, TileMask(causal=True, unseen_BST=documents(5, 5).at[:, 0, 0].set(False))),
}


def both(kernel: TileKernel, given: Given, mask: TileMask) -> tuple[TileResult, Any]:
    """A tile merged with another one over other keys, and the gradients by way of the first."""
    q = given[0]
    found = kernel.forward(*given, mask)
    rest = kernel.forward(q, *made(q.shape[1], 4, seed=20)[1:], TileMask())
    whole = merged(found, rest)
    dout = random(*whole.out.shape, seed=30)
    return whole, kernel.backward(*given, mask, WholeResult(whole.out, dout, whole.lse))


@pytest.mark.parametrize("name", MASKS)
def test_a_tile_and_its_gradients_are_those_of_plain_jax(name: str, emulated: None) -> None:
    queries, keys, mask = MASKS[name]
    given = made(queries, keys, seed=10)
    got, want = both(CUDNN_TILES, given, mask), both(XLA_TILES, given, mask)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert oracle.error(a, b) < 1e-5


def grads(kernel: str, starts: bool, window: int | None) -> Any:
    """Result and gradients of a ring over four devices, 12 positions each."""
    shapes = (2, 48, KV_HEADS, GROUPS, WIDTH), (2, 48, KV_HEADS, WIDTH), (2, 48, KV_HEADS, WIDTH)
    given = [random(*shape, seed=40 + i) for i, shape in enumerate(shapes)]
    first = jnp.where(jnp.arange(48) < 11, 0, 11)[None].repeat(2, 0) if starts else None

    def region(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        attend = lambda *qkv: ring_attention(*qkv, first, window=window, kernel=kernel)  # noqa: E731
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    spec = jax.P(None, "context")
    run = jax.shard_map(region, mesh=make_mesh(context=4), in_specs=(spec,) * 4, out_specs=(spec,) * 4)
    return jax.jit(run)(*given, random(*shapes[0], seed=50))


@pytest.mark.parametrize(("starts", "window"), levels(itertools.product((True, False), (7, None)), everyday=4))
def test_a_ring_of_such_tiles_is_that_of_plain_tiles(starts: bool, window: int | None, emulated: None) -> None:
    got, want = grads("cudnn", starts, window), grads("xla", starts, window)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert oracle.error(a, b) < 1e-5


def lowered(context: int, *, documents: bool = False, remat: str = "none", attention: str = "cudnn") -> str:
    """A step for CUDA. Nothing looks for a GPU or for cuDNN."""
    config = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, vocab=32, style="llama", attention=attention)
    model, mesh, tx = gpt(config, max_length=24, context="ring"), make_mesh(context=context), optax.sgd(0.1)
    state, ids = state_target(model, tx, mesh, strategy="zero3"), np.zeros((2, 24), np.int32)
    step = make_train_step(model, tx, mesh, strategy="zero3", precision="bf16", remat=remat)
    batch = {"inputs": ids, "targets": ids, "weights": np.ones(ids.shape, np.float32)}
    batch |= {"documents": ids} if documents else {}
    return step.jitted(state).trace(state, batch).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("context", "documents", "remat", "again"),
    levels([(2, True, "full", 1), (4, False, "dots", 0), (4, True, "full", 1), (2, False, "none", 0)], everyday=4),
)
def test_a_step_calls_a_kernel_for_each_tile(context: int, documents: bool, remat: str, again: int) -> None:
    text = lowered(context, documents=documents, remat=remat)
    calls = Counter(re.findall(r"@__cudnn\$(\w+)", text))
    name = "fmhaScaleBiasSoftmax" if documents else "fmhaSoftmax"
    tiles = 2 * context + 1  # three of its own, and two in each round
    assert calls == {name: tiles * (1 + again), f"{name}Backward": tiles}
    chunk = 12 // context
    scores = rf"tensor<2x(2x2|4)x{chunk}x{chunk}x"
    assert not re.search(scores, text) and "CustomSPMDPartitioning" not in text
    assert re.search(scores, lowered(context, documents=documents, remat=remat, attention="xla"))


known = cudnn_tiles._parameters


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("fused", None, "has no primitives of cuDNN's attention of the known names"),
        ("_parameters", lambda which: [*known(which), "x"], "have other parameters than the known ones"),
    ],
)
def test_another_jax_falls_back_to_plain_tiles(
    name: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = ("mesh={data: 1, fsdp: 1, tensor: 1, context: 4}", "model={name: gpt, heads: 4, width: 64}")
    config = load_config("configs/quickstart.yaml", [*always, "parallel.context=ring", "precision.policy=bf16"])
    monkeypatch.setattr("jaxdist.build.cuda_capability", lambda config, mesh: "9.0")
    given: Any = (config, precision_of(config.precision), abstract_mesh(context=4))
    assert attention_of(*given) == ("cudnn", None)
    monkeypatch.setattr(cudnn_tiles, name, value)
    kernel, found = attention_of(*given)
    assert kernel == "xla" and found is not None and why in found


@pytest.mark.parametrize("wide", [False, True])
def test_dropout_of_some_pairs_is_that_of_all(wide: bool) -> None:
    rows, columns, rate = jnp.array([0, 3, 9]), jnp.array([2, 11, 5, 6]), 0.4
    keys, weights = jax.random.split(jax.random.key(3), 2), jnp.ones((2, 5, 10, 12))

    def both(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        given: Any = {"site": 1, "rate": rate}
        return dropout_heads(weights, keys, **given), kept_pairs(keys, rows, columns, length=12, heads=5, **given)

    with jax.enable_x64(wide):
        region = jax.shard_map(both, mesh=make_mesh(tensor=1), in_specs=jax.P(), out_specs=jax.P())
        whole, some = jax.jit(region)(keys)
    assert some.dtype == bool and 0 < some.sum() < some.size
    np.testing.assert_array_equal(some, whole[:, :, rows][..., columns] > 0)


@pytest.mark.parametrize("length", [1 << 20, 999_983])  # in the second, adding low parts overflows
def test_places_have_64_bits(length: int) -> None:
    rows, columns = [0, 1, 1023, 4095, 4096, 777_777, length - 1], [0, 1, 999_982, length - 1]
    high, low = places_of(jnp.array(rows), jnp.array(columns), length)
    found = (np.asarray(high, np.uint64) << np.uint64(32)) + np.asarray(low, np.uint64)
    assert found.tolist() == [[row * length + column for column in columns] for row in rows]


def test_masks_that_a_ring_cannot_draw_are_one_line() -> None:
    given: Any = (jax.random.split(jax.random.key(0), 1), jnp.arange(2), jnp.arange(2))
    with pytest.raises(UserError, match="at most 1048576 positions, and the sequence has 1048577"):
        kept_pairs(*given, length=(1 << 20) + 1, heads=1, site=0, rate=0.1)
    with jax.threefry_partitionable(False), pytest.raises(UserError, match="jax_threefry_partitionable=False"):
        kept_pairs(*given, length=4, heads=1, site=0, rate=0.1)
