"""Local SGD and DiLoCo in every layout, against replicas that are trained one after the other on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from layouts import SEQ, Case, initial, make_batch, model_config, optimizer
from levels import levels
from replicas import ROWS, local_parts, placed

from jaxdist.config.sections.local import LocalConfig, OuterConfig
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.init import state_target
from jaxdist.models.gpt import gpt
from jaxdist.specs import leaves_by_name
from jaxdist.state import place_params
from jaxdist.step import make_train_step

NESTEROV = OuterConfig("nesterov", lr=0.7, momentum=0.9)
DILOCO = LocalConfig(every=2, outer=NESTEROV)
STREAMED = LocalConfig(every=4, outer=NESTEROV, fragments=2, keep=0.5)
CASES = [(Case("gpt2", True, "ddp", 1, (2, 1, 1)), DILOCO)]
SLOW = [
    (Case("gpt2", True, "zero3", 1, (2, 2, 2)), DILOCO),
    (Case("gpt2", True, "ddp", 1, (2, 1, 1)), STREAMED),
    (Case("gpt2", True, "zero1", 2, (2, 2, 1)), DILOCO),
    (Case("llama", False, "zero2", 2, (2, 2, 1)), DILOCO),
    (Case("gpt2", True, "zero3", 1, (4, 1, 2), remat="full"), STREAMED),
    (Case("gpt2", True, "ddp", 4, (2, 1, 2), pipe=2, schedule="one_f_one_b"), DILOCO),
    (Case("llama", False, "zero3", 4, (2, 2, 1), pipe=2, schedule="zero_bubble"), DILOCO),
    (Case("gpt2", True, "ddp", 1, (2, 2, 1)), DILOCO),
]


@functools.cache
def inner_of(config: Any, tx: Any) -> Any:
    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            loss, grads = jax.value_and_grad(functools.partial(oracle.loss, config=config))(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    return step


def by_hand(case: Case, local: LocalConfig, tx: Any, steps: int) -> tuple[list[Any], Any, list[float]]:
    """(parameters of each replica, the anchor, losses), by replicas on one device and an outer step in NumPy."""
    config, count = model_config(case), case.mesh[0]
    anchor = leaves_by_name(jax.tree.map(np.array, initial(config, "fp64")))
    trace = {name: np.zeros_like(leaf) for name, leaf in anchor.items()}
    structure, step = jax.tree.structure(initial(config, "fp64")), inner_of(config, tx)
    own = [initial(config, "fp64") for _ in range(count)]
    states, losses = [tx.init(params) for params in own], []
    tokens = np.zeros((count, local.fragments))
    for i in range(steps):
        batch, found, weights = make_batch(ROWS, i), [], []
        for r in range(count):
            rows = slice(r * ROWS // count, (r + 1) * ROWS // count)
            part = {key: leaf[rows] for key, leaf in batch.items()}
            loss, own[r], states[r] = step(own[r], states[r], part)
            found.append(float(loss))
            weights.append(part["weights"].sum())
        tokens += np.array(weights)[:, None]
        losses.append(float(np.average(found, weights=weights)))
        for f in local.due(i + 1):
            share = tokens[:, f] / tokens[:, f].sum()
            tokens[:, f] = 0
            mine = [leaves_by_name(jax.tree.map(np.array, each)) for each in own]
            for name in anchor:
                block = name.startswith("blocks.")
                if not block and f < local.fragments - 1:
                    continue
                at: Any = slice(f, None, local.fragments) if block else ...
                delta = sum(w * (anchor[name][at] - leaf[name][at]) for w, leaf in zip(share, mine, strict=True))
                momentum = local.outer.momentum
                trace[name][at] = delta + momentum * trace[name][at]
                moved = delta + momentum * trace[name][at] if local.outer.name == "nesterov" else trace[name][at]
                anchor[name][at] -= local.outer.lr * moved
                for leaf in mine:
                    leaf[name][at] = local.keep * leaf[name][at] + (1 - local.keep) * anchor[name][at]
            own = [jax.tree.unflatten(structure, each.values()) for each in mine]
    return own, jax.tree.unflatten(structure, anchor.values()), losses


def check(case: Case, local: LocalConfig, steps: int = 6) -> None:
    with jax.enable_x64(True):
        tx = optimizer()
        want, anchor, losses = by_hand(case, local, tx, steps)
        state, step = local_parts(case, local, tx)
        got = []
        for i in range(steps):
            state, metrics = step(state, placed(i, state))
            got.append(float(metrics["loss"]))
        own = jax.device_get(state.opt_state.params)
        for r, replica in enumerate(want):
            assert oracle.error(jax.tree.map(lambda leaf, r=r: leaf[r], own), replica) < 1e-10
        assert oracle.error(jax.device_get(state.params), anchor) < 1e-10
        assert max(abs(a - b) / b for a, b in zip(got, losses, strict=True)) < 1e-10


@pytest.mark.parametrize(("case", "local"), CASES, ids=str)
def test_replicas_and_anchor_agree_with_one_device(case: Case, local: LocalConfig) -> None:
    check(case, local)


@pytest.mark.parametrize(("case", "local"), levels(SLOW, slow=3, common=1), ids=str)
def test_replicas_and_anchor_agree_with_one_device_in_other_layouts(case: Case, local: LocalConfig) -> None:
    check(case, local)


@pytest.mark.slow
def test_what_experts_share_is_split_within_a_replica() -> None:
    moe = ("moe", MoEConfig(experts=8, top_k=2, bias_rate=None))

    def trained(strategy: str, expert: int) -> tuple[Any, Any]:
        case = Case("llama", False, strategy, 1, (2, 1, 1), expert=expert, options=(moe,))
        state, step = local_parts(case, DILOCO, optimizer())
        for i in range(4):
            state, _ = step(state, placed(i, state))
        return jax.device_get(state.params), jax.device_get(state.opt_state.params)

    with jax.enable_x64(True):
        assert oracle.error(trained("zero3", 4), trained("ddp", 1)) < 1e-10


@pytest.mark.slow
def test_an_outer_step_after_each_step_of_sgd_is_ddp_even_with_ragged_batches() -> None:
    case, local, tx = Case("gpt2", True, "ddp", 1, (2, 1, 1)), LocalConfig(every=1), optax.sgd(0.3)
    with jax.enable_x64(True):
        state, step = local_parts(case, local, tx)
        mesh = state.step.sharding.mesh
        model = gpt(model_config(case), max_length=SEQ, param_dtype=jnp.float64)
        plain = place_params(initial(model_config(case), "fp64"), tx, state_target(model, tx, mesh))
        together = make_train_step(model, tx, mesh, precision="fp64")
        for i in range(3):
            plain, want = together(plain, placed(i, plain))
            state, got = step(state, placed(i, state))
            assert abs(float(got["loss"]) - float(want["loss"])) < 1e-12
            assert float(got["weight"]) == float(want["weight"])
        assert oracle.error(state.params, plain.params) < 1e-12
