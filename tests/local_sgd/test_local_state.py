"""Replicas that fail, that send less, and that resume: from a checkpoint in mid-round, and as another number."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import oracle
import pytest
from layouts import SEQ, Case, model_config
from replicas import local_parts, placed

from jaxdist.checkpoint import Checkpoints
from jaxdist.config.load import load_config, settings_by_key
from jaxdist.config.sections.local import LocalConfig, OuterConfig
from jaxdist.errors import UserError
from jaxdist.init import init_state
from jaxdist.local_sgd.replicas import Replicas
from jaxdist.local_sgd.state import outer_optimizer
from jaxdist.local_sgd.step import init_local_state, make_local_step
from jaxdist.mesh import HOST, make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.state import TrainState
from jaxdist.trainer.resume import check_replicas

SGD = optax.sgd(0.3, 0.9)


def case(replicas: int) -> Case:
    return Case("gpt2", True, "ddp", 1, (replicas, 1, 1))


def host(tree: Any) -> Any:
    return jax.tree.map(np.array, jax.device_get(tree))


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(host(a)), jax.tree.leaves(host(b)), strict=True))


def memories(tree: Any) -> set[str]:
    """The kinds of memory in which the arrays are; counts of steps are always on the device."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def poisoned(state: TrainState) -> Any:
    """A batch whose last rows, which the second of two replicas gets, have a weight that is not finite."""
    batch = placed(0, state)
    weights = np.array(batch["weights"])
    weights[-1] = np.inf
    return batch | {"weights": jax.device_put(weights, batch["weights"].sharding)}


@pytest.mark.slow
def test_a_replica_that_is_not_finite_skips_its_step_alone() -> None:
    state, step = local_parts(case(2), LocalConfig(every=2), SGD, "fp32", max_skips=10)
    before = host(state.opt_state.params)
    state, _ = step(state, poisoned(state))
    after = host(state.opt_state.params)
    assert same(jax.tree.map(lambda leaf: leaf[1], before), jax.tree.map(lambda leaf: leaf[1], after))
    assert not same(jax.tree.map(lambda leaf: leaf[0], before), jax.tree.map(lambda leaf: leaf[0], after))
    assert host(state.guard.skipped).tolist() == [0, 1]
    assert host(state.opt_state.tokens)[1] == 0
    state, metrics = step(state, placed(1, state))
    assert int(metrics["skipped_in_a_row"]) == 0
    assert np.isfinite(float(metrics["loss"])) and np.isfinite(float(metrics["round_loss"]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(host(state.params)))


@pytest.mark.slow
def test_a_halted_replica_is_known_to_all_after_the_outer_step() -> None:
    state, step = local_parts(case(2), LocalConfig(every=2), SGD, "fp32", max_skips=0)
    state, metrics = step(state, poisoned(state))
    assert "skipped_in_a_row" not in metrics  # only this process would know it
    _, metrics = step(state, placed(1, state))
    assert int(metrics["skipped_in_a_row"]) == 1
    assert np.isnan(float(metrics["loss"]))


@pytest.mark.slow
def test_int8_differs_by_its_rounding_which_is_kept() -> None:
    exact, step = local_parts(case(2), LocalConfig(every=1), SGD, "fp32")
    lossy, other = local_parts(case(2), LocalConfig(every=1, algorithm="ring", wire_dtype="int8"), SGD, "fp32")
    start = host(exact.params)
    exact, _ = step(exact, placed(0, exact))
    lossy, _ = other(lossy, placed(0, lossy))
    moved = jax.tree.map(np.subtract, host(exact.params), start)
    moved_lossy = jax.tree.map(np.subtract, host(lossy.params), start)
    whole = optax.tree.norm(jax.tree.map(np.subtract, moved, moved_lossy)) / optax.tree.norm(moved)
    assert 0 < float(whole) < 0.02
    kept = host(lossy.opt_state.lost)
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(kept))
    names = list(kept[0])
    errors = dict(zip(names, jax.tree.leaves(jax.tree.map(np.subtract, moved_lossy, moved)), strict=True))
    for name in names:  # what the anchor lacks is what the replicas have kept
        assert np.abs(errors[name] - kept[0][name].mean(axis=0)).max() < 1e-5


def replicas_of_test(replicas: int, local: LocalConfig) -> tuple[TrainState, Replicas]:
    state, step = local_parts(case(replicas), local, SGD, "fp32")
    target = jax.eval_shape(lambda: state)
    target = jax.tree.map(
        lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding), target, state
    )
    return state, Replicas(target, target, step, outer_optimizer(local), local, ())


