"""Mixture of experts: it trains like one device in every layout, drops the same tokens, and counts each token once."""

import dataclasses
import itertools
from typing import Any

import experts_oracle
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import oracle
import pytest
from experts_oracle import split
from jax.sharding import NamedSharding
from layouts import SEQ, STRATEGIES, Case, batch_size, make_batch, model_config, run
from levels import levels

from jaxdist import init_state, make_mesh, make_train_step, state_target
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.generation.generate import generate
from jaxdist.models.gpt import gpt
from jaxdist.nn.context.positions import context_size
from jaxdist.nn.experts.balance import with_count
from jaxdist.nn.experts.capacity import by_capacity
from jaxdist.nn.experts.dispatch import Experts, RoutedTokens
from jaxdist.nn.experts.layer import DISPATCH
from jaxdist.nn.experts.router import balance_losses
from jaxdist.specs import BATCH_SPEC, leaves_by_name
from jaxdist.state import place_params

DROPPING = MoEConfig(
    8, top_k=2, dispatch="capacity", factor=0.75, group=4, bias_rate=0.05, balance_loss=0.1, z_loss=0.01, pieces=2
)
DROPLESS = MoEConfig(experts=8, top_k=3, scores="sigmoid", scaling=2.5, shared=1, bias_rate=0.05, balance_loss=0.1)
PLAIN = MoEConfig(experts=8, top_k=1, normalised=False, bias_rate=None, balance_loss=0.1, dense=1)
KINDS = {"dropping": DROPPING, "dropless": DROPLESS, "plain": PLAIN}


def case(kind: str, expert: int, i: int, **given: Any) -> Case:
    """A case whose other options change with i."""
    tensor = 2 if expert < 8 and i % 2 else 1
    fsdp = 2 if expert * tensor < 8 and i % 3 else 1
    style = ("llama", "gpt2")[i % 2]
    usual = {"documents": bool(i % 5 % 2), "remat": ("none", "full", ("attention.out", "mlp.rows"))[i % 3]}
    strategy, mesh = STRATEGIES[i % len(STRATEGIES)], (1, fsdp, tensor)
    found = Case(style, style == "gpt2", strategy, 1 + i % 2, mesh, expert=expert, options=(("moe", KINDS[kind]),))
    return found._replace(**{**usual, **given})


CASES = [
    *(case(kind, expert, i) for i, (kind, expert) in enumerate(itertools.product([*KINDS] * 4, (2, 4, 8)))),
    *(case(kind, 1, 5 * i + 1) for i, kind in enumerate(KINDS)),
    *(case(kind, 2, 2 * i + 1, sequence=True) for i, kind in enumerate(KINDS)),
    *(case(kind, 2, 2 * i, context=2, form=form) for i, kind in enumerate(KINDS) for form in ("all_to_all", "ring")),
    *(case(kind, 2, i, prefetch=1, strategy="zero3") for i, kind in enumerate(KINDS)),
    *(case(kind, 2, i, remat="sqrt") for i, kind in enumerate(KINDS)),
    *(case(kind, 2, i, scan_blocks=2, remat="full") for i, kind in enumerate(KINDS)),
    *(case(kind, 2, 2 * i + 1, sequence=True, batch_split=2) for i, kind in enumerate(KINDS)),
    *(case(kind, 2, i, algorithm=("ring", "tree", "two_level")[i]) for i, kind in enumerate(KINDS)),
]
PIPELINES = [
    case(kind, 2, i, options=(("moe", KINDS[kind]), ("layers", 2 + KINDS[kind].dense)))._replace(
        pipe=2, schedule=schedule, microbatches=4, mesh=(1, 1, 1 + i % 2)
    )
    for i, (kind, schedule) in enumerate(itertools.product(KINDS, ("one_f_one_b", "zero_bubble", "gpipe")))
]


def statistics_of(grads: Any) -> Any:
    """(chosen, dropped), [L, E], in tokens: of gradients, which are divided by one number in all leaves."""
    _, own = split(grads)
    chosen, dropped, _ = np.split(np.asarray(own["statistics"]), (8, 16), axis=1)
    return chosen, dropped, own


def check(case: Case) -> None:
    with jax.enable_x64(True):
        config, rows = model_config(case), batch_size(case)
        want = experts_oracle.reference(config, rows, documents=case.documents)
        got = run(case, "fp64", 3)
        assert max(abs(a - b) / b for a, b in zip(got.losses, want.losses, strict=True)) < 1e-10
        for step in range(3):
            assert oracle.error(split(got.grads[step])[0], want.grads[step]) < 1e-10
            chosen, dropped, own = statistics_of(got.grads[step])
            factor = rows * SEQ * config.moe.top_k / chosen.sum(1, keepdims=True)
            assert np.allclose(
                chosen * factor, want.chosen[step], rtol=1e-12, atol=0
            )  # each token once, in no layout n times
            assert np.allclose(dropped * factor, want.dropped[step], rtol=1e-12, atol=0)
            if "bias" in own:
                assert np.array_equal(own["bias"], chosen)
        assert oracle.error(got.params, want.params) < 1e-10
        if config.moe.dispatch == "capacity":
            assert all(0.05 < each.sum() / (rows * SEQ * config.moe.top_k * len(each)) < 0.7 for each in want.dropped)


