"""The loss a chunk of tokens at a time: the same loss and gradients, without logits of all tokens."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import oracle
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from levels import others_slow

from jaxdist import make_mesh, make_train_step
from jaxdist.collectives import psum, to_varying
from jaxdist.config.schema import ModelConfig
from jaxdist.init import state_target
from jaxdist.mesh import abstract_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn import chunked_cross_entropy, loss_chunk, vocab_cross_entropy, vocab_logits
from jaxdist.nn.loss import WHOLE_BYTES
from jaxdist.plan.traced.flops import flops_of

CASES = [
    layouts.Case("gpt2", True, "zero3", 1, (1, 2, 2), loss_chunk=24),
    layouts.Case("llama", False, "ddp", 4, (2, 1, 1), loss_chunk=7),
    layouts.Case("llama", False, "zero2", 1, (2, 2, 2), remat="full", loss_chunk=1),
    layouts.Case("llama", True, "zero1", 2, (1, 4, 2), remat="sqrt", loss_chunk=8),
    layouts.Case("gpt2", False, "zero3", 1, (2, 2, 1), prefetch=1, loss_chunk=9),
    layouts.Case("gpt2", True, "zero3", 1, (1, 2, 1), "deterministic", loss_chunk=5),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])], ids=str
)
def test_layout_equals_one_device(case: layouts.Case) -> None:
    """Chunks of a number of tokens that does not divide theirs; masks; the table split over tensor."""
    layouts.check_wide(case)


def sums(chunk: int) -> Callable[..., jax.Array]:
    """Loss of (h, table, targets, weights), in chunks or (0) at once."""
    if chunk:
        return lambda h, table, *rest: chunked_cross_entropy(h, table, *rest, chunk=chunk)
    return lambda h, table, targets, weights: (vocab_cross_entropy(vocab_logits(h, table), targets) * weights).sum()


def gradients(chunk: int, h: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
    def region(h: jax.Array, table: jax.Array) -> Any:
        return jax.value_and_grad(sums(chunk), argnums=(0, 1))(h, table, targets, weights)

    return jax.jit(jax.shard_map(region, mesh=make_mesh(), in_specs=(P(), P()), out_specs=P()))(h, table)


def test_gradients_in_fp32_are_those_of_whole_logits() -> None:
    rng = np.random.default_rng(0)
    h, table = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 211, 32), (1000, 32)))
    targets = jnp.asarray(rng.integers(0, 1000, (3, 211)), jnp.int32)
    weights = jnp.asarray(rng.random((3, 211)) < 0.7, jnp.float32)
    (loss, grads), (whole, want) = (gradients(chunk, h, table, targets, weights) for chunk in (100, 0))
    assert float(loss) == pytest.approx(float(whole), rel=1e-6)
    assert oracle.error(grads, want) < 1e-6


def test_the_gradient_of_the_table_is_summed_in_fp32() -> None:
    """1024 equal chunks: a sum in bf16 would stop growing at 256 of them."""
    h, table = jnp.ones((1, 1024, 8), jnp.bfloat16), jnp.zeros((16, 8), jnp.bfloat16)
    targets, weights = jnp.zeros((1, 1024), jnp.int32), jnp.ones((1, 1024), jnp.float32)
    got, want = (gradients(chunk, h, table, targets, weights)[1][1] for chunk in (1, 0))
    assert got.dtype == jnp.bfloat16
    assert oracle.error(got, want) < 0.01


@pytest.mark.parametrize("chunk", [0, 16])
def test_no_gradient_is_scattered_on_gpus(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scatter into the gradient of all logits is a kernel of its own there. Both ways have the same gradients."""
    rng = np.random.default_rng(4)
    given = (
        jnp.asarray(rng.normal(size=(2, 64, 32)), jnp.float32),
        jnp.asarray(rng.normal(size=(512, 32)), jnp.float32),
    )
    rest = jnp.asarray(rng.integers(0, 512, (2, 64)), jnp.int32), jnp.ones((2, 64))
    scattered = gradients(chunk, *given, *rest)
    monkeypatch.setattr("jaxdist.nn.embedding.traced_for_gpus", lambda: True)
    assert oracle.error(gradients(chunk, *given, *rest)[1], scattered[1]) < 1e-6
    h, table = jnp.ones((2, 64, 32)), jnp.ones((512, 32))
    text = str(jax.make_jaxpr(lambda: gradients(chunk, h, table, jnp.zeros((2, 64), jnp.int32), jnp.ones((2, 64))))())
    assert "dot_general" in text and "scatter" not in text


