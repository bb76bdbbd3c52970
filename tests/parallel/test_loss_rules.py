"""What a loss of a user may not do is refused, in one line that says what to write."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from losses import plain, returning, rows, stateful, steps_of, trace

import jaxdist
from jaxdist.errors import UserError
from jaxdist.jaxpr.source import line_of_user
from jaxdist.jaxpr.walk import every_equation
from jaxdist.mesh import abstract_mesh


def in_condition(h: jax.Array, keys: Any, state: Any) -> Any:
    return lax.cond(h[0, 0] > 0, lambda: jaxdist.batch_mean(h), lambda: state)


def objective(w: jax.Array, x: jax.Array) -> jax.Array:
    return (jaxdist.batch_mean(x @ w) ** 2).sum()


def inside(gradient: Any) -> Any:
    """A loss that holds gradient(w, x), a tree of arrays, of `objective`."""

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        found = gradient(params["w"], batch["x"])
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(found)), batch["x"].shape[0]

    return loss


def by_linear_transpose(w: jax.Array, x: jax.Array) -> Any:
    return jax.linear_transpose(lambda w: jaxdist.batch_mean(x @ w), w)(w[0])


def penalised(w: jax.Array, x: jax.Array) -> Any:
    return lax.scan(lambda total, _: (total + jax.grad(objective)(w, x), None), jnp.zeros_like(w), length=2)[0]


def ruled(how: Any, backward: Any, mean: Any = jaxdist.batch_mean) -> Any:
    """A loss with a function whose derivative is given, backward(x, g, mean)."""

    def centre(x: jax.Array) -> jax.Array:
        return x - mean(x)

    own = how(centre)
    if how is jax.custom_vjp:
        own.defvjp(lambda x: (centre(x), x), lambda x, g: (backward(x, g, mean),))
    else:
        own.defjvp(lambda primals, tangents: (own(*primals), backward(*primals, *tangents, mean)))
    return returning(lambda h: ((own(h) ** 2).sum(), h.shape[0]))


def normalised(x: jax.Array) -> jax.Array:
    """The identity, whose cotangents are divided by their size over all rows."""
    return x


def scaled_gradients(mean: Any) -> Any:
    own = jax.custom_vjp(normalised)
    own.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.sqrt(mean(g**2)),))
    return returning(lambda h: ((own(h) ** 2).sum(), h.shape[0]))


def of_this_device(x: jax.Array) -> jax.Array:
    return jaxdist.batch_mean(x, sync=False)


def through_ref(h: jax.Array, keys: Any, state: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(4))
    ref[...] = h.mean(0)
    return ref[...]


def in_branch(h: jax.Array, keys: Any, state: Any) -> Any:
    return lax.cond(state[0] > 0, lambda: of_this_device(h), lambda: state)


def solved(h: jax.Array) -> Any:
    """Implicit derivatives: the solution of (2 + mean of h) v = mean of h."""
    mean = jaxdist.batch_mean(h)
    found = lax.custom_linear_solve(
        lambda v: 2 * v + jaxdist.batch_mean(h * v), mean, lambda _, b: b / (2 + mean), symmetric=True
    )
    return found.sum(), 1


def called_linear(h: jax.Array) -> Any:
    """The mean, with the transpose that it has on one device."""
    call = jax.custom_derivatives.linear_call
    return call(lambda _, x: jaxdist.batch_mean(x).sum(), lambda _, g: jnp.full(h.shape, g / h.shape[0]), (), h), 1


def hidden(hide: Any) -> Any:
    """A loss with hide(g) in the backward pass of a custom_vjp."""
    own = jax.custom_vjp(lambda x: x)
    own.defvjp(lambda x: (x, None), lambda _, g: (hide(g),))
    return returning(lambda h: (own(h).sum(), h.shape[0]))


def over_vmap(name: str, mean: Any = jaxdist.batch_mean) -> Any:
    """A loss that takes means in a vmap whose axis has a name. It has as many parts as the mesh has devices."""
    means = jax.vmap(mean, axis_name=name)
    return returning(lambda h: (means(jnp.stack([h, h + 1])).sum(), h.shape[0]))


def row_by_row(loop: Any) -> Any:
    """A loss with a mean of each row, by loop(function, h)."""
    return returning(lambda h: (loop(lambda row: (row - jaxdist.batch_mean(row)).sum(), h).sum(), h.shape[0]))


def time_major(h: jax.Array) -> Any:
    rounds = jnp.stack([h, 2 * h])
    return (rounds - jaxdist.batch_mean(rounds)).sum(), h.shape[0]


ZEROS, MEANS = np.zeros(4, np.float32), "allowed: .*correct.sum"
GRADIENT = r"takes the gradient of something with a batch_mean \(test_loss_rules.py:\d+\).*vmap\(jax.grad\(f\)"
RULE = "batch_mean: called in a function with a custom_vjp or custom_jvp, .*give that function the mean"
ROWS = r"batch_mean: called for each row, .*\(test_loss_rules.py:\d+\).*moveaxis"
REFUSED: dict[str, tuple[Any, Any, str]] = {  # a loss, its model_state, the message
    "local": (
        stateful(lambda h, keys, state: state + h.mean(0)),
        ZEROS,
        "model_state is computed from this device.* jaxdist.batch_mean",
    ),
    "local in a scan": (
        stateful(lambda h, keys, state: lax.scan(lambda total, row: (total + row, None), state, h)[0]),
        ZEROS,
        "from this device",
    ),
    "the number of rows": (
        stateful(lambda h, keys, state: {"n": state["n"] + h.shape[0]}),
        {"n": 0},
        "model_state.n is computed from the number of this device's rows",
    ),
    "the number of rows, as an array": (
        stateful(lambda h, keys, state: state + jnp.ones(h.shape[0]).sum()),
        jnp.float32(0),
        "model_state is computed from the number of this device's rows",
    ),
    "a mean in a vmap over rows": (row_by_row(lambda f, h: jax.vmap(f)(h)), (), ROWS),
    "a mean in a loop over rows": (row_by_row(lax.map), (), ROWS),
    "a mean of rows in dim 1": (returning(time_major), (), ROWS),
    "a mean over dim 1": (returning(lambda h: (jaxdist.batch_mean(h, axis=1).sum(), 1)), (), r"moveaxis\(x, 1, 0\)"),
    "a complex mean": (
        returning(lambda h: (abs(jaxdist.batch_mean(lax.complex(h, h))).sum(), 1)),
        (),
        "x is complex64; .*x.real",
    ),
    "an integer loss": (returning(lambda h: ((h > 0).sum(), 1)), (), "sum of losses is int32; allowed: a float"),
    "a complex loss": (returning(lambda h: (lax.complex(h, h).sum(), 1)), (), "sum of losses is complex64"),
    "in a while_loop": (
        stateful(lambda h, keys, state: lax.while_loop(lambda v: v[0] < 1, lambda v: v + jaxdist.batch_mean(h), state)),
        ZEROS,
        "batch_mean in a while, .*a fixed number of rounds, lax.fori_loop",
    ),
    "by keys": (stateful(lambda h, keys, state: jax.random.normal(keys[0], (4,))), ZEROS, "rows or keys"),
    "a count of rows": (
        stateful(lambda h, keys, state: state + (h > 0).sum(dtype=jnp.int32)),
        jnp.int32(0),
        "int32, and is computed from the batch",
    ),
    "a count of means": (
        stateful(lambda h, keys, state: jaxdist.batch_mean(h).sum().astype(jnp.int32)),
        jnp.int32(0),
        "int32, and is computed from the batch",
    ),
    "a gradient": (inside(jax.grad(objective)), (), GRADIENT),
    "a gradient in jit": (inside(jax.jit(jax.grad(jax.jit(objective)))), (), GRADIENT),
    "a gradient, rematerialised": (inside(jax.grad(jax.checkpoint(objective))), (), GRADIENT),  # type: ignore[attr-defined]
    "a gradient in a vmap": (
        inside(lambda w, x: jax.vmap(jax.grad(objective), (0, None))(jnp.stack([w, w]), x)),
        (),
        GRADIENT,
    ),
    "a gradient in a scan": (inside(penalised), (), GRADIENT),
    "a vjp": (inside(lambda w, x: jax.vjp(objective, w, x)[1](1.0)), (), GRADIENT),
    "a Hessian": (inside(jax.hessian(objective)), (), GRADIENT),
    "a transpose": (inside(by_linear_transpose), (), GRADIENT),
    "a gradient in a metric": (
        lambda params, batch, keys: (
            *plain(params, batch, keys),
            {"size": (jax.grad(objective)(params["w"], batch["x"]).sum(), 1)},
        ),
        (),
        GRADIENT,
    ),
    "a custom_vjp": (ruled(jax.custom_vjp, lambda x, g, mean: g - mean(g)), (), RULE),
    "a custom_jvp": (ruled(jax.custom_jvp, lambda x, g, mean: g - mean(g)), (), RULE),
    "a custom_vjp, in its rule": (scaled_gradients(jaxdist.batch_mean), (), RULE),
    "a linear solve": (returning(solved), (), "batch_mean in a custom_linear_solve, whose derivative is a rule"),
    "a linear call": (returning(called_linear), (), "batch_mean in a linear_call, whose derivative is a rule"),
    "a mean by hand, as of SyncBN": (
        returning(lambda h: ((h - lax.pmean(h.mean(0), "data")).sum(), h.shape[0])),
        (),
        "contains psum over data.*for statistics use jaxdist.batch_mean",
    ),
    "the number of a device": (
        returning(lambda h: (h.sum() * lax.axis_index("data").astype(h.dtype), h.shape[0])),
        (),
        "contains axis_index over data; a loss may use no collective and no axis_index",
    ),
    "dropout that stores its stream": (
        returning(lambda h: (nnx.Dropout(0.5, rngs=nnx.Rngs(0))(h).sum(), h.shape[0])),
        (),
        "draws random numbers with a stored key, the same at every step",
    ),
    "a sum in a backward pass": (hidden(lambda g: lax.psum(g, "data")), (), "contains psum over data"),
    "a stored key in a backward pass": (
        hidden(lambda g: g + jax.random.normal(jax.random.key(0), g.shape)),
        (),
        r"a stored key, the same at every step \(test_loss_rules.py",
    ),
    "a vmap's axis": (over_vmap("data"), (), "jax.vmap or pmap with axis_name='data', .*another name"),
    "a vmap's other axis": (over_vmap("fsdp"), (), "axis_name='fsdp'"),
    "a ref": (stateful(through_ref), ZEROS, r"uses a jax.Ref \(test_loss_rules.py:\d+\)"),
    "no key": (returning(lambda h: (lax.rng_uniform(0.0, 1.0, (4,)).sum() * h.sum(), 1)), (), "rng_uniform"),
    "a complex state": (plain, {"z": np.zeros(2, np.complex64)}, r"model_state.z: complex64\[2\]; .*two floats"),
    "an empty state": (plain, {"z": np.zeros((0, 3))}, r"model_state.z: \w+\[0, 3\]; .*leave an empty one out"),
    "a state of half bytes": (plain, jnp.zeros(2, jnp.int4), r"model_state: int4\[2\]; .*8 bits or more"),
    "two leaves of one name": (plain, {"a.b": ZEROS, "a": {"b": ZEROS}}, "model_state.a.b: two leaves .*rename"),
    "in a condition": (stateful(in_condition), ZEROS, "batch_mean in a cond"),
    "another shape": (stateful(lambda h, keys, state: state[:2]), ZEROS, r"given as float32\[4\] .* as float32\[2\]"),
    "another dtype": (stateful(lambda h, keys, state: state.astype(jnp.bfloat16)), ZEROS, r"returned as bfloat16\[4\]"),
    "another leaf": (stateful(lambda h, keys, state: {"n": state["m"]}), {"m": ZEROS}, "model_state.m was only given"),
    "another tree": (stateful(lambda h, keys, state: list(state)), (ZEROS,), "another kind of tree"),
    "no new state": (lambda params, batch, keys, state: plain(params, batch, keys), ZEROS, "returned 2 values"),
    "no old state": (lambda params, batch, keys: (*plain(params, batch, keys), {}, 0), (), "has no model_state"),
    "a state not taken": (plain, ZEROS, r"is called with \(params, batch, keys, model_state\)"),
    "a state not given": (stateful(lambda *_: 0), (), r"give it to init_state\(..., model_state=\)"),
    "no keys": (lambda params, batch: plain(params, batch, None), (), r"write def loss_fn\(params, batch, keys\)"),
    "keys in the state": (plain, {"rng": jax.random.key(0)}, "model_state.rng: .*random keys are no state"),
    "Flax's form": (returning(lambda h: ((h.sum(), 12), {"size": h})), (), MEANS),
    "a mean and aux": (returning(lambda h: (h.mean(), {"size": (h.sum(), h.size)})), (), MEANS),
    "a mean": (returning(lambda h: h.mean()), (), "must return two scalars"),
    "rows": (returning(lambda h: (h, h.size)), (), "must return two scalars"),
    "metrics in a list": (returning(lambda h: (h.sum(), h.size, [h.sum()])), (), "metrics of type list.*" + MEANS),
    "three numbers": (returning(lambda h: (h.sum(), 1.0, 2.0)), (), "metrics of type float"),
    "a metric's mean": (returning(lambda h: (h.sum(), h.size, {"size": h.mean()})), (), "'size' must be two scalars"),
    "a metric's rows": (returning(lambda h: (h.sum(), h.size, {"size": (h, 1)})), (), "'size' must be two scalars"),
    "a name of a metric": (returning(lambda h: (h.sum(), h.size, {"loss": (h.sum(), 1)})), (), "'loss' is jaxdist's"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_loss_may_not_do_is_one_line(case: str) -> None:
    loss, model_state, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as found:
        trace(loss, model_state)
    assert "\n" not in str(found.value)


def forward_mode(w: jax.Array, x: jax.Array) -> Any:
    return jax.jvp(lambda w: objective(w, x), (w,), (w,))


def gradient_of_rows(w: jax.Array, x: jax.Array) -> Any:
    """What the message of `GRADIENT` says."""
    return jaxdist.batch_mean(jax.vmap(jax.grad(lambda w, row: ((row @ w) ** 2).sum()), (None, 0))(w, x))


def mean_given(w: jax.Array, x: jax.Array) -> Any:
    """What the message of `RULE` says."""

    @jax.custom_vjp
    def centre(x: jax.Array, mean: jax.Array) -> jax.Array:
        return x - mean

    centre.defvjp(lambda x, mean: (x - mean, None), lambda _, g: (g, -g.sum(0)))
    h = x @ w
    return centre(h, jaxdist.batch_mean(h))


def counted(params: Any, batch: Any, keys: Any, state: Any) -> Any:
    """A loss whose random numbers come from a count in its state."""
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), state), (4,))
    return ((batch["x"] @ params["w"] + noise) ** 2).sum(), batch["x"].shape[0], {}, state + 1


def in_rounds(h: jax.Array) -> Any:
    rounds = lax.fori_loop(0, 3, lambda _, v: v / 2 + jaxdist.batch_mean(h), jnp.zeros(4))
    return ((h - rounds) ** 2).sum(), h.shape[0]


def over_heads(h: jax.Array) -> Any:
    return jax.vmap(lambda head: head - jaxdist.batch_mean(head), 1, 1)(h).sum(), h.shape[0]


def hard_coded(params: Any, batch: Any, keys: Any) -> Any:
    """A loss that runs with 6 rows on a device only."""
    h = batch["x"].reshape(6, 2) @ params["w"]
    return (h - jaxdist.batch_mean(h * jnp.ones((6, 1)))).sum(), 6


def of_equal_rows(h: jax.Array, keys: Any, state: Any) -> Any:
    """A state that does not depend on the number of rows, though its program does."""
    return 0.9 * state + 0.1 * jnp.broadcast_to(state / 3, h.shape).mean(0)


ALLOWED: dict[str, tuple[Any, Any]] = {  # a loss, its model_state
    "a gradient of what has no mean": (inside(jax.grad(lambda w, x: ((x @ w) ** 2).sum())), ()),
    "a gradient beside a mean": (
        inside(lambda w, x: jax.grad(lambda v: ((x @ v - jaxdist.batch_mean(x @ w)) ** 2).sum())(w)),
        (),
    ),
    "a gradient of this device's mean": (inside(lambda w, x: jax.grad(lambda w: of_this_device(x @ w).sum())(w)), ()),
    "a mean of gradients of rows": (inside(gradient_of_rows), ()),
    "forward mode": (inside(forward_mode), ()),
    "a mean given to a custom_vjp": (inside(mean_given), ()),
    "this device's mean in a custom_vjp": (scaled_gradients(of_this_device), ()),
    "this device's mean in a branch": (stateful(in_branch), ZEROS),
    "a vmap's axis of another name": (over_vmap("expert"), ()),
    "this device's mean over a vmap's axis": (over_vmap("data", of_this_device), ()),
    "a count for keys": (counted, jnp.int32(0)),
    "a mean in a loop of rounds": (returning(in_rounds), ()),
    "a mean in a vmap over heads": (returning(over_heads), ()),
    "a mean of all dims": (returning(lambda h: ((h - jaxdist.batch_mean(h, axis=None)).sum(), h.shape[0])), ()),
    "a mean of this device's mean": (stateful(lambda h, keys, state: jaxdist.batch_mean(h.mean(0)[None])), ZEROS),
    "a mean of rows in a loop over rows": (
        returning(lambda h: (lax.map(lambda row: row.sum(), h - jaxdist.batch_mean(h)).sum(), h.shape[0])),
        (),
    ),
    "a number of rows": (hard_coded, ()),
    "a state of equal rows": (stateful(of_equal_rows), ZEROS),
    "sizes of axes": (
        returning(
            lambda h: (
                ((h - jaxdist.batch_mean(h)) ** 2).sum() / (h.shape[0] * lax.axis_size("data") * lax.axis_size("fsdp")),
                1,
            )
        ),
        (),
    ),
}


def test_a_check_runs_nothing_that_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """The new state is computed for two numbers of rows, without the rest of the loss."""

    def loss(params: Any, batch: Any, keys: Any, state: Any) -> Any:
        jax.debug.print("h {}", batch["x"].sum())
        total, count = plain(params, batch, keys)
        return total, count, {}, of_equal_rows(batch["x"] @ params["w"], keys, state)

    trace(loss, ZEROS)
    jax.effects_barrier()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("case", ALLOWED)
def test_what_sounds_alike_is_allowed(case: str) -> None:
    loss, model_state = ALLOWED[case]
    state, _ = trace(loss, model_state).out_info
    assert jax.tree.map(jnp.shape, state.model_state) == jax.tree.map(jnp.shape, model_state)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [gradient_of_rows, forward_mode, mean_given])
def test_what_the_messages_say_trains_alike_in_every_layout(gradient: Any) -> None:
    """In float64: a loss with the gradient of a mean, and its own gradient."""
    found = []
    with jax.enable_x64(True):
        for sizes in ({"data": 1}, {"data": 2, "fsdp": 2}, {"data": 3}):
            params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(2, 4)))}

            def loss(params: Any, batch: Any, keys: Any) -> Any:
                shared = jax.tree.leaves(gradient(params["w"], batch["x"]))
                per_row = [leaf if leaf.shape[:1] == batch["x"].shape[:1] else leaf[None] for leaf in shared]
                total = sum(jaxdist.batch_mean(jnp.sin(leaf)).sum() for leaf in per_row)
                return total * batch["x"].shape[0], batch["x"].shape[0]

            state, step = steps_of(loss, (), params=params, sizes=sizes, precision="fp64", return_grads=True)
            _, metrics = step(state, {"x": rows(0)["x"].astype(np.float64)})
            found.append(jax.device_get((metrics["loss"], metrics["grads"])))
    for other in found[1:]:
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-10), other, found[0])


def test_what_is_not_trained_needs_no_derivative() -> None:
    """A loop that has none in reverse, over frozen parameters."""

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        frozen = lax.while_loop(lambda v: v.sum() < 10, lambda v: v * 2, params["frozen"])
        return ((batch["x"] @ params["w"] + frozen) ** 2).sum(), batch["x"].shape[0]

    params = {"frozen": jnp.ones(4), "w": jnp.ones((2, 4))}
    trace(loss, params=params, freeze=["frozen"])
    with pytest.raises(ValueError, match="[Rr]everse-mode differentiation"):
        trace(loss, params=params)


def test_a_collective_in_a_metric_is_refused_too() -> None:
    with pytest.raises(UserError, match="contains psum over data"):
        trace(returning(lambda h: (h.sum(), h.size, {"size": (lax.psum(h.sum(), "data"), 1)})))


def test_a_model_has_no_model_state() -> None:
    from jaxdist.config.schema import ModelConfig
    from jaxdist.models.gpt import gpt

    config = ModelConfig(layers=1, width=8, heads=2, vocab=8, mlp_width=8).resolved()
    with pytest.raises(UserError, match="model_state: a ModelDef has none"):
        jaxdist.state_target(
            gpt(config, max_length=8, param_dtype=jnp.float32), optax.sgd(0.1), abstract_mesh(), model_state=ZEROS
        )


def test_a_batch_mean_in_a_region_of_ones_own_is_refused() -> None:
    mesh = jaxdist.make_mesh(data=2)
    own = jax.shard_map(jaxdist.batch_mean, mesh=mesh, in_specs=jaxdist.BATCH_SPEC, out_specs=jaxdist.BATCH_SPEC)
    with pytest.raises(UserError, match="batch_mean: called in a shard_map over data"):
        own(jnp.ones((4, 2)))


def test_keys_do_not_depend_on_the_default_generator() -> None:
    """With "rbg", a `jax.vmap` over keys draws other numbers in other layouts."""

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        assert str(jax.random.key_impl(keys)) == "threefry2x32"
        return plain(params, batch, keys)

    with jax.default_prng_impl("rbg"):
        trace(loss)


@pytest.mark.parametrize("name", ["/home/user/lib/loss.py", "<stdin>"])
def test_a_message_names_the_line_of_the_user(name: str) -> None:
    """In a folder that is called "lib" too, and in what is typed in; never one of jaxdist, though it is nearer."""
    space: dict[str, Any] = {"mean": jaxdist.batch_mean}
    exec(compile("def loss(x):\n    return mean(x)", name, "exec"), space)
    sites = every_equation(jax.make_jaxpr(space["loss"])(jnp.ones(3)))
    [found] = [line_of_user(site.equation) for site in sites if site.equation.primitive.name == "div"]
    assert found == f"{Path(name).name}:2"


def test_a_state_of_an_nnx_module_may_be_the_model_state() -> None:
    """An `nnx.State` that is made of the arguments of a step, and merged in the trace of a check."""
    module = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    graph, params, statistics = nnx.split(module, nnx.Param, nnx.BatchStat)

    def loss(params: Any, batch: Any, keys: Any, state: Any) -> Any:
        merged = nnx.merge(graph, params, state)
        out = merged(jnp.tile(batch["x"], (1, 2)))
        new = jax.tree.map(lambda leaf: jaxdist.batch_mean(leaf[None]), nnx.state(merged, nnx.BatchStat))
        return (out**2).sum(), out.shape[0], {}, new

    state, _ = trace(loss, statistics, params=params).out_info
    assert [leaf.shape for leaf in jax.tree.leaves(state.model_state)] == [(4,), (4,)]
