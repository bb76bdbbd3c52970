"""Training of a small GPT in a layout (mesh, strategy, remat, ...), and by the oracle on one device."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import NamedSharding

from jaxdist import registry
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.optim import clip_by_ordered_norm, only_trained
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import TrainState, place_params
from jaxdist.step import make_train_step
from jaxdist.train_step import TrainStep

SEQ, VOCAB = 16, 48
STRATEGIES = tuple(registry.names("jaxdist.parallel.strategies"))


class Case(NamedTuple):
    style: str
    tied: bool
    strategy: str
    microbatches: int
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    algorithm: str = "native"
    remat: str | tuple[str, ...] = "none"
    prefetch: int = 0
    overlap: bool = False  # buckets so small that every block fills one, and is summed in the backward pass
    loss_chunk: int | None = None
    sequence: bool = False
    pipe: int = 1
    schedule: str = "accumulate"
    scan_blocks: int = 1
    collective_matmul: bool = False  # in a pipeline without conditions
    options: tuple[tuple[str, Any], ...] = ()  # of the model, besides
    documents: bool = False  # several in a row, which do not see each other
    context: int = 1
    form: str | None = None  # of attention over context
    expert: int = 1
    batch_split: int = 1

    def __str__(self) -> str:
        later = self[10:14] if self[10:14] != (False, 1, "accumulate", 1) else ()
        last = ("collective_matmul",) if self.collective_matmul else ()
        last += tuple(getattr(value, "dispatch", key) for key, value in self.options) + ("documents",) * self.documents
        last += (f"{self.form}{self.context}",) if self.form else ()
        last += (f"expert{self.expert}",) if self.expert > 1 else ()
        last += ("halves",) if self.batch_split > 1 else ()
        return "-".join(str(part) for part in (*self[:4], "x".join(map(str, self.mesh)), *self[5:10], *later, *last))


def sync_of(case: Case) -> GradSync:
    """By an algorithm; "deterministic" is a way of running as well."""
    if case.algorithm == "deterministic":
        return GradSync(deterministic=True)
    return GradSync(case.algorithm, **({"bucket_mb": 0.001} if case.overlap else {}))


def model_config(case: Case) -> ModelConfig:
    odd = any(size % 2 and size > 1 for size in case.mesh)
    heads, width = (12, 48) if odd else (16, 32)
    found = ModelConfig(
        style=case.style,
        tied=case.tied,
        layers=layers_of(case),
        width=width,
        heads=heads,
        vocab=VOCAB,
        mlp_width=width * 2,
        loss_chunk=case.loss_chunk,
        kv_heads=heads // 2 if case.style == "llama" else None,
        scan_blocks=case.scan_blocks,
    )
    return found.replace(**dict(case.options)).resolved()


def layers_of(case: Case) -> int:
    """Five blocks are two segments of two and one of one, or two rounds of a loop and one block more."""
    return 5 if case.remat == "sqrt" or case.scan_blocks == 2 else 2 + 3 * case.prefetch


def batch_size(case: Case) -> int:
    return 32 if case.mesh[0] * case.mesh[1] in (1, 2, 4, 8) else 4 * case.mesh[0] * case.mesh[1]


def make_batch(size: int, step: int, *, documents: bool = False) -> dict[str, np.ndarray]:
    """Ragged masks: the share of counted tokens grows along the batch, and one row counts none."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, VOCAB, (size, SEQ + 1)).astype(np.int32)
    weights = (rng.random((size, SEQ)) < np.linspace(0.02, 1, size)[:, None]).astype(np.float32)
    weights[size // 2] = 0
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}
    if documents:  # of any length, and in some rows only one
        first = (rng.random((size, SEQ)) < np.linspace(0, 0.7, size)[:, None]) * np.arange(SEQ)
        batch["documents"] = np.maximum.accumulate(first, axis=1).astype(np.int32)
    return batch


