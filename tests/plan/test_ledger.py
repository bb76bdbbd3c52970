"""The ledger, and the bytes of a state, against closed forms, written unit by unit, and against what is compiled."""

import functools
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from batches import token_shapes
from jax.sharding import NamedSharding
from levels import levels, others_slow

import jaxdist
from jaxdist import make_mesh, make_train_step, registry, state_target
from jaxdist.collectives import psum
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.errors import UserError
from jaxdist.mesh import abstract_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn import embedding, linear
from jaxdist.nn.mlp import MLP
from jaxdist.optim.make import make_optimizer
from jaxdist.plan.compiled.hlo import compare, compiled_collectives
from jaxdist.plan.explain import memory_at_rest
from jaxdist.plan.traced.ledger import BETWEEN, INSIDE, collectives_of, hosts_of, ledger
from jaxdist.plan.traced.sharding import sharding_rows
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import specs_of_arrays

NAMES = registry.names("jaxdist.parallel.strategies")
LAYERS, WIDTH, VOCAB, LENGTH, ROWS = 3, 32, 64, 8, 96
LOSS = 2 * 4  # bytes: loss and weight, together


def model(style: str = "llama", *, tied: bool = False, layers: int = LAYERS) -> Any:
    config = ModelConfig(style=style, layers=layers, width=WIDTH, heads=4, vocab=VOCAB, mlp_width=64, tied=tied)
    return gpt(config, max_length=LENGTH)


def ledger_of(definition: Any, strategy: str, **options: Any) -> Any:
    """On a mesh without devices. options: sizes of the mesh, and arguments of `make_train_step`."""
    sizes = {axis: options.pop(axis) for axis in ("pipe", "data", "fsdp", "tensor") if axis in options}
    mesh, tx = abstract_mesh(**sizes), optax.adamw(1e-3)
    step = make_train_step(definition, tx, mesh, strategy=strategy, **options)
    return ledger(step, state_target(definition, tx, mesh, strategy=strategy), token_shapes(ROWS))


def unit_bytes(definition: Any) -> dict[str, int]:
    """Bytes of each unit, in fp32; "table": of the embedding's, which a tied head reads."""
    size = lambda tree: sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))  # noqa: E731
    units = {name: size(tree) for name, tree in definition.shapes.items()}
    return units | {"table": size(definition.shapes["embed"]["tokens"])}


@pytest.mark.parametrize(
    ("n", "microbatches", "strategy", "tied"),
    levels(
        (
            (*sizes, name, tied)
            for sizes in ((16, 3), (16, 1), (2, 3), (2, 1))
            for tied in (False, True)
            for name in NAMES
        ),
        everyday=5,
    ),
)
def test_wire_bytes_are_the_closed_forms(strategy: str, n: int, microbatches: int, tied: bool) -> None:
    definition = model(tied=tied)  # Llama: a GPT-2 block ends with a bias, which its backward pass does not read
    found = ledger_of(definition, strategy, fsdp=n, microbatches=microbatches, remat="full").total("op")
    units, share = unit_bytes(definition), (n - 1) / n
    whole = units["embed"] + units["blocks"] + units["head"]
    again = units["table"] if tied else 0  # the head's use of it
    loss = 2 * share * LOSS
    want = {
        "ddp": {"psum": 2 * share * whole + loss},
        "zero1": {"all_gather": share * whole, "reduce_scatter": share * whole, "psum": loss},
        "zero2": {"all_gather": share * whole, "reduce_scatter": microbatches * share * (whole + again), "psum": loss},
        # Blocks forward and, for the backward pass, again. A look-up's backward does not read the table; the head's is
        # the next thing after its forward pass.
        "zero3": {
            "all_gather": microbatches * share * (whole + units["blocks"] + again),
            "reduce_scatter": microbatches * share * (whole + again),
            "psum": loss,
        },
    }[strategy]
    assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 3])
def test_prefetching_gathers_two_blocks_and_the_head_once_and_the_embedding_never(microbatches: int) -> None:
    definition, n = model(), 16
    found = ledger_of(definition, "zero3", fsdp=n, microbatches=microbatches, remat="full", prefetch=1).total("op")
    units, share = unit_bytes(definition), (n - 1) / n
    slices = -(-WIDTH // LAYERS) * LAYERS / WIDTH  # the last slice of the head's table takes some columns again
    head = 4 * WIDTH + 4 * WIDTH * VOCAB * slices
    tokens, once = ROWS * LENGTH, 2 * units["blocks"] // LAYERS
    want = {
        "all_gather": share * (microbatches * (2 * units["blocks"] - once + head) + 4 * tokens),
        "reduce_scatter": share * microbatches * (units["blocks"] + head),
        "all_to_all": share * 2 * 4 * tokens * WIDTH / n,  # activations of a device's own tokens, and their gradients
        "psum": 2 * share * LOSS,
    }
    assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "prefetch"), levels(itertools.product(("ddp", "zero3"), (0, 1)), everyday=4))
