"""LoRA's adapters train in every layout as on one device, where their product is added to the kernel; nothing else has
a gradient, a sum over devices, or optimizer state."""

import functools
import math
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
from layouts import Case

from jaxdist import make_mesh, make_train_step, state_target
from jaxdist.config.sections.optimizer import ADAPTERS_ONLY, LoraConfig
from jaxdist.models.gpt import gpt
from jaxdist.precision.policy import POLICIES
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
    return tuple(jax.tree.map(lambda own, leaf: leaf if own is yes else None, named, params) for yes in (True, False))


def joined(adapters: Any, rest: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, adapters, rest, is_leaf=lambda leaf: leaf is None)


def model_of(case: Case, policy: str, lora: LoraConfig | None = LORA) -> Any:
    return gpt(
        layouts.model_config(case),
        max_length=layouts.SEQ,
        param_dtype=POLICIES[policy].param,
        sequence_parallel=case.sequence,
        lora=lora,
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


def step_of(case: Case, policy: str, lora: LoraConfig = LORA, **options: Any) -> Any:
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


EVERYDAY = [
    Case("llama", False, "zero3", 2, (2, 2, 2), sequence=True),
    Case("gpt2", True, "zero2", 2, (1, 2, 2), pipe=2, schedule="one_f_one_b"),
]
SLOW = [
    Case("gpt2", True, "ddp", 1, (2, 1, 4)),
    Case("llama", False, "zero1", 4, (2, 2, 1), remat="full"),
    Case("llama", False, "zero3", 1, (1, 4, 2), prefetch=1),
    Case("gpt2", True, "zero3", 2, (2, 2, 1), algorithm="deterministic"),
    Case("llama", False, "zero3", 2, (2, 1, 2), pipe=2, schedule="gpipe", remat="full", sequence=True),
    Case("gpt2", True, "zero3", 1, (2, 2, 1), algorithm="ring", overlap=True),
]


@pytest.mark.parametrize("case", [*EVERYDAY, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=str)
def test_adapters_train_as_on_one_device(case: Case) -> None:
    with jax.enable_x64(True):
        config = layouts.model_config(case)
        losses, want_grads, want = reference(config, layouts.batch_size(case))
        tx, target, step = step_of(case, "fp64", return_grads=True)
        from jaxdist.optim import only_trained

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
