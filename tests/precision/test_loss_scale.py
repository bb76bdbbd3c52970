"""The loss scale moves by GradScaler's rule; what is not finite changes nothing; runs stop, skip or roll back."""

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from levels import levels
from pages import on_page

from jaxdist import init_state, make_mesh, make_train_step
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config, ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.precision import LossScale
from jaxdist.data import Loader
from jaxdist.errors import UserError
from jaxdist.models.gpt import gpt
from jaxdist.observe import read_metrics
from jaxdist.optim.make import learning_rates
from jaxdist.precision.loss_scale import fresh_guard, next_guard, released, scale_of, tree_is_finite
from jaxdist.precision.policy import Precision
from jaxdist.specs import batch_spec
from jaxdist.state import shardings_of
from jaxdist.trainer.nonfinite import NonFinite, Spikes
from jaxdist.trainer.recorder import updates_before
from jaxdist.trainer.train import train

# torch.amp.GradScaler(init_scale=65536, growth_factor=2, backoff_factor=0.5, growth_interval=3), as documented: an
# overflow multiplies the scale by backoff_factor and resets the count of good steps; growth_interval good steps in a
# row multiply it by growth_factor and reset the count. (overflow?, scale after, count after), written by hand.
GRADSCALER = [
    (True, 32768, 0), (True, 16384, 0), (False, 16384, 1), (False, 16384, 2), (False, 32768, 0), (False, 32768, 1),
    (False, 32768, 2), (True, 16384, 0), (False, 16384, 1), (False, 16384, 2), (False, 32768, 0), (False, 32768, 1),
    (False, 32768, 2), (False, 65536, 0), (True, 32768, 0), (False, 32768, 1), (True, 16384, 0), (False, 16384, 1),
]  # fmt: skip


def test_the_scale_moves_as_gradscalers() -> None:
    rule, guard, skipped, row = LossScale(growth_interval=3), fresh_guard(), 0, 0
    assert float(scale_of(guard, rule)) == 65536
    for overflow, scale, count in GRADSCALER:
        guard = next_guard(guard, jnp.asarray(not overflow), rule)
        skipped, row = skipped + overflow, row + 1 if overflow else 0
        assert (float(guard.scale), int(guard.good_steps)) == (scale, count)
        assert (int(guard.skipped), int(guard.in_a_row)) == (skipped, row)


def test_the_scale_stays_finite_and_a_fixed_one_stays() -> None:
    rule, guard = LossScale(init_scale=2.0**127, growth_interval=1), fresh_guard()
    for _ in range(3):
        guard = next_guard(guard, jnp.asarray(True), rule)
    assert float(guard.scale) == 2.0**127
    fixed = Precision(jnp.float32, jnp.float16, jnp.float32, loss_scale=128.0).scale_rule
    for finite in (True, False, True):
        guard = next_guard(guard._replace(scale=jnp.float32(0)), jnp.asarray(finite), fixed)
        assert float(guard.scale) == 128
    assert Precision(jnp.float32, jnp.float32, jnp.float32).scale_rule is None
    assert scale_of(fresh_guard(), None) == 1.0
    assert float(next_guard(fresh_guard(), jnp.asarray(False), None).scale) == 0