def test_sums_in_the_backward_pass_send_what_sums_at_the_end_send(strategy: str, prefetch: int) -> None:
    early = jaxdist.GradSync(bucket_mb=1e-6)
    sizes = {"data": 4} if strategy == "ddp" else {"data": 4, "fsdp": 2}
    apart = ledger_of(model(), strategy, **sizes, prefetch=prefetch, grad_sync=early)
    late = ledger_of(model(), strategy, **sizes, prefetch=prefetch)
    assert apart.total("op") == pytest.approx(late.total("op"), rel=1e-12)
    of_blocks = [each for each in apart.collectives if each.purpose == "gradients of blocks"]
    assert {each.phase for each in of_blocks} == {"backward"} and {each.op for each in of_blocks} == {"psum"}
    shards = 1 if strategy == "ddp" else 2
    assert sum(each.wire_bytes for each in of_blocks) == 2 * 3 / 4 * unit_bytes(model())["blocks"] / shards
    beside = strategy == "zero3" and prefetch == 1  # shards are summed beside a block however small they are
    assert beside == any(each.purpose == "gradients of blocks" for each in late.collectives)


@pytest.mark.parametrize("strategy", others_slow([name for name in NAMES if name != "ddp"], "zero3"))
def test_hybrid_sharding_adds_an_all_reduce_of_shards(strategy: str) -> None:
    definition, f, d = model(), 4, 8
    found = ledger_of(definition, strategy, fsdp=f, data=d)
    units = unit_bytes(definition)
    whole = units["embed"] + units["blocks"] + units["head"]
    assert found.total("axes")[("data",)] == 2 * (d - 1) / d * whole / f
    assert found.total("axes")[("data", "fsdp")] == 2 * (d * f - 1) / (d * f) * LOSS
    alone = ledger_of(definition, strategy, fsdp=f).total("axes")
    loss = 2 * (f - 1) / f * LOSS
    assert found.total("axes")[("fsdp",)] == alone[("fsdp",)] - loss


@pytest.mark.parametrize(
    ("remat", "of_a_block", "t"), levels([("none", 4, 2), ("none", 4, 4), ("full", 5, 2), ("full", 5, 4)], everyday=3)
)
def test_tensor_parallelism_sums_activations(t: int, remat: str, of_a_block: int) -> None:
    """Four all-reduces of activations a block, one more where the forward pass runs again; embedding and head: one of
    activations forward, one backward, and three of a number a token for the loss."""
    found = ledger_of(model(), "ddp", tensor=t, remat=remat)
    activations, tokens = ROWS * LENGTH * WIDTH * 4, ROWS * LENGTH * 4
    calls = [each for each in found.collectives if each.axes == ("tensor",)]
    assert len(calls) == len(found.collectives)  # nothing else
    large = sum(each.calls for each in calls if each.bytes_per_call == activations)
    assert large == of_a_block * LAYERS + 2
    small = sum(each.calls for each in calls if each.bytes_per_call == tokens)
    assert large + small == sum(each.calls for each in calls) and small == 3


NEW_COMPILER = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10's XLA merges several gathers here")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        *levels((name, {}) for name in NAMES),
        # The compiler must not move gathers out of the loop over microbatches, and merge none of those ahead.
        pytest.param("zero3", {"microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("zero3", {"prefetch": 1, "remat": "full"}, marks=pytest.mark.slow),
        *(
            pytest.param(
                "zero3", {"style": "gpt2", "prefetch": prefetch, "remat": remat}, marks=[NEW_COMPILER, pytest.mark.slow]
            )
            for prefetch, remat in ((0, "full"), (1, "none"))
        ),
        pytest.param("ddp", {"prefetch": 1, "grad_sync": jaxdist.GradSync(bucket_mb=1e-3)}, marks=pytest.mark.slow),
    ],
)
def test_the_compiled_program_agrees(strategy: str, options: dict[str, Any]) -> None:
    options = dict(options)
    style = options.pop("style", "llama")
    definition = model(style, tied=style == "gpt2")
    mesh, tx = make_mesh(data=2, fsdp=2, tensor=2), optax.adamw(1e-3)
    state = state_target(definition, tx, mesh, strategy=strategy)
    step = make_train_step(definition, tx, mesh, strategy=strategy, **options)
    data = {
        name: jax.ShapeDtypeStruct((16, *leaf.shape[1:]), leaf.dtype, sharding=NamedSharding(mesh, BATCH_SPEC))
        for name, leaf in token_shapes(ROWS).items()
    }
    compiled = compiled_collectives(step.lower(state, data).compile().as_text())
    planned, found = ledger(step, state, data), dict[str, float]()
    for each in compiled:
        if not each.added:
            found[each.op] = found.get(each.op, 0) + each.wire_bytes
    compared = compare(planned, compiled)
    assert found == planned.total("op")
    assert [op for op, each in compared.items() if not each.agrees] == []
    assert all(each.ledger_elements == each.compiled_elements for each in compared.values())
    assert compared.keys() == found.keys()
    added = [each for each in compiled if each.added]  # for the norm of the gradient
    assert {each.op for each in added} <= {"psum"} and sum(each.wire_bytes for each in added) < 500


