"""What a new user writes and prints first, and the line that answers it."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.init import _tell_whole
from jaxdist.mesh import _tell_idle, abstract_mesh
from jaxdist.optim.ema import with_ema

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SGD = optax.sgd(0.1)
ROWS = np.ones((8, 4), np.float32)


@jax.tree_util.register_pytree_node_class
class Layer:
    """A layer that is a tree of its parameters, and callable, as modules of Equinox are."""

    def __init__(self, w: Any, activation: Any = None) -> None:
        self.w, self.activation = w, activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.asarray(x @ self.w)

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.w, self.activation), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, Any]) -> "Layer":
        return cls(*children)


def loss(params: Any, batch: Any, keys: Any) -> Any:
    w = params.w if isinstance(params, Layer) else params["w"]
    return ((batch.astype(w.dtype) @ w) ** 2).sum(), batch.shape[0]


def run(of_state: dict[str, Any], of_step: dict[str, Any], params: Any = None, **mesh_sizes: int) -> Any:
    """One step from a state with other options than the step's."""
    mesh = jaxdist.make_mesh(**mesh_sizes or {"fsdp": 4})
    state = jaxdist.init_state({"w": jnp.ones((4, 4))} if params is None else params, SGD, mesh, **of_state)
    return jaxdist.make_train_step(loss, SGD, mesh, **of_step)(state, ROWS)


def rerun_a_cell() -> None:
    mesh = jaxdist.make_mesh(data=2)
    state = jaxdist.init_state({"w": jnp.ones((4, 4))}, SGD, mesh)
    step = jaxdist.make_train_step(loss, SGD, mesh)
    for _ in range(2):
        step(state, ROWS)


def step_of_two(arguments: Callable[[Any], tuple[Any, Any]]) -> None:
    mesh = jaxdist.make_mesh(data=2)
    state = jaxdist.init_state({"w": jnp.ones((4, 4))}, SGD, mesh)
    jaxdist.make_train_step(loss, SGD, mesh)(*arguments(state))