@pytest.mark.parametrize("tensor", others_slow([1, 4], 4))
def test_gpus_read_the_logits_once(tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reduction gives the largest and the sum. The results are those of two, of large logits and of -inf too."""
    rng = np.random.default_rng(5)
    split = P(None, None, "tensor") if tensor > 1 else P()
    weights = rng.normal(size=(2, 6))

    def results(logits: np.ndarray, targets: np.ndarray) -> tuple[Any, ...]:
        def loss(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses = vocab_cross_entropy(logits, jnp.asarray(targets))
            return (losses * weights).sum(), losses

        region = jax.shard_map(
            jax.grad(loss, has_aux=True), mesh=make_mesh(tensor=tensor), in_specs=split, out_specs=(split, P())
        )
        return jax.jit(region)(logits)

    with jax.enable_x64(True):
        logits = rng.normal(size=(2, 6, 32))
        logits[0, 0], logits[0, 1, :16], logits[1] = logits[0, 0] * 1e4, -np.inf, logits[1] - 1e5
        targets = rng.integers(16, 32, (2, 6)).astype(np.int32)
        want = results(logits, targets)
        monkeypatch.setattr("jaxdist.nn.embedding.traced_for_gpus", lambda: True)
        jax.clear_caches()
        got = results(logits, targets)
        text = str(jax.make_jaxpr(lambda logits: results(logits, targets))(logits))
    for one, other in zip(got, want, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)
    assert "reduce_max" not in text


@pytest.mark.parametrize("on_gpus", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_of_half_precision_are_summed_in_fp32(
    on_gpus: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head of one's own. In bf16 a sum of ones would stop growing at 256."""
    monkeypatch.setattr("jaxdist.nn.embedding.traced_for_gpus", lambda: on_gpus)
    loss = lambda logits: vocab_cross_entropy(logits, jnp.zeros((1, 2), jnp.int32)).sum()  # noqa: E731
    region = jax.shard_map(jax.value_and_grad(loss), mesh=make_mesh(), in_specs=P(), out_specs=P())
    total, grad = jax.jit(region)(jnp.zeros((1, 2, 50304), dtype))
    assert float(total) == pytest.approx(2 * np.log(50304), rel=1e-6)
    assert float(grad[0, 0, 0]) == pytest.approx(-1, abs=1e-2) and grad.dtype == dtype


def test_the_gradient_of_a_bias_of_the_logits() -> None:
    """In bf16 too it is that of whole logits, summed over chunks in fp32."""
    rng = np.random.default_rng(2)
    h, table = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((2, 50, 16), (40, 16)))
    bias = jnp.asarray(rng.normal(size=40), jnp.bfloat16)
    targets, weights = jnp.asarray(rng.integers(0, 40, (2, 50)), jnp.int32), jnp.ones((2, 50))

    def grads(chunk: int) -> Any:
        def loss(h: jax.Array, table: jax.Array, bias: jax.Array) -> jax.Array:
            if chunk:
                return chunked_cross_entropy(h, table, targets, weights, chunk=chunk, bias_V=bias)
            return (vocab_cross_entropy(vocab_logits(h, table, bias), targets) * weights).sum()

        region = jax.shard_map(jax.grad(loss, argnums=(0, 1, 2)), mesh=make_mesh(), in_specs=(P(),) * 3, out_specs=P())
        return jax.jit(region)(h, table, bias)

    assert oracle.error(grads(7), grads(0)) < 1e-2
    assert [leaf.dtype for leaf in grads(7)] == [jnp.bfloat16] * 3


