"""Embedding and head on pipelines: split over the stages at rest, gathered and reduced once a step; they train like one
device."""

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import oracle
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from levels import levels, others_slow

from jaxdist import registry
from jaxdist.checkpoint import Checkpoints
from jaxdist.config.load import load_config
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.init import init_state, state_target
from jaxdist.jaxpr.axes import moving_axes
from jaxdist.mesh import AnyMesh, abstract_mesh, make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.optim import only_trained
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions, StrategyOptions
from jaxdist.plan.explain import Explanation, explain
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import BATCH_SPEC, bytes_per_device, path_name, spec_axes, spec_leaves
from jaxdist.state import place_params, specs_of_arrays
from jaxdist.step import make_train_step
from jaxdist.trainer.evaluation import make_eval_step

ROOT = Path(__file__).parents[2]
NAMES = registry.names("jaxdist.parallel.strategies")
SOMEONES = "embedding_only.embedding_only"
SOME, NONE = 4096, 2**30  # bytes; of the models below only tables of tokens have as many as the first
INT8 = GradSync("ring", wire_dtype="int8")
MICROBATCHES, BATCH = 4, 32


class Case(NamedTuple):
    strategy: str
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    style: str
    tied: bool
    min_shard_bytes: int = 0
    freeze: tuple[str, ...] = ()
    pipe: int = 2
    algorithm: str = "native"
    schedule: str = "one_f_one_b"

    def __str__(self) -> str:
        return "-".join("x".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in self)

    def make_mesh(self) -> AnyMesh:
        return make_mesh(pipe=self.pipe, **dict(zip(("data", "fsdp", "tensor"), self.mesh, strict=True)))


def config_of(style: str, *, tied: bool) -> ModelConfig:
    case = layouts.Case(style, tied, "ddp", MICROBATCHES, (1, 1, 1))
    return dataclasses.replace(layouts.model_config(case), layers=4)


def model_of(style: str = "gpt2", *, tied: bool = False, dtype: Any = jnp.float32) -> Any:
    return gpt(config_of(style, tied=tied), max_length=layouts.SEQ, param_dtype=dtype)


def others(tree: Any) -> Any:
    """Embedding and head."""
    return {"embed": tree["embed"], "head": tree["head"]}


def reference(config: ModelConfig, freeze: tuple[str, ...]) -> tuple[list[Any], Any]:
    """(gradients of three steps, parameters after them) on one device. freeze: nothing, or the embedding."""
    if not freeze:
        found = layouts.reference(config, BATCH, "fp64")
        return found.grads, found.params
    assert freeze == ("embed.*",)
    tx, params = layouts.optimizer(), dict(layouts.initial(config, "fp64"))
    frozen, grads = jax.tree.map(jnp.asarray, {"embed": params.pop("embed")}), []
    opt_state = tx.init(params)
    loss = jax.jit(jax.grad(lambda params, batch: oracle.loss({**frozen, **params}, batch, config)))
    for i in range(3):
        with jax.numpy_dtype_promotion("standard"):
            grads.append(loss(params, layouts.make_batch(BATCH, i)))
            updates, opt_state = tx.update(grads[-1], opt_state, params)
            params = optax.apply_updates(params, updates)
    return grads, frozen | params


def check(case: Case) -> None:
    config, tx, mesh = config_of(case.style, tied=case.tied), layouts.optimizer(), case.make_mesh()
    with jax.enable_x64(True):
        model = model_of(case.style, tied=case.tied, dtype=jnp.float64)
        options: Any = {"strategy": case.strategy, "freeze": case.freeze, "min_shard_bytes": case.min_shard_bytes}
        target = state_target(model, tx, mesh, **options)
        split = ["pipe" in spec_axes(spec) for spec in spec_leaves(others(specs_of_arrays(target.params)))]
        assert {0: all(split), SOME: any(split) and not all(split), NONE: not any(split)}[case.min_shard_bytes]
        state = place_params(layouts.initial(config, "fp64"), only_trained(tx, case.freeze), target)
        step = make_train_step(
            model,
            tx,
            mesh,
            schedule=case.schedule,
            microbatches=MICROBATCHES,
            precision="fp64",
            grad_sync=GradSync(case.algorithm),
            return_grads=True,
            **options,
        )
        all_grads, params = reference(config, case.freeze)
        for i, grads in enumerate(all_grads):
            batch = jax.device_put(layouts.make_batch(BATCH, i), NamedSharding(mesh, BATCH_SPEC))
            state, metrics = step(state, batch)
            assert oracle.error({unit: metrics["grads"][unit] for unit in grads}, grads) < 1e-10
        assert oracle.error(state.params, params) < 1e-10