@pytest.mark.parametrize("shape", [(), (2, 2), (70_001,), (1, 5000), (5000, 1), (3, 40, 500)])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_finite_trees(shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    largest = jnp.full(shape, jnp.finfo(dtype).max, dtype)  # sums of it overflow
    tree = {"a": jnp.ones(3), "b": jnp.arange(3), "c": largest, "none": jnp.ones((0, 4))}
    finite = jax.jit(tree_is_finite)
    assert finite(tree) and finite(())
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        assert not finite({**tree, "c": largest.at[(-1,) * len(shape)].set(bad)})


def test_spikes_are_judged_by_the_median() -> None:
    spikes = Spikes(2.0)
    for step in range(1, 16):
        spikes.check(step, 100.0 if step == 3 else 1.0)  # too few losses before it
    spikes.check(16, 1.9)
    with pytest.raises(NonFinite, match="loss of step 17 is 2.1, 2.1 times the median of the last 16, more than"):
        spikes.check(17, 2.1)
    signed = Spikes(2.0)  # one that may be negative has no scale
    for step, loss in enumerate([0.0] * 20 + [-9.0] * 40 + [1.0, -8.0, 20.0]):
        signed.check(step, loss)
    never = Spikes(0.0)
    for step in range(1, 30):
        never.check(step, 10.0**step)


def test_skipped_steps_are_no_updates() -> None:
    """Nor are those of replicas, which may skip others: the one with the fewest may have skipped none."""
    assert [updates_before(*each) for each in ((1, 0, 0), (3, 1, 0), (3, 1, 1), (3, 2, 2))] == [0, 1, 2, 1]
    assert updates_before(3, skipped=0, in_a_row=1) == 2


@pytest.mark.parametrize("scale", [0, 0.0, float("nan"), 1e39, "dyn", LossScale("fixd"), LossScale("fixed", 0.0)])
def test_a_scale_of_a_policy_in_python_is_checked(scale: Any) -> None:
    """A scale of 0 trained nothing, in silence."""
    precision = Precision(jnp.float32, jnp.float16, jnp.float32, loss_scale=scale)
    with pytest.raises(UserError, match=r"^precision\.loss_scale\.(init_scale|mode): .*; allowed: "):
        make_train_step(lambda *_: (jnp.zeros(()), 1), optax.sgd(0.1), make_mesh(), precision=precision)


LENGTH = 8
SHARED = pytest.mark.xdist_group("loss scale")  # one compiled step


@functools.cache
def compiled(precision: Any, **options: int) -> tuple[Any, Any, Any]:
    """(mesh, maker of a state, step) of a small GPT on two devices."""
    model = gpt(ModelConfig(layers=2, width=16, heads=2, vocab=32, dropout=0.1), max_length=LENGTH)
    mesh, tx = make_mesh(fsdp=2), optax.adamw(optax.linear_schedule(1e-2, 0, 50))
    step = make_train_step(model, tx, mesh, strategy="zero3", precision=precision, **options)
    first = init_state(model, tx, mesh, strategy="zero3")
    copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=shardings_of(first))
    return mesh, lambda: copy(first), step


def made(precision: Any, **options: int) -> tuple[Any, Any, Any]:
    """(mesh, state, step)."""
    mesh, make, step = compiled(precision, **options)
    return mesh, make(), step


def batch_of(mesh: Any, i: int, weight: float = 1.0) -> dict[str, jax.Array]:
    draw = np.random.default_rng(i)
    grid = {name: draw.integers(0, 32, (8, LENGTH), dtype=np.int32) for name in ("inputs", "targets")}
    data = {**grid, "weights": np.full((8, LENGTH), weight, np.float32)}
    return {name: jax.device_put(x, NamedSharding(mesh, batch_spec(mesh))) for name, x in data.items()}


def params_after(precision: Any, weights: list[float], **options: int) -> tuple[list[np.ndarray], Any]:
    mesh, state, step = made(precision, **options)
    for i, weight in enumerate(weights):
        state, _ = step(state, batch_of(mesh, i, weight))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.opt_state)], state


@pytest.mark.slow
def test_a_scale_changes_nothing_but_rounding() -> None:
    plain, _ = params_after("fp32", [1.0] * 3)
    scaled, state = params_after(Precision(jnp.float32, jnp.float32, jnp.float32, loss_scale=1024.0), [1.0] * 3)
    # Sums of gradients and of their squares; where a gradient is zero, AdamW makes its rounding as large as an update.
    for a, b in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    assert float(state.guard.scale) == 1024