def test_a_table_in_fp32_keeps_its_gradient_in_fp32() -> None:
    """With `precision.keep_fp32` of the head: as whole logits do, nothing is rounded to the type of h."""
    rng = np.random.default_rng(3)
    h, table = jnp.asarray(rng.normal(size=(2, 40, 16)), jnp.bfloat16), jnp.asarray(rng.normal(size=(50, 16)))
    targets, weights = jnp.asarray(rng.integers(0, 50, (2, 40)), jnp.int32), jnp.ones((2, 40))
    got, want = (gradients(chunk, h, table.astype(jnp.float32), targets, weights)[1] for chunk in (10, 0))
    assert [leaf.dtype for leaf in got] == [jnp.bfloat16, jnp.float32]
    assert oracle.error(got[1], want[1]) < 1e-6


def test_no_product_is_computed_twice() -> None:
    """Three matrix products of the vocabulary's size where the loss is differentiated, one where it is not."""
    h, table = jax.ShapeDtypeStruct((2, 64, 32), jnp.float32), jax.ShapeDtypeStruct((512, 32), jnp.float32)
    rest = jnp.zeros((2, 64), jnp.int32), jnp.ones((2, 64))

    def flops(chunk: int, *, differentiated: bool) -> float:
        loss = lambda h, table: sums(chunk)(h, table, *rest)  # noqa: E731
        function = jax.grad(loss, argnums=(0, 1)) if differentiated else loss
        region = jax.shard_map(function, mesh=make_mesh(), in_specs=(P(), P()), out_specs=P())
        return flops_of(jax.make_jaxpr(region)(h, table))

    product = 2 * 128 * 512 * 32
    assert [flops(chunk, differentiated=True) for chunk in (0, 16)] == [3 * product] * 2
    assert [flops(chunk, differentiated=False) for chunk in (0, 16)] == [product] * 2


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_small_gradients_in_fp16_are_lifted_by_the_loss_scale(dtype: Any) -> None:
    """The gradients of the loss itself would be zeros: the probability of each of 2^14 tokens, times 2^-14."""
    vocab = 2**14
    h, table = jnp.full((1, 4, 8), 2.0**-14, dtype), jnp.zeros((vocab, 8), jnp.float16)
    targets, weights = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4))

    def region(h: jax.Array, table: jax.Array) -> Any:
        return jax.grad(lambda table: sums(2)(h, table, targets, weights) * 2.0**12)(table)

    grads = jax.jit(jax.shard_map(region, mesh=make_mesh(), in_specs=(P(), P()), out_specs=P()))(h, table)
    np.testing.assert_allclose(np.asarray(grads[1:], np.float64), 4 / vocab * 2.0**-14 * 2.0**12, rtol=2e-3)


