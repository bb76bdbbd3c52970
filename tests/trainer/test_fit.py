"""`jaxdist.fit`: the bare loop's bits, resuming with any data, evaluation, callbacks, moving averages, early stops."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jobs import Processes, free_port, torchrun
from levels import levels

import jaxdist
from jaxdist import init
from jaxdist.cli.work.checkpoint import average
from jaxdist.data import own_batches
from jaxdist.data.own_batches import OwnBatches, Placing, _decoded, _encoded, one_pass
from jaxdist.errors import UserError
from jaxdist.models.gpt import gpt
from jaxdist.observe import read_metrics
from jaxdist.optim.ema import ema_of, with_ema
from jaxdist.runtime.run_folder import new_run_directory
from jaxdist.runtime.watch.stop import StopSignal
from jaxdist.specs import BATCH_SPEC
from jaxdist.train_step import TrainStep
from jaxdist.trainer.evaluation import Ending

pytestmark = pytest.mark.xdist_group("fit")  # compiled steps are shared

TX = optax.adam(1e-2)
ZERO3 = {"strategy": "zero3", "min_shard_bytes": 0}
STEPS, ROWS = 6, 8
Metrics = list[tuple[int, dict[str, float]]]


def batches(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, ROWS, 4)).astype(np.float32)
    return [{"x": each, "y": each.sum(-1) > 0} for each in x]


def params() -> dict[str, jax.Array]:
    return {"w": jnp.zeros((8, 4)), "out": jnp.ones(8) / 8}


def logits(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w"].T) @ params["out"]


def loss(params: Any, batch: Any, keys: jax.Array) -> tuple[jax.Array, int]:
    """With random numbers that depend on the step."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)
    losses = optax.sigmoid_binary_cross_entropy(
        logits(params, batch["x"] + 0.1 * noise), batch["y"].astype(jnp.float32)
    )
    return losses.sum(), losses.size


def mesh() -> jax.sharding.Mesh:
    return jaxdist.make_mesh(fsdp=8)


def fit(data: Any, folder: Path, loss: Any = loss, **given: Any) -> jaxdist.FitResult:
    settings = {
        "checkpoint.every": 0,
        "observe.console": "plain",
        "observe.log_every": 1000,
        **given.pop("settings", {}),
    }
    optimizer = given.pop("optimizer", TX)
    whole = {"steps": STEPS, "params": params(), "mesh": mesh(), "run_dir": folder, **ZERO3, **given}
    return jaxdist.fit(loss, optimizer, data, settings=settings, **whole)


class Loop:
    """The bare loop: losses, and the parameters and state after each step."""

    def __init__(self, data: list[Any], optimizer: Any = TX, loss: Any = loss, **given: Any) -> None:
        self.state = jaxdist.init_state(params(), optimizer, mesh(), **ZERO3, **given)
        step = jaxdist.make_train_step(loss, optimizer, mesh(), **ZERO3)
        self.losses, self.params = list[float](), [jax.device_get(self.state.params)]
        for i in range(STEPS):
            self.state, metrics = step(self.state, data[i % len(data)])
            self.losses.append(float(metrics["loss"]))
            self.params.append(jax.device_get(self.state.params))


@pytest.fixture(scope="module")
def bare() -> Loop:
    return Loop(batches(4))