@pytest.mark.parametrize("case", levels([*CASES, *PIPELINES], everyday=99, slow=3, common=4), ids=str)
def test_it_trains_like_one_device(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_what_experts_share_is_split_over_expert_too(strategy: str) -> None:
    tx, config = optax.adam(1e-3), model_config(case("dropless", 2, 0))

    def bytes_of(**mesh: int) -> tuple[int, int]:
        target = state_target(gpt(config, max_length=SEQ), tx, make_mesh(**mesh), strategy=strategy)
        named = leaves_by_name({"params": target.params, "optimizer": target.opt_state})
        # A router's statistics are 19 numbers, which no mesh divides.
        leaves = [leaf for name, leaf in named.items() if leaf.ndim and not name.endswith(".statistics")]
        own = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in leaves)
        return own, sum(leaf.size for leaf in leaves)

    for mesh in ({"expert": 8}, {"fsdp": 2, "expert": 4}, {"expert": 4, "context": 2}, {"fsdp": 8}):
        own, whole = bytes_of(**mesh)
        assert own * 8 == whole > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"expert": 4, "context": 2}, {"fsdp": 2, "expert": 2, "context": 2}], ids=str)
def test_generation_is_that_of_one_device(mesh: dict[str, int]) -> None:
    """`expert` lies between `fsdp` and `context`, whose devices generation counts to `fsdp`."""
    config, tx = model_config(case("dropless", 2, 0)), optax.sgd(0.1)
    alone, model = gpt(config, max_length=SEQ), gpt(config, max_length=SEQ, context="ring")
    drawn = init_state(alone, tx, make_mesh(devices=jax.devices()[:1])).params
    params = jax.tree.map(lambda leaf: np.linspace(1, 2, leaf.size, dtype=leaf.dtype).reshape(leaf.shape) * leaf, drawn)

    def texts(model: Any, mesh: Any, **given: Any) -> list[Any]:
        placed = place_params(params, tx, state_target(model, tx, mesh, **given)).params
        found = generate(model, placed, [[1, 2, 3], [4, 5], [6], [7], [8]], max_tokens=6, temperature=0.0)
        return [each.ids for each in found]

    assert texts(model, make_mesh(**mesh), strategy="zero3") == texts(alone, make_mesh(devices=jax.devices()[:1]))


@pytest.mark.slow
def test_parameters_that_operations_on_arrays_made() -> None:
    """The mean of two checkpoints has specs without axes of size 1: what a strategy has split is still known."""
    mesh, config, tx = make_mesh(expert=4), model_config(case("dropless", 2, 0)), optax.sgd(0.1)
    model = gpt(config, max_length=SEQ)
    state = init_state(model, tx, mesh, strategy="zero3")
    mean = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]).mean(0), state.params)
    assert str(mean["head"]["norm"]["scale"].sharding.spec) != str(state.params["head"]["norm"]["scale"].sharding.spec)
    batch = jax.device_put(make_batch(8, 0), NamedSharding(mesh, BATCH_SPEC))
    prompts = [[1, 2, 3], [4, 5], [6], [7]]

    def told(params: Any) -> Any:
        step = make_train_step(model, tx, mesh, strategy="zero3")
        ids = [each.ids for each in generate(model, params, prompts, max_tokens=4, temperature=0.0)]
        new, metrics = step(jax.tree.map(jnp.copy, state)._replace(params=jax.tree.map(jnp.copy, params)), batch)
        return ids, float(metrics["loss"]), jax.device_get(new.params)

    (ids, loss, after), (same_ids, same_loss, same_after) = told(mean), told(state.params)
    assert (ids, loss) == (same_ids, same_loss)
    jax.tree.map(np.testing.assert_array_equal, after, same_after)


def gradients_times(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Experts.__call__

    def wrong(self: Any, rows: Any, multiply: Any) -> Any:
        twice = lambda kernels: 2 * kernels - jax.lax.stop_gradient(kernels)  # noqa: E731
        return right(self, rows, lambda rows, kernels: multiply(rows, twice(kernels)))

    monkeypatch.setattr(Experts, "__call__", wrong)


def norm_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_experts(yes: bool) -> Any:
        named = lambda path: any(getattr(key, "key", None) == "experts" for key in path)  # noqa: E731
        return lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: named(path) is yes, tree)

    parts = [optax.masked(optax.clip_by_global_norm(0.5), of_experts(yes)) for yes in (True, False)]
    adam = optax.adamw(1e-2, weight_decay=0.1, eps=1e-6)
    monkeypatch.setattr(layouts, "optimizer", lambda **_: optax.chain(*parts, adam))


def capacity_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(tokens: Any, experts: Any, options: MoEConfig) -> Any:
        shape = tokens.x_BSD.shape
        flat = RoutedTokens(*(each.reshape(1, -1, each.shape[-1]) for each in tokens))
        y, dropped = by_capacity(flat, experts, dataclasses.replace(options, group=flat.x_BSD.shape[1]))
        return y.reshape(shape), dropped.reshape(tokens.experts_BSK.shape)

    monkeypatch.setitem(DISPATCH, "capacity", wrong)


def loss_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(routing: Any, chosen: Any) -> Any:
        balance, z = balance_losses(routing, chosen)
        return balance * context_size(), z

    monkeypatch.setattr("jaxdist.nn.experts.layer.balance_losses", wrong)


def sign_of_each_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    sign = lambda count: jnp.sign(count) if count.shape == (8,) else count  # noqa: E731
    monkeypatch.setattr(
        "jaxdist.nn.experts.layer.with_count", lambda y, parameter, count: with_count(y, parameter, sign(count))
    )


MUTANTS = {
    "gradients of experts times n": (gradients_times, case("dropping", 2, 0)),
    "a norm for each group of devices": (norm_of_each_group, case("dropping", 2, 0)),
    "a capacity for each shard": (capacity_of_a_shard, case("dropping", 2, 0)),
    "a balance loss for each device": (loss_of_each_device, case("dropping", 2, 2, context=2, form="all_to_all")),
    "a bias moved for each microbatch": (sign_of_each_microbatch, case("dropless", 2, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, case = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(case)