@pytest.mark.slow
def test_a_checkpoint_in_mid_round_goes_on_with_the_same_bits_and_with_another_number_of_replicas(
    tmp_path: Path,
) -> None:
    local = LocalConfig(every=3, outer=OuterConfig("nesterov", 0.7, 0.9))
    state, replicas = replicas_of_test(2, local)
    for i in range(4):
        state, _ = replicas.step(state, placed(i, state))
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(4, state, {"config": {"mesh.data": 2}})
        checkpoints.wait()
        said: list[str] = []
        again = replicas.restore(checkpoints, 4, said.append)
        assert same(again, state) and not said
        before = host(state)
        state, _ = replicas.step(state, placed(4, state))
        again, _ = replicas.step(again, placed(4, again))
        assert same(again, state)

        _, four = replicas_of_test(4, local)
        more = four.restore(checkpoints, 4, said.append)
    assert said == ["mesh.data: 4 replicas go on from the mean of the 2 in the checkpoint of step 4"]
    tokens = before.opt_state.tokens
    assert same(more.params, before.params) and same(more.opt_state.outer, before.opt_state.outer)
    assert host(more.opt_state.tokens).tolist() == [[tokens.sum() / 4]] * 4
    mean = jax.tree.map(lambda leaf: np.average(leaf, axis=0, weights=tokens[:, 0]), before.opt_state.params)
    for r in range(4):
        assert oracle.error(jax.tree.map(lambda leaf, r=r: leaf[r], host(more.opt_state.params)), mean) < 1e-6
    more, metrics = four.step(more, placed(4, more))
    more, metrics = four.step(more, placed(5, more))
    assert "round_loss" in metrics


@pytest.mark.slow
def test_an_anchor_in_host_memory_leads_to_the_same_bits(tmp_path: Path) -> None:
    outer = OuterConfig("nesterov", 0.7, 0.9)
    near = LocalConfig(every=2, outer=outer, fragments=2, algorithm="ring", wire_dtype="int8")
    far = dataclasses.replace(near, offload=True)
    found = []
    for local in (near, far):
        state, replicas = replicas_of_test(2, local)
        for i in range(3):
            state, _ = replicas.step(state, placed(i, state))
        found.append(state)
    want, got = found
    assert same(want, got)
    own = got.opt_state
    assert memories((got.params, own.outer, own.lost)) == {HOST} and memories(want) == {"device"}
    assert memories((got.step, got.guard, own.params, own.opt_state, own.tokens, own.losses)) == {"device"}

    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(3, got, {"config": {"mesh.data": 2}})
        checkpoints.wait()
        back, four = replicas_of_test(2, near)[1], replicas_of_test(4, far)[1]
        assert same(back.restore(checkpoints, 3, print), want)
        more = four.restore(checkpoints, 3, print)
    assert memories((more.params, more.opt_state.outer, more.opt_state.lost)) == {HOST}
    assert same(more.params, want.params) and same(more.opt_state.outer, own.outer)
    more, _ = four.step(more, placed(3, more))
    assert memories(more.params) == {HOST}


def test_a_step_from_python_has_no_more_fragments_than_blocks() -> None:
    with pytest.raises(UserError, match=r"^parallel\.local\.fragments: 9, but the model has \d+ blocks"):
        local_parts(case(2), LocalConfig(every=9, fragments=9), SGD, "fp32")


@pytest.mark.slow
def test_from_python_all_replicas_start_alike_and_train() -> None:
    model, mesh, local = gpt(model_config(case(2)), max_length=SEQ), make_mesh(data=2, fsdp=2), LocalConfig(every=2)
    state = init_local_state(model, SGD, mesh, local, strategy="zero2")
    step = make_local_step(model, SGD, mesh, local, strategy="zero2")
    first, anchor = host(state.opt_state.params), host(state.params)
    assert same(first, jax.tree.map(lambda leaf: np.stack([leaf, leaf]), anchor))
    state, _ = step(state, placed(0, state))
    assert same(state.params, anchor) and not same(state.opt_state.params, first)
    state, metrics = step(state, placed(1, state))
    assert same(state.opt_state.params, jax.tree.map(lambda leaf: np.stack([leaf, leaf]), host(state.params)))
    assert not same(state.params, anchor) and np.isfinite(float(metrics["round_loss"]))