WANTS_STATE = ["state: is a", "allowed: a TrainState", "call step(state, batch)"]
ZERO3: dict[str, Any] = {"strategy": "zero3"}
CASES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a function among the parameters": (
        lambda: run({}, {}, params=Layer(jnp.ones((4, 4)), jnp.tanh)),
        ["params.1: <", "is no array", "eqx.partition(model, eqx.is_inexact_array)"],
    ),
    "a counter among the parameters": (
        lambda: run({}, {}, params={"w": jnp.ones((4, 4)), "count": jnp.ones((), jnp.uint32)}),
        ["params.count: uint32", "no gradient", "nnx.to_pure_dict(nnx.state(model, nnx.Param))"],
    ),
    "a complex parameter": (
        lambda: run({}, {}, params={"w": jnp.ones((4, 4), jnp.complex64)}),
        ["params.w: complex64; allowed: real parameters", "as two arrays", "jax.lax.complex"],
    ),
    "zero3 for the step only": (
        lambda: run({}, ZERO3),
        ["state: all parameters are whole", "'ddp'", "'zero3' shards w as", "init_state(..., strategy='zero3')"],
    ),
    "another size of shards": (
        lambda: run(ZERO3 | {"min_shard_bytes": 1 << 20}, ZERO3),
        ["a larger min_shard_bytes", "shards w as", "with min_shard_bytes=0", "rules=[('w', P())]"],
    ),
    "zero3 for the state only": (
        lambda: run(ZERO3, {}),
        ["strategy: 'ddp'", "give make_train_step", "strategy='zero3'"],
    ),
    "fsdp as a strategy": (lambda: run({"strategy": "fsdp"}, {}), ["'fsdp' is not known", "ddp, zero1", "'zero3'?"]),
    "dp as a strategy": (lambda: run({}, {"strategy": "dp"}), ["'dp' is not known", "did you mean 'ddp'?"]),
    "zero as a strategy": (lambda: run({}, {"strategy": "zero"}), ["'zero' is not known", "did you mean 'zero3'?"]),
    "fsdp as a strategy, in YAML": (
        lambda: load_config(QUICKSTART, ["parallel.strategy=fsdp"]),
        ["parallel.strategy: 'fsdp' is not known", "did you mean 'zero3'?"],
    ),
    "dp as an axis": (
        lambda: jaxdist.make_mesh(dp=8),
        ["mesh.dp", "pipe, data, fsdp, expert, context, tensor", "did you mean data=8?"],
    ),
    "a dict as a mesh, for a state": (
        lambda: jaxdist.init_state({"w": jnp.ones(4)}, SGD, {"data": 2, "fsdp": 4}),  # type: ignore[arg-type]
        ["mesh: {'data': 2, 'fsdp': 4}", "give jaxdist.make_mesh(data=2, fsdp=4)"],
    ),
    "a name as a mesh, for a step": (
        lambda: jaxdist.make_train_step(loss, SGD, "data"),  # type: ignore[arg-type]
        ["mesh: 'data'", "give jaxdist.make_mesh(data=-1)"],
    ),
    "a mesh of jax": (
        lambda: jaxdist.make_train_step(loss, SGD, jax.make_mesh((4, 2), ("data", "x"))),
        ["mesh: Explicit axes data, x", "give jaxdist.make_mesh(data=4)"],
    ),
    "a state given twice": (
        rerun_a_cell,
        ["state: was given to an earlier step", "state, metrics = step(state, batch)"],
    ),
    "a size without an axis": (
        lambda: jaxdist.make_mesh(8),  # type: ignore[arg-type]
        ["mesh: 8 names no axis", "pipe, data, fsdp", "give sizes by name: fsdp=8"],
    ),
    "a number of devices": (
        lambda: jaxdist.make_mesh(devices=8),  # type: ignore[arg-type]
        ["mesh: 8 names no axis", "give sizes by name: fsdp=8"],
    ),
    "a text as a size": (
        lambda: jaxdist.make_mesh(data="2"),  # type: ignore[arg-type]
        ["mesh.data='2': allowed are integers >= 1"],
    ),
    "a float as a size": (
        lambda: jaxdist.make_mesh(data=2.0),  # type: ignore[arg-type]
        ["mesh.data=2.0: allowed are integers >= 1"],
    ),
    "a dict of rules": (
        lambda: run({"rules": {"w": P("fsdp")}}, {}),
        ["rules: is a dict", "pairs (pattern, PartitionSpec)", "give list(rules.items())"],
    ),
    "a rule by itself": (
        lambda: run({"rules": ("w", P("fsdp"))}, {}),
        ["rules: 'w' is no pair", "give [('*.kernel', P(None, 'fsdp'))]"],
    ),
    "a name as a spec": (
        lambda: run({"rules": [("w", "fsdp")]}, {}),
        ["rules: ('w', 'fsdp') is no pair", "pairs (pattern, PartitionSpec)"],
    ),
    "an optimizer that is not made, for a state": (
        lambda: jaxdist.init_state({"w": jnp.ones(4)}, optax.adam, jaxdist.make_mesh(data=2)),  # type: ignore[arg-type]
        ["optimizer: is the function adam", "give optax.adam(1e-3)"],
    ),
    "an optimizer that is not made, for a step": (
        lambda: jaxdist.make_train_step(loss, optax.adam, jaxdist.make_mesh(data=2)),  # type: ignore[arg-type]
        ["optimizer: is the function adam", "give optax.adam(1e-3)"],
    ),
    "an optimizer that is not made, with an average": (
        lambda: with_ema(optax.adam, 0.9),  # type: ignore[arg-type]
        ["optimizer: is the function adam", "give optax.adam(1e-3)"],
    ),
    "a class as parameters": (
        lambda: jaxdist.init_state(nnx.Linear, SGD, jaxdist.make_mesh(data=2)),
        ["params: is the class Linear", "jaxdist.nnx_loss(module, fn)"],
    ),
    "a class as a model": (
        lambda: jaxdist.make_train_step(nnx.Linear, SGD, jaxdist.make_mesh(data=2)),  # type: ignore[arg-type]
        ["model: is the class Linear", "a ModelDef, what jaxdist.nnx_loss"],
    ),
    "a batch in place of the state": (lambda: step_of_two(lambda state: (ROWS, state)), WANTS_STATE),
    "parameters in place of the state": (lambda: step_of_two(lambda state: (state.params, ROWS)), WANTS_STATE),
    "a state of NumPy arrays": (
        lambda: step_of_two(lambda state: (jax.device_get(state), ROWS)),
        ["state: step is no array that is laid out on the mesh", "give jax.device_put(new, jax.tree.map("],
    ),
    "a batch of nothing": (
        lambda: step_of_two(lambda state: (state, {})),
        ["batch: has leaves of shapes []", "arrays with the same dim 0"],
    ),
    "a batch of no rows": (
        lambda: step_of_two(lambda state: (state, ROWS[:0])),
        ["batch: 0 rows are no batch, give a multiple of 2"],
    ),
    "no schedule": (lambda: run({}, {"schedule": None}), ["parallel.schedule: ", "it is a NoneType", "accumulate"]),
}
OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a dtype": ({"precision": jnp.bfloat16}, ["precision: is the class bfloat16", "give precision='bf16'"]),
    "a dict": ({"grad_sync": {"algorithm": "ring"}}, ["grad_sync: is a dict", "jaxdist.GradSync(algorithm='ring')"]),
    "a number": ({"freeze": 3}, ["freeze: is 3", "freeze=('embed.*',)"]),
    "a text": ({"seed": "a"}, ["seed: 'a'; allowed: an integer >= 0"]),
    "a typo": ({"microbatch": 2}, ["microbatch: is no keyword", "did you mean microbatches=2?"]),
    "no option": ({"rule": ()}, ["rule: is no keyword", "rules= is an argument of init_state alone"]),
}
CALLED: dict[str, Callable[..., Any]] = {
    "StepOptions": jaxdist.StepOptions,
    "init_state": lambda **given: run(given, {}),
    "make_train_step": lambda **given: run({}, given),
}