def test_the_same_samples_on_devices_with_tables_of_their_own() -> None:
    h, tables = jnp.ones((2, 3, 4)), jnp.arange(80.0).reshape(2, 10, 4) / 80

    def region(h: jax.Array, tables: jax.Array) -> Any:
        rest = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3))
        return jax.grad(lambda h, tables: psum(sums(2)(h, tables[0], *rest), "data"), argnums=(0, 1))(h, tables)

    run = jax.shard_map(region, mesh=make_mesh(data=2), in_specs=(P(), P("data")), out_specs=(P(), P("data")))

    def whole(h: jax.Array, tables: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(jnp.einsum("BSD,NVD->NBSV", h, tables))[..., 0].sum()

    assert oracle.error(jax.jit(run)(h, tables), jax.grad(whole, argnums=(0, 1))(h, tables)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("cast", [False, True])
def test_devices_with_samples_of_their_own(cast: bool) -> None:
    """The gradient of a table that is the same on all is the sum of theirs, also where their cotangents differ."""
    rng = np.random.default_rng(1)
    h, table = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 6, 4), (50, 4)))
    targets, weights = jnp.asarray(rng.integers(0, 50, (8, 6)), jnp.int32), jnp.ones((8, 6))
    factors = jnp.arange(1.0, 5.0)  # of each device's loss

    def region(table: jax.Array, h: jax.Array, targets: jax.Array, weights: jax.Array, own: jax.Array) -> Any:
        def loss(table: jax.Array, h: jax.Array) -> jax.Array:
            table = to_varying(table, ("data",)) if cast else table
            return psum(sums(5)(h, table, targets, weights) * own[0], "data")

        return jax.grad(loss, argnums=(0, 1))(table, h)

    split = P("data")
    run = jax.shard_map(region, mesh=make_mesh(data=4), in_specs=(P(), *[split] * 4), out_specs=(P(), split))
    found = jax.jit(run)(table, h, targets, weights, factors)

    def whole(table: jax.Array, h: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(h @ table.T, targets).sum(1)
        return (losses * jnp.repeat(factors, 2)).sum()

    assert oracle.error(found, jax.grad(whole, argnums=(0, 1))(table, h)) < 1e-5


def test_when_logits_are_cut_up() -> None:
    def chunk(rows: int, length: int, vocab: int, asked: int | None, dtype: Any = jnp.bfloat16) -> int:
        shapes = jax.ShapeDtypeStruct((rows, length, 64), dtype), jax.ShapeDtypeStruct((vocab, 64), dtype)
        return loss_chunk(*shapes, asked)  # type: ignore[arg-type]

    assert chunk(32, 128, 256, None) == 0  # the quickstart's batch, on one device
    assert chunk(32, 128, 256, 100) == 100
    assert chunk(32, 128, 256, 32 * 128) == 0  # one chunk is none
    assert chunk(32, 1024, 50304, 0) == 0
    assert WHOLE_BYTES == 2**28 and chunk(2**10, 2**8, 2**8, None) == 0 < chunk(2**10, 2**8, 2**8 + 1, None)
    # The largest that fit, of those that leave little to fill up: 1280 would take 7 chunks for 6.4, or for 6.5.
    assert chunk(8, 1024, 50304, None) == 1024 and chunk(65, 128, 50304, None) == 768
    assert chunk(32, 1024, 128256, None) == 512 and 512 * 128256 * 4 <= WHOLE_BYTES < 640 * 128256 * 4
    assert chunk(32, 1024, 2**20, None) == 128  # not fewer, however large the vocabulary


LARGE = ModelConfig(layers=1, width=64, heads=1, vocab=50304)  # logits of 32k tokens: 6.1 GiB


def lower(config: ModelConfig, rows: int, length: int, mesh: Any) -> Any:
    model, tx = gpt(config, max_length=length), optax.sgd(0.1)
    state = state_target(model, tx, mesh)
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((rows, length), kind) for name, kind in kinds.items()}
    return make_train_step(model, tx, mesh).jitted(state).trace(state, batch)


def largest(jaxpr: Any) -> int:
    """Elements of the largest array that an equation makes, at any depth."""

    def found(jaxpr: Any) -> Iterator[int]:
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            yield from (int(np.prod(getattr(each.aval, "shape", ()))) for each in equation.outvars)
            for sub in jaxprs_in_params(equation.params):
                yield from found(sub)

    return max(found(jaxpr))


@pytest.mark.parametrize(("chunk", "most"), [(0, 32768 * 50304), (None, 1024 * 50304), (256, 256 * 50304)])
def test_logits_are_never_whole(chunk: int | None, most: int) -> None:
    traced = lower(dataclasses.replace(LARGE, loss_chunk=chunk), 256, 128, abstract_mesh(data=1))
    assert largest(traced.jaxpr) == most


@pytest.mark.slow
def test_temporary_memory_is_a_tenth() -> None:
    """Compiled, not run: 32,768 tokens, a vocabulary of 50,304, one device."""

    def temporary(chunk: int | None) -> int:
        traced = lower(dataclasses.replace(LARGE, loss_chunk=chunk), 256, 128, make_mesh())
        return int(traced.lower().compile().memory_analysis().temp_size_in_bytes)

    assert temporary(0) > 10 * temporary(None) and temporary(0) > 32768 * 50304 * 4
