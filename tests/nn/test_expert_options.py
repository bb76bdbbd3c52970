"""Mixture of experts beside other options: what it sends, precisions, optimizers, generation, what is refused."""

import dataclasses
import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx
from layouts import SEQ, VOCAB, make_batch
from levels import levels

from jaxdist.config.load import load_config
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.config.sections.optimizer import LoraConfig, OptimizerConfig
from jaxdist.errors import UserError
from jaxdist.generation.generate import generate
from jaxdist.init import init_state, state_target
from jaxdist.jaxpr.walk import every_equation
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn import Attention, MoE, VocabEmbed, VocabHead, make_norm, model_def, vocab_cross_entropy, vocab_logits
from jaxdist.nn.experts.balance import BySign
from jaxdist.nn.experts.grouped import grouped_product
from jaxdist.optim import only_trained
from jaxdist.optim.make import make_optimizer
from jaxdist.plan.experts import expert_traffic, experts_text
from jaxdist.plan.traced.flops import flops_of
from jaxdist.plan.traced.ledger import ledger
from jaxdist.precision.policy import POLICIES
from jaxdist.state import place_params
from jaxdist.step import make_train_step

WIDTH, BLOCKS, EXPERTS = 32, 2, 4
DROPPING = MoEConfig(EXPERTS, dispatch="capacity", factor=0.5, group=4, balance_loss=0.1, bias_rate=0.01)
DROPLESS = MoEConfig(EXPERTS, shared=1, balance_loss=0.1, z_loss=0.01, bias_rate=0.01)


def model_of(moe: MoEConfig, **given: Any) -> Any:
    config = ModelConfig(
        style="llama", layers=BLOCKS, width=WIDTH, heads=4, vocab=VOCAB, mlp_width=2 * WIDTH, moe=moe
    ).resolved()
    return gpt(config, max_length=24, **given)


KINDS = {"capacity": DROPPING, "dropless": DROPLESS}


def drawn(model: Any, scale: float = 0.2) -> Any:
    draw = lambda leaf: (scale * np.random.default_rng(0).standard_normal(leaf.shape)).astype(leaf.dtype)  # noqa: E731
    return jax.tree.map(draw, model.shapes)


def mesh_of(sizes: dict[str, int]) -> Any:
    return make_mesh(**sizes, devices=jax.devices()[: int(np.prod([*sizes.values(), 1]))])


def trained(moe: MoEConfig, sizes: dict[str, int], tx: Any = None, **given: Any) -> Any:
    """(metrics of three steps, parameters after them)."""
    model = model_of(moe, lora=given.pop("lora", None), fp8=given.get("precision") == "fp8")
    tx, mesh = tx or optax.adamw(1e-2), mesh_of(sizes)
    layout = {key: given[key] for key in ("strategy", "freeze") if key in given}
    target = state_target(model, tx, mesh, **layout)
    inner = only_trained(tx, given.get("freeze", ()), model.update_rules)
    state, step, found = place_params(drawn(model), inner, target), make_train_step(model, tx, mesh, **given), []
    for i in range(3):
        state, metrics = step(state, make_batch(16, i))
        found.append(jax.device_get(metrics))
    return found, jax.device_get(state.params)


def test_losses_of_experts_weigh_as_the_tokens_that_count() -> None:
    """Tokens are left out by a weight of 0, or by a target of -100, which counted for the losses of experts."""
    batch, rows = make_batch(4, 0) | {"loss_seed": np.full(4, 0.5, np.float32)}, model_of(DROPLESS).rows
    kept = np.arange(SEQ) >= SEQ - 3
    by_weight = {**batch, "weights": (batch["weights"] * kept).astype(np.float32)}
    by_target = {**batch, "targets": np.where(kept, batch["targets"], -100).astype(batch["targets"].dtype)}
    documents, want = rows(by_weight)
    assert documents is None and want.tolist() == (0.5 * by_weight["weights"].sum(1)).tolist()
    assert rows(by_target)[1].tolist() == want.tolist() != rows(batch)[1].tolist()


BYTES = [
    (dispatch, devices, remat)
    for dispatch in ("capacity", "dropless")
    for devices in (2, 8)
    for remat in ("none", "full", "dots", ("mlp.rows",), ("attention.out",))
]