@pytest.mark.parametrize("call", CALLED)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_another_kind_or_name_is_answered_by_one_line(name: str, call: str) -> None:
    given, parts = OPTIONS[name]
    with pytest.raises(jaxdist.UserError) as found:
        CALLED[call](**given)
    assert all(part in str(found.value) for part in parts), found.value


def test_options_in_a_dict() -> None:
    with pytest.raises(jaxdist.UserError, match=r"^options: is a dict; allowed: a jaxdist.StepOptions, or None; give"):
        run({"options": {"strategy": "ddp"}}, {})


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_answered_by_one_line(name: str) -> None:
    act, parts = CASES[name]
    with pytest.raises(jaxdist.UserError) as found:
        act()
    text = str(found.value)
    assert "\n" not in text
    assert all(part in text for part in parts), text


WANT_MODELS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda model: jaxdist.fit(model, SGD, [ROWS], steps=1),
    "fit with params": lambda model: jaxdist.fit(model, SGD, [ROWS], steps=1, params={"w": jnp.ones(4)}),
    "make_train_step": lambda model: jaxdist.make_train_step(model, SGD, jaxdist.make_mesh(data=2)),
    "verify": lambda model: jaxdist.verify(model, None, ROWS, jaxdist.make_mesh(data=2)),
    "init_state": lambda model: jaxdist.init_state(model, SGD, jaxdist.make_mesh(data=2)),
}
MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "NNX": (lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "jaxdist.nnx_loss(module, "),
    "Linen": (lambda: linen.Dense(4), "jaxdist.linen_loss(module, variables, "),
}