@pytest.mark.slow
def test_what_the_compiler_adds_is_told_apart() -> None:
    mesh, tx, definition = make_mesh(fsdp=4), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), model()
    state = state_target(definition, tx, mesh, strategy="zero3")
    step = make_train_step(definition, tx, mesh, strategy="zero3")
    data = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, BATCH_SPEC))
        for name, leaf in token_shapes(ROWS).items()
    }
    added = [each for each in compiled_collectives(step.lower(state, data).compile().as_text()) if each.added]
    assert added and {each.op for each in added} == {"psum"} and sum(each.wire_bytes for each in added) < 1000


def test_lines_say_where_and_what_for() -> None:
    found = ledger_of(model(), "zero3", fsdp=8, data=4, tensor=2)
    by_purpose = {(each.purpose, each.phase): each for each in found.collectives}
    gather = by_purpose["blocks.mlp.up.kernel", "recompute"]
    assert (gather.op, gather.axes, gather.group_size, gather.calls) == ("all_gather", ("fsdp",), 8, LAYERS)
    assert gather.source.startswith("jaxdist/nn/linear.py:")
    assert by_purpose["gradient of blocks.mlp.up.kernel", "backward"].op == "reduce_scatter"
    assert by_purpose["activations of blocks.attention", "forward"].source.startswith("jaxdist/nn/linear.py:")
    assert by_purpose["gradients", "once a step"].axes == ("data",)
    # 64 devices, 8 on a host: tensor pairs are neighbours, an fsdp group of 8 spreads over two hosts.
    assert {each.axes: each.link for each in found.collectives} == {
        ("tensor",): INSIDE,
        ("fsdp",): BETWEEN,
        ("data",): BETWEEN,
        ("data", "fsdp"): BETWEEN,
    }


def line_with(module: Any, text: str) -> str:
    """ "jaxdist/nn/linear.py:55", the only line of a module in which the text is."""
    path = Path(module.__file__)
    [line] = [i for i, each in enumerate(path.read_text().splitlines(), start=1) if text in each]
    return f"{path.relative_to(Path(jaxdist.__file__).parents[1]).as_posix()}:{line}"


