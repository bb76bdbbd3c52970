"""Optimizer state in host memory: where each array is, by its type; the same training; checkpoints; what it saves."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist import init_state, make_mesh, make_train_step, state_target
from jaxdist.build import assemble
from jaxdist.checkpoint import Checkpoints
from jaxdist.config.load import load_config
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.mesh import HOST, abstract_mesh
from jaxdist.plan.compiled.memory import batch_of, resident_bytes
from jaxdist.plan.explain import IN_HOST_MEMORY, explain, memory_at_rest
from jaxdist.state import TrainState
from jaxdist.trainer.train import train

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
Space = jax.memory.Space


def loss(params: Any, batch: Any, keys: Any) -> tuple[Any, Any]:
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return jnp.square(hidden @ params["down"]).sum(), jnp.asarray(batch["x"].shape[0], hidden.dtype)


def params() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0).normal
    return {"up": jnp.asarray(draw(size=(8, 16))), "down": jnp.asarray(draw(size=(16, 4)))}


def batch(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(8, 8))}


def kinds(state: TrainState) -> tuple[set[str | None], set[str | None]]:
    """Memory kinds of the moments, and of everything else."""
    arrays = jax.tree.leaves(state.opt_state)
    moments = [leaf for leaf in arrays if leaf.ndim]
    others = jax.tree.leaves(state._replace(opt_state=[leaf for leaf in arrays if not leaf.ndim]))
    assert len(moments) >= 2
    return {leaf.sharding.memory_kind for leaf in moments}, {leaf.sharding.memory_kind for leaf in others}


OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "muon": lambda: optax.contrib.muon(1e-2),
}


def trained(offload: bool, *, optimizer: str, strategy: str, sizes: dict[str, int], **options: Any) -> TrainState:
    """Three steps in float64."""
    mesh, tx = make_mesh(**sizes), OPTIMIZERS[optimizer]()
    state = init_state(params(), tx, mesh, strategy=strategy, offload=offload, **options)
    step = make_train_step(loss, tx, mesh, strategy=strategy, precision="fp64", microbatches=2, **options)
    for i in range(3):
        state, _ = step(state, batch(i))
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "strategy", "options"),
    [
        ("adamw", "zero3", {}),
        pytest.param("muon", "zero1", {}, marks=pytest.mark.slow),
        pytest.param("adamw", "zero2", {"freeze": ("up",)}, marks=pytest.mark.slow),
        pytest.param("adamw", "ddp", {"grad_sync": GradSync(deterministic=True)}, marks=pytest.mark.slow),
    ],
)
def test_trains_as_on_the_device(optimizer: str, strategy: str, options: dict[str, Any]) -> None:
    """Bit for bit: the program is the same but for where the state is stored."""
    case = {"optimizer": optimizer, "strategy": strategy, "sizes": {"data": 2, "fsdp": 2}} | options
    with jax.enable_x64(True):
        want, got = trained(False, **case), trained(True, **case)
    assert kinds(got) == ({HOST}, {"device"}) and kinds(want) == ({"device"}, {"device"})
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype and a.sharding.spec == b.sharding.spec
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def traced(*overrides: str) -> tuple[TrainState, Any]:
    """The step of the quickstart on 8 GPUs that are not here: its state's layout, and the traced function."""
    config = load_config(QUICKSTART, ["optimizer.name=adamw", *overrides], planned=True)
    mesh = abstract_mesh(**vars(config.mesh))
    parts = assemble(config, mesh)
    return parts.target, parts.step.jitted(parts.target).trace(parts.target, batch_of(config, mesh))


@pytest.mark.slow
def test_types_say_where_everything_is() -> None:
    target, step = traced("memory.offload.optimizer=true")
    moments = [leaf for leaf in jax.tree.leaves(target.opt_state) if leaf.ndim]
    assert kinds(target) == ({HOST}, {None}) and len(moments) == 2 * len(jax.tree.leaves(target.params))
    jaxpr = step.jaxpr.jaxpr
    inputs, outputs = ([x for x in each if x.aval.memory_space == Space.Host] for each in (jaxpr.invars, jaxpr.outvars))
    assert [x.aval.shape for x in inputs] == [x.aval.shape for x in outputs] == [leaf.shape for leaf in moments]
    # Each is fetched once, and not before the gradients are there: it would lie beside the activations otherwise.
    moves = [each for each in jaxpr.eqns if each.primitive.name == "device_put"]
    fetched = [each for each in moves if each.invars[0].aval.memory_space == Space.Host]
    assert len(fetched) == len(moments)
    barriers = [each for each in jaxpr.eqns if each.primitive.name == "optimization_barrier"]
    [barrier] = [each for each in barriers if fetched[0].invars[0] in each.outvars]
    assert all(each.invars[0] in barrier.outvars for each in fetched)
    near = [x.aval.shape for x in barrier.invars if x.aval.memory_space == Space.Device and x.aval.ndim]
    assert near == [leaf.shape for leaf in jax.tree.leaves(target.params)]  # the gradients