def same(found: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


def test_fit_is_the_bare_loop(bare: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit; callbacks are told each step once, in order, when the next one is under way."""
    told: Metrics = []
    events = list[str]()
    call = TrainStep.__call__

    def counted(self: TrainStep, *given: Any) -> Any:
        events.append("step")
        return call(self, *given)

    def callback(step: int, metrics: Any) -> None:
        told.append((step, metrics))
        events.append(f"told {step}")
        jnp.zeros(3).at[1].set(2.0)  # may use devices

    monkeypatch.setattr(TrainStep, "__call__", counted)
    done = fit(batches(4), tmp_path, callbacks=[callback])
    same(done.state, bare.state)
    assert [step for step, _ in told] == [1, 2, 3, 4, 5, 6]
    assert [metrics["loss"] for _, metrics in told] == bare.losses
    assert events == ["step", *[name for i in range(1, 6) for name in ("step", f"told {i}")], "told 6"]
    assert (done.stopped, done.exit_status, done.ema, done.metrics) == ("", 0, None, told[-1][1])
    assert [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == bare.losses
    assert done.state.params["w"].sharding.shard_shape((8, 4)) == (1, 4)


def test_a_complete_run_says_so_and_has_its_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"settings": {"checkpoint.every": 3}, "eval_data": batches(2)}
    done = fit(batches(4), tmp_path, **given)
    assert "complete: " not in capsys.readouterr().out
    again = fit(batches(4), tmp_path, **given)
    same(again.state, done.state)
    assert "eval/loss" in done.metrics
    assert again.metrics == {name: float(value) for name, value in done.metrics.items()}
    assert f"complete: step {STEPS} was the last\n" in capsys.readouterr().out


class Stateful:
    """As a StatefulDataLoader: epochs, and a state of its own beside a count of what it has read."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.at, self.read, self.loaded = data, 0, 0, False

    def __iter__(self) -> Iterator[Any]:
        self.at, self.loaded = self.at if self.loaded else 0, False
        while self.at < len(self.data):
            self.at, self.read = self.at + 1, self.read + 1
            yield self.data[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": np.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        np.testing.assert_array_equal(state["generator"], np.arange(3))
        self.at, self.loaded = state["at"], True


class WithIteratorState:
    """As a grain.IterDataset: each iterator has a state."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.read = data, 0

    def __iter__(self) -> Any:
        outer = self

        class Iterating:
            at = 0

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> Any:
                if self.at == len(outer.data):
                    raise StopIteration
                self.at, outer.read = self.at + 1, outer.read + 1
                return outer.data[self.at - 1]

            def get_state(self) -> bytes:
                return str(self.at).encode()

            def set_state(self, state: bytes) -> None:
                self.at = int(state)

        return Iterating()


class Tensor:
    """As a tensor of torch, which a tree takes for a leaf."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def numpy(self) -> np.ndarray:
        return self.array


def reused(data: list[Any]) -> Callable[[], Iterator[Any]]:
    """A function that makes a generator, whose batches are in the same memory."""

    def generate() -> Iterator[Any]:
        memory = {name: np.empty_like(leaf) for name, leaf in data[0].items()}
        for batch in data:
            for name, leaf in batch.items():
                memory[name][...] = leaf
            yield memory

    return generate


class Epochs:
    """As a loader whose order depends on the epoch that it is told, and not on what was read before."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.epoch = data, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from (self.data if self.epoch % 2 == 0 else self.data[::-1])


KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda data: data,
    "function": reused,
    "tensors": lambda data: [{name: Tensor(leaf) for name, leaf in batch.items()} for batch in data],
    "state": Stateful,
    "iterator with state": WithIteratorState,
}


@pytest.mark.parametrize(
    "kind", [*list(KINDS)[:1], *[pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS][1:]]]
)
def test_a_stopped_run_goes_on_to_the_bit(
    kind: str, bare: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGTERM, over the end of an epoch of 4 batches."""
    heard, receive = threading.Event(), StopSignal._receive
    monkeypatch.setattr(StopSignal, "_receive", lambda self, name: (receive(self, name), heard.set()))

    def ask(step: int, metrics: Any) -> None:
        if step == 3:  # step 4 is under way
            signal.raise_signal(signal.SIGTERM)  # os.kill may reach another thread, and this one later
            assert heard.wait(60), "a thread hears it, and the run would be over before that"

    done = fit(KINDS[kind](batches(4)), tmp_path, callbacks=[ask])
    stopped = int(done.state.step)
    assert (done.stopped, done.exit_status, stopped) == ("SIGTERM", 75, 4)
    assert f"stopped after step {stopped} by SIGTERM; the same call with run_dir={tmp_path} " in capsys.readouterr().out
    told: Metrics = []
    data = KINDS[kind](batches(4))
    done = fit(data, tmp_path, callbacks=[lambda *given: told.append(given)])
    same(done.state, bare.state)
    assert [step for step, _ in told] == [*range(stopped + 1, STEPS + 1)]
    assert [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == bare.losses
    if "state" in kind:
        assert data.read <= STEPS - stopped + 2, "it read again what it had read before"


@pytest.mark.slow
def test_a_run_that_failed_goes_on_from_its_checkpoint(bare: Loop, tmp_path: Path) -> None:
    def fail(step: int, metrics: Any) -> None:
        if step == 5:
            raise ZeroDivisionError("of a callback")

    with pytest.raises(ZeroDivisionError, match="of a callback"):
        fit(batches(4), tmp_path, callbacks=[fail], settings={"checkpoint.every": 2})
    same(fit(batches(4), tmp_path).state, bare.state)
    assert [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == bare.losses


@pytest.mark.parametrize("kind", ["ones", "rows", "teacher"])
def test_a_loss_that_computes_constants(kind: str, tmp_path: Path) -> None:
    """The first call traces the loss. What jax computes there, or reads of a closed-over array, is no transfer of a
    step."""
    mesh = jaxdist.make_mesh(data=2, fsdp=2)
    teacher = jax.device_put(np.full(4, 2.0, np.float32), NamedSharding(mesh, P("fsdp")))
    weights: dict[str, Callable[[Any], Any]] = {
        "ones": lambda batch: jnp.ones_like(batch[:, 0]).sum(),
        "rows": lambda batch: jax.vmap(lambda row: jnp.float32(1))(batch).sum(),
        "teacher": len,
    }

    def loss(params: Any, batch: Any, keys: Any) -> tuple[Any, Any]:
        want = batch @ teacher if kind == "teacher" else 0.0
        return jnp.square(batch @ params["w"] - want).sum(), weights[kind](batch)

    given = {"params": {"w": np.ones(4, np.float32)}, "mesh": mesh, "strategy": "zero3"}
    batch = np.ones((8, 4), np.float32)
    jaxdist.fit(loss, optax.sgd(0.01), [batch], steps=2, run_dir=tmp_path / "run", **given)
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["loss"]
    assert first == pytest.approx(16.0)


def test_the_folder_of_an_elastic_run_is_not_taken(tmp_path: Path) -> None:
    """Its config.yaml belongs to its log, which `jaxdist replay` computes again."""
    (tmp_path / "elastic.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").write_text("its own")
    loss = lambda params, batch, keys: (jnp.square(batch @ params["w"]).sum(), len(batch))  # noqa: E731
    batch, given = np.ones((8, 4), np.float32), {"params": {"w": np.ones(4, np.float32)}}
    with pytest.raises(UserError, match=r"^run_dir: .* is the folder of an elastic run; allowed: a new folder$"):
        jaxdist.fit(loss, optax.sgd(0.01), [batch], steps=2, run_dir=tmp_path, **given)
    assert (tmp_path / "config.yaml").read_text() == "its own"


def test_moving_average(bare: Loop, tmp_path: Path) -> None:
    """Beside NumPy's; it is what is evaluated, it is sharded, and the parameters are those without one."""
    clean = lambda params, batch, keys: loss(params, batch, jax.random.split(jax.random.key(0), ROWS))  # noqa: E731
    wanted = jax.tree.map(np.float64, bare.params[0])
    for after in bare.params[1:]:
        wanted = jax.tree.map(lambda ema, leaf: 0.8 * ema + 0.2 * leaf, wanted, after)
    done = fit(batches(4), tmp_path, ema=0.8, eval_data=reused(batches(3, seed=1)), settings={"train.eval_every": 3})
    same(done.state.params, bare.state.params)
    jax.tree.map(lambda found, true: np.testing.assert_allclose(found, true, rtol=1e-5), done.ema, wanted)
    assert done.ema["w"].sharding.shard_shape((8, 4)) == (1, 4)
    sums = [clean(done.ema, batch, None) for batch in batches(3, seed=1)]
    assert done.metrics["eval/loss"] == pytest.approx(sum(float(each[0]) for each in sums) / (3 * ROWS), rel=1e-6)
    found = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl") if "eval/loss" in record]
    assert found == [3, 6]
    target = jaxdist.state_target(params(), optax.identity(), jaxdist.make_mesh(fsdp=2), **ZERO3).params
    for ema, saved in ((False, done.state.params), (True, done.ema)):
        with jaxdist.open_pretrained(tmp_path, ema=ema) as pretrained:
            same(pretrained.load(target, say=lambda line: None), saved)
    average(tmp_path, tmp_path / "mean", last=1)  # of one step: its parameters, which are then the moving average too
    with jaxdist.open_pretrained(tmp_path / "mean", ema=True) as pretrained:
        same(pretrained.load(target, say=lambda line: None), done.state.params)


def counted(params: Any, batch: Any, keys: Any, carried: Any) -> tuple[Any, ...]:
    """A loss whose state does not depend on the data: its numbers are shown as metrics."""
    total, weight = loss(params, batch, keys)
    shown = {"shown": (weight * carried["mean"].astype(jnp.float32).sum(), weight)}
    return total, weight, shown, jax.tree.map(lambda leaf: leaf + 1, carried)


@pytest.mark.parametrize(
    "given",
    levels(
        [
            {},
            {"strategy": "ddp", "grad_sync": jaxdist.GradSync(deterministic=True)},
            {"freeze": ("out",), "offload": True},
        ],
        everyday=3,
    ),
    ids=["zero3", "deterministic", "frozen, offloaded"],
)
def test_the_average_covers_a_model_state(given: dict[str, Any], tmp_path: Path) -> None:
    """Its floats, beside NumPy's, in a run that is resumed; others are taken as they are."""
    first = {"mean": jnp.zeros(2, jnp.bfloat16), "count": jnp.int32(0)}
    given = given | {
        "model_state": first,
        "ema": 0.75,
        "eval_data": reused(batches(2)),
        "settings": {"train.eval_every": 3},
    }
    for steps in (3, STEPS):
        done = fit(batches(4), tmp_path, counted, steps=steps, **given)
    wanted = np.float32(0)
    for step in range(1, STEPS + 1):
        wanted = 0.75 * wanted + 0.25 * step
    assert (done.ema_model_state["mean"].dtype, int(done.ema_model_state["count"])) == (jnp.float32, STEPS)
    np.testing.assert_allclose(done.ema_model_state["mean"], [wanted] * 2, rtol=1e-6)
    assert done.metrics["eval/shown"] == pytest.approx(2 * float(jnp.bfloat16(wanted)))
    assert not first["mean"].is_deleted() and float(done.state.model_state["mean"][0]) == STEPS
    average(tmp_path, tmp_path / "mean", last=1)


def test_an_average_without_frozen_parameters() -> None:
    state = jaxdist.init_state(params(), with_ema(TX, 0.9), mesh(), freeze=("out",), **ZERO3)
    ema = ema_of(state.opt_state, state.params)
    assert ema["out"] is state.params["out"] and ema["w"] is state.opt_state.ema["w"]


def test_an_early_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The norm grows from the first evaluation on: with patience=2 the third is the last. So it stays when resumed."""
    norm = lambda params, batch, keys: ((params["w"] ** 2).sum(), 1, {"mean": (batch["x"].sum(), batch["x"].size)})  # noqa: E731
    given = {"eval_data": batches(2), "eval_loss": norm, "patience": 2, "settings": {"train.eval_every": 1}}
    for callbacks in ([], [lambda *_: pytest.fail("the run is over")]):
        done = fit(batches(4), tmp_path, callbacks=callbacks, **given)
        assert (int(done.state.step), done.stopped, done.exit_status) == (3, "patience", 0)
        assert "complete after step 3: 2 evaluations in a row without a lower eval/loss" in capsys.readouterr().out
    record = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert record["eval/mean"] == pytest.approx(float(np.mean([batch["x"] for batch in batches(2)])), rel=1e-5)


def counting(params: Any, batch: Any, keys: jax.Array, state: Any) -> tuple[Any, Any, Any, Any]:
    total, weight = loss(params, batch, keys)
    right = ((logits(params, batch["x"]) > 0) == batch["y"]).sum()
    return total, weight, {"accuracy": (right, weight)}, {"steps": state["steps"] + 1}


def test_state_and_metrics_of_a_loss(tmp_path: Path) -> None:
    start = {"steps": jnp.zeros((), jnp.int32)}
    given: dict[str, Any] = {"model_state": start, "eval_data": batches(2), "settings": {"train.eval_every": 3}}
    done = fit(batches(4), tmp_path, counting, **given)
    assert int(done.state.model_state["steps"]) == STEPS
    assert 0 <= done.metrics["accuracy"] <= 1 and 0 <= done.metrics["eval/accuracy"] <= 1
    assert all("accuracy" in record for record in read_metrics(tmp_path / "metrics.jsonl"))


def poisoned(at: int) -> list[Any]:
    data = batches(STEPS + 4)
    data[at] = {**data[at], "x": data[at]["x"] * np.nan}
    return data


def test_a_skipped_step_is_evaluated(tmp_path: Path) -> None:
    """Its parameters are those of the step before, and the last evaluation is not to be missed."""
    given: dict[str, Any] = {"settings": {"train.on_nonfinite": "skip", "train.eval_every": 3}, "eval_data": batches(1)}
    told: Metrics = []
    done = fit(poisoned(5), tmp_path, callbacks=[lambda step, metrics: told.append((step, metrics))], **given)
    assert not np.isfinite(done.metrics["loss"]) and np.isfinite(done.metrics["eval/loss"])
    assert [step for step, metrics in told if "eval/loss" in metrics] == [3, 6]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.out = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(self.norm(x)))[:, 0]


@pytest.mark.slow
def test_a_module(tmp_path: Path) -> None:
    """Its parameters and state are its loss's; evaluations are in evaluation mode."""

    def classify(model: Net, batch: Any) -> tuple[jax.Array, int]:
        losses = optax.sigmoid_binary_cross_entropy(model(batch["x"]), batch["y"].astype(jnp.float32))
        return losses.sum(), losses.size

    module, data = Net(nnx.Rngs(0)), batches(STEPS)
    trained = jaxdist.nnx_loss(module, classify)
    done = fit(data, tmp_path, trained, params=None, eval_data=data)
    module = jaxdist.nnx_update(module, done.state)
    module.eval()
    found = [float(classify(module, batch)[0]) / ROWS for batch in data]
    assert done.metrics["eval/loss"] == pytest.approx(np.mean(found), rel=1e-5)
    assert done.metrics["eval/loss"] != pytest.approx(done.metrics["loss"], rel=1e-2)
    with pytest.raises(UserError, match="^params: the model has its own; leave them out$"):
        fit(data, tmp_path, trained)


def test_a_step_that_is_not_finite(tmp_path: Path) -> None:
    """It ends the run."""
    mend = "the batch of step 4 holds NaN or inf in 'x'; mend the data, or leave those rows out"
    with pytest.raises(FloatingPointError, match=f"^loss of step 4 is nan; {mend}$"):
        fit(poisoned(3), tmp_path / "stop")


def test_a_loss_that_grows_is_not_the_data_s_doing(tmp_path: Path) -> None:
    """Nor that of the learning rate, before the first update. After it, `fit` has no key for the rate."""
    wild = lambda params, batch, keys: ((params["w"] + 1e30).sum() ** 2, 1)  # noqa: E731
    first = "before any update: look at the loss, the labels and the initial parameters"
    for name, policy, more in (("a", "fp32", ""), ("b", "bf16", ", or take precision=fp32")):
        with pytest.raises(FloatingPointError, match=f"^loss of step 1 is (inf|nan); {first}{more}$"):
            fit(batches(2), tmp_path / name, wild, precision=policy)
    with pytest.raises(FloatingPointError, match=f"^loss of step 2 is (inf|nan), after 1 more in a row .*; {first}$"):
        skips = {"train.on_nonfinite": "skip"}
        fit(batches(2), tmp_path / "c", wild, settings=skips, max_skips=1)
    with pytest.raises(FloatingPointError, match=f"^loss of step 11 is (inf|nan), after 10 more in a row .*; {first}$"):
        fit(batches(2), tmp_path / "e", wild, settings=skips, steps=20)
    later = lambda params, batch, keys: (jnp.exp(1e4 * abs(params["w"].sum())) + params["w"].sum(), 1)  # noqa: E731
    with pytest.raises(FloatingPointError, match="^loss of step 2 is (inf|nan); try a lower learning rate$"):
        fit(batches(2), tmp_path / "d", later)


@pytest.mark.slow
def test_a_rollback(tmp_path: Path) -> None:
    """The run goes on past the batch, which an iterator has given already. What patience had counted since the
    checkpoint is not counted twice: 5 evaluations are worse than the first."""
    told: Metrics = []
    data = iter(poisoned(3))
    rolling = {
        "settings": {"train.on_nonfinite": "rollback", "checkpoint.every": 2, "train.eval_every": 1},
        "eval_data": batches(1),
        "eval_loss": lambda params, batch, keys: ((params["w"] ** 2).sum(), 1),
        "patience": 6,
        "callbacks": [lambda *given: told.append(given)],
    }
    done = fit(data, tmp_path / "rollback", **rolling)
    assert [step for step, _ in told] == [1, 2, 3, 4, 3, 4, 5, 6] and done.stopped == ""
    assert np.isfinite(done.metrics["loss"])
    incidents = (tmp_path / "rollback" / "incidents.jsonl").read_text()
    assert '"batches_passed": 2' in incidents


PLACING: dict[str, int] = {"fsdp": 8, "microbatches": 1}


def own(data: Any, **given: Any) -> OwnBatches:
    return OwnBatches(data, Placing(NamedSharding(mesh(), BATCH_SPEC), PLACING, "data"), **given)


WRONG: dict[str, tuple[Any, str]] = {
    "a batch": (batches(1)[0], "data: is one batch, a dict; give an iterable of batches, such as [batch]"),
    "an array": (np.zeros((8, 4)), "data: is one batch, a ndarray; give an iterable of batches, such as [batch]"),
    "a pair": (
        (np.zeros((8, 4)), np.zeros(8, np.int32)),
        "data: looks like one batch, a tuple of arrays of different kinds; give an iterable of batches, such",
    ),
    "a number": (3, "data: is a int, which gives no batches; give an iterable of batches"),
    "empty": ([], "data: is empty; give at least one batch"),
    "nothing": (lambda: iter(()), "data: gives no batches; give an iterable that does"),
    "rows": ([{"x": np.zeros((12, 2))}], "data: batch 0: 12 rows do not divide by 8 (fsdp 8 x microbatches 1)"),
    "other rows": (
        [{"x": np.zeros((8, 2)), "y": np.zeros(7)}],
        "data: batch 0: y has 7 rows, and x has 8; give as many",
    ),
    "numbers": (
        [{"x": [1, 2]}],
        "data: batch 0: x.0 is a int; allowed: arrays of numbers, [rows, ...]; of a Hugging Face dataset by",
    ),
    "one number": (
        [{"x": np.ones(8), "t": jnp.float32(3)}],
        "data: batch 0: t is one number; allowed: arrays of numbers",
    ),
    "texts": ([{"x": np.array(["a"] * 8)}], "data: batch 0: x is an array of <U1; allowed: arrays of numbers, [rows"),
    "no arrays": ([{}], "data: batch 0 is a dict without arrays; give a tree of arrays [rows, ...]"),
    "large": ([np.full(8, 2**40)], "data: batch 0 holds integers that do not fit into int32; allowed: from"),
    "larger": (
        [{"x": np.array([0, np.inf, np.nan, -1e300] * 2)}],
        "data: batch 0: x holds -1e+300, which is infinite in float",
    ),
    "no rows": ([{"x": np.ones((0, 2))}], "data: batch 0: 0 rows are no batch, give a multiple of 8"),
    "the last of an epoch": (
        [np.zeros((8, 2)), np.zeros((4, 2))],
        "data: batch 1: the array is float64[4, 2], and was float64[8, 2] in the first; give all batches one shape: ",
    ),
    "the end": (iter([np.zeros(8)]), "data: ended after 1 batches; give more, or what can be read again: a list, or"),
}


@pytest.mark.parametrize("name", WRONG)
def test_data_that_are_wrong(name: str) -> None:
    """One line each."""
    data, line = WRONG[name]
    with pytest.raises(UserError) as raised:
        given = own(data)
        for i in range(3):
            given.batch(i)
    assert str(raised.value).replace("float32", "float64").startswith(line), raised.value


class Sampled:
    """As a DataLoader whose sampler is told the epoch."""

    def __init__(self, data: list[Any]) -> None:
        self.sampler = Epochs(data)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)


@pytest.mark.parametrize("kind", [Epochs, Sampled])
def test_data_of_epochs(kind: Any) -> None:
    """set_epoch is told each; those that are passed over count."""
    data = [np.full(8, i, np.float32) for i in range(3)]
    for first in (0, 4):
        made = own(kind(data), first=first)
        found = [int(made.batch(i)[0]) for i in range(first, 9)]
        assert found == [0, 1, 2, 2, 1, 0, 0, 1, 2][first:]
        assert int(made.batch(6)[0]) == 0 and made.position(7) is None


@pytest.mark.parametrize("kind", ["function", "state", "iterator with state"])
def test_positions_of_data(kind: str) -> None:
    """Batches are asked for ahead of the position that is saved; those of before are what they were."""
    data = batches(4)
    first = own(KINDS[kind](data))
    taken = [first.batch(i) for i in range(7)]
    for i, batch in enumerate(taken):
        same(batch, data[i % 4])
    same(first.batch(4), data[0])
    position, again = json.loads(json.dumps(first.position(5))), KINDS[kind](data)
    second = own(again, first=5, position=position)
    same(second.batch(5), data[1])
    assert (position is None) == (kind == "function")
    assert kind == "function" or again.read == 1


def test_a_position_of_other_processes() -> None:
    with pytest.raises(UserError, match="data: its position was saved by 2 processes, and there are 1; start as many"):
        own(Stateful(batches(1)), first=1, position=[None, None])


def test_states_of_data_are_json() -> None:
    """No type is lost, and what is none of them is refused."""
    state = {"a": [1, 2.5, None, True], "b": (b"\x00\xff", "text"), 3: {"c": np.arange(4, dtype=np.uint8)}, "d": {}}
    found = _decoded(_encoded(state))
    np.testing.assert_array_equal(found[3].pop("c"), state[3].pop("c"))  # type: ignore[attr-defined,index]
    assert found == state
    with pytest.raises(UserError, match="data: its state holds a set; allowed: numbers, texts, bytes, arrays"):
        _encoded({"a": {1}})
    for array in (np.array(["a", None], object), np.ones(2, jnp.bfloat16)):
        with pytest.raises(UserError, match=f"data: its state holds a ndarray of {array.dtype}; allowed: numbers, "):
            _encoded([array])


def test_numbers_of_files_with_the_other_byte_order() -> None:
    made = own([{"x": np.arange(8, dtype=">f8"), "y": np.arange(8, dtype=">i4")}]).batch(0)
    same(made, {"x": np.arange(8, dtype=np.float32), "y": np.arange(8, dtype=np.int32)})
    assert (made["x"].dtype, made["y"].dtype) == (np.float32, np.int32)


class Indexed:
    """Batches computed from their number, which raise no IndexError."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        assert number < 2
        return batches(2)[number]


def test_an_epoch_of_data_with_an_index_and_a_length() -> None:
    assert len(list(one_pass(Indexed()))) == len(list(one_pass(batches(2)))) == len(list(one_pass(Indexed))) == 2


def test_lists_of_other_lengths_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_batches, "from_all", lambda value: [value, value + 1])
    with pytest.raises(UserError, match="^data: has 2, 3 batches in the processes; give as many in each"):
        own(batches(2))


def test_a_process_that_has_not_joined_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would train alone, with its own rows: `fit` refuses it, a bare loop is told."""
    init._tell_alone.cache_clear()
    monkeypatch.setenv("RANK", "1")
    for size, alone in (("1", False), ("2", True)):
        monkeypatch.setenv("WORLD_SIZE", size)
        jaxdist.init_state(params(), TX, mesh())
        assert ("RANK is 1 and WORLD_SIZE 2, and this process has joined no job" in caplog.text) == alone
    with pytest.raises(
        UserError, match=r"^RANK is 1 and WORLD_SIZE 2, .*; call join_job\(find_job\(os.environ\)\) before"
    ):
        fit(batches(2), tmp_path)


def test_new_folders_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the same second."""
    monkeypatch.chdir(tmp_path)
    folders = [new_run_directory("fit", make=True) for _ in range(4)]
    assert len(set(folders)) == 4 and all(folder.is_dir() for folder in folders)
    assert not new_run_directory("other").exists()


@pytest.mark.parametrize(("counts", "line"), [((3, 3), ""), ((3, 2), "eval_data: gives 3, 2 batches in the processes")])
def test_as_many_batches_in_all_processes(counts: tuple[int, int], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, of which one is in a thread: each asks the other before each batch."""
    meeting, told = threading.Barrier(2, timeout=10), dict[int, Any]()

    def from_all(value: Any) -> list[Any]:
        told[int(threading.current_thread().name)] = value
        meeting.wait()
        found = [told[0], told[1]]
        meeting.wait()
        return found

    def read(rank: int) -> None:
        try:
            found[rank] = list(own_batches.as_many(iter(range(counts[rank])), "eval_data"))
        except UserError as error:
            found[rank] = str(error)

    monkeypatch.setattr(own_batches, "from_all", from_all)
    found = dict[int, Any]()
    threads = [threading.Thread(target=read, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        assert found[rank].startswith(line) if line else found[rank] == [0, 1, 2]


class Persistent:
    """As a DataLoader with persistent_workers: the same iterator each time, which begins anew."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.at = data, 0

    def __iter__(self) -> Any:
        outer = self
        outer.at = 0

        class Again:
            def __next__(self) -> Any:
                if outer.at == len(outer.data):
                    raise StopIteration
                outer.at += 1
                return outer.data[outer.at - 1]

        self.iterator = getattr(self, "iterator", None) or Again()
        return self.iterator


def test_the_same_iterator_again() -> None:
    made = own(Persistent([np.full(8, i, np.float32) for i in range(3)]))
    assert [int(made.batch(i)[0]) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_generator_that_was_read_already() -> None:
    """Its batches would be passed over again."""
    generator = reused(batches(4))()
    own(generator).batch(0)
    with pytest.raises(UserError, match="data: a generator that was read already, .* after 2 batches"):
        own(generator, first=2)


def test_what_patience_counts() -> None:
    """What is not finite does not count; a rollback goes back to what was counted then."""
    ending = Ending(patience=3)
    assert [ending({"eval/loss": value}) for value in (np.nan, 2.0, 3.0, np.nan, np.inf, np.nan)] == [False] * 6
    assert (ending.best, ending.since) == (2.0, 1)
    ending.restore({"fit": {"best": 5.0, "since": 0}})
    assert (ending.best, ending.since) == (5.0, 0)
    ending.restore({})
    assert (ending.best, ending.since) == (None, 0)


def test_an_evaluation_in_the_precision_of_training(tmp_path: Path) -> None:
    """Under bf16, in parameters of bf16; NaN where nothing has a weight."""

    def typed(params: Any, batch: Any, keys: Any) -> tuple[Any, Any, Any]:
        total, weight = (batch["x"].astype(params["w"].dtype) @ params["w"].T).sum(), ROWS
        return total, weight, {"bytes": (params["w"].dtype.itemsize, 1), "nothing": (0, 0)}

    given = {"settings": {"train.eval_every": 1}, "precision": "bf16", "steps": 1}
    done = fit(batches(1), tmp_path, typed, eval_data=batches(1), **given)
    assert done.metrics["eval/bytes"] == done.metrics["bytes"] == 2
    assert np.isnan(done.metrics["eval/nothing"])


def test_held_out_data_with_nan_do_not_end_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said once, and every step is taken."""
    spoilt = batches(1)
    spoilt[0]["x"][0, 0] = np.nan
    done = fit(batches(2), tmp_path, eval_data=spoilt, patience=1, steps=4, settings={"train.eval_every": 1})
    assert (int(done.state.step), done.stopped) == (4, "")
    assert capsys.readouterr().out.count("warning: eval/loss of step 1 is nan: the held-out data hold NaN or inf") == 1


def test_an_optimizer_of_another_length_is_no_damage(tmp_path: Path) -> None:
    """AdamW is a chain of three, Adam of two; orbax quotes its own arguments."""
    fit(batches(1), tmp_path, optimizer=optax.adamw(0.1), steps=1)
    with pytest.raises(UserError, match=r"step 1: opt_state has other parts than here; model and optimizer must be"):
        fit(batches(1), tmp_path, optimizer=optax.adam(0.1), steps=2)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_mesh_by_default(strategy: str, tmp_path: Path) -> None:
    """Strategies that shard have something to shard over. A number of NumPy and one callback are taken too."""
    told: Metrics = []
    done = jaxdist.fit(
        loss,
        TX,
        batches(1),
        steps=np.int64(1),  # type: ignore[arg-type]
        params=params(),
        run_dir=tmp_path,
        callbacks=lambda *given: told.append(given),
        strategy=strategy,
        min_shard_bytes=0,
    )
    assert [step for step, _ in told] == [1]
    assert done.state.params["w"].sharding.shard_shape((8, 4)) == {"ddp": (8, 4), "zero3": (1, 4)}[strategy]


@pytest.mark.slow
def test_data_that_end_too_early(tmp_path: Path) -> None:
    """The steps that were taken are recorded, told and saved, and the run goes on with better data."""
    told: Metrics = []
    for data, line in ((iter(batches(3)), "ended after 3"), ([*batches(5)[:4], np.zeros((8, 3))], "batch 4")):
        with pytest.raises(UserError, match=line):
            fit(data, tmp_path, callbacks=[lambda *given: told.append(given)])
    assert [step for step, _ in told] == [1, 2, 3, 4]
    done = fit(batches(6), tmp_path, callbacks=[lambda *given: told.append(given)])
    assert [step for step, _ in told] == [1, 2, 3, 4, 5, 6] and done.stopped == ""
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            [{"x": np.zeros((12, 4))}],
            "eval_data: batch 0: 12 rows do not divide by 8 .*nearest numbers of rows that work: 8, 16",
        ),
        ([{"x": np.zeros((8, 4))}], "'y'"),
        (lambda: iter(()), "eval_data: gives no batches"),
    ],
)
def test_an_evaluation_is_tried_first(data: Any, line: str, tmp_path: Path) -> None:
    """Before the first step."""
    with pytest.raises((UserError, KeyError), match=line):
        fit(batches(4), tmp_path, eval_data=data, callbacks=[lambda *_: pytest.fail("a step was taken")])


def test_a_run_that_goes_on_in_another_layout_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fit(batches(4), tmp_path, steps=2)
    fit(batches(4), tmp_path, steps=3)
    assert "after step 2, with train.steps 2 -> 3\n" in capsys.readouterr().out
    double = [jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), batch) for batch in batches(4)]
    sums = jaxdist.Precision(param=jnp.float32, compute=jnp.float32, reduce=jnp.bfloat16)
    given = {"strategy": "ddp", "microbatches": 2, "precision": sums}
    fit(double, tmp_path, steps=4, mesh=jaxdist.make_mesh(data=2, fsdp=4), **given)
    layout = 'mesh.data 1 -> 2, mesh.fsdp 8 -> 4, strategy "zero3" -> "ddp", microbatches 1 -> 2'
    rest = 'precision "fp32" -> "float32 float32 bfloat16", rows 8 -> 16'
    assert f"after step 3, with train.steps 3 -> 4, {layout}, {rest}\n" in capsys.readouterr().out


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a number of callbacks": ({"callbacks": 3}, "callbacks: is 3; allowed: functions (step, metrics); give"),
    "a callback's result": ({"callbacks": [None]}, "callbacks: is a list; allowed: functions (step, metrics); give"),
    "no params": ({"params": None}, "params: None; a loss_fn of your own needs them"),
    "ema": ({"ema": 1.0}, "ema: 1.0; allowed: a number between 0 and 1"),
    "a text as ema": ({"ema": "0.9"}, "ema: '0.9'; allowed: a number between 0 and 1"),
    "patience": ({"patience": 2}, "patience: 2; allowed: an int of 1 or more, with eval_data"),
    "patience of a bool": ({"patience": True, "eval_data": [0]}, "patience: True; allowed: an int of 1 or more"),
    "patience of a float": ({"patience": 2.5, "eval_data": [0]}, "patience: 2.5; allowed: an int of 1 or more"),
    "steps": ({"steps": 0}, "steps: 0"),
    "a setting": ({"eval_every": 2}, "eval_every: is no keyword of fit; give settings={'train.eval_every': ...}"),
    "epochs": ({"epochs": 3}, "epochs: is no keyword of fit; give steps=, the number of the last step"),
    "batch_size": ({"batch_size": 3}, "batch_size: is no keyword of fit; give data, which gives whole batches"),
    "an option": ({"microbatch": 3}, "microbatch: is no keyword of fit; did you mean microbatches=3?"),
    "a model": ({"loss": "gpt"}, "model: is 'gpt'; allowed: a ModelDef, what jaxdist.nnx_loss"),
    "skips": (
        {"max_skips": 3},
        "max_skips: 3 has no effect: without a loss scale, and with train.on_nonfinite stop, no",
    ),
    "eval_loss": ({"eval_loss": loss}, "eval_loss: needs eval_data"),
    "run_dir": ({"folder": ""}, "run_dir: is empty; give a folder"),
    "a file": ({"folder": __file__}, "run_dir: "),
    "settings": (
        {"settings": {"train.evalevery": 1}},
        "settings: 'train.evalevery' is none of fit's; allowed: train.max_hours, ",
    ),
    "nested settings": (
        {"settings": {"train": {"eval_every": 10}}},
        "settings: 'train' is none of fit's; allowed: train.max_hours, ",
    ),
    "a mesh of a text": ({"mesh": "data"}, "mesh: 'data'; allowed: what jaxdist.make_mesh makes, Auto axes; give jax"),
    "a mesh of a dict": ({"mesh": {"data": 2, "fsdp": 4}}, "mesh: {'data': 2, 'fsdp': 4}; allowed: what jaxdist.make"),
    "a value": ({"settings": {"train.on_nonfinite": "no"}}, "train.on_nonfinite: 'no'"),
    "eval_data": (
        {"eval_data": iter(batches(1))},
        "eval_data: can be read once only; give what can be read again: a list, or the function that makes it",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_wrong(name: str, tmp_path: Path) -> None:
    given, line = CALLS[name]
    with pytest.raises(UserError) as raised:
        fit(batches(4), **{"folder": tmp_path / "run", **given})
    assert str(raised.value).startswith(line), raised.value


def test_settings_that_are_none_or_nested() -> None:
    def given(settings: Any) -> str:
        with pytest.raises(UserError) as raised:
            jaxdist.fit(loss, TX, batches(1), steps=1, params=params(), settings=settings)
        return str(raised.value)

    assert given(None) == "settings: None; allowed: a dict, such as {'train.eval_every': 10}; or leave it out"
    assert given("train").startswith("settings: 'train'; allowed: a dict")
    assert given({"train": {"eval_every": 10}}).endswith("; give settings={'train.eval_every': ...}")
    assert given({3: 4}).startswith("settings: 3 is none of fit's")


def test_an_optimizer_that_is_none() -> None:
    with pytest.raises(UserError, match=r"^optimizer: is the function adam; .* give optax.adam\(1e-3\)$"):
        jaxdist.fit(loss, optax.adam, batches(1), steps=1, params=params())  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["torch", "grain", "datasets"])
def test_data_of_other_packages(package: str, tmp_path: Path, bare: Loop) -> None:
    """Where they are installed."""
    found = pytest.importorskip(package, reason=f"{package} is not installed: its data are not tried")
    data = batches(4)
    if package == "torch":
        tensors = [{name: found.from_numpy(leaf) for name, leaf in batch.items()} for batch in data]
        given: Any = found.utils.data.DataLoader(tensors, batch_size=None)
    elif package == "grain":
        given = found.MapDataset.source(data).to_iter_dataset()
    else:
        rows = {name: np.concatenate([batch[name] for batch in data]) for name in data[0]}
        given = found.Dataset.from_dict(rows).with_format("numpy").to_iterable_dataset().batch(ROWS)
    fit(given, tmp_path, steps=3)
    done = fit(given, tmp_path)
    assert int(done.state.step) == int(bare.state.step)
    same(done.state.params, bare.state.params)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"pipe": 2, "fsdp": 4}])