@SHARED
def test_skipped_steps_are_as_if_they_were_not() -> None:
    """But for the number of the step, which dropout folds: the batches around them are the same ones."""
    bad = math.inf
    mesh, state, step = made("fp32")
    for i, weight in enumerate((1.0, bad, bad, 1.0)):
        state, metrics = step(state, batch_of(mesh, i, weight))
        assert int(metrics["skipped_in_a_row"]) == (i if weight == bad else 0)
    _, other, _ = made("fp32")
    other, _ = step(other, batch_of(mesh, 0))
    number = jax.device_put(np.int32(3), other.step.sharding)
    other, _ = step(other._replace(step=number), batch_of(mesh, 3))
    for a, b in zip(*(jax.tree.leaves((each.params, each.opt_state)) for each in (state, other)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (int(state.step), int(state.guard.skipped)) == (4, 2)


@pytest.mark.slow
def test_what_int8_sums_carry_does_not_move_with_the_scale() -> None:
    """A scale that falls to a thousandth between two steps: the second adds what the first one's encoding lost."""
    norms = []
    for backoff in (1.0, 2.0**-10):
        rule = LossScale(init_scale=2.0**10, growth_factor=1.0, backoff_factor=backoff)
        model = gpt(ModelConfig(layers=1, width=16, heads=2, vocab=32), max_length=LENGTH)
        mesh, tx, sync = make_mesh(data=2), optax.sgd(0.0), GradSync("ring", wire_dtype="int8")
        policy = Precision(jnp.float32, jnp.float32, jnp.float32, loss_scale=rule)
        step = make_train_step(model, tx, mesh, precision=policy, grad_sync=sync, return_grads=True)
        state = init_state(model, tx, mesh, grad_sync=sync)
        for i, weight in enumerate((1.0, math.inf, 1.0)):
            state, metrics = step(state, batch_of(mesh, i, weight))
        norms.append(float(metrics["grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.slow
def test_on_gpus_a_choice_keeps_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for them, here on a CPU: a step that is not finite changes no bit; a condition is not in it."""
    monkeypatch.setattr("jaxdist.step.on_cpu", lambda mesh: False)
    mesh, make, step = compiled.__wrapped__("fp32")
    state = make()
    assert "cond[" not in str(step.jitted(state).trace(state, batch_of(mesh, 0)).jaxpr)
    want = [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))]
    for i, weight in enumerate((math.inf, math.nan, 1.0)):
        state, _ = step(state, batch_of(mesh, i, weight))
        got = [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(got, want, strict=True)) == (weight != 1)
    assert int(state.guard.skipped) == 2


@SHARED
def test_after_too_many_skips_the_state_is_halted() -> None:
    """If the step was given a number. Without one it trains again with the next good batch, as GradScaler."""
    bad, limit = math.inf, 10
    one, _ = params_after("fp32", [1.0])
    data = [1.0, *[bad] * (limit + 1), 1.0, 1.0]
    more, halted = params_after("fp32", data, max_skips=limit)
    for a, b in zip(one, more, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (int(halted.step), int(halted.guard.in_a_row), int(halted.guard.skipped)) == (
        limit + 2,
        limit + 1,
        limit + 1,
    )
    other, state = params_after("fp32", data)
    assert (int(state.step), int(state.guard.in_a_row), int(state.guard.skipped)) == (len(data), 0, limit + 1)
    assert all((a != b).any() for a, b in zip(one, other, strict=True) if a.size > 1)


@pytest.mark.slow
def test_the_scale_goes_on_shrinking_in_a_bare_loop() -> None:
    mesh, state, step = made("fp16")
    for i in range(20):
        state, metrics = step(state, batch_of(mesh, i, math.inf))
    assert (float(metrics["loss_scale"]), int(state.step)) == (2.0**-4, 20)


@pytest.mark.parametrize("precision", levels(["fp16", "fp32", "bf16", "O1"], slow=4))
def test_no_false_alarm_in_500_steps(precision: str) -> None:
    """None without a scale; with one, where it is too large at the start, and gradients really are not finite."""
    mesh, state, step = made(precision)
    finite = []
    for i in range(500):
        state, metrics = step(state, batch_of(mesh, i % 20))
        finite.append(math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]))
    assert int(state.guard.skipped) == finite.count(False) and all(finite[10:])
    assert all(finite) or precision in ("fp16", "O1")


@SHARED
def test_a_weight_that_is_not_a_number_is_not_finite() -> None:
    mesh, state, step = made("fp32")
    state, metrics = step(state, batch_of(mesh, 0, math.nan))
    assert int(metrics["skipped"]) == 1 and math.isnan(metrics["loss"])


def test_a_state_that_goes_on_is_released() -> None:
    guard = fresh_guard()._replace(in_a_row=jnp.int32(3), skipped=jnp.int32(4))
    assert (int(released(guard).in_a_row), int(released(guard).skipped), released(())) == (0, 4, ())


@SHARED
def test_a_state_without_a_guard_is_refused() -> None:
    mesh, state, _ = made("fp32")
    step = make_train_step(gpt(ModelConfig(layers=1), max_length=LENGTH), optax.adamw(1e-3), mesh)
    with pytest.raises(UserError, match="state: has no guard; make it with init_state"):
        step(state._replace(guard=()), batch_of(mesh, 0))


# Whole runs.

YAML = """
model: {{layers: 2, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
mesh: {{data: 2}}
train: {{steps: 6, eval_every: 0, sample_tokens: 0}}
checkpoint: {{every: 2}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""
Configure = Callable[..., Config]


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Configure:
    folder = tmp_path_factory.mktemp("text")
    (folder / "data").mkdir()
    words = np.random.default_rng(0).choice(["def", "return", "x", "y", "0", "+"], 2000)
    for i in range(3):
        (folder / "data" / f"{i}.py").write_text(" ".join(words))
    path = folder / "tiny.yaml"
    path.write_text(YAML.format(path=folder / "data"))
    return lambda *overrides: load_config(path, overrides)


def spoil(patch: pytest.MonkeyPatch, bad: tuple[int, ...], *, read: list[int] | None = None) -> None:
    """The weights of these batches are infinite. read: gets the number of each batch."""
    real = Loader.batch

    def batch(self: Loader, i: int) -> Any:
        made = real(self, i)
        if read is not None:
            read.append(i)
        return {**made, "weights": made["weights"] * math.inf} if i in bad else made

    patch.setattr(Loader, "batch", batch)


@pytest.mark.slow
def test_a_run_skips(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, (2,))
    config = configure("train.on_nonfinite=skip", "mesh.data=1")
    assert train(config, tmp_path) == 0
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.get("skipped") for record in records] == [None, None, 1, None, None, None]
    rates = learning_rates(config.optimizer, 6)
    assert [record["lr"] for record in records] == [float(rates[i]) for i in (0, 1, 2, 2, 3, 4)]
    assert "step 3 skipped: loss nan, gradient norm nan" in capsys.readouterr().out
    assert not (tmp_path / "incidents.jsonl").exists()


@pytest.mark.slow
def test_a_run_stops_and_says_why(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        spoil(patch, (2,))
        assert train(configure("parallel.microbatches=2"), tmp_path) == 1
    text = capsys.readouterr().out
    assert "found: the sum of the batch's weights is not finite: the data's doing\n" in text
    [said] = re.findall(r"step 3: .*\nlooking into .*\n", text)
    bad = "the batch of step 3 holds NaN or inf in 'weights'; mend the data, or leave those rows out"
    on_page("docs/precision.md", said, {"loss of": "grad_norm of", bad: "try a lower optimizer.lr"})
    [incident] = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert (incident["step"], incident["action"], incident["found"]["kind"]) == (3, "stopped", "weight")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]  # as before the bad batch
    assert train(configure("parallel.microbatches=2"), tmp_path) == 0  # and goes on after it
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.get("skipped") for record in records] == [None, None, 1, None, None, None]


@pytest.mark.slow
def test_a_run_ends_after_too_many_skips(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, (1, 3, 4, 5))
    config = configure("train.on_nonfinite=skip", "precision.max_consecutive_skips=1", "mesh.data=1")
    assert train(config, tmp_path) == 1
    text = capsys.readouterr().out
    assert "step 2 skipped" in text and "step 4 skipped" in text and "step 5 skipped" not in text
    assert "loss of step 5 is nan, after 1 more in a row (precision.max_consecutive_skips)" in text
    assert "found: the sum of the batch's weights" in text


@pytest.mark.slow
def test_a_run_rolls_back_past_the_batches(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And goes on as if the data had been without them; so does a run that resumes it."""
    here, there, read = tmp_path / "a", tmp_path / "b", list[int]()
    rolling = ("train.on_nonfinite=rollback", "mesh.data=1", "optimizer.schedule=constant")
    with monkeypatch.context() as patch:
        spoil(patch, (3,))  # the step after the checkpoint of step 2 is good, the next is not
        assert train(configure(*rolling), here) == 0
    assert "rolled back to step 2; the batches of steps 3 to 4 are passed over" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        spoil(patch, (), read=read)
        assert train(configure(*rolling, "train.steps=8"), here) == 0
    assert read == [8, 9]
    real = Loader.batch
    monkeypatch.setattr(Loader, "batch", lambda self, i: real(self, i if i < 2 else i + 2))
    assert train(configure(*rolling, "train.steps=8"), there) == 0
    found, wanted = ([record["loss"] for record in read_metrics(folder / "metrics.jsonl")] for folder in (here, there))
    assert found == wanted and len(found) == 8
    [incident] = [json.loads(line) for line in (here / "incidents.jsonl").read_text().splitlines()]
    assert (incident["step"], incident["action"], incident["batches_passed"]) == (4, "rolled back", 2)


@pytest.mark.slow
def test_rollbacks_end(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        spoil(patch, tuple(range(2, 30)))
        assert train(configure("train.on_nonfinite=rollback", "mesh.data=1"), tmp_path / "a") == 1
    assert capsys.readouterr().out.count("rolled back to step 2") == 3
    records = [json.loads(line) for line in (tmp_path / "a" / "incidents.jsonl").read_text().splitlines()]
    assert records[-1]["action"] == "3 times from the checkpoint of step 2 on; try a lower optimizer.lr"
    spoil(monkeypatch, (0,))
    assert train(configure("train.on_nonfinite=rollback", "mesh.data=1"), tmp_path / "b") == 1
    [record] = [json.loads(line) for line in (tmp_path / "b" / "incidents.jsonl").read_text().splitlines()]
    assert record["action"].startswith("there is no checkpoint yet")


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_not_saved(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finite gradients, and a learning rate that makes the update overflow."""
    config = configure(
        "optimizer.lr=1e38",
        "optimizer.weight_decay=1e3",
        "optimizer.schedule=constant",
        "mesh.data=1",
        "checkpoint.every=1",
    )
    assert train(config, tmp_path) == 1
    assert "the state after step 1 is not finite, though loss and gradients were" in capsys.readouterr().out
    assert not list(tmp_path.glob("checkpoints/[0-9]*"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.on_nonfinite=ignore"],
            "train.on_nonfinite: 'ignore' is not known; allowed: one of stop, skip, rollback",
        ),
        (
            ["train.loss_spike=2", "train.on_nonfinite=skip"],
            "train.loss_spike: 2 with train.on_nonfinite skip; allowed: 0",
        ),
        (["train.loss_spike=0.5"], "train.loss_spike: 0.5 with train.on_nonfinite stop; allowed: 0, or above 1"),
        (
            ["train.on_nonfinite=rollback", "checkpoint.every=0"],
            "train.on_nonfinite: 'rollback' goes back to a checkpoint",
        ),
        (
            ["precision=bf16", "precision.loss_scale.init_scale=8"],
            "precision.loss_scale.init_scale: 8 has no effect where",
        ),
        (
            ["precision=O1", "precision.loss_scale={mode: fixed, growth_factor: 4}"],
            "precision.loss_scale.growth_factor: 4 has no effect where the scale is fixed; allowed: 2",
        ),
        (
            ["precision.max_consecutive_skips=3"],
            "precision.max_consecutive_skips: 3 has no effect: without a loss scale",
        ),
        (
            ["precision.loss_scale=moving"],
            "precision.loss_scale.mode: 'moving' is not known; allowed: one of none, fixed",
        ),
    ],
)
def test_settings_that_do_not_go_together(configure: Configure, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        configure(*overrides)
    assert str(caught.value).startswith(message)
