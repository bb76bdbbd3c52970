"""Context parallelism: every form trains like one device, in every layout; what it sends, keeps and refuses."""

import dataclasses
import itertools
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx
from layouts import (
    SEQ,
    STRATEGIES,
    VOCAB,
    Case,
    batch_size,
    check_fp32,
    check_wide,
    initial,
    make_batch,
    model_config,
    reference,
    run,
)
from levels import levels

from jaxdist.build import attention_of, form_of
from jaxdist.collectives import to_varying
from jaxdist.config.load import load_config
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.generation.generate import generate
from jaxdist.init import init_state, state_target
from jaxdist.mesh import abstract_mesh, make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn import Attention, model_def, normal, own_context
from jaxdist.nn.context import ring, tiles
from jaxdist.nn.context.dropout_masks import kept_pairs
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.plan.context import context_text, traffic
from jaxdist.plan.report.draw_context import draw_context, rounds_of_tiles
from jaxdist.plan.report.draw_rounds import data_of
from jaxdist.plan.traced.ledger import ledger
from jaxdist.precision.policy import precision_of
from jaxdist.specs import has_shards
from jaxdist.state import place_params
from jaxdist.step import make_train_step
from jaxdist.trainer.evaluation import make_eval_step

ROOT = Path(__file__).parents[2]
FORMS = ("all_to_all", "gather", "ring")
REMATS: Any = ("none", "full", "dots", ("attention.context",))