def test_a_model(sizes: dict[str, int], tmp_path: Path) -> None:
    """A ModelDef of blocks, evaluated too, stopped and resumed: as one device trains it."""
    config = jaxdist.Config().model.replace(layers=2, width=16, heads=2, vocab=32)
    model, rng = gpt(config, max_length=8, param_dtype=jnp.float32), np.random.default_rng(0)
    ids = rng.integers(0, 32, (4, 16, 9)).astype(np.int32)
    data = [{"inputs": x[:, :-1], "targets": x[:, 1:], "weights": np.ones((16, 8), np.float32)} for x in ids]
    found = {}
    for name, mesh in (("one", jaxdist.make_mesh()), ("run", jaxdist.make_mesh(**sizes))):
        options = (
            {**ZERO3, "schedule": "one_f_one_b", "microbatches": 2}
            if "pipe" in mesh.shape and mesh.shape["pipe"] > 1
            else ZERO3
        )
        settings = {"train.eval_every": 4, "observe.console": "plain"}
        for steps in (2, 4):
            done = jaxdist.fit(
                model,
                TX,
                data,
                steps=steps,
                mesh=mesh,
                run_dir=tmp_path / name,
                eval_data=data[:2],
                settings=settings,
                **options,
            )
        found[name] = done.metrics
    for key in ("loss", "eval/loss", "grad_norm"):
        assert found["run"][key] == pytest.approx(found["one"][key], rel=2e-5), key