@pytest.mark.parametrize(
    ("strategy", "options"),
    levels(
        [
            ("zero3", {"remat": "full"}),
            ("zero1", {}),
            ("zero2", {"microbatches": 2, "remat": "full"}),
            ("zero3", {"prefetch": 1, "remat": "full"}),
            ("zero2", {}),
            ("zero3", {"grad_sync": jaxdist.GradSync(deterministic=True)}),
            ("zero3", {"tensor": 2}),
            ("zero3", {"pipe": 2, "schedule": "gpipe", "microbatches": 2}),
            ("zero3", {"pipe": 2, "schedule": "one_f_one_b", "microbatches": 4, "remat": "full"}),
        ],
        everyday=6,
    ),
    ids=str,
)
def test_a_parameters_line_is_that_of_its_layer(strategy: str, options: dict[str, Any]) -> None:
    found = ledger_of(model(layers=4), strategy, fsdp=4, **options)
    column = line_with(linear, "y = product(x, self.kernel[...]")
    lines = {
        "blocks.mlp.up.kernel": column,
        "blocks.attention.qkv.linear.kernel": column,
        "blocks.mlp.down.kernel": line_with(linear, "part = product(x, self.kernel[...]"),
        "embed.tokens.table": line_with(embedding, "rows = table.astype("),
        "head.projection.table": line_with(embedding, 'einsum_fp32("BSD,VD->BSV"'),
    }
    for name, line in lines.items():
        mine = [each for each in found.collectives if each.purpose in (name, f"gradient of {name}")]
        assert {each.source for each in mine} == ({line} if mine else set()), name
        if not (name == "embed.tokens.table" and options.get("prefetch")):  # it is looked up by columns
            assert {each.op for each in mine} in ({"all_gather", "reduce_scatter"}, {"all_gather", "ppermute"}), name


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_parameters_line_is_the_users_own(strategy: str) -> None:
    @jax.jit
    def apply(x: Any, weights: Any, bias: Any) -> Any:
        return (jax.numpy.einsum("bi,oi->bo", x, weights) + bias).sum()  # the line

    def loss(params: Any, batch: Any, keys: Any) -> tuple[Any, Any]:
        weights = params["w"].T.astype(batch["x"].dtype)  # moved, and not yet computed with
        scaled = jax.jit(lambda x: x * 2)(batch["x"])
        return apply(scaled, weights, params["b"]), scaled.size

    mesh, tx, start = abstract_mesh(fsdp=4), optax.sgd(0.1), {"w": np.zeros((8, 16)), "b": np.zeros(16)}
    state = state_target(lambda key: jax.tree.map(jax.numpy.float32, start), tx, mesh, strategy=strategy)
    step = make_train_step(loss, tx, mesh, strategy=strategy)
    found = ledger(step, state, {"x": jax.ShapeDtypeStruct((64, 8), np.float32)})
    [line] = [i for i, each in enumerate(Path(__file__).read_text().splitlines(), 1) if each.endswith("# the line")]
    for name in ("w", "b"):
        lines = {each.source for each in found.collectives if each.purpose in (name, f"gradient of {name}")}
        assert lines == {f"{Path(__file__).name}:{line}"}, name


def test_a_parameter_that_no_layer_reads_keeps_the_line_that_sends_it() -> None:
    mesh = abstract_mesh(fsdp=4)

    def region(x: Any) -> Any:
        with jax.named_scope("w"):
            return jaxdist.collectives.all_gather(x, "fsdp")

    spec = jax.sharding.PartitionSpec("fsdp")
    traced = jax.make_jaxpr(jax.shard_map(region, mesh=mesh, in_specs=spec, out_specs=spec))(np.zeros(8, np.float32))
    [each] = collectives_of(traced, mesh, hosts_of(mesh, 8), {"w"})
    assert each.purpose == "w" and each.source.startswith("test_ledger.py:")


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_hand_written_algorithms_are_counted_by_their_messages(algorithm: str) -> None:
    found = ledger_of(model(), "ddp", data=4, grad_sync=jaxdist.GradSync(algorithm))
    hops = [each for each in found.collectives if each.op == "ppermute"]
    assert hops and {each.purpose for each in hops} == {"gradients"}
    if algorithm == "ring":
        units = unit_bytes(model())
        whole = units["embed"] + units["blocks"] + units["head"]
        assert sum(each.wire_bytes for each in hops) == 2 * 3 / 4 * whole


def test_a_loop_of_unknown_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = MLP.__call__

    def patched(self: Any, x: Any) -> Any:
        x = plain(self, x)
        return jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x + psum(x, "tensor"), jax.lax.stop_gradient(x))

    monkeypatch.setattr(MLP, "__call__", patched)
    with pytest.raises(UserError, match=r"test_ledger.py:\d+ communicates, and its length is not in the program"):
        ledger_of(model(), "ddp", tensor=2)


@pytest.mark.slow
def test_state_of_a_large_model_is_twelve_bytes_a_parameter() -> None:
    """7.5 billion parameters on 64 devices, as in the ZeRO paper's figure 1 (theirs are in mixed precision)."""
    config = ModelConfig(style="gpt2", layers=36, width=4096, heads=32, vocab=50304)
    definition, mesh, tx = gpt(config, max_length=1024), abstract_mesh(fsdp=64), optax.adamw(1e-3)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(definition.shapes))
    assert 7.3e9 < count < 7.7e9
    for strategy, shards in (("ddp", 1), ("zero1", 64), ("zero2", 64), ("zero3", 64)):
        target = state_target(definition, tx, mesh, strategy=strategy)
        rows = sharding_rows(target.params, specs_of_arrays(target.params), mesh)
        assert sum(row.bytes_per_device for row in rows) == 4 * count // shards
        moments = sharding_rows(target.opt_state, specs_of_arrays(target.opt_state), mesh)
        assert sum(row.bytes_per_device for row in moments if row.shape) == 8 * count // shards


