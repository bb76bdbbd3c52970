"""LoRA's adapters train in every layout as on one device, where their product is added to the kernel; nothing else has
a gradient, a sum over devices, or optimizer state."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import oracle
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding
from jaxprs import floats
from layouts import Case
from levels import levels, others_slow

from jaxdist import make_mesh, make_train_step, state_target
from jaxdist.build import make_model
from jaxdist.config.schema import Config
from jaxdist.config.sections.optimizer import ADAPTERS_ONLY, LoraConfig, OptimizerConfig
from jaxdist.errors import UserError
from jaxdist.jaxpr import walk
from jaxdist.mesh import BATCH_AXES
from jaxdist.models.gpt import gpt
from jaxdist.optim import only_trained
from jaxdist.plan.traced.ledger import ledger
from jaxdist.precision.policy import POLICIES, precision_of
from jaxdist.specs import BATCH_SPEC, leaves_by_name
from jaxdist.state import place_params

LORA = LoraConfig(rank=3, alpha=6.0, targets=("*",))


def merged(params: Any, scale: float) -> Any:
    """Kernels with their adapters' products added, by their definition and not by jaxdist."""
    flat = flatten_dict(params)
    found = {path: leaf for path, leaf in flat.items() if "lora" not in path}
    for path, a in flat.items():
        if path[-1] == "a":
            at = path.index("lora")
            kernel, b = (*path[:at], "kernel"), flat[*path[:-1], "b"]
            delta = scale * jnp.einsum("lir,lr...->li...", a, b)
            part = path[at + 1]
            group = found[kernel].shape[-2] - 2
            places = {"q": slice(0, group), "k": slice(group, group + 1), "v": slice(group + 1, group + 2)}
            places |= {"gate": slice(0, 1), "up": slice(1, 2), "a": slice(None)}
            found[kernel] = found[kernel].at[..., places[part], :].add(delta)
    return unflatten_dict(found)


def split(params: Any) -> tuple[Any, Any]:
    """(adapters, the rest), with None in place of the others."""
    named = jax.tree_util.tree_map_with_path(lambda path, leaf: any(each.key == "lora" for each in path), params)
    adapters, rest = (
        jax.tree.map(lambda own, leaf, yes=yes: leaf if own is yes else None, named, params) for yes in (True, False)
    )
    return adapters, rest


def joined(adapters: Any, rest: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, adapters, rest, is_leaf=lambda leaf: leaf is None)


def model_of(case: Case, policy: str, lora: LoraConfig | None = LORA) -> Any:
    return gpt(
        layouts.model_config(case),
        max_length=layouts.SEQ,
        param_dtype=POLICIES[policy].param,
        sequence_parallel=case.sequence,
        lora=lora,
        fp8=POLICIES[policy].fp8,
    )


@functools.cache
def initial(config: Any) -> Any:
    return oracle.drawn(gpt(config, max_length=layouts.SEQ, param_dtype=jnp.float64, lora=LORA).shapes)