TWO = """
import atexit, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, rows = int(sys.argv[2]), int(sys.argv[3])  # negative: the callback fails
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, rank)
import jax.numpy as jnp, numpy as np, optax
import jaxdist
x = np.random.default_rng(0).normal(size=(4, 8, 4)).astype(np.float32)[:, 4 * rank : 4 * rank + abs(rows)]

class Counting:  # a state of its own, another one in each process
    at = 0
    def __iter__(self):
        while self.at < 4:
            self.at += 1
            yield x[self.at - 1]
        self.at = 0
    def state_dict(self):
        return {"at": self.at, "rank": rank}
    def load_state_dict(self, state):
        assert state["rank"] == rank, state
        self.at = state["at"]

loss = lambda params, batch, keys: (((batch @ params["w"] - 1) ** 2).sum(), batch.shape[0])
mesh, losses = jaxdist.make_mesh(fsdp=8), []
atexit.register(print, "exits as usual, which waits for the other", flush=True)
for steps in (3, 6):
    jaxdist.fit(loss, optax.adam(0.1), Counting(), steps=steps, params={"w": jnp.zeros((4, 8))}, mesh=mesh,
                run_dir="run", strategy="zero3", eval_data=list(x),
                callbacks=[lambda step, metrics: losses.append(metrics["loss"] / (rows > 0 or step < 2))])
print("losses", *losses, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(4, 4), (4, 3), (4, -4)])
def test_two_processes(rows: tuple[int, int], tmp_path: Path) -> None:
    """Each gives its own rows, and goes on from its own state. Where one gives fewer, both say so and end. Where a
    callback fails in one, it ends at once, and the other too."""
    processes, port = Processes(tmp_path), free_port()
    for rank in range(2):
        processes.add(["-c", TWO, str(port), str(rank), str(rows[rank])], {})
    try:
        status = processes.wait(60)
    finally:
        processes.kill()
    if rows == (4, -4):
        assert 0 not in status and "ZeroDivisionError" in processes.err(1), processes.logs()
        assert "exits as usual" not in processes.out(1)
        return
    if rows != (4, 4):
        assert 0 not in status
        assert all("data: batch 0 has 4, 3 rows in the processes; give as many" in processes.err(i) for i in range(2))
        return
    assert status == [0, 0], processes.logs()
    x = np.random.default_rng(0).normal(size=(4, 8, 4)).astype(np.float32)
    square = lambda params, batch, keys: (((batch @ params["w"] - 1) ** 2).sum(), batch.shape[0])  # noqa: E731
    told: Metrics = []
    jaxdist.fit(
        square,
        optax.adam(0.1),
        list(x),
        steps=6,
        params={"w": jnp.zeros((4, 8))},
        mesh=mesh(),
        run_dir=tmp_path / "one",
        callbacks=[lambda *given: told.append(given)],
    )
    for rank in range(2):
        (line,) = [each for each in processes.out(rank).splitlines() if each.startswith("losses")]
        found = [float(each) for each in line.split()[1:]]
        np.testing.assert_allclose(found, [metrics["loss"] for _, metrics in told], rtol=1e-5)


EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FILES = ("fit", "bare_loop", "loop_checkpoints", "loop_load", "loop_evaluation", "loop_profile", "loop_ema")


def test_the_page_shows_the_examples() -> None:
    page = (EXAMPLES.parent / "own_loop.md").read_text()
    assert all((EXAMPLES / f"{name}.py").read_text() in page for name in (*FILES, "loop_processes"))
    load = "def load(" + (EXAMPLES / "loop_load.py").read_text().partition("def load(")[2].partition("\n\n\n")[0]
    assert load in (EXAMPLES.parent / "checkpoints.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_the_example_of_a_job_runs(number: int, tmp_path: Path) -> None:
    processes, port = Processes(tmp_path), free_port()
    try:
        for rank in range(number):
            environ = torchrun(port, rank) if number > 1 else {}
            processes.add([str(EXAMPLES / "loop_processes.py"), "run"], environ)
        assert set(processes.wait(120)) == {0}, processes.logs()
    finally:
        processes.kill()
    assert f"step 100: {number} processes, {8 * number} devices, 0.197" in processes.out(0)
    assert {"50", "100"} <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.slow
def test_the_examples_run() -> None:
    """In one process; the fit last, which ends it with its status."""
    run = "import runpy, sys; [runpy.run_path(name, run_name='__main__') for name in sys.argv[1:]]"
    files = [str(EXAMPLES / f"{name}.py") for name in (*FILES[1:], FILES[0])]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(EXAMPLES.parents[1])}
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); {run}", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    for line in (
        "step 75: loss 0.",
        "steps 41 to 100: loss 0.",
        "loaded: loss 1.",
        "step 100: {",
        "written: ",
        "told of step 100: 0.",
    ):
        assert line in said, said
    assert "average of the parameters, P('fsdp'" in said and "accuracy 0.9" in said.splitlines()[-1]