def case(form: str, context: int, i: int, **given: Any) -> Case:
    """A case whose other options change with i, so that all cases together have every pair of them often."""
    tensor = 2 if context < 8 and i % 2 else 1
    fsdp = 2 if context * tensor < 8 and i % 3 else 1
    style = ("llama", "gpt2")[i % 2]
    usual = {"documents": bool(i % 5 % 2), "remat": REMATS[(i + i // 4) % 4]}
    strategy = STRATEGIES[i % len(STRATEGIES)]
    return Case(
        style, style == "gpt2", strategy, 1 + i % 2, (1, fsdp, tensor), context=context, form=form, **{**usual, **given}
    )


CASES = [
    *(case(form, context, i) for i, (form, context) in enumerate(itertools.product(FORMS * 4, (2, 4, 8)))),
    *(case(form, 2, i, options=(("window", 5),)) for i, form in enumerate(FORMS)),
    *(case(form, 2, 2 * i + 1, sequence=True, documents=True) for i, form in enumerate(FORMS)),
    *(case(form, 4, i, loss_chunk=5) for i, form in enumerate(FORMS)),
    *(case(form, 2, 3, prefetch=1) for form in FORMS),
]
PIPELINES = [
    case(form, 2, i)._replace(pipe=2, schedule=schedule, microbatches=4, mesh=(1, 1, 1 + i % 2))
    for i, (form, schedule) in enumerate(itertools.product(FORMS, ("one_f_one_b", "zero_bubble", "gpipe")))
]


@pytest.mark.parametrize("case", levels([*CASES, *PIPELINES], everyday=99, slow=12, common=3), ids=str)
def test_it_trains_like_one_device(case: Case) -> None:
    check_wide(case)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_losses_in_fp32(form: str) -> None:
    check_fp32(case(form, 4, 2))


LLAMA = Case("llama", False, "ddp", 1, (1, 1, 1), context=2, form="ring", documents=True)


def local_numbers(own: int, dtype: Any = jnp.int32, device: Any = None) -> jax.Array:
    return jnp.arange(own, dtype=dtype)


def in_a_row(device: Any, devices: int) -> tuple[Any, Any]:
    return 2 * device, 2 * device + 1


def sum_of_both(a: tiles.TileResult, b: tiles.TileResult) -> tiles.TileResult:
    return tiles.TileResult(a.out + b.out, jnp.logaddexp(a.lse, b.lse))


MUTANTS = {
    "rotary by local positions": (LLAMA, "jaxdist.nn.attention.rotary.own_numbers", local_numbers),
    "merged without lse": (LLAMA, "jaxdist.nn.context.ring.merged", sum_of_both),
    "chunks in a row": (LLAMA, "jaxdist.nn.context.positions.chunks_of", in_a_row),
    "no masks of documents in the rounds": (
        LLAMA,
        "jaxdist.nn.context.ring._Masks.of_round",
        lambda self, i, before: (tiles.TileMask(), tiles.TileMask()),
    ),
    "gather without its positions": (
        LLAMA._replace(form="gather"),
        "jaxdist.nn.context.forms.own_numbers",
        local_numbers,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, target, mutant = MUTANTS[name]
    module, name = target.rsplit(".", 1) if "_Masks" not in target else (ring._Masks, "of_round")
    with jax.enable_x64(True):
        config, rows = model_config(case), batch_size(case)
        want = reference(config, rows, "fp64", documents=case.documents).grads[0]
        assert oracle.error(run(case, "fp64", 1).grads[0], want) < 1e-10
        monkeypatch.setattr(sys.modules[module] if isinstance(module, str) else module, name, mutant)
        assert oracle.error(run(case, "fp64", 1).grads[0], want) > 1e-3


def kept_of_local(keys: jax.Array, rows: jax.Array, columns: jax.Array, **given: Any) -> jax.Array:
    return kept_pairs(keys, rows - rows[0], columns - columns[0], **given)


def grads_with_dropout(context: int, form: str | None, documents: bool = False, **mesh: int) -> Any:
    config = dataclasses.replace(model_config(LLAMA), dropout=0.3)
    mesh_of, tx = make_mesh(context=context, **mesh), optax.sgd(0.0)
    model = gpt(config, max_length=SEQ, param_dtype=jnp.float64, context=form)
    options: Any = {"strategy": "zero3", "remat": "full", "microbatches": 2} if form == "ring" else {}
    target = state_target(model, tx, mesh_of, strategy=options.get("strategy", "ddp"))
    state = place_params(initial(config, "fp64"), tx, target)
    step = make_train_step(model, tx, mesh_of, precision="fp64", return_grads=True, **options)
    return jax.device_get(step(state, make_batch(8, 0, documents=documents))[1]["grads"])


@pytest.mark.parametrize(
    ("form", "context", "tensor", "documents"),
    [
        ("ring", 2, 1, True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("ring", 4, 2, True),
                ("ring", 8, 1, False),
                ("all_to_all", 2, 2, False),
                ("gather", 2, 1, False),
            )
        ),
    ],
)
def test_dropout_is_that_of_one_device(
    form: str, context: int, tensor: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jax.enable_x64(True):
        given = {"context": context, "form": form, "tensor": tensor, "documents": documents}
        want = grads_with_dropout(1, None, documents)
        assert oracle.error(grads_with_dropout(**given), want) < 1e-10
        if form == "ring":
            monkeypatch.setattr(ring, "kept_pairs", kept_of_local)
        else:
            first = lambda x, *, dim: jax.lax.slice_in_dim(x, 0, x.shape[dim] // context, axis=dim)  # noqa: E731
            monkeypatch.setattr(sys.modules["jaxdist.nn.dropout"], "own_context", first)
        assert oracle.error(grads_with_dropout(**given), want) > 1e-3  # by local position


ROWS, BLOCKS, HEADS, KV_HEADS, WIDTH = 2, 2, 16, 8, 32


def small(context: int, form: str | None, *, tensor: int = 1, **model: Any) -> tuple[Any, Any]:
    """(model, mesh)."""
    config = ModelConfig(
        style="llama",
        layers=BLOCKS,
        width=WIDTH,
        heads=HEADS,
        kv_heads=KV_HEADS,
        mlp_width=64,
        **{"vocab": VOCAB, **model},
    )
    mesh = make_mesh(context=context, tensor=tensor, devices=jax.devices()[: context * tensor])
    return gpt(config.resolved(), max_length=SEQ, context=form), mesh


def batch_shapes() -> dict[str, jax.ShapeDtypeStruct]:
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct((ROWS, SEQ), kind) for name, kind in kinds.items()}


@pytest.mark.parametrize(
    ("context", "form", "remat"),
    levels(itertools.product((4, 2, 8), FORMS, (*REMATS, ("attention.out",))), everyday=14),
    ids=str,
)
def test_the_ledger_has_what_the_closed_form_says(context: int, form: str, remat: Any) -> None:
    (model, mesh), tx = small(context, form), optax.sgd(0.1)
    step = make_train_step(model, tx, mesh, remat=remat)
    found = ledger(step, state_target(model, tx, mesh), batch_shapes())
    sent = sum(each.wire_bytes for each in found.collectives if each.op != "psum")  # those sum gradients and loss
    of_a_head = ROWS * SEQ // context * (WIDTH // HEADS) * 4
    want = traffic(form, queries=HEADS * of_a_head, keys=2 * KV_HEADS * of_a_head, devices=context, remat=remat)
    assert sent == BLOCKS * want.total


def test_the_ring_sends_its_sums_in_fp32() -> None:
    (model, mesh), tx = small(4, "ring"), optax.sgd(0.1)
    step = make_train_step(model, tx, mesh, precision="bf16")
    found = ledger(step, state_target(model, tx, mesh), batch_shapes())
    sent = sum(each.wire_bytes for each in found.collectives if each.op == "ppermute")
    of_a_head = ROWS * SEQ // 4 * (WIDTH // HEADS) * 2
    assert sent == BLOCKS * traffic("ring", queries=0, keys=2 * KV_HEADS * of_a_head, devices=4, widened=2).total


def kept(context: int, function: Any, length: int = 256) -> int:
    """Bytes that attention keeps for its backward pass on a device."""
    sizes: list[int] = []

    def region(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, pull = jax.vjp(function, q, k, v)
        held = {id(leaf): leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "shape")}
        sizes.append(sum(leaf.size * leaf.dtype.itemsize for leaf in held.values()))
        return out

    spec = jax.P(None, "context")
    shapes = [jax.ShapeDtypeStruct((1, length, 2, *groups, 8), jnp.float32) for groups in ((2,), (), ())]
    mesh = abstract_mesh(context=context)
    jax.eval_shape(jax.shard_map(region, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec), *shapes)
    return sizes[0]


def test_a_ring_keeps_its_part_of_what_there_is() -> None:
    # q, k, v, the result, and lse: nothing of other devices, and no scores.
    numbers = {context: kept(context, ring.ring_attention) for context in (2, 4, 8)}
    whole = 4 * 256 * (2 * 2 * 8 + 2 * 2 * 8 + 2 * 2 * 8 + 2 * 2)
    assert numbers == {context: pytest.approx(whole / context, rel=0.01) for context in numbers}

    def by_autodiff(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ring._forward(*to_varying((q, k, v), ("context",)), None, None, ring.RingOptions(None, "xla", 0.0, 0))[0]

    assert kept(8, by_autodiff) > 10 * numbers[8]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_state_is_split_over_fsdp_and_context(strategy: str) -> None:
    tx = optax.adam(1e-3)
    model = gpt(model_config(LLAMA), max_length=SEQ, context="ring")

    def bytes_of(**mesh: int) -> tuple[int, int]:
        target = state_target(model, tx, make_mesh(**mesh), strategy=strategy)
        leaves = jax.tree.leaves((target.params, target.opt_state))
        split = [leaf for leaf in leaves if leaf.ndim and has_shards(leaf.sharding.spec)]
        own = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in split)
        return own, sum(leaf.size for leaf in split)

    for mesh in ({"context": 8}, {"fsdp": 2, "context": 4}, {"fsdp": 8}):
        own, whole = bytes_of(**mesh)
        assert own * 8 == whole > 20_000


@pytest.mark.slow
@pytest.mark.parametrize(("context", "pipe"), [pytest.param(4, 1, marks=pytest.mark.slow), (2, 2)])
def test_generation_is_that_of_one_device(context: int, pipe: int) -> None:
    """Generation counts the devices of context to fsdp. A vocabulary of 49 is whole on all stages of a pipeline, and
    the columns of its table are split over context and pipe."""
    (model, _), mesh = small(context, "all_to_all", vocab=49), make_mesh(context=context, pipe=pipe)
    alone, single = small(1, None, vocab=49)
    drawn = init_state(alone, optax.sgd(0.1), single).params
    params = jax.tree.map(lambda leaf: np.linspace(1, 2, leaf.size, dtype=leaf.dtype).reshape(leaf.shape) * leaf, drawn)

    def texts(model: Any, mesh: Any, **given: Any) -> list[Any]:
        target = state_target(model, optax.sgd(0.1), mesh, **given)
        placed = place_params(params, optax.sgd(0.1), target).params
        found = generate(model, placed, [[1, 2, 3], [4, 5], [6], [7], [8]], max_tokens=6, temperature=0.0)
        return [each.ids for each in found]

    assert texts(model, mesh, strategy="zero3") == texts(alone, single)


REFUSED = {
    "a length": (("data.seq_len=1022",), "data.seq_len: 1022 is not divisible by 8"),
    "with sequence parallelism": (
        ("mesh.tensor=2", "parallel.sequence_parallel=true", "data.seq_len=24"),
        "24 is not divisible by 16",
    ),
    "heads": (("parallel.context=all_to_all", "mesh.context=8"), "model.kv_heads 4"),
    "local SGD": (("parallel.local.every=2", "train.eval_every=2"), "parallel.local.every: 2 does not go with"),
    "another model": (("model.name=bert",), "no attention of model bert is split over this axis"),
    "deterministic": (("parallel.grad_sync.deterministic=true",), "mesh.context: 4 is given"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_it_is_one_line(name: str) -> None:
    overrides, text = REFUSED[name]
    always = ("mesh={data: 1, fsdp: 1, tensor: 1, context: 4}", "model={name: gpt, heads: 4, width: 64}")
    with pytest.raises(UserError, match=re.escape(text)):
        load_config("configs/quickstart.yaml", [*always, *overrides], planned=True)


def test_auto_takes_the_form_that_fits() -> None:
    def form(*overrides: str) -> str | None:
        always = ("mesh={data: 1, fsdp: 1, tensor: 1, context: 4}", "model={name: gpt, heads: 4, width: 64}")
        return form_of(load_config("configs/quickstart.yaml", [*always, *overrides], planned=True))

    assert form() == "all_to_all"
    assert form("mesh.context=8") == "ring"
    assert form("mesh.tensor=2") == "ring"
    assert form("mesh.context=8", "model.dropout=0.1") == "ring"
    assert form("mesh.context=1") is None


def test_a_model_that_was_not_built_for_it_is_refused() -> None:
    model, mesh = small(2, None)
    with pytest.raises(UserError, match="context='all_to_all'"):
        make_train_step(model, optax.sgd(0.1), mesh)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"context": "rings"}, "context: 'rings' is none; allowed: all_to_all, gather, ring"),
        ({"context": "gather", "causal": False}, "context: 'gather' is for causal attention"),
        ({"kernel": "cudnn", "dropout": 0.1}, "kernel: 'cudnn' drops nothing, and dropout is 0.1"),
        ({"kernel": "flash"}, "kernel: 'flash' is no kernel of attention"),
    ],
)
def test_a_layer_says_what_it_cannot(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        Attention(nnx.Rngs(0), WIDTH, HEADS, HEADS, bias=False, **given)


def test_gather_has_no_kernel_of_cudnn() -> None:
    always = ("mesh={data: 1, fsdp: 1, tensor: 1, context: 4}", "model={name: gpt, heads: 4, width: 64}")
    config = load_config("configs/quickstart.yaml", [*always, "parallel.context=gather"], planned=True)
    why = "attention over mesh.context 4 goes by gather, which computes scores in plain XLA"
    assert attention_of(config, precision_of(config.precision), abstract_mesh(context=4)) == ("xla", why)
    asked = dataclasses.replace(config, model=config.model.replace(attention="cudnn"))
    with pytest.raises(UserError, match=re.escape(why)):
        attention_of(asked, precision_of(config.precision), abstract_mesh(context=4))


def test_a_ring_is_refused_in_conditions() -> None:
    model, tx, mesh = small(2, "ring")[0], optax.sgd(0.1), make_mesh(context=2, pipe=2)
    step = make_train_step(model, tx, mesh, schedule="one_f_one_b", microbatches=2)
    with pytest.raises(UserError, match="parallel.context: ring sends inside a pipeline's stages"):
        step.lower(state_target(model, tx, mesh), batch_shapes())


def test_the_picture_has_every_tile_of_the_mask_once() -> None:
    for devices in (2, 3, 4, 8):
        tiles = rounds_of_tiles(devices)
        assert tiles.keys() == {(q, k) for q in range(2 * devices) for k in range(q + 1)}
        work = Counter(tiles.values())
        assert set(work) == {(device, i) for device in range(devices) for i in range(devices)}
        assert all(count == (2 if i else 3) for (_, i), count in work.items())  # the own chunks: two halves and a whole
    kept = (ROOT / "docs" / "pictures" / "context.svg").read_text(encoding="utf-8")
    assert data_of(draw_context()) == data_of(kept), "run scripts/docs/draw_context.py"


@pytest.mark.slow
def test_losses_by_position_add_up_to_the_loss() -> None:
    config = model_config(LLAMA).replace(position_losses=4)
    model, mesh = gpt(config, max_length=SEQ, context="all_to_all"), make_mesh(context=2)
    params = init_state(model, optax.sgd(0.1), mesh).params
    batch = make_batch(8, 0, documents=True)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    found = make_eval_step(model, mesh, specs, get_strategy(StepOptions()))(params, batch)
    parts = {name: found[name] for name in found if name != "loss"}
    assert list(parts) == ["loss_from_00", "loss_from_04", "loss_from_08", "loss_from_12"]
    for i in range(2):
        assert sum(float(part[i]) for part in parts.values()) == pytest.approx(float(found["loss"][i]), rel=1e-5)
    at = np.arange(SEQ) - batch["documents"]
    assert float(parts["loss_from_04"][1]) == batch["weights"][(at >= 4) & (at < 8)].sum()


def test_explain_says_what_a_token_costs() -> None:
    def line(*overrides: str) -> str | None:
        always = (
            "mesh={data: 1, fsdp: 1, tensor: 2, context: 4}",
            "model={name: gpt, heads: 8, kv_heads: 8, width: 64}",
        )
        return context_text(load_config("configs/quickstart.yaml", [*always, *overrides], planned=True))

    # Of a device: 4 heads of 8 values in fp32 are 128 bytes of queries, 256 of keys and values.
    assert line("memory.remat=full") == (
        "context=4: of each token and block a device sends 1.12 KiB for attention by all_to_all (2.25 KiB by gather,"
        " 3.00 KiB by ring)"
    )
    assert line("mesh.context=1") is None


@pytest.mark.parametrize(
    ("context", "seen", "text"), [("gather", True, "a key mask is not split"), (None, False, "Attention(..., context=")]
)
def test_attention_that_is_not_split_is_one_line(context: str | None, seen: bool, text: str) -> None:
    def region() -> jax.Array:
        layer = Attention(nnx.Rngs(0), 16, 2, 2, bias=False, context=context)
        h, keys = jnp.zeros((1, 4, 16)), jax.random.split(jax.random.key(0), 1)
        return layer(h, keys, jnp.ones((1, 8), bool) if seen else None)

    with pytest.raises(UserError, match=re.escape(text)):
        jax.eval_shape(
            jax.shard_map(region, mesh=abstract_mesh(context=2), in_specs=(), out_specs=jax.P(None, "context"))
        )


class Ids(nnx.Module):
    """An embedding of ids that takes this device's positions, or forgets to."""

    def __init__(self, rngs: nnx.Rngs, *, own: bool) -> None:
        self.table, self.own = normal(rngs, (VOCAB, 16), 0.1, (None, None)), own

    def __call__(self, batch: Any, keys: jax.Array) -> jax.Array:
        found = self.table[...][batch["inputs"]]
        return own_context(found, dim=1) if self.own else found


class Squares(nnx.Module):
    """A head that reads no positions of the batch."""

    def __call__(self, h: jax.Array, batch: Any, embed: Any) -> tuple[jax.Array, jax.Array]:
        return (h**2).sum(), jnp.ones((), h.dtype)


class Alone(nnx.Module):
    """A block of one attention."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = Attention(rngs, 16, 2, 2, bias=False, context="ring")

    def __call__(self, h: jax.Array, keys: jax.Array) -> jax.Array:
        return h + self.attention(h, keys)


class Own(nnx.Module):
    """A model of somebody else's."""

    def __init__(self, rngs: nnx.Rngs, *, own: bool) -> None:
        self.embed, self.blocks, self.head = Ids(rngs, own=own), nnx.List([Alone(rngs)]), Squares()


def test_an_embedding_that_forgets_its_positions_is_one_line() -> None:
    tx, mesh, batch = optax.sgd(0.1), make_mesh(context=2), make_batch(4, 0)
    model = model_def(lambda rngs: Own(rngs, own=True))
    as_long = {"further": np.zeros((4, SEQ // 2), np.float32)}  # as a device's own positions, which were refused
    for each in (batch, batch | as_long):
        make_train_step(model, tx, mesh).lower(state_target(model, tx, mesh), each)
    model = model_def(lambda rngs: Own(rngs, own=False))
    with pytest.raises(UserError, match="embed: gives all 16 positions of a sample"):
        make_train_step(model, tx, mesh).lower(state_target(model, tx, mesh), batch)