@pytest.mark.parametrize(("dispatch", "devices", "remat"), levels(BYTES, everyday=3), ids=str)
def test_the_ledger_has_what_the_closed_form_says(dispatch: str, devices: int, remat: Any) -> None:
    moe, policy = MoEConfig(8, dispatch=dispatch, factor=1.0, group=4), "bf16" if devices == 2 else "fp32"
    mesh, tx, rows = make_mesh(expert=devices, devices=jax.devices()[:devices]), optax.sgd(0.1), 16
    model = model_of(moe)
    batch = jax.eval_shape(lambda: make_batch(rows, 0))
    step = make_train_step(model, tx, mesh, remat=remat, precision=policy)
    found = ledger(step, state_target(model, tx, mesh), batch)
    sent = sum(each.wire_bytes for each in found.collectives if each.op != "psum")  # those sum gradients and loss
    of_a_token = expert_traffic(
        moe,
        width=WIDTH,
        devices=devices,
        itemsize=jnp.dtype(POLICIES[policy].compute).itemsize,
        gate_bytes=4,
        dispatch=dispatch,
        remat=remat,
    )
    assert sent == BLOCKS * rows * SEQ // devices * of_a_token.total


def test_explain_says_what_a_token_costs() -> None:
    config = load_config("configs/moe_quickstart.yaml", [], planned=True)
    said = experts_text(config) or ""
    assert re.fullmatch(
        r"expert=2: of each token and block a device sends [\d.]+ KiB to experts and back by dropless \([\d.]+ KiB by"
        r" capacity\)",
        said,
    )
    assert experts_text(load_config("configs/quickstart.yaml", [], planned=True)) is None


def test_grouped_products_are_those_of_each_group() -> None:
    rng = np.random.default_rng(0)
    rows, kernels = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((24, 5), (3, 5, 7)))
    owner = jnp.asarray([0, 0, 2, 2, 2, 3], jnp.int32)  # nothing of expert 1, and one block of nobody's
    weights = jnp.asarray(rng.standard_normal((24, 7)), jnp.float32)

    def one_by_one(rows: jax.Array, kernels: jax.Array) -> jax.Array:
        padded = jnp.concatenate([kernels, jnp.zeros_like(kernels[:1])])
        return jnp.einsum("mi,mio->mo", rows, padded[jnp.repeat(owner, 4)])

    found, pull = jax.vjp(lambda rows, kernels: grouped_product(rows, kernels, owner), rows, kernels)
    want, pull_of_each = jax.vjp(one_by_one, rows, kernels)
    for got, right in zip((found, *pull(weights)), (want, *pull_of_each(weights)), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
    # Work is that of the rows, not of the rows times the experts.
    traced = jax.make_jaxpr(lambda rows, kernels: grouped_product(rows, kernels, owner))(rows, kernels)
    assert flops_of(traced.jaxpr) == 2 * 24 * 5 * 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moe", "policy"), levels(itertools.product(KINDS, ("bf16", "fp16", "O1")), everyday=6), ids=str
)
def test_half_precision_chooses_as_fp32_does(moe: str, policy: str) -> None:
    want, got = (trained(KINDS[moe], {"expert": 2}, precision=each)[0] for each in ("fp32", policy))
    for a, b in zip(got, want, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-3)
        assert np.abs(a["experts/load"] - b["experts/load"]).max() < 0.1