EVERYDAY = [
    Case("ddp", (2, 1, 2), "gpt2", True),
    Case("zero1", (1, 2, 1), "gpt2", False, SOME),
    Case("zero3", (1, 2, 2), "llama", False),
    Case("zero2", (1, 2, 1), "llama", False, SOME, ("embed.*",)),
]
MESHES = [(1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 1, 2)]
OPTIONS = list(itertools.product(("gpt2", "llama"), (True, False), (0, SOME)))
CROSSED = [
    *(Case(name, mesh, *OPTIONS[(5 * i + 3 * j) % 8]) for i, name in enumerate(NAMES) for j, mesh in enumerate(MESHES)),
    *(Case(name, (1, 2, 1), "gpt2", i % 2 == 0, SOME * (i // 2), ("embed.*",)) for i, name in enumerate(NAMES)),
    *(Case(name, (1, 2, 2), "llama", i % 2 == 0, NONE) for i, name in enumerate(NAMES)),
    Case("zero1", (1, 2, 1), "gpt2", True, pipe=4, algorithm="ring"),
    Case("zero1", (2, 1, 1), "llama", False, pipe=4, schedule="gpipe"),
    Case(SOMEONES, (1, 2, 2), "gpt2", False, schedule="gpipe"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *levels(EVERYDAY, everyday=8, slow=4, common=2),
        *levels((case for case in CROSSED if case not in EVERYDAY), slow=16, common=4),
    ],
    ids=str,
)
def test_spread_parameters_train_like_on_one_device(case: Case) -> None:
    check(case)


def test_crossed_cases_hold_every_value_of_every_option() -> None:
    """Every strategy on every mesh, and with each strategy and on each mesh every value of every option."""
    found = [case for case in CROSSED if case.min_shard_bytes < NONE]
    assert {(name, mesh) for name in NAMES for mesh in MESHES} <= {case[:2] for case in found}
    for place, names in ((0, NAMES), (1, MESHES)):
        for name in names:
            own = [case[2:5] for case in found if case[place] == name]
            assert all(len(set(values)) == 2 for values in zip(*own, strict=True)), name


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("ddp", {"pipe": 4, "data": 2}, marks=pytest.mark.slow),
        pytest.param("zero3", {"pipe": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        *(pytest.param(name, {"pipe": 4, "fsdp": 2}, marks=pytest.mark.slow) for name in NAMES),
    ],
    ids=str,
)
def test_a_device_holds_a_stages_part(name: str, sizes: dict[str, int]) -> None:
    """Parameters and both moments of Adam of embedding and head, on every device: closed form, and all of it aliased
    by the next state."""
    mesh, tx, model = make_mesh(**sizes), optax.adamw(1e-3), model_of()
    state = init_state(model, tx, mesh, strategy=name)
    tables, rest = 2 * 48 * 32, layouts.SEQ * 32 + 2 * 32  # tokens, and the head's; positions, and a norm
    by_strategy = 1 if name == "ddp" else mesh.shape["fsdp"]
    expected = 3 * 4 * (tables // mesh.shape["tensor"] + rest) // (by_strategy * mesh.shape["pipe"])
    everything = sum(bytes_per_device(leaf, leaf.sharding.spec, mesh) for leaf in jax.tree.leaves(state))
    for device in mesh.devices.flat:
        held = Counter[bool]()
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            unit = re.search(r"\b(embed|head)\b", path_name(path)) is not None
            held[unit] += sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.device == device)
        assert held[True] == expected and held.total() == everything
    options: Any = {"schedule": "one_f_one_b", "microbatches": MICROBATCHES, "return_grads": True}
    data = jax.device_put(layouts.make_batch(BATCH, 0), NamedSharding(mesh, BATCH_SPEC))
    compiled = make_train_step(model, tx, mesh, strategy=name, **options).lower(state, data).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == everything
    assert compiled.output_shardings[1]["grads"] == jax.tree.map(lambda leaf: leaf.sharding, state.params)


def jaxpr_of(strategy: str, *, min_shard_bytes: int = 0, schedule: str = "one_f_one_b", **sizes: int) -> Any:
    mesh, tx, model = abstract_mesh(**sizes), optax.sgd(0.1), model_of()
    options = StepOptions(
        strategy=strategy, schedule=schedule, microbatches=MICROBATCHES, min_shard_bytes=min_shard_bytes
    )
    target, step = state_target(model, tx, mesh, options), make_train_step(model, tx, mesh, options)
    return step.jitted(target).trace(target, layouts.make_batch(BATCH, 0)).jaxpr


def over_pipe(jaxpr: Any, outside: tuple[str, ...] = ()) -> Iterator[tuple[str, bool]]:
    """(collective over pipe, whether it stands in a loop or a condition), once for each place in the program."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        if "pipe" in moving_axes(equation):
            yield name.removesuffix("_invariant"), not {"scan", "while", "cond"}.isdisjoint(outside)
        for sub in jaxprs_in_params(equation.params):
            yield from over_pipe(sub, (*outside, name))


@pytest.mark.parametrize("strategy", others_slow([*NAMES, SOMEONES], "zero3", SOMEONES))
def test_gathers_and_sums_stand_outside_of_the_schedule(strategy: str) -> None:
    leaves = len(jax.tree.leaves(others(model_of().shapes)))
    once = {("all_gather", False): leaves, ("reduce_scatter", False): leaves}
    # Loss and weight; the sends of activations and of their gradients.
    schedule = {("psum", False): 1, ("ppermute", True): 2}
    assert Counter(over_pipe(jaxpr_of(strategy, pipe=2, data=2, fsdp=2))) == once | schedule
    whole = Counter(over_pipe(jaxpr_of(strategy, pipe=2, data=2, fsdp=2, min_shard_bytes=NONE)))
    assert whole == {("psum", False): 2, ("ppermute", True): 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "zero3")]
)
def test_a_program_without_stages_stays_as_it_is(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(schedule: str, **sizes: int) -> str:
        return re.sub(r"0x[0-9a-f]+", "", str(jaxpr_of(strategy, schedule=schedule, **sizes)))

    cases = [{"schedule": "accumulate", "data": 2, "fsdp": 2}, {"schedule": "one_f_one_b", "pipe": 2}]
    spread = [texts(**case) for case in cases]
    monkeypatch.setattr("jaxdist.parallel.compose.sharding_over_pipe", lambda strategy, options: strategy)
    plain = [texts(**case) for case in cases]
    assert [a == b for a, b in zip(spread, plain, strict=True)] == [True, False]


def test_pipe_takes_a_dim_that_is_free_or_the_minor_part_of_one() -> None:
    def place(
        shape: tuple[int, ...],
        *spec: Any,
        unit: str = "head",
        pipe: int = 2,
        small: int = 0,
        strategy: str = "zero3",
        sync: GradSync = GradSync(),  # noqa: B008
    ) -> P:
        mesh = abstract_mesh(pipe=pipe, fsdp=4, tensor=2)
        options = StrategyOptions(POLICIES["fp32"], sync, min_shard_bytes=small, strategy=strategy)
        shapes, specs = (
            {"embed": {}, "blocks": {}, "head": {}} | {unit: {"leaf": leaf}}
            for leaf in (jax.ShapeDtypeStruct(shape, jnp.float32), P(*spec))
        )
        return get_strategy(options).place(shapes, specs, mesh)[unit]["leaf"]

    assert place((8, 16), None, None) == P("fsdp", "pipe")
    assert place((8, 16), None, None, unit="embed") == P("pipe", "fsdp")
    assert place((8, 16), None, None, strategy="ddp") == P("pipe", None)
    assert place((7, 16), None, None) == P(None, ("fsdp", "pipe"))
    assert place((16, 16), "tensor", None) == P(("tensor", "pipe"), "fsdp")
    assert place((16, 7), "tensor", None) == P(("tensor", "fsdp", "pipe"), None)
    assert place((16, 4), None, None) == P("fsdp", "pipe")
    assert place((12,), None) == P("fsdp")  # 3 on a device
    assert place((7,), None) == P(None)
    assert place((8,), None, small=32) == P(("fsdp", "pipe"))
    assert place((8,), None, small=33) == P(None)
    assert place((8, 16), None, None, pipe=1) == P("fsdp", None)
    assert place((8, 16), None, None, sync=INT8) == P("fsdp", None)
    assert place((4, 8, 16), "pipe", None, None, unit="blocks") == P("pipe", "fsdp", None)


def explained(strategy: str, *overrides: str) -> Explanation:
    always = (
        "mesh.pipe=2",
        "mesh.data=1",
        "mesh.tensor=1",
        "parallel.schedule=one_f_one_b",
        "parallel.microbatches=4",
        f"parallel.strategy={strategy}",
        "parallel.min_shard_bytes=0",
    )
    return explain(load_config(ROOT / "configs" / "quickstart.yaml", [*always, *overrides], planned=True))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", others_slow(NAMES, "ddp"))
def test_explain_names_what_is_spread_and_counts_its_copies(strategy: str) -> None:
    found = explained(strategy)
    spread = {row.path: row.bytes_per_device for row in found.parameters if not row.path.startswith("blocks.")}
    assert all("pipe" in spec_axes(row.spec) for row in found.parameters)
    calls = {(each.op, each.purpose): each for each in found.ledger.collectives if each.axes == ("pipe",)}
    for path, nbytes in spread.items():
        gather, back = calls["all_gather", path], calls["reduce_scatter", f"gradient of {path}"]
        assert (gather.calls, gather.conditional, gather.bytes_per_call) == (1, False, nbytes)
        assert (back.calls, back.conditional, back.bytes_per_call) == (1, False, 2 * nbytes)
    blocks = found.memory["parameters"] - sum(spread.values())
    for_a_step = 2 * sum(spread.values())  # over both stages
    fsdp = {"zero1": 2, "zero2": 2}.get(strategy)  # these gather over it once a step as well
    copies = for_a_step if fsdp is None else fsdp * (for_a_step + blocks)
    assert found.memory["gathered copies, the whole step"] == copies
    whole = 2 if strategy == "zero1" else 1
    assert found.memory["gradients"] == whole * (for_a_step + blocks)


@pytest.mark.slow
def test_evaluation_and_checkpoints_of_spread_parameters(tmp_path: Path) -> None:
    model, tx, one = model_of("llama", tied=True), optax.adamw(1e-3), make_mesh()
    batch = layouts.make_batch(BATCH, 0)

    def loss(params: Any, mesh: Any, strategy: str) -> float:
        placing = get_strategy(StrategyOptions(POLICIES["fp32"], strategy=strategy))
        total, weight = make_eval_step(model, mesh, specs_of_arrays(params), placing)(
            params, jax.device_put(batch, NamedSharding(mesh, BATCH_SPEC))
        )["loss"]
        return float(total / weight)

    mesh = make_mesh(pipe=2, fsdp=2, tensor=2)
    state = init_state(model, tx, mesh, strategy="zero3", seed=1)
    with Checkpoints(tmp_path / "saved", keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        got = checkpoints.restore(1, state_target(model, tx, one))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(state))
    assert loss(state.params, mesh, "zero3") == pytest.approx(loss(got.params, one, "ddp"), rel=1e-5)


@pytest.mark.slow
def test_sums_in_int8_leave_embedding_and_head_whole() -> None:
    """Their residual has the shape of what is summed."""
    mesh, tx, model = make_mesh(pipe=2, data=2), optax.sgd(0.1), model_of()
    make: Any = functools.partial(init_state, model, tx, mesh)
    state = make(grad_sync=INT8)
    assert not any(spec_axes(spec) for spec in spec_leaves(others(specs_of_arrays(state.params))))
    step = make_train_step(
        model, tx, mesh, schedule="one_f_one_b", microbatches=MICROBATCHES, grad_sync=INT8, return_grads=True
    )
    exact = make_train_step(model, tx, mesh, schedule="one_f_one_b", microbatches=MICROBATCHES, return_grads=True)
    batch = jax.device_put(layouts.make_batch(BATCH, 0), NamedSharding(mesh, BATCH_SPEC))
    got, want = step(state, batch)[1]["grads"], exact(make(), batch)[1]["grads"]
    assert 0 < oracle.error(others(got), others(want)) < 0.05