def test_a_program_for_gpus_moves_it() -> None:
    """Lowered for CUDA, which needs no GPU: what is in host memory, what is copied from there and back."""
    target, step = traced("memory.offload.optimizer=true", "model.layers=1")
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    moments = sum(leaf.ndim > 0 for leaf in jax.tree.leaves(target.opt_state))
    head = text[text.index("@main(") :].split("\n", 1)[0]
    arguments, results = head.split(") -> (")
    assert arguments.count(f'mhlo.memory_kind = "{HOST}"') == results.count(f'mhlo.memory_kind = "{HOST}"') == moments
    places = [line for line in text.splitlines() if "@annotate_device_placement" in line]
    assert sum(f'_xla_buffer_placement = "{HOST}"' in line for line in places) >= moments
    assert sum('_xla_buffer_placement = "device"' in line for line in places) >= moments
    _, step = traced("model.layers=1")
    assert "annotate_device_placement" not in step.lower(lowering_platforms=("cuda",)).as_text()


def test_a_program_for_gpus_fetches_the_anchor_of_replicas_in_an_outer_step_only() -> None:
    keys = ["optimizer.name=adamw", "model.layers=1", "mesh={data: 2, fsdp: 1}", "parallel.strategy=ddp"]
    keys += ["parallel.local={every: 10, offload: true, outer: {name: nesterov, lr: 1.0, momentum: 0.5}}"]
    config = load_config(QUICKSTART, [*keys, "train.eval_every=0"], planned=True)
    parts = assemble(config, mesh := abstract_mesh(**vars(config.mesh)))
    batch, target = batch_of(config, mesh), parts.target
    inner = parts.step.jitted(target).trace(target, batch)
    outer = parts.step.outer(0, target).trace(target, parts.step.inner_metrics(target, batch))
    texts = [step.lower(lowering_platforms=("cuda",)).as_text() for step in (inner, outer)]
    leaves = len(jax.tree.leaves((target.params, target.opt_state.outer)))
    anchor = resident_bytes(parts.replicas.one.params)
    assert memory_at_rest(target)[IN_HOST_MEMORY] == 2 * anchor  # with the momentum
    assert [text.count('_xla_buffer_placement = "device"') for text in texts] == [0, leaves]


@pytest.mark.slow
def test_explain_finds_no_moment_on_the_device() -> None:
    found = [
        explain(load_config(QUICKSTART, ["optimizer.name=adamw", f"memory.offload.optimizer={on}"], planned=True))
        for on in ("false", "true")
    ]
    before, after = (each.memory for each in found)
    counts = 2 * 4  # of steps: one for Adam, one for the schedule
    assert before["optimizer state"] == 2 * before["parameters"] + counts and "host memory" not in "".join(before)
    assert after["optimizer state"] == counts
    assert after["host memory, optimizer state"] == 2 * before["parameters"]
    assert found[0].ledger.wire_bytes == found[1].ledger.wire_bytes


def test_a_checkpoint_goes_to_either_memory(tmp_path: Path) -> None:
    tx = optax.adam(1e-2)
    like = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in params().items()}

    def target(offload: bool, **sizes: int) -> TrainState:
        return state_target(like, tx, make_mesh(**sizes), strategy="zero3", offload=offload)

    saved = init_state(like, tx, make_mesh(fsdp=4), strategy="zero3", offload=True)
    filled = jax.tree.map(lambda leaf: jax.device_put(np.full(leaf.shape, 3.0, leaf.dtype), leaf.sharding), saved)
    assert kinds(filled) == ({HOST}, {"device"})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, filled, {})
        checkpoints.wait()
        for asked in (target(True, fsdp=4), target(True, fsdp=2), target(False, fsdp=4)):
            restored = checkpoints.restore(1, asked)
            for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(asked), strict=True):
                assert got.sharding == want.sharding and (np.asarray(got) == 3).all()
                assert (got.sharding.memory_kind == HOST) == (want.sharding.memory_kind == HOST)


def test_devices_without_host_memory_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdist.init.has_host_memory", lambda mesh: False)
    target = state_target(params(), optax.adam(1e-2), make_mesh(fsdp=2), offload=True)
    assert not {leaf.sharding.memory_kind for leaf in jax.tree.leaves(target)} & {HOST}


YAML = """
model: {{layers: 1, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
mesh: {{fsdp: 2}}
parallel: {{strategy: zero3, min_shard_bytes: 0}}
train: {{steps: 1, eval_every: 0, sample_tokens: 0}}
memory: {{offload: {{optimizer: true}}}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""


@pytest.mark.slow
def test_a_run_on_cpus_says_that_it_is_without_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    for i in range(3):
        (tmp_path / "data" / f"{i}.py").write_text("x = 1 + 1\n" * 500)
    (tmp_path / "tiny.yaml").write_text(YAML.format(path=tmp_path / "data"))
    assert train(load_config(tmp_path / "tiny.yaml"), tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert said.count("without effect: simulated CPU devices have no host memory beside their own") == 1
    assert "MiB a device in host memory" in said
