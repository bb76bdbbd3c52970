"""Models of somebody else's blocks, in every kind of layout, against the same written plainly on one device in float64:
the example of stock NNX layers, and an encoder whose blocks read a key mask of the batch."""

import functools
import importlib
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import child
import jax
import jax.numpy as jnp
import jaxprs
import layouts
import numpy as np
import optax
import oracle
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import nn, registry
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.model import ModelDef
from jaxdist.models.gpt import gpt
from jaxdist.nn import Attention, LayerNorm, VocabEmbed, VocabHead, model_def, vocab_cross_entropy, vocab_logits
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import place_params
from jaxdist.step import make_train_step

EXAMPLES = child.ROOT / "docs" / "examples"
SIZES = {"layers": 2, "width": 16, "vocab": layouts.VOCAB, "length": layouts.SEQ}
ROWS = 16


@pytest.fixture(scope="module")
def examples() -> Any:
    """The modules own_blocks and own_tensor, which imports the former."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield {name: importlib.import_module(name) for name in ("own_blocks", "own_tensor")}
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in ("own_blocks", "own_tensor"):
            sys.modules.pop(name)


def norm(x: jax.Array, params: Any, eps: float = 1e-6) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * params["scale"] + params["bias"]


def linear(x: jax.Array, params: Any) -> jax.Array:
    return jnp.tensordot(x, params["kernel"], 1) + params["bias"]


def attended(q: jax.Array, k: jax.Array, v: jax.Array, allowed: Any) -> jax.Array:
    """[B, S, heads, K] of all three -> [B, S, heads, K]. allowed: [B or 1, S, S]."""
    scores = jnp.exp(jnp.einsum("bshk,bthk->bsht", q, k) / np.sqrt(q.shape[-1]))
    scores = jnp.where(allowed[:, :, None, :], scores, 0)
    total = scores.sum(-1, keepdims=True)
    return jnp.einsum("bsht,bthk->bshk", scores / jnp.where(total == 0, 1, total), v)


def weighted(logits: jax.Array, batch: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def stock_loss(params: Any, batch: Any) -> jax.Array:
    """The model of docs/examples/own_blocks.py."""
    table, positions = (params["embed"][name]["embedding"] for name in ("tokens", "positions"))
    h, causal = table[batch["inputs"]] + positions, np.tril(np.ones((1, layouts.SEQ, layouts.SEQ), bool))
    for i in range(SIZES["layers"]):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        x, layer = norm(h, own["norm1"]), own["attention"]
        context = attended(*(linear(x, layer[name]) for name in ("query", "key", "value")), causal)
        h = h + jnp.einsum("bshk,hkd->bsd", context, layer["out"]["kernel"]) + layer["out"]["bias"]
        h = h + linear(jax.nn.gelu(linear(norm(h, own["norm2"]), own["up"])), own["down"])
    return weighted(norm(h, params["head"]["norm"]) @ table.T, batch)


class Tokens(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = VocabEmbed(rngs, layouts.VOCAB, 16)

    def __call__(self, batch: Any, keys_B: jax.Array) -> jax.Array:
        return self.tokens(batch["inputs"])


class Encoder(nnx.Module):
    """A block that looks both ways, but not at padding, and adds numbers of the batch: a mask and floats are rows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = LayerNorm(16, eps=1e-6)
        self.attention = Attention(rngs, 16, 4, 4, bias=True, causal=False)

    def __call__(self, h: jax.Array, keys_B: jax.Array, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        seen_BS, added_BS = rows
        return h + self.attention(self.norm(h), keys_B, seen_BS) + added_BS[..., None].astype(h.dtype)


class Labels(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.projection = VocabHead(rngs, layouts.VOCAB, 16)

    def __call__(self, h: jax.Array, batch: Any, embed: Any) -> tuple[jax.Array, jax.Array]:
        losses = vocab_cross_entropy(vocab_logits(h, self.projection.table[...]), batch["targets"])
        weights = batch["weights"].astype(losses.dtype)
        return (losses * weights).sum(), weights.sum()


class Bert(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.head = Tokens(rngs), Labels(rngs)
        self.blocks = nnx.List([Encoder(rngs) for _ in range(SIZES["layers"])])


def bert_loss(params: Any, batch: Any) -> jax.Array:
    h = params["embed"]["tokens"]["table"][batch["inputs"]]
    for i in range(SIZES["layers"]):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        qkv = linear(norm(h, own["norm"]), own["attention"]["qkv"]["linear"])
        context = attended(*(qkv[..., n, :] for n in range(3)), (batch["inputs"] != 0)[:, None, :])
        h = h + linear(context.reshape(h.shape), own["attention"]["out"]) + batch["weights"][..., None]
    return weighted(h @ params["head"]["projection"]["table"].T, batch)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, **_: Any) -> jax.Array:
    """For `nnx.MultiHeadAttention`, whose own takes the softmax in float32 whatever the precision."""
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bhst,bthk->bshk", weights, v)


def stock(examples: Any, block: Any) -> ModelDef:
    """The example with this block."""

    class Wide(block):
        def __init__(self, rngs: nnx.Rngs, width: int) -> None:
            super().__init__(rngs, width)
            self.attention.attention_fn = plain_attention

    return model_def(lambda rngs: examples["own_blocks"].GPT(rngs, Wide, **SIZES), tied=True, param_dtype=jnp.float64)


def padded(step: int) -> dict[str, np.ndarray]:
    """A batch with padding (id 0): the longer, the later the sample; the last one is all padding."""
    batch = layouts.make_batch(ROWS, step)
    ids = np.maximum(batch["inputs"], 1)
    length = np.linspace(layouts.SEQ, 0, ROWS).round()
    return batch | {"inputs": np.where(np.arange(layouts.SEQ) < length[:, None], ids, 0)}


@functools.cache
def one_device(loss: Any, shapes: Any) -> tuple[Any, list[tuple[Any, Any]], Any]:
    """(parameters before three steps of AdamW with clipping, (loss, gradients) of each, parameters after them)."""
    tx, first = layouts.optimizer(), oracle.drawn(jax.tree.unflatten(*shapes))

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        found = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(found[1], opt_state, params)
        return found, optax.apply_updates(params, updates), opt_state

    params, opt_state, steps = first, tx.init(first), []
    for i in range(3):
        found, params, opt_state = step(params, opt_state, padded(i))
        steps.append(jax.device_get(found))
    return first, steps, jax.device_get(params)


@jax.numpy_dtype_promotion("standard")  # as stock layers need it
def check(model: ModelDef, loss: Any, *, mesh: dict[str, int], **options: Any) -> None:
    """Losses, all gradients and the parameters after three steps are those of one device."""
    leaves, treedef = jax.tree.flatten(model.shapes)
    first, steps, last = one_device(loss, (treedef, tuple(leaves)))
    tx, placed = layouts.optimizer(), make_mesh(**mesh)
    target = state_target(model, tx, placed, strategy="zero3")
    step = make_train_step(model, tx, placed, strategy="zero3", precision="fp64", return_grads=True, **options)
    state = place_params(first, tx, target)
    for i, (want, grads) in enumerate(steps):
        state, metrics = step(state, jax.device_put(padded(i), NamedSharding(placed, BATCH_SPEC)))
        assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-10)
        assert not jax.tree.leaves(jax.tree.map(differs, jax.device_get(metrics["grads"]), grads))
    assert oracle.error(state.params, last) < 1e-10


def differs(got: Any, want: Any) -> str | None:
    """A gradient that differs. Softmax does not depend on the bias of keys: both are 0 then, but for rounding."""
    size = np.linalg.norm(want)
    if np.linalg.norm(got - want) < (1e-10 * size if size > 1e-15 else 1e-15):
        return None
    return f"{got} is not {want}"


slow = pytest.mark.slow
PIPE = {"schedule": "one_f_one_b", "microbatches": 2}
LAYOUTS = [
    pytest.param({}, {}, marks=slow, id="one device"),
    pytest.param({"fsdp": 8}, {"remat": "full"}, marks=slow, id="zero3"),
    pytest.param({"pipe": 2, "fsdp": 2}, PIPE, marks=slow, id="1f1b"),
]


@pytest.mark.parametrize(("mesh", "options"), LAYOUTS)
def test_stock_layers_train_as_on_one_device(mesh: Any, options: Any, examples: dict[str, ModuleType]) -> None:
    with jax.enable_x64(True):
        check(stock(examples, examples["own_blocks"].Block), stock_loss, mesh=mesh, **options)


@pytest.mark.parametrize("precision", ["fp16", "O1", pytest.param("bf16", marks=slow), pytest.param("O2", marks=slow)])
def test_stock_layers_take_every_precision(precision: str, examples: dict[str, ModuleType]) -> None:
    """As it is traced. fp16 leaves the parameters of norms in float32, and a norm of Flax gives their dtype."""
    model = model_def(lambda rngs: examples["own_blocks"].GPT(rngs, **SIZES), tied=True)
    mesh, tx = make_mesh(fsdp=2), optax.sgd(0.1)
    state = state_target(model, tx, mesh, strategy="zero3")
    step = make_train_step(model, tx, mesh, strategy="zero3", precision=precision)
    with jax.numpy_dtype_promotion("standard"):
        new, _ = step.jitted(state).trace(state, padded(0)).out_info
    assert [leaf.dtype for leaf in jax.tree.leaves(new)] == [leaf.dtype for leaf in jax.tree.leaves(state)]


def test_a_norm_that_widens_h_is_one_line(examples: dict[str, ModuleType]) -> None:
    class Uncast(examples["own_blocks"].Block):  # type: ignore[misc]  # it is known when this runs
        def __call__(self, h: jax.Array, keys_B: jax.Array) -> jax.Array:
            return self.norm1(h)  # type: ignore[no-any-return]

    model = model_def(lambda rngs: examples["own_blocks"].GPT(rngs, Uncast, **SIZES), tied=True)
    mesh, tx = make_mesh(fsdp=2), optax.sgd(0.1)
    state = state_target(model, tx, mesh, strategy="zero3")
    step = make_train_step(model, tx, mesh, strategy="zero3", precision="fp16")
    said = (
        r"block: makes float32.* of float16.*precision\.keep_fp32.*: write norm\(h\)\.astype\(h\.dtype\) in the block"
    )
    with jax.numpy_dtype_promotion("standard"), pytest.raises(UserError, match=said):
        step.jitted(state).trace(state, padded(0))


@pytest.mark.slow
def test_two_lines_split_them_over_tensor(examples: dict[str, ModuleType]) -> None:
    with jax.enable_x64(True):
        check(stock(examples, examples["own_tensor"].SplitBlock), stock_loss, mesh={"fsdp": 2, "tensor": 2})


BERT: dict[str, Any] = {"rows": lambda batch: (batch["inputs"] != 0, batch["weights"])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [({"pipe": 2, "tensor": 2}, PIPE), ({"fsdp": 4, "tensor": 2}, {"remat": "sqrt"}), ({"fsdp": 2}, {"prefetch": 1})],
    ids=["1f1b", "sqrt", "prefetch"],
)
def test_blocks_read_rows_of_the_batch(mesh: Any, options: Any) -> None:
    with jax.enable_x64(True):
        check(model_def(Bert, param_dtype=jnp.float64, **BERT), bert_loss, mesh=mesh, **options)


@pytest.mark.parametrize("options", [{}, PIPE, {"prefetch": 1}], ids=["accumulate", "1f1b", "prefetch"])
def test_every_block_is_given_its_rows(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is traced: the rows of this device's microbatch."""
    seen, call = [], Encoder.__call__
    monkeypatch.setattr(Encoder, "__call__", lambda *given: seen.append(given[3]) or call(*given))
    mesh, tx = make_mesh(**({"pipe": 2} if options == PIPE else {"fsdp": 2})), optax.sgd(0.1)
    model = model_def(Bert, **BERT)
    state = state_target(model, tx, mesh, strategy="zero3")
    step = make_train_step(model, tx, mesh, strategy="zero3", **options)
    step.jitted(state).trace(state, padded(0))
    own = ROWS // (2 * options.get("microbatches", 1)) * (2 if options == PIPE else 1), layouts.SEQ
    assert seen and {(x.shape, str(x.dtype)) for x in jax.tree.leaves(seen)} == {(own, "bool"), (own, "float32")}


class Reader(nnx.Module):
    """A block whose backward pass reads rows of the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.read = nnx.Linear(5, 16, rngs=rngs)

    def __call__(self, h: jax.Array, keys_B: jax.Array, rows: jax.Array) -> jax.Array:
        return h + self.read(rows).sum(1, keepdims=True)


class Readers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.head = Tokens(rngs), Labels(rngs)
        self.blocks = nnx.List([Reader(rngs) for _ in range(6)])


@pytest.mark.parametrize("options", [PIPE, {"prefetch": 1}], ids=["1f1b", "prefetch"])
def test_rows_are_kept_once_and_not_for_each_block(options: Any) -> None:
    mesh, tx = make_mesh(**({"pipe": 2} if options == PIPE else {"fsdp": 2})), optax.sgd(0.1)
    model = model_def(Readers, rows=lambda batch: batch["memory"])
    state = state_target(model, tx, mesh, strategy="zero3")
    step = make_train_step(model, tx, mesh, strategy="zero3", **options)
    batch = padded(0) | {"memory": np.zeros((ROWS, 7, 5), np.float32)}
    traced = step.jitted(state).trace(state, batch).jaxpr
    shapes = {atom.aval.shape for _, each in jaxprs.equations(traced) for atom in each.outvars}
    own = (8, 7, 5)  # of a microbatch on a device: half of the rows
    assert {shape[:-3] for shape in shapes if shape[-3:] == own} <= {(), (1,), (2,)}  # two microbatches wait


@pytest.mark.slow
def test_stock_layers_take_the_memory_of_jaxdists_own(examples: dict[str, ModuleType]) -> None:
    sizes, ids = {"layers": 8, "width": 64}, np.zeros((32, 32), np.int32)
    batch, mesh, adamw = (
        {"inputs": ids, "targets": ids, "weights": ids.astype(np.float32)},
        make_mesh(fsdp=8),
        optax.adamw(1),
    )
    stock = model_def(lambda rngs: examples["own_blocks"].GPT(rngs, **sizes), tied=True)
    taken = []
    for model in (stock, gpt(ModelConfig(heads=4, vocab=256, **sizes), max_length=32)):
        state = state_target(model, adamw, mesh, strategy="zero3")
        step = make_train_step(model, adamw, mesh, strategy="zero3", remat="full")
        with jax.numpy_dtype_promotion("standard"):
            memory = step.lower(state, batch).compile().memory_analysis()
        taken.append(memory.alias_size_in_bytes + memory.temp_size_in_bytes)
    assert taken[0] < 1.15 * taken[1]  # whose attention keeps no scores


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lines"), [("own_loss", 2), ("own_blocks", 2), ("own_tensor", 2)])
def test_the_examples_run(name: str, lines: int) -> None:
    """Each prints layouts, whose losses are the same."""
    environment = child.environment() | child.QUICK | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"loss ([\d.]+); a device holds [\d.]+ \+ [\d.]+ MiB", done.stdout)
    assert len(losses) == lines and len(set(losses)) == 1 and float(losses[0]) < 5.6, done.stdout


def experts(rngs: nnx.Rngs, *, kind: str = "gelu", **options: Any) -> nn.MoE:
    """A mixture of four experts."""
    return nn.MoE(rngs, 8, MoEConfig(**{"experts": 4, "hidden": 8} | options), kind=kind, out_scale=1.0)


WRONG_LAYERS: dict[str, tuple[Any, str]] = {
    "no window": (lambda r: Attention(r, 16, 4, 2, bias=True, window=0), "window: 0; allowed: 1 or more positions"),
    "both ways": (
        lambda r: Attention(r, 16, 4, 2, bias=True, window=2, causal=False),
        "window: 2, with causal=False; allowed: 1 or more positions of causal attention; or None",
    ),
    "heads": (lambda r: Attention(r, 24, 6, 4, bias=True), "kv_heads: 4 with heads 6; allowed: a number that divides"),
    "cross": (lambda r: nn.CrossAttention(r, 24, 24, 6, 4, bias=True), "kv_heads: 4 with heads 6; allowed: a number"),
    "width": (lambda r: Attention(r, 8, 3, 3, bias=False), "heads: 3 with width 8; allowed: a number that divides the"),
    "narrow": (lambda r: Attention(r, 8, 16, 16, bias=False), "heads: 16 with width 8; allowed: a number that divides"),
    "no heads": (lambda r: Attention(r, 8, 0, 1, bias=False), "heads: 0 with width 8; allowed: a number that divides"),
    "cross width": (lambda r: nn.CrossAttention(r, 8, 8, 3, 3, bias=False), "heads: 3 with width 8; allowed: a number"),
    "an axis": (
        lambda r: nn.param(jnp.ones((8, 8)), ("model", None)),
        "spec: ('model', None) of an array [8, 8]; allow",
    ),
    "a strategy's axis": (lambda r: nn.param(jnp.ones(8), ("fsdp",)), "spec: ('fsdp',) of an array [8]; allowed: for"),
    "too few axes": (
        lambda r: nn.zeros((8, 8), ("tensor",)),
        "spec: ('tensor',) of an array [8, 8]; allowed: for each",
    ),
    "experts of no kind": (
        lambda r: experts(r, kind="relu"),
        "kind: 'relu' is no feed-forward layer; allowed: gelu, g",
    ),
    "too many choices": (lambda r: experts(r, top_k=5), "model.moe.top_k: 5 of 4 experts; allowed: 1 to 4"),
    "no hidden size": (
        lambda r: experts(r, hidden=None),
        "options: experts=4, hidden=None; allowed: numbers, as MoECo",
    ),
    "no experts": (lambda r: experts(r, experts=0), "options: experts=0, hidden=8; allowed: numbers, as MoEConfig(exp"),
    "dropout": (
        lambda r: Attention(r, 16, 4, 2, bias=True, dropout=1.5),
        "dropout: 1.5; allowed: a number >= 0 and < 1",
    ),
    "a rate": (
        lambda r: nn.dropout(jnp.ones((2, 4)), jax.random.split(jax.random.key(0), 2), site=0, rate=-0.5),
        "dropout: -0.5; allowed: a number >= 0 and < 1",
    ),
    "a norm": (lambda r: nn.make_norm("rms_norm", 8, eps=1e-5, bias=True), "kind: 'rms_norm' is no norm; allowed:"),
    "an MLP": (
        lambda r: nn.MLP(r, 8, 16, kind="relu", bias=True, out_scale=1.0),
        "kind: 'relu' is no feed-forward layer; allowed: gelu, gelu_erf, swiglu",
    ),
}


@pytest.mark.parametrize("name", WRONG_LAYERS)
def test_layers_that_cannot_be(name: str) -> None:
    made, line = WRONG_LAYERS[name]
    with pytest.raises(UserError) as raised:
        made(nnx.Rngs(0))
    assert str(raised.value).startswith(line)


def test_positions_outside_the_table_are_nan() -> None:
    """As ids outside the vocabulary are: they gave the last row."""
    layer = nn.PositionEmbed(nnx.Rngs(0), 8, 4)
    found = np.asarray(
        jax.shard_map(lambda at: layer(3, at), mesh=make_mesh(), in_specs=P(), out_specs=P())(
            np.array([[0, 7, 8], [-1, 3, 100]])
        )
    )
    assert np.isnan(found).all(-1).tolist() == [[False, False, True], [True, False, True]]
    assert np.array_equal(found[0, 1], layer.table[...][7])


def test_pages_show_what_runs() -> None:
    page = (child.ROOT / "docs" / "own_model.md").read_text(encoding="utf-8")
    for name in ("own_blocks", "own_loss", "own_tensor", "own_config"):
        assert (EXAMPLES / f"{name}.py").read_text() in page


def test_the_example_of_a_configuration_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    for name in ("own_blocks", "own_config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    config, given = ModelConfig(layers=3, width=16), {"max_length": 8, "param_dtype": jnp.float32}
    made = registry.make("jaxdist.models", "own_config.my_gpt", ModelDef, config, **given, key="model.name")
    assert made.layers == 3 and made.shapes["embed"]["positions"]["embedding"].shape == (8, 16)