@pytest.mark.parametrize("call", WANT_MODELS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_without_a_loss_is_told_how_to_get_one(name: str, call: str) -> None:
    make, mend = MODULES[name]
    with pytest.raises(jaxdist.UserError, match="^(model|loss|params): (is|holds) a (Linear|Dense)") as found:
        WANT_MODELS[call](make())
    assert mend in str(found.value)


@pytest.mark.parametrize(("typo", "meant"), [("init_sate", "init_state"), ("make_mash", "make_mesh"), ("zzz", None)])
def test_a_name_that_is_not_there(typo: str, meant: str | None) -> None:
    with pytest.raises(AttributeError) as found:
        getattr(jaxdist, typo)
    assert (found.value.name, found.value.obj) == (typo, jaxdist)
    assert str(found.value).endswith(f"did you mean {meant!r}?" if meant else repr(typo))


FOLDERS = """
import sys, jaxdist
assert not {"jax", "flax", "numpy"} & set(sys.modules)
jaxdist.nn.ColumnParallelLinear, jaxdist.runtime.spawn, jaxdist.data.Loader, jaxdist.checkpoint.Checkpoints
jaxdist.optim.global_norm, jaxdist.collectives.all_reduce, jaxdist.precision
"""


def test_folders_are_there_after_the_import_which_starts_no_jax() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(jaxdist.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", FOLDERS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_mesh_that_leaves_devices_idle_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    _tell_idle.cache_clear()  # of another test's
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        for _ in range(2):
            jaxdist.make_mesh(data=7)
        jaxdist.make_mesh(data=-1)
        jaxdist.make_mesh(data=5, devices=jax.devices()[:6])
    [record] = caplog.records
    assert "uses 7 of 8 devices" in record.getMessage() and "fsdp=-1" in record.getMessage()


def test_a_strategy_that_shards_nothing_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not on one device, and not before a state is made: plans and checks look at many layouts."""
    _tell_whole.cache_clear()  # of another test's
    params, four = {"w": jnp.ones((64, 64))}, jaxdist.make_mesh(data=4, devices=jax.devices()[:4])
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        jaxdist.init_state(params, SGD, four, strategy="ddp")
        jaxdist.state_target(params, SGD, four, strategy="zero3")
        for sizes in ({"fsdp": 4}, {"data": 2, "fsdp": 2}, {"tensor": 4}, {}):
            mesh = jaxdist.make_mesh(**sizes, devices=jax.devices()[:4])
            jaxdist.init_state(params, SGD, mesh, strategy="zero3")
        assert not caplog.records
        for _ in range(2):
            jaxdist.init_state(params, SGD, four, strategy="zero3")
    [record] = caplog.records
    said = "strategy: 'zero3' shards over fsdp, expert and context, which have one device each here: every device of "
    assert record.getMessage().startswith(f"{said}data=4 has all parameters; give make_mesh(fsdp=4)")


def test_a_strategy_whose_axes_divide_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Not where parameters are small, one is sharded, or rules keep them whole."""
    _tell_whole.cache_clear()
    mesh, odd = jaxdist.make_mesh(data=2, fsdp=4), {"w": jnp.ones((7, 9)), "v": jnp.ones(7)}
    with caplog.at_level(logging.WARNING, logger="jaxdist"):
        jaxdist.init_state(odd, SGD, mesh, strategy="ddp")
        jaxdist.init_state(odd, SGD, mesh, strategy="zero3", min_shard_bytes=2**20)
        jaxdist.init_state({**odd, "u": jnp.ones(8)}, SGD, mesh, strategy="zero3")
        jaxdist.init_state(odd, SGD, mesh, strategy="zero3", rules=[("*", P())])
        assert not caplog.records
        for _ in range(2):
            jaxdist.init_state(odd, SGD, mesh, strategy="zero3")
    [record] = caplog.records
    said = (
        "strategy: 'zero3' shards over fsdp=4, which divides no dim of a parameter: every device has all of them; give"
    )
    assert record.getMessage().startswith(said)


def test_a_callable_tree_is_no_function_that_makes_parameters() -> None:
    def trained(params: Any) -> list[Any]:
        state, _ = run({}, {}, params=params)
        return jax.tree.leaves(jax.device_get(state.params))

    np.testing.assert_array_equal(trained(Layer(jnp.eye(4))), trained({"w": jnp.eye(4)}))


ALIKE: list[tuple[dict[str, Any], Any]] = [
    (ZERO3 | {"min_shard_bytes": 2**20}, {"w": jnp.ones((4, 4))}),  # every parameter is small
    (ZERO3, {"w": jnp.ones((4, 3))}),  # one dim of two divides
    (ZERO3, {"w": jnp.ones((4, 4)), "b": jnp.ones(3)}),  # some do not divide
    (ZERO3 | {"freeze": ("b",)}, {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}),
]


@pytest.mark.parametrize(("options", "params"), ALIKE, ids=str)
def test_a_state_of_the_same_options_is_taken(options: dict[str, Any], params: Any) -> None:
    mesh = jaxdist.make_mesh(fsdp=4)
    step = jaxdist.make_train_step(loss, SGD, mesh, **options)
    target = jaxdist.state_target(params, SGD, mesh, **options)
    state, _ = step.lower(target, ROWS).out_info
    assert jax.tree.map(jnp.shape, state.params) == jax.tree.map(jnp.shape, target.params)


def test_an_axis_of_size_1_shards_nothing() -> None:
    state, metrics = run({}, ZERO3, data=2)
    assert int(state.step) == 1 and np.isfinite(metrics["loss"])


def test_a_state_and_a_step_are_one_line() -> None:
    mesh, params = jaxdist.make_mesh(fsdp=4), {"w": jnp.ones((4, 4))}
    options = jaxdist.StepOptions(strategy="zero3", precision="bf16", microbatches=2)  # type: ignore[arg-type]
    state, step = jaxdist.init_state(params, SGD, mesh, options), jaxdist.make_train_step(loss, SGD, mesh, options)
    told = "strategy='zero3', mesh: fsdp=4, schedule='accumulate', microbatches=2, precision='bf16'"
    assert repr(step) == f"TrainStep({told}, not compiled yet)"
    size = "16 parameters, 36 B a device, mesh: fsdp=4"  # 4 of them, and five counts
    assert repr(jax.block_until_ready(state)) == f"TrainState(step 0, {size})"
    new, _ = step(state, ROWS)
    assert repr(step) == f"TrainStep({told})"
    assert repr(state) == f"TrainState(used up by the step it was given to, {size})"
    assert repr(jax.block_until_ready(new)) == f"TrainState(step 1, {size})"
    assert repr(jax.device_get(new)) == "TrainState(step 1, 16 parameters)"
    assert repr(jaxdist.state_target(params, SGD, mesh, options)) == f"TrainState(abstract, {size})"


def test_whatever_a_state_holds_it_has_a_text() -> None:
    state, seen = jaxdist.init_state({"w": jnp.ones((4, 4))}, SGD, jaxdist.make_mesh(data=2)), []

    def look(state: Any) -> Any:
        seen.append(repr(state))
        return state

    jax.eval_shape(jax.vmap(look), jax.tree.map(lambda leaf: leaf[None], state))
    assert seen == ["TrainState(abstract, 16 parameters)"]
    for leaf in (None, 1.0, jax.P("data"), state.step.sharding, jax.ShapeDtypeStruct((2,), jnp.float32)):
        assert repr(jax.tree.map(lambda _, leaf=leaf: leaf, state)).startswith("TrainState(")


def test_a_ledger_and_a_sharding_table_are_printed_as_tables() -> None:
    mesh, params = abstract_mesh(fsdp=64), {"w": jnp.ones((64, 4)), "b<1>": jnp.ones(4)}
    target = jaxdist.state_target(params, SGD, mesh, strategy="zero3")
    step = jaxdist.make_train_step(loss, SGD, mesh, strategy="zero3")
    found = jaxdist.ledger(step, target, np.ones((64, 64), np.float32))
    heads, *rows, empty, total = str(found).splitlines()[1:]
    assert heads.split()[:3] == ["op", "axes", "n"] and len(rows) == len(found.collectives) > 1 and not empty
    assert any("reduce_scatter" in row and "FSDP reduce-scatter" in row for row in rows)
    assert total.startswith("A device sends ")
    assert "and 1 more" in found.text(rows=len(rows) - 1)
    table = jaxdist.sharding_table(target.params, {"w": jax.P("fsdp"), "b<1>": jax.P()}, mesh)
    for each in (found, table):
        shown = each._repr_html_()
        assert shown.startswith("<pre>") and shown.endswith("</pre>") and "<1>" not in shown


def test_what_cannot_be_printed_is_escaped() -> None:
    """Messages quote files of others, such as a dtype in the header of safetensors."""
    line = str(UserError("a\0b,\n  c\ud800 \x1b[2J é 한"))
    assert line == r"a\x00b, c\ud800 \x1b[2J é 한" and line.isprintable()
