"""`parallel.collective_matmul`: rings of products are the plain products, train like one device, and send the same."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from layouts import Case, check_wide
from levels import levels, others_slow

from jaxdist.build import make_model
from jaxdist.collectives import to_varying
from jaxdist.config.schema import Config, ModelConfig, ParallelConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn.matmul.collective import gather_product, product_scatter
from jaxdist.nn.sequence_parallel import sum_to_positions, whole_sequence
from jaxdist.plan.traced.ledger import ledger
from jaxdist.precision.policy import make_precision
from jaxdist.step import make_train_step

Product = Callable[[jax.Array, jax.Array], jax.Array]
LAYERS, WIDTH, ROWS, LENGTH = 2, 32, 4, 16
CASES = [
    Case("gpt2", True, "ddp", 1, (1, 1, 2)),
    Case("llama", False, "zero3", 2, (2, 2, 2)),
    Case("llama", True, "zero3", 1, (1, 2, 4), prefetch=1, remat="full", loss_chunk=7),
    Case("gpt2", False, "zero2", 4, (1, 2, 4), remat="dots"),
    Case("gpt2", True, "zero1", 1, (2, 1, 4)),
    Case("llama", False, "ddp", 4, (1, 1, 4), pipe=2, schedule="zero_bubble"),
    Case("gpt2", True, "zero3", 4, (1, 2, 2), pipe=2, schedule="one_f_one_b"),
    Case("llama", True, "zero3", 1, (2, 1, 2), remat=("attention.out", "mlp.hidden"), scan_blocks=2),
    Case("gpt2", False, "zero3", 1, (1, 1, 8), remat="full"),
]
CASES = [case._replace(sequence=True, collective_matmul=True) for case in CASES]


@pytest.mark.parametrize("case", levels(CASES, slow=4, common=2), ids=str)
def test_a_model_trains_like_one_device(case: Case) -> None:
    check_wide(case)


def plain_gather(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.tensordot(whole_sequence(x), kernel, 1)


def plain_scatter(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return sum_to_positions(jnp.tensordot(x, kernel, 1))


def run(product: Product, tensor: int, features: tuple[int, ...], *, dtype: Any) -> list[np.ndarray]:
    """Result and gradients of x [B, S, I] and kernel: x split over positions, or over I where products are summed."""
    gathers = product in (gather_product, plain_gather)
    data = 8 // tensor if tensor != 3 else 2
    inputs, rng = (5 if gathers else 5 * tensor), np.random.default_rng(tensor)
    features = (features[0] * tensor, *features[1:]) if gathers else features
    x_BSI = rng.standard_normal((data, 7 * tensor, inputs))
    kernel, weights = rng.standard_normal((inputs, *features)), rng.standard_normal((data, 7 * tensor, *features))
    split = P(None, "tensor") if gathers else P("tensor")
    rows = "data" if data > 1 else None
    of_x, of_y = P(rows, "tensor"), P(rows, None, "tensor")
    of_x, of_y = (of_x, of_y) if gathers else (of_y, of_x)

    def own(x: jax.Array, kernel: jax.Array, weights: jax.Array) -> Any:
        y, pull = jax.vjp(product, x, kernel)  # the kernel is the same along data: its gradient is summed over it
        return y, *pull(weights)

    mesh = make_mesh(data=data, tensor=tensor)
    both = jax.shard_map(own, mesh=mesh, in_specs=(of_x, split, of_y), out_specs=(of_y, of_x, split), check_vma=True)
    results = jax.jit(both)(*(jnp.asarray(each, dtype) for each in (x_BSI, kernel, weights)))
    return [np.asarray(each, np.float64) for each in results]


PAIRS = [(gather_product, plain_gather), (product_scatter, plain_scatter)]


@pytest.mark.parametrize("tensor", others_slow([1, 2, 3, 4, 8], 3))
@pytest.mark.parametrize(("ring", "plain"), PAIRS)
def test_rings_are_the_plain_products(ring: Product, plain: Product, tensor: int) -> None:
    with jax.enable_x64(True):
        for features in ((3,), (2, 3)):
            got, want = (run(product, tensor, features, dtype=jnp.float64) for product in (ring, plain))
            for one, other in zip(got, want, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("ring", "plain"), others_slow(PAIRS, PAIRS[0]))
def test_half_precision_rounds_once_a_device_and_gradients_of_kernels_once(ring: Product, plain: Product) -> None:
    got, usual, exact = (
        run(each, 4, (8,), dtype=dtype)
        for each, dtype in ((ring, jnp.bfloat16), (plain, jnp.bfloat16), (plain, jnp.float32))
    )
    for allowed, one, usually, right in zip((4, 4, 2), got, usual, exact, strict=True):
        wrong, before = (np.abs(each - right).max() / np.abs(right).max() for each in (one, usually))
        assert 0 < wrong < allowed * 2**-8 and wrong < 3 * before


@pytest.mark.parametrize(("ring", "forward", "backward"), [(gather_product, 4, 4 + 1), (product_scatter, 4, 4 + 1)])
def test_gradients_of_kernels_are_one_product(ring: Product, forward: int, backward: int) -> None:
    def products(function: Callable[..., Any]) -> int:
        specs = P(None, "tensor"), P(), P(None, "tensor")
        step = jax.shard_map(function, mesh=make_mesh(tensor=4), in_specs=specs, out_specs=P("tensor"), check_vma=True)
        shapes = (jnp.ones(shape) for shape in ((1, 16, 8), (8, 4), (1, 16, 4)))
        return str(jax.make_jaxpr(step)(*shapes)).count("dot_general[")

    def both(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> jax.Array:
        y, pull = jax.vjp(ring, x, to_varying(kernel, ("tensor",)))
        dy = jnp.broadcast_to(dy[:, :1], y.shape)
        return sum(each.sum() for each in pull(dy))[None]

    assert products(both) == forward + backward


@pytest.mark.parametrize(("ring", "plain"), PAIRS)
def test_the_backward_pass_keeps_what_it_keeps_without(ring: Product, plain: Product) -> None:
    def kept(product: Product) -> list[tuple[tuple[int, ...], Any]]:
        found: list[jax.Array] = []

        def own(x: jax.Array, kernel: jax.Array) -> jax.Array:
            y, pull = jax.vjp(product, x, kernel)
            found.extend(jax.tree.leaves(pull))
            return y

        mesh, gathers = make_mesh(tensor=4), ring is gather_product
        whole, split = P(None, "tensor"), P(None, None, "tensor")
        of_x, of_kernel, of_y = (whole, P(None, "tensor"), split) if gathers else (split, P("tensor"), whole)
        step = jax.shard_map(own, mesh=mesh, in_specs=(of_x, of_kernel), out_specs=of_y, check_vma=True)
        jax.eval_shape(step, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 8, 12), (12, 20))))
        return sorted((leaf.shape, str(leaf.dtype)) for leaf in found if leaf.ndim)

    assert kept(ring) == kept(plain) and len(kept(ring)) == 2


def sent(tensor: int, *, collective_matmul: bool, remat: str) -> tuple[collections.Counter[str], float, set[str]]:
    """(calls by op; bytes that a device sends of activations; types that travel in rings)."""
    model = gpt(
        ModelConfig(layers=LAYERS, width=WIDTH, heads=8, vocab=64, mlp_width=64),
        max_length=LENGTH,
        sequence_parallel=True,
        collective_matmul=collective_matmul,
    )
    mesh, tx = make_mesh(tensor=tensor), optax.sgd(0.1)
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), kind) for name, kind in kinds.items()}
    step = make_train_step(model, tx, mesh, remat=remat, precision="bf16")
    calls: collections.Counter[str] = collections.Counter()
    found = [each for each in ledger(step, state_target(model, tx, mesh), batch).collectives if each.op != "psum"]
    for each in found:
        calls[each.op] += each.calls
    return calls, sum(each.wire_bytes for each in found), {each.dtype for each in found if each.op == "ppermute"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "remat", "rings"),
    levels(
        [  # rings of a block
            (4, "none", 8),
            (2, "none", 8),
            (8, "none", 8),
            (2, "full", 11),
            (4, "full", 11),
            (8, "full", 11),
        ],
        everyday=6,
    ),
)
def test_the_same_bytes_in_pieces(tensor: int, remat: str, rings: int) -> None:
    before, plain, _ = sent(tensor, collective_matmul=False, remat=remat)
    after, in_pieces, dtypes = sent(tensor, collective_matmul=True, remat=remat)
    assert in_pieces == plain
    assert sum(before.values()) - rings * LAYERS == after["all_gather"] + after["reduce_scatter"]  # embedding, head
    assert after["ppermute"] == rings * LAYERS * (tensor - 1)
    assert dtypes == {"uint16"}  # bfloat16, as its bits: see `Group.permute`


def test_in_conditions_of_a_pipeline_is_one_line() -> None:
    mesh, tx = make_mesh(pipe=2, tensor=2), optax.sgd(0.1)
    model = gpt(
        ModelConfig(layers=2, width=32, heads=4, vocab=16), max_length=8, sequence_parallel=True, collective_matmul=True
    )
    batch = {name: np.zeros((4, 8), np.int32) for name in ("inputs", "targets")} | {"weights": np.ones((4, 8))}
    step = make_train_step(model, tx, mesh, schedule="gpipe", microbatches=2)
    with pytest.raises(UserError, match="parallel.collective_matmul: true sends .*; or parallel.pipeline_cond=false"):
        step.lower(state_target(model, tx, mesh), batch)


def test_alone_or_in_float8_is_one_line() -> None:
    build = functools.partial(gpt, ModelConfig(layers=1), max_length=8, collective_matmul=True)
    with pytest.raises(UserError, match="parallel.collective_matmul: true cuts .*; or parallel.sequence_parallel=true"):
        build()
    with pytest.raises(UserError, match="parallel.collective_matmul: true multiplies .*; or precision.policy=bf16"):
        build(sequence_parallel=True, fp8=True)


def test_a_length_that_does_not_divide_is_one_line() -> None:
    own = functools.partial(jax.shard_map, mesh=make_mesh(tensor=4), check_vma=True)
    step = own(product_scatter, in_specs=(P(None, None, "tensor"), P("tensor")), out_specs=P(None, "tensor"))
    with pytest.raises(UserError, match="6 positions are not divisible by tensor=4"):
        jax.eval_shape(step, jnp.zeros((1, 6, 4)), jnp.zeros((4, 8)))


def without_option(config: ModelConfig, *, max_length: int, param_dtype: Any, sequence_parallel: bool) -> Any:
    """A model of somebody else's that splits positions, and no more."""
    return gpt(config, max_length=max_length, param_dtype=param_dtype, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("asked", [False, True])
def test_a_model_that_does_not_know_it_is_refused(asked: bool) -> None:
    name = "test_collective_matmul.without_option"
    config = Config(
        model=ModelConfig(name=name, layers=1, width=32, heads=2, vocab=32),
        parallel=ParallelConfig(sequence_parallel=True, collective_matmul=asked),
    )
    build = functools.partial(make_model, config, make_precision("fp32"), stages=1, training=True)
    if not asked:
        assert build().layers == 1
        return
    with pytest.raises(
        UserError, match="parallel.collective_matmul: true needs a model .* option collective_matmul, and"
    ):
        build()