def test_keys_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    load_config("configs/quickstart.yaml", ["parallel.local.every=0", "parallel.local.keep=0.5"])
    assert caplog.messages == ["parallel.local.keep: has no effect, since parallel.local.every is 0"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.local.every=10", "parallel.local.wire_dtype=int8"], "parallel.local.wire_dtype: 'int8' needs a"),
        (["parallel.local.every=2", "parallel.local.fragments=3"], "parallel.local.fragments: 3, one after the other"),
        (["parallel.local.every=9", "parallel.local.fragments=5"], "the model has 4 blocks"),
        (["parallel.local.every=7"], "train.eval_every: 40 is between outer steps"),
        (["parallel.local.every=10", "train.ema=0.9"], "train.ema: 0.9 does not go with parallel.local.every"),
        (["parallel.local.every=10", "memory.offload.optimizer=true"], "memory.offload.optimizer: true does not go"),
        (["parallel.local.every=10", "parallel.grad_sync.deterministic=true"], "deterministic: true does not go with"),
        (["parallel.local.outer.name=adagrad"], "parallel.local.outer.name: 'adagrad'"),
        (["parallel.local.every=-1"], "parallel.local.every: -1"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(overrides: list[str], said: str) -> None:
    base = ["optimizer.name=adamw", "parallel.strategy=ddp", "train.steps=160"]
    with pytest.raises(UserError) as caught:
        load_config("configs/quickstart.yaml", base + overrides)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_with_replicas_is_not_resumed_without_them(tmp_path: Path) -> None:
    config = load_config("configs/quickstart.yaml", ["parallel.local.every=10"])
    check_replicas({"config": {"parallel.local.every": 20}}, config, tmp_path)
    with pytest.raises(UserError, match=r"parallel\.local\.every: 10, but the run in .* had 0"):
        check_replicas({"config": {}}, config, tmp_path)


@pytest.mark.parametrize(
    ("key", "now", "before"),
    [
        ("outer.momentum", "0.5", "0.0"),
        ("outer.name", '"adam"', '"nesterov"'),
        ("fragments", "2", "1"),
        ("wire_dtype", '"int8"', "null"),
    ],
)
def test_a_run_is_not_resumed_with_other_arrays_for_its_outer_steps(
    tmp_path: Path, key: str, now: str, before: str
) -> None:
    base = ["parallel.local.every=10", "parallel.local.algorithm=ring"]
    first, other = (
        load_config("configs/quickstart.yaml", [*base, *more]) for more in ([], [f"parallel.local.{key}={now}"])
    )
    for saved, config, texts in ((first, other, (now, before)), (other, first, (before, now))):
        with pytest.raises(UserError) as caught:
            check_replicas({"config": settings_by_key(saved)}, config, tmp_path)
        said = f"parallel.local.{key}: {texts[0]}, but the run in {tmp_path} had {texts[1]}, and its checkpoint holds"
        assert str(caught.value).startswith(said) and "set it back, or start another run" in str(caught.value)
    for more in ("outer.lr=0.5", "outer.name=sgd", "keep=0.5", "every=20", "algorithm=tree"):
        config = load_config("configs/quickstart.yaml", [*base, f"parallel.local.{more}"])
        check_replicas({"config": settings_by_key(first)}, config, tmp_path)


def test_wrong_calls_in_python_are_one_line() -> None:
    model, mesh, local = gpt(model_config(case(2)), max_length=SEQ), make_mesh(data=2), LocalConfig(every=2)
    state = init_state(model, SGD, mesh)
    calls = {
        "state: is that of one model, as init_state makes it; .*init_local_state": lambda: make_local_step(
            model, SGD, mesh, local
        )(state, {}),
        "local.every: 0, by which replicas never meet": lambda: make_local_step(model, SGD, mesh, LocalConfig()),
        "local.every: 0, by which": lambda: init_local_state(model, SGD, mesh, LocalConfig()),
        "parallel.local.every: -1 is out of range": lambda: make_local_step(model, SGD, mesh, LocalConfig(every=-1)),
        "local: is a dict; allowed: a LocalConfig": lambda: make_local_step(model, SGD, mesh, {"every": 2}),  # type: ignore[arg-type]
        "parallel.local.every: is for models with blocks, .*; or a ModelDef, as of gpt": lambda: make_local_step(
            lambda params, batch, keys: (0.0, 1),  # type: ignore[arg-type]
            SGD,
            mesh,
            local,
        ),
    }
    for line, call in calls.items():
        with pytest.raises(UserError, match=f"^{line}"):
            call()