def optimizer(*, deterministic: bool = False) -> optax.GradientTransformation:
    clip = clip_by_ordered_norm if deterministic else optax.clip_by_global_norm
    return optax.chain(clip(0.5), optax.adamw(1e-2, weight_decay=0.1, eps=1e-6))


class Reference(NamedTuple):
    losses: list[float]
    grads: list[Any]
    params: Any


@functools.cache
def initial(config: ModelConfig, policy: str) -> Any:
    model = gpt(config, max_length=SEQ, param_dtype=POLICIES[policy].param)
    return oracle.drawn(jax.eval_shape(model.init, jax.random.key(0)))


@functools.cache
def reference(config: ModelConfig, size: int, policy: str, *, documents: bool = False) -> Reference:
    """Three steps on one device, with the oracle's loss and plain optax."""
    params, tx = initial(config, policy), optimizer()

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            loss, grads = jax.value_and_grad(functools.partial(oracle.loss, config=config))(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
        return loss, grads, optax.apply_updates(params, updates), opt_state

    losses, all_grads, opt_state = [], [], jax.jit(tx.init)(params)
    for i in range(3):
        loss, grads, params, opt_state = step(params, opt_state, make_batch(size, i, documents=documents))
        losses.append(float(loss))
        all_grads.append(jax.device_get(grads))
    return Reference(losses, all_grads, jax.device_get(params))


def parts_of(case: Case, policy: str) -> tuple[optax.GradientTransformation, TrainState, TrainStep]:
    """(optimizer, the state as ShapeDtypeStructs, step)."""
    data, fsdp, tensor = case.mesh
    mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor, pipe=case.pipe, context=case.context, expert=case.expert)
    model = gpt(
        model_config(case),
        max_length=SEQ,
        param_dtype=POLICIES[policy].param,
        sequence_parallel=case.sequence,
        collective_matmul=case.collective_matmul,
        context=case.form,
    )
    tx = optimizer(deterministic=case.algorithm == "deterministic")
    target = state_target(model, tx, mesh, strategy=case.strategy)
    step = make_train_step(
        model,
        tx,
        mesh,
        strategy=case.strategy,
        schedule=case.schedule,
        microbatches=case.microbatches,
        precision=policy,
        grad_sync=sync_of(case),
        remat=case.remat,
        prefetch=case.prefetch,
        batch_split=case.batch_split,
        return_grads=True,
        pipeline_cond=not case.collective_matmul and case.form != "ring",
    )
    return only_trained(tx, (), model.update_rules), target, step


def run(case: Case, policy: str, steps: int) -> Reference:
    tx, target, step = parts_of(case, policy)
    mesh, state = target.step.sharding.mesh, place_params(initial(model_config(case), policy), tx, target)
    losses, grads = [], []
    for i in range(steps):
        batch = make_batch(batch_size(case), i, documents=case.documents)
        batch = jax.device_put(batch, NamedSharding(mesh, BATCH_SPEC))
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        grads.append(jax.device_get(metrics["grads"]))
    return Reference(losses, grads, jax.device_get(state.params))


def check_wide(case: Case) -> None:
    with jax.enable_x64(True):
        want = reference(model_config(case), batch_size(case), "fp64", documents=case.documents)
        got = run(case, "fp64", 3)
        assert max(abs(a - b) / b for a, b in zip(got.losses, want.losses, strict=True)) < 1e-10
        for step in range(3):
            assert oracle.error(got.grads[step], want.grads[step]) < 1e-10
        assert oracle.error(got.params, want.params) < 1e-10


def check_fp32(case: Case) -> None:
    with jax.enable_x64(True):
        want = reference(model_config(case), batch_size(case), "fp64", documents=case.documents)
        got = run(case, "fp32", 1)
    assert got.losses[0] == pytest.approx(want.losses[0], rel=1e-5)
    assert jax.tree.leaves(got.grads[0])[0].dtype == jnp.float32
    assert oracle.error(got.grads[0], want.grads[0]) < 1e-5