@pytest.mark.slow
def test_fp8_chooses_as_bf16_does_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and shared experts multiply in float8; the router does in fp32, and its choice hardly moves."""
    monkeypatch.setattr(
        "jaxdist.precision.float8_devices.has_float8", lambda device: True
    )  # XLA widens the operands here
    want = trained(DROPLESS, {}, precision="bf16")[0]
    for sizes, given in (({}, {}), ({"expert": 2}, {}), ({"fsdp": 2, "tensor": 2}, {"strategy": "zero3"})):
        for a, b in zip(trained(DROPLESS, sizes, precision="fp8", **given)[0], want, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=0.02) and a["loss"] != b["loss"]
            assert np.abs(a["experts/load"] - b["experts/load"]).max() < 0.2


def test_a_router_in_half_precision_is_refused() -> None:
    with pytest.raises(UserError, match=re.escape("give precision.keep_fp32 the pattern '*.router.*' too")):
        trained(DROPLESS, {}, precision=POLICIES["bf16"]._replace(keep_fp32=("*norm*",)))


LAYOUTS = {"zero3": ({"fsdp": 4}, {"strategy": "zero3"}), "microbatches": ({"data": 2}, {"microbatches": 2})}


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(("moe", "layout"), levels(itertools.product(KINDS, LAYOUTS), slow=1), ids=str)
def test_the_same_bits_in_every_layout(moe: str, layout: str) -> None:
    (sizes, given), sync = LAYOUTS[layout], GradSync(deterministic=True)
    want, got = trained(KINDS[moe], {}, grad_sync=sync), trained(KINDS[moe], sizes, grad_sync=sync, **given)
    assert all(map(np.array_equal, *(jax.tree.leaves(each) for each in (got, want))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_are_those_of_one_device(name: str) -> None:
    tx = make_optimizer(OptimizerConfig(name=name, lr=1e-2), steps=3)
    sizes = {"expert": 2, "fsdp": 2, "tensor": 2}
    (_, want), (_, got) = trained(DROPLESS, {}, tx), trained(DROPLESS, sizes, tx, strategy="zero3")
    assert oracle.error(got, want) < 1e-5


def test_an_expert_at_the_mean_stays_in_every_layout() -> None:
    rule = BySign(0.01)
    for experts, tokens in (
        (6, 16),
        (7, 100_000),
    ):  # the mean of counts that are divided by a number is none of a float
        counts = jnp.full((2, experts), tokens, jnp.float32).at[0, :2].add(jnp.array([1, -1], jnp.float32))
        moved = rule(counts * jnp.float32(1 / 0.3))
        assert np.array_equal(moved, 0.01 * np.array([[-1, 1] + [0] * (experts - 2), [0] * experts], np.float32))


def test_the_router_is_in_fp32_where_operations_are_cast() -> None:
    model, tx, mesh = model_of(DROPPING), optax.sgd(0.1), mesh_of({})
    step = make_train_step(model, tx, mesh, precision="O1")
    traced = step.trace(state_target(model, tx, mesh, precision="O1"), jax.eval_shape(lambda: make_batch(8, 0)))
    logits = [site.equation for site in every_equation(traced.jaxpr) if str(site.names).endswith("BsD,DE->BsE")]
    kinds = {each.outvars[0].aval.dtype.name for each in logits if each.primitive.name == "dot_general"}
    assert kinds == {"float32"}


@pytest.mark.slow
def test_muon_orthogonalises_each_expert() -> None:
    tx = make_optimizer(OptimizerConfig(name="muon", lr=1.0, clip_norm=0.0, weight_decay=0.0, warmup_steps=0), steps=3)
    shapes = model_of(DROPLESS).shapes
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), shapes)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = tx.update(params, tx.init(params), params)
    down = updates["blocks"]["mlp"]["experts"]["down"]["kernel"]  # [L, E, F, D]
    sizes = np.linalg.svd(np.asarray(down, np.float64), compute_uv=False)
    assert sizes.shape[:2] == (BLOCKS, EXPERTS)
    assert (sizes.max(-1) / sizes.min(-1) < 2).all()  # of a random matrix of 64 x 32 it is about 6


@pytest.mark.slow
def test_adapters_leave_router_and_experts_alone() -> None:
    lora = LoraConfig(rank=2, targets=("*",))
    found, params = trained(DROPLESS, {"expert": 2}, lora=lora, freeze=("*", "!*.lora.*"))
    assert "experts/load" not in found[0]  # its counts are those of a frozen router
    own = params["blocks"]["mlp"]
    assert set(own["shared"]["up"]) == {"kernel", "lora"}
    assert set(own["experts"]["up"]) == {"kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "moe"),
    [
        ({"expert": 2, "fsdp": 2}, DROPPING),
        pytest.param({"expert": 2, "pipe": 2}, DROPLESS, marks=pytest.mark.slow),
        pytest.param({"expert": 4}, dataclasses.replace(DROPLESS, dense=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_generation_is_that_of_one_device_and_drops_nothing(mesh: dict[str, int], moe: MoEConfig) -> None:
    moe = dataclasses.replace(moe, dispatch="dropless")  # as `build.make_model` does for evaluations

    def texts(sizes: dict[str, int]) -> list[Any]:
        model, tx = model_of(moe), optax.sgd(0.1)
        target = state_target(model, tx, mesh_of(sizes), strategy="zero3" if "fsdp" in sizes else "ddp")
        placed = place_params(drawn(model, 0.3), only_trained(tx, (), model.update_rules), target).params
        found = generate(model, placed, [[1, 2, 3], [4, 5], [6], [7]], max_tokens=6, temperature=0.0)
        return [each.ids for each in found]

    assert texts(mesh) == texts({})


REFUSED = {
    "an axis": (("mesh.expert=3",), "mesh.expert: 3 does not divide model.moe.experts 8"),
    "a width": (("mesh.tensor=4", "model.moe.hidden=6"), "mesh.tensor: 4 does not divide model.moe.hidden 6"),
    "choices": (("model.moe.top_k=9",), "model.moe.top_k: 9 of 8 experts; allowed: 1 to 8"),
    "one expert": (("model.moe={experts: 1, top_k: 1}", "mesh.expert=1"), "model.moe.experts: 1 leaves nothing"),
    "dense blocks": (("model.moe.dense=4",), "model.moe.dense: 4 of 4 blocks leaves no mixture"),
    "a group": (
        ("model.moe.dispatch=capacity", "model.moe.group=48"),
        "model.moe.group: 48 does not divide the 128 neighbouring positions of a device (data.seq_len 128); groups that"
        " work: ",
    ),
    "a group of chunks": (
        ("model.moe.dispatch=capacity", "model.moe.group=64", "mesh.context=2", "mesh.tensor=1"),
        "64 does not divide the 32 neighbouring positions of a device (data.seq_len 128 / two chunks",
    ),
    "lossy sums": (
        ("parallel.grad_sync.algorithm=ring", "parallel.grad_sync.wire_dtype=bfloat16"),
        "would round the counts of tokens",
    ),
    "stored in half": (
        ("precision=O3", "optimizer={name: sgd}"),
        "precision.policy: 'O3' stores parameters in float16",
    ),
    "sums in half": (
        ("precision={policy: bf16, reduce_dtype: bfloat16}",),
        "precision.reduce_dtype: 'bfloat16' would round the numbers of tokens",
    ),
    "local SGD": (
        ("parallel.local.every=2", "train.eval_every=2", "mesh.data=2", "mesh.fsdp=1", "optimizer.name=adamw"),
        "parallel.local.every: 2, and outer steps would move the biases of model.moe.bias_rate 0.01",
    ),
    "another model": (("model={name: bert}",), "mesh.expert: 2 is given, but no layer of model bert is a mixture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_it_is_one_line(name: str) -> None:
    overrides, text = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(text)):
        load_config("configs/moe_quickstart.yaml", overrides, planned=True)


@pytest.mark.parametrize("bias_rate", [0.01, None])
def test_sums_that_round_counts_are_refused_from_python(bias_rate: float | None) -> None:
    """As from a configuration: the biases stood still."""
    model, mesh = model_of(dataclasses.replace(DROPLESS, bias_rate=bias_rate)), mesh_of({})
    tx = optax.sgd(0.1)

    def trace(**options: Any) -> None:
        state = state_target(model, tx, mesh, **options)
        make_train_step(model, tx, mesh, **options).jitted(state).trace(state, make_batch(4, 0))

    for wire in ("bfloat16", "int8"):
        with pytest.raises(
            UserError, match=rf"^parallel\.grad_sync\.wire_dtype: '{wire}' would round the counts of tok"
        ):
            trace(grad_sync=GradSync("ring", wire_dtype=wire))
    halved = POLICIES["fp32"]._replace(reduce=jnp.bfloat16)
    if bias_rate is None:
        trace(precision=halved)
        return
    with pytest.raises(
        UserError, match=r"^precision\.reduce_dtype: 'bfloat16' .* that blocks\.mlp\.router\.bias goes by"
    ):
        trace(precision=halved)


@pytest.mark.parametrize("name", ["balance_loss", "z_loss"])
def test_losses_without_rows_are_refused(name: str) -> None:
    """A block without rows has no weights of these losses, which were left out without a word."""

    class Part(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, options: MoEConfig) -> None:
            self.mlp = MoE(rngs, 8, options, kind="gelu", out_scale=1.0)

        def __call__(self, h: Any, *given: Any) -> Any: ...

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, **loss: float) -> None:
            options = MoEConfig(EXPERTS, hidden=8, **loss)
            self.blocks, self.embed, self.head = (
                nnx.List([Part(rngs, options)]),
                Part(rngs, options),
                Part(rngs, options),
            )

    assert model_def(Model).layers == model_def(partial(Model, **{name: 0.5}), rows=lambda batch: None).layers == 1
    with pytest.raises(
        UserError, match=rf"model_def: rows is not given, and {name} 0\.5 of MoE would count nothing; allow"
    ):
        model_def(partial(Model, **{name: 0.5}))


@pytest.mark.slow
def test_the_page_shows_a_block_that_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ExpertBlock" in block)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            attention = Attention(rngs, 128, 4, 4, bias=False)
            norms = {f"norm{i}": make_norm("rmsnorm", 128, eps=1e-5, bias=False) for i in (1, 2)}
            names = {"rngs": rngs, "attention": attention, **norms}
            exec(code, names)
            self.blocks, self.embed, self.head = nnx.List([names["block"]]), Embed(rngs), Head(rngs)

    class Embed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.tokens = VocabEmbed(rngs, VOCAB, 128)

        def __call__(self, batch: Any, keys_B: Any) -> Any:
            return self.tokens(batch["inputs"])

    class Head(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table = VocabHead(rngs, VOCAB, 128)

        def __call__(self, h: Any, batch: Any, embed: Any) -> Any:
            losses = vocab_cross_entropy(vocab_logits(h, self.table.table[...]), batch["targets"])
            return (losses * batch["weights"]).sum(), batch["weights"].sum()

    names: dict[str, Any] = {}
    exec(code[code.index("def rows") :], names)
    model, tx, mesh = model_def(Model, rows=names["rows"]), optax.adam(1e-3), mesh_of({"expert": 2})
    state, step = init_state(model, tx, mesh), make_train_step(model, tx, mesh)
    first = [float(step(state, make_batch(8, 0))[1]["experts/max_load"]) for _ in range(1)]
    assert 1 <= first[0] <= 4