@pytest.mark.slow
def test_the_table_is_what_devices_hold() -> None:
    mesh, tx = make_mesh(data=2, fsdp=2, tensor=2), optax.sgd(0.1)
    state = jaxdist.init_state(model("gpt2"), tx, mesh, strategy="zero3")
    text = jaxdist.sharding_table(state.params, specs_of_arrays(state.params), mesh)
    rows = sharding_rows(state.params, specs_of_arrays(state.params), mesh)
    for row, leaf in zip(rows, jax.tree.leaves(state.params), strict=True):
        assert row.shard == leaf.addressable_shards[0].data.shape
        assert row.bytes_per_device == leaf.addressable_shards[0].data.nbytes
        assert row.copies == sum(shard.index == leaf.addressable_shards[0].index for shard in leaf.addressable_shards)
        assert row.path in text
    assert f"{sum(row.bytes_per_device for row in rows):,}" in text


def test_a_strategy_of_somebody_elses_is_one_file() -> None:
    found = ledger_of(model(), "embedding_only.embedding_only", fsdp=4)
    assert {each.purpose for each in found.collectives if each.op == "all_gather"} == {"embed.tokens.table"}


# A Llama with every size another one: V vocabulary, D width, H heads of K, F inner width, L blocks. Shape, and whether
# tensor splits it. Norms are smaller than `SMALL` for one block: they rest whole.
V, D, H, K, F, L, SMALL = 512, 128, 4, 32, 384, 3, 1024
PARAMETERS: dict[str, tuple[tuple[int, ...], bool]] = {
    "table": ((V, D), True),
    "projection": ((V, D), True),
    "norm": ((D,), False),
    "norm1": ((L, D), False),
    "norm2": ((L, D), False),
    "qkv": ((L, D, H, 3, K), True),
    "out": ((L, D, D), True),
    "up": ((L, D, 2, F), True),
    "down": ((L, F, D), True),
}
KERNELS = ("qkv", "out", "up", "down")  # what Muon takes
# Beside what mirrors parameters: two int32, of the optimizer and its schedule; Muon has a pair for its Adam as well,
# and three coefficients; Adafactor one for blocks and one for the rest. sgd counts for the schedule only.
COUNTS = {"adamw": 8, "lion": 8, "sgd": 4, "momentum": 4, "adafactor": 16, "muon": 28}


def optimizer_bytes(optimizer: str, name: str, shard: int) -> int:
    """Of one parameter, on one device, of which it has `shard` elements: fp32."""
    shape, _ = PARAMETERS[name]
    if optimizer == "adafactor":
        # Shazeer and Stern 2018, for each block: where a matrix has 128 inputs and outputs or more, a mean for each of
        # them in place of the second moment, and an empty moment of one element. No parameter has their shape, so that
        # they are whole on every device. Elsewhere a moment like the parameter, and two empty factors. No first moment.
        blocks, (inputs, *outputs) = (shape[0], shape[1:]) if shape[0] == L else (1, shape)
        if outputs and min(inputs, math.prod(outputs)) >= 128:
            return 4 * blocks * (inputs + math.prod(outputs) + 1)
        return 4 * (shard + 2 * blocks)
    elements = {"adamw": 2, "lion": 1, "sgd": 0, "momentum": 1, "muon": 1 if name in KERNELS else 2}[optimizer]
    return 4 * elements * shard


@pytest.mark.parametrize("optimizer", COUNTS)
@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(
    "sizes", [{"data": 8}, {"fsdp": 8}, {"tensor": 4}, {"data": 2, "fsdp": 4, "tensor": 2}], ids=str
)
def test_state_bytes_are_closed_forms(strategy: str, sizes: dict[str, int], optimizer: str) -> None:
    options = OptimizerConfig("sgd" if optimizer == "momentum" else optimizer, momentum=float(optimizer != "sgd") / 2)
    mesh, tx = abstract_mesh(**sizes), make_optimizer(options, steps=10)
    target = state_target(state_model(), tx, mesh, strategy=strategy, min_shard_bytes=SMALL)
    shards = {}
    for name, (shape, by_tensor) in PARAMETERS.items():
        sharded = strategy != "ddp" and not name.startswith("norm")
        parts = (sizes.get("tensor", 1) if by_tensor else 1) * (sizes.get("fsdp", 1) if sharded else 1)
        shards[name] = math.prod(shape) // parts
    assert memory_at_rest(target) == {
        "parameters": 4 * sum(shards.values()),
        "optimizer state": COUNTS[optimizer] + sum(optimizer_bytes(optimizer, *item) for item in shards.items()),
    }


@functools.cache
def state_model() -> Any:
    return gpt(ModelConfig(style="llama", layers=L, width=D, heads=H, vocab=V, mlp_width=F, tied=False), max_length=8)