@functools.cache
def reference(config: Any, size: int) -> Any:
    """Losses, gradients and parameters of three steps on one device."""
    tx, scale = layouts.optimizer(), LORA.alpha / LORA.rank
    adapters, rest = split(jax.tree.map(jnp.asarray, initial(config)))
    loss_of = lambda adapters, batch: oracle.loss(merged(joined(adapters, rest), scale), batch, config)  # noqa: E731

    @jax.jit
    def step(adapters: Any, opt_state: Any, batch: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            loss, grads = jax.value_and_grad(loss_of)(adapters, batch)
            updates, opt_state = tx.update(grads, opt_state, adapters)
        return loss, grads, optax.apply_updates(adapters, updates), opt_state

    losses, all_grads, opt_state = [], [], tx.init(adapters)
    for i in range(3):
        loss, grads, adapters, opt_state = step(adapters, opt_state, layouts.make_batch(size, i))
        losses.append(float(loss))
        all_grads.append(jax.device_get(grads))
    return losses, all_grads, jax.device_get(joined(adapters, rest))


def step_of(case: Case, policy: str, lora: LoraConfig | None = LORA, **options: Any) -> Any:
    """(optimizer, target, step) of a layout with adapters."""
    mesh = make_mesh(data=case.mesh[0], fsdp=case.mesh[1], tensor=case.mesh[2], pipe=case.pipe)
    tx, model = layouts.optimizer(deterministic=case.algorithm == "deterministic"), model_of(case, policy, lora)
    given: Any = {"strategy": case.strategy, "freeze": ADAPTERS_ONLY}
    given |= {"precision": policy, "grad_sync": layouts.sync_of(case), "schedule": case.schedule}
    given |= {"microbatches": case.microbatches, "remat": case.remat, "prefetch": case.prefetch, **options}
    return tx, state_target(model, tx, mesh, **given), make_train_step(model, tx, mesh, **given)


def batch_on(target: Any, case: Case, step: int) -> Any:
    sharding = NamedSharding(target.step.sharding.mesh, BATCH_SPEC)
    return jax.device_put(layouts.make_batch(layouts.batch_size(case), step), sharding)


EVERYDAY = [Case("llama", False, "zero3", 2, (2, 2, 2), sequence=True)]
SLOW = [
    Case("gpt2", True, "zero2", 2, (1, 2, 2), pipe=2, schedule="one_f_one_b"),
    Case("gpt2", True, "ddp", 1, (2, 1, 4)),
    Case("llama", False, "zero1", 4, (2, 2, 1), remat="full"),
    Case("llama", False, "zero3", 1, (1, 4, 2), prefetch=1),
    Case("gpt2", True, "zero3", 2, (2, 2, 1), algorithm="deterministic"),
    Case("llama", False, "zero3", 2, (2, 1, 2), pipe=2, schedule="gpipe", remat="full", sequence=True),
    Case("gpt2", True, "zero3", 1, (2, 2, 1), algorithm="ring", overlap=True),
]


@pytest.mark.parametrize("case", levels([*EVERYDAY, *SLOW], everyday=8, slow=3, common=1), ids=str)
def test_adapters_train_as_on_one_device(case: Case) -> None:
    with jax.enable_x64(True):
        config = layouts.model_config(case)
        losses, want_grads, want = reference(config, layouts.batch_size(case))
        tx, target, step = step_of(case, "fp64", return_grads=True)
        state = place_params(initial(config), only_trained(tx, ADAPTERS_ONLY), target)
        for i in range(3):
            state, metrics = step(state, batch_on(target, case, i))
            assert abs(float(metrics["loss"]) - losses[i]) / losses[i] < 1e-10
            found, wanted = leaves_by_name(metrics["grads"]), leaves_by_name(want_grads[i])
            assert found.keys() == wanted.keys() and all(".lora." in name for name in found)
            assert oracle.error(found, wanted) < 1e-10
        assert oracle.error(state.params, want) < 1e-10
        for name, leaf in leaves_by_name(state.params).items():
            old = leaves_by_name(initial(config))[name]
            assert (np.asarray(leaf).tobytes() == old.tobytes()) == (".lora." not in name), name


def count(case: Case, lora: LoraConfig) -> int:
    """Rank x (in + out), of every projection of every block."""
    c = layouts.model_config(case)
    head, hidden = c.width // c.heads, c.mlp_width
    outs = {"q": c.width, "k": c.kv_heads * head, "v": c.kv_heads * head, "out": c.width, "up": hidden}
    sizes = {name: c.width + out for name, out in outs.items()} | {"down": hidden + c.width}
    if c.mlp == "swiglu":
        sizes["gate"] = sizes["up"]
    return c.layers * lora.rank * sum(sizes.values())


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_optimizer_state_is_that_of_the_adapters(style: str) -> None:
    case = Case(style, False, "zero3", 1, (2, 2, 2))
    _, target, _ = step_of(case, "fp32")
    moments = [leaf for leaf in jax.tree.leaves(target.opt_state) if leaf.ndim]
    assert sum(math.prod(leaf.shape) for leaf in moments) == 2 * count(case, LORA)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", others_slow(["ddp", "zero3"], "zero3"))
def test_the_ledger_shows_that_only_adapters_are_reduced(strategy: str) -> None:
    """Over data and fsdp; over tensor, as many activations are summed as without adapters."""
    case = Case("llama", False, strategy, 1, (2, 2 if strategy == "zero3" else 1, 2))
    _, target, step = step_of(case, "fp32")
    found = ledger(step, target, batch_on(target, case, 0)).collectives
    trained, scalars = 4 * count(case, LORA), 8
    whole = {"a": 0, "b": 0}  # those that tensor does not split
    for name, leaf in leaves_by_name(target.params).items():
        if ".lora." in name and "tensor" not in str(leaf.sharding.spec):
            whole[name[-1]] += leaf.size * 4
    shards = case.mesh[1]
    on_device = (trained + sum(whole.values())) // 2  # half of what tensor splits
    reduced = [each for each in found if each.op in ("psum", "reduce_scatter") and "tensor" not in each.axes]
    over = {axis: sum(each.bytes_per_call * each.calls for each in reduced if axis in each.axes) for axis in BATCH_AXES}
    assert over["data"] == on_device // shards + scalars
    assert over["fsdp"] == (on_device + scalars if shards > 1 else 0)
    _, plain, other = layouts.parts_of(case, "fp32")
    usual = ledger(other, plain, batch_on(plain, case, 0)).collectives
    size = max(each.bytes_per_call for each in usual if each.axes == ("tensor",))
    calls = [
        sum(e.calls for e in each if e.axes == ("tensor",) and e.bytes_per_call == size) for each in (found, usual)
    ]
    assert calls[0] == calls[1] > 0
    small = [each for each in found if each.axes == ("tensor",) and each.source.startswith("jaxdist/nn/lora.py")]
    assert sum(each.bytes_per_call * each.calls for each in small) == sum(whole.values())


def losses_of(case: Case, lora: LoraConfig, policy: str = "fp64") -> list[float]:
    tx, target, step = step_of(case, policy, lora)
    config = layouts.model_config(case)
    params = jax.tree.map(lambda leaf, like: np.asarray(leaf, like.dtype), initial(config), target.params)
    state, losses = place_params(params, only_trained(tx, ADAPTERS_ONLY), target), []
    for i in range(2):
        state, metrics = step(state, batch_on(target, case, i))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow
def test_dropout_is_alike_in_every_layout() -> None:
    dropped = LoraConfig(rank=3, alpha=6.0, targets=("*",), dropout=0.5)
    with jax.enable_x64(True):
        want = losses_of(Case("llama", False, "ddp", 1, (1, 1, 1)), dropped)
        got = losses_of(Case("llama", False, "zero3", 2, (2, 1, 2), sequence=True), dropped)
        none = losses_of(Case("llama", False, "ddp", 1, (1, 1, 1)), LORA)
    np.testing.assert_allclose(got, want, rtol=1e-10)
    assert abs(want[0] - none[0]) > 1e-6


def test_targets() -> None:
    """The names of Hugging Face stand for patterns of ours."""

    def adapted(style: str, *targets: str) -> set[str]:
        case = Case(style, False, "ddp", 1, (1, 1, 1))
        names = leaves_by_name(model_of(case, "fp32", LoraConfig(rank=2, targets=targets)).shapes)
        return {name.removeprefix("blocks.").removesuffix(".a") for name in names if name.endswith(".a")}

    qkv = {f"attention.qkv.linear.lora.{part}" for part in "qkv"}
    assert adapted("llama", "q_proj", "v_proj") == qkv - {"attention.qkv.linear.lora.k"}
    assert adapted("gpt2", "c_attn") == qkv
    assert adapted("gpt2", "c_attn", "c_proj") == {*qkv, "attention.out.lora", "mlp.down.lora"}
    assert adapted("llama", "gate_proj", "blocks.mlp.down") == {"mlp.up.lora.gate", "mlp.down.lora"}
    assert adapted("llama", *LoraConfig().targets) == {*qkv, "attention.out.lora"}
    with pytest.raises(UserError, match=r"optimizer.lora.targets: 'gate_proj' fits no linear layer .* blocks.mlp.up"):
        adapted("gpt2", "gate_proj")


@pytest.mark.slow
def test_the_model_begins_as_without_adapters() -> None:
    case = Case("gpt2", True, "ddp", 1, (1, 1, 1))
    with_them, without = (model_of(case, "fp32", lora).init(jax.random.key(0)) for lora in (LORA, None))
    found = leaves_by_name(with_them)
    for name, leaf in leaves_by_name(without).items():
        np.testing.assert_array_equal(found[name], leaf)
    assert all(not np.any(leaf) for name, leaf in found.items() if name.endswith(".b"))


@pytest.mark.slow
def test_float8_multiplies_kernels_and_not_adapters() -> None:
    """Also where the sizes of an adapter would fit."""

    def products(lora: LoraConfig | None) -> int:
        case = Case("llama", False, "ddp", 1, (1, 1, 1))
        _, target, step = step_of(case, "fp8", lora, freeze=())
        sites = walk.every_equation(step.jitted(target).trace(target, layouts.make_batch(32, 0)).jaxpr)
        dots = [site for site in sites if site.equation.primitive.name == "dot_general"]
        return sum(site.times for site in dots if any("float8" in dtype for dtype in floats(site.equation)))

    assert products(replace(LORA, rank=16)) == products(None) > 0


def test_what_cannot_be() -> None:
    config = layouts.model_config(Case("llama", False, "ddp", 1, (1, 1, 1)))
    with pytest.raises(UserError, match="collective_matmul: true .* optimizer.lora"):
        gpt(config, max_length=8, sequence_parallel=True, collective_matmul=True, lora=LORA)
    with pytest.raises(UserError, match=r"optimizer.freeze: '!\*.lora.\*' fits no parameter"):
        state_target(gpt(config, max_length=8), optax.sgd(0.1), make_mesh(), freeze=ADAPTERS_ONLY)
    with pytest.raises(UserError, match=r"optimizer.freeze: !head.\* freezes nothing"):
        state_target(gpt(config, max_length=8), optax.sgd(0.1), make_mesh(), freeze=("!head.*",))
    optimizer, own = OptimizerConfig(lora=LORA), Config().model.replace(name="outsider.model.tower")
    loaded = replace(Config(), optimizer=optimizer, model=own)
    with pytest.raises(UserError, match="optimizer.lora.rank: 3 needs a model that takes the option lora"):
        make_model(loaded, precision_of(loaded.precision), stages=1, training=True)


def test_the_head_can_be_trained_beside_adapters() -> None:
    config = OptimizerConfig(lora=LORA, freeze=("!head.*",))
    case = Case("llama", False, "zero1", 1, (1, 2, 1))
    _, target, _ = step_of(case, "fp32", freeze=config.frozen)
    names = {name.partition("mu.")[2] for name in leaves_by_name(target.opt_state) if ".mu." in name}
    assert {name for name in names if ".lora." not in name} == {"head.norm.scale", "head.projection.table"}


def test_an_adapter_can_be_frozen() -> None:
    """Of the patterns that a parameter fits, the last counts."""
    config = OptimizerConfig(lora=LORA, freeze=("*.lora*.a",))
    model = gpt(layouts.model_config(Case("llama", False, "ddp", 1, (1, 1, 1))), max_length=8, lora=LORA)
    target = state_target(model, optax.adamw(0.1), make_mesh(), freeze=config.frozen)
    trained = {name for name in leaves_by_name(target.opt_state) if ".mu." in name}
    assert trained and all(name.endswith(".b") for name in trained)
