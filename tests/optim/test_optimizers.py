"""Learning-rate schedules, what is decayed, what Muon takes; and that every optimizer sees whole tensors in every
layout."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from levels import levels, others_slow

import jaxdist
from jaxdist.config.load import load_config
from jaxdist.config.resolve import warmup_of
from jaxdist.config.rules.fields import check_section
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.errors import UserError
from jaxdist.init import init_state, state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.optim.make import decay_mask, learning_rate, learning_rates, make_optimizer
from jaxdist.optim.muon import muon_dims, scale_by_muon
from jaxdist.optim.update import call_update
from jaxdist.parallel.options import StepOptions
from jaxdist.specs import leaves_by_name, path_name
from jaxdist.state import place_params
from jaxdist.step import make_train_step

MODEL = ModelConfig(style="gpt2", layers=2, width=16, heads=4, vocab=32)


@pytest.mark.parametrize(("schedule", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_schedules(schedule: str, middle: float) -> None:
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=4, final_lr_ratio=0.1)
    rates = learning_rates(config, 24)
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)  # the first step already moves
    assert rates[13] > middle * 0.99 > rates[14] * 0.9
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1, rel=1e-5)
    assert np.all(np.diff(rates[4:]) <= 0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "own"])
def test_rates_are_as_wide_as_floats_are(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`jaxdist verify` compares steps in float64. A schedule of one's own gets the step as an integer."""
    (tmp_path / "rates_of_my_own.py").write_text(
        "import jax.numpy as jnp\ndef table(config, *, steps):\n    return lambda step: jnp.arange(9.0)[step]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "rates_of_my_own.table" if schedule == "own" else schedule
    config = OptimizerConfig(schedule=name, warmup_steps=2, lr=0.3)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert learning_rate(config, 9)(jnp.int32(5)).dtype == jnp.float64


def test_without_warm_up_the_first_rate_is_the_peak() -> None:
    assert learning_rates(OptimizerConfig(lr=0.5), 10)[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("steps", "rising"), others_slow([(20, 10), (10, 10), (9, 4), (8, 4), (1, 0)], (10, 10), (9, 4))
)
def test_a_warm_up_that_is_longer_than_the_run(steps: int, rising: int) -> None:
    """It is as long as was asked for while the run is, and half of a shorter run."""
    rates = learning_rates(OptimizerConfig(lr=1.0, warmup_steps=10), steps)
    assert warmup_of(10, steps) == rising
    assert np.argmax(rates) == max(0, rising - 1) and rates.max() == pytest.approx(1)
    assert rates[0] == pytest.approx(1 / max(1, rising))


def test_dotted_paths() -> None:
    """An optimizer and a schedule of somebody else's, after jaxdist's warm-up and clipping."""
    own = {"name": "outsider.optimizer.momentum", "schedule": "outsider.optimizer.stable_decay"}
    config = OptimizerConfig(lr=1.0, warmup_steps=4, momentum=0.5, clip_norm=1.0, **own)
    check_section(config, "optimizer")
    rates = learning_rates(config, 15)
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 1, *[1] * 6, 0.8, 0.6, 0.4, 0.2, 0], atol=1e-6)
    optimizer, params, moved, momentum = make_optimizer(config, steps=15), {"w": jnp.zeros(2)}, 0.0, 0.0
    state = optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for rate in rates[:3]:
            updates, state = optimizer.update({"w": jnp.array([0.0, 7.0])}, state, params)
            params = optax.apply_updates(params, updates)
            momentum = 0.5 * momentum + 1.0
            moved -= rate * momentum
    np.testing.assert_allclose(params["w"], [0, moved], rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "path", "line"),
    [
        ("name", "outsider.optimizer.no_optimizer", "'outsider.optimizer.no_optimizer' gives a float, not a Gradient"),
        ("name", "outsider.optimizer.adam", "module 'outsider.optimizer' ("),
        ("name", "optax.lamb", "'optax.lamb' is no entry of jaxdist.optim.make: as a function, it does not take what"),
        (
            "name",
            "os.system",
            "'os.system' is no entry of jaxdist.optim.make: it is a function of the interpreter; allo",
        ),
        (
            "schedule",
            "outsider.optimizer.no_schedule",
            "'outsider.optimizer.no_schedule' gives a float; allowed: step ->",
        ),
        (
            "schedule",
            "os.system",
            "'os.system' is no entry of jaxdist.optim.make: it is a function of the interpreter; a",
        ),
        ("schedule", "nowhere.rate", "no module 'nowhere' for the dotted path 'nowhere.rate'; install it, or run this"),
    ],
)
def test_dotted_paths_that_are_wrong(key: str, path: str, line: str) -> None:
    with pytest.raises(UserError) as raised:
        make_optimizer(OptimizerConfig(**{key: path}), steps=10)
    assert str(raised.value).startswith(f"optimizer.{key}: {line}"), raised.value


@pytest.mark.parametrize("name", ["outsider.optimizer.momentum", "adamw", "muon"])
def test_optimizers_of_deterministic_runs(name: str, tmp_path: Path) -> None:
    """Of a dotted path the step finds out, in the traced program, whether it sums over elements."""
    (tmp_path / "run.yaml").write_text("parallel: {grad_sync: {deterministic: true}}")
    read = lambda: load_config(tmp_path / "run.yaml", [f"optimizer.name={name}"])  # noqa: E731
    if name != "muon":
        assert read().optimizer.name == name
        return
    with pytest.raises(UserError, match="optimizer.name: 'muon' sums over whole parameters"):
        read()


def test_vectors_are_not_decayed_however_they_are_stacked() -> None:
    shapes = gpt(MODEL, max_length=8).shapes
    mask = {path_name(path): value for path, value in jax.tree_util.tree_leaves_with_path(decay_mask(shapes))}
    assert {name for name, decays in mask.items() if not decays} == {
        name for name in mask if name.endswith((".bias", ".scale"))
    }
    assert mask["blocks.mlp.up.kernel"] and mask["embed.tokens.table"]
    vector = {"gamma": jnp.ones((3, 4)), "kernel": jnp.ones((3, 4, 4))}  # of three blocks
    own = decay_mask({"embed": {"table": jnp.ones((8, 4))}, "blocks": vector, "head": {"gamma": jnp.ones(4)}})
    assert own == {"embed": {"table": True}, "blocks": {"gamma": False, "kernel": True}, "head": {"gamma": False}}
    assert decay_mask({"blocks": vector}) == {"blocks": {"gamma": True, "kernel": True}}  # no model: nothing is stacked


@pytest.mark.parametrize("blocks", [list, lambda rows: dict(enumerate(rows))])
@jax.numpy_dtype_promotion("standard")  # as the optimizers of optax need it
def test_blocks_of_a_tree_of_ones_own_are_not_stacked(blocks: Any) -> None:
    """As of a list, and of an `nnx.List`: a matrix of them was taken for a stack of vectors."""
    block = {"kernel": jnp.ones((4, 6)), "gamma": jnp.ones(6)}
    tree = {"embed": jnp.ones((8, 4)), "blocks": blocks([block, block]), "head": {"kernel": jnp.ones((4, 8))}}
    other = {"embed": tree["embed"], "layers": tree["blocks"], "head": tree["head"]}  # with a name that is no unit
    names = [name.replace("blocks", "layers") for name in leaves_by_name(tree)]
    decayed = leaves_by_name(decay_mask(tree))
    assert [*decayed.values()] == [name.endswith(("kernel", "embed")) for name in names]
    for name in ("adamw", "muon", "adafactor"):
        updates = []
        for each in (tree, other):
            tx = make_optimizer(OptimizerConfig(name=name, clip_norm=0), steps=3)
            updates.append(tx.update(jax.tree.map(jnp.cos, each), tx.init(each), each)[0])
        assert leaves_by_name(updates[0]["blocks"]).keys() == leaves_by_name(updates[1]["layers"]).keys()
        jax.tree.map(np.testing.assert_array_equal, updates[0]["blocks"], updates[1]["layers"])
    assert decay_mask({**tree, "blocks": block})["blocks"] == {"kernel": True, "gamma": False}  # rows of 4 and of 6


def test_muon_takes_the_kernels_of_blocks() -> None:
    shapes = gpt(MODEL, max_length=8).shapes
    dims = {
        path_name(path): value
        for path, value in jax.tree_util.tree_leaves_with_path(
            muon_dims(shapes), is_leaf=lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)
        )
    }
    taken = {name for name, value in dims.items() if value is not None}
    layers = ("attention.qkv.linear", "attention.out", "mlp.up", "mlp.down")
    assert taken == {f"blocks.{name}.kernel" for name in layers}
    assert dims["blocks.attention.qkv.linear.kernel"].output_axis == (2, 3, 4)
    foreign = muon_dims({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)})
    assert foreign["b"] is None and foreign["w"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", levels(("adamw", "sgd", "muon", "lion", "adafactor"), everyday=5, slow=2))
def test_every_optimizer_takes_the_same_step_in_every_layout(name: str) -> None:
    """Adafactor, Muon and clipping look across a tensor: local statistics would differ here."""
    options = OptimizerConfig(name=name, lr=1e-2, clip_norm=0.1, eps=1e-6)
    ids = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((8, 8), np.float32)}

    def params_after(strategy: str, **sizes: int) -> object:
        with jax.numpy_dtype_promotion("standard"):
            tx, mesh = make_optimizer(options, steps=3), make_mesh(**sizes)
            width = 128 if name == "adafactor" else 16  # it factors dims of 128 and more
            config = dataclasses.replace(MODEL, style="llama", width=width, vocab=width * 2)
            model = gpt(config, max_length=8, param_dtype=jnp.float64)
            state = place_params(model.init(jax.random.key(0)), tx, state_target(model, tx, mesh, strategy=strategy))
            step = make_train_step(model, tx, mesh, strategy=strategy, precision="fp64")
            for _ in range(2):
                state, _ = step(state, batch)
        return jax.device_get(state.params)

    # Llama has no biases: the gradient of a key bias is zero but for rounding, and Lion would take the sign of that.
    with jax.enable_x64(True):
        assert oracle.error(params_after("zero3", data=2, fsdp=2, tensor=2), params_after("ddp")) < 1e-9


def random_tree(shapes: object, seed: int) -> object:
    rng = np.random.default_rng(seed)
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape)), shapes, is_leaf=is_shape)


LAYERS, WIDTH = 3, 128
STACKED_SHAPES = {
    "embed": {"table": (160, WIDTH)},
    "blocks": {
        "qkv": {"kernel": (LAYERS, WIDTH, 4, 3, 32), "bias": (LAYERS, 4, 3, 32)},
        "down": {"kernel": (LAYERS, 256, WIDTH), "bias": (LAYERS, WIDTH)},
        "small": {"kernel": (LAYERS, 8, 4, 4)},
    },
    "head": {"norm": {"scale": (WIDTH,)}},
}


OF_TENSORS = {
    "novograd": optax.novograd(1e-2, weight_decay=0.1),  # one number for each parameter
    "injected": optax.inject_hyperparams(optax.adamw)(1e-2),  # numbers that are those of all blocks
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(1e-2)),
    "decay": optax.adamw(1e-2, weight_decay=0.5, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
}


@pytest.mark.parametrize("name", others_slow(OF_TENSORS, "clip", "decay", "novograd", "injected"))
def test_per_block_is_the_optimizer_of_each_block_alone(name: str) -> None:
    shapes = {
        "embed": {"table": (8, 4)},
        "blocks": {"kernel": (3, 4, 6), "scale": (3, 4)},
        "head": {"norm": {"scale": (4,)}},
    }
    params, *grads = (random_tree(shapes, seed) for seed in range(3))
    others = {name: params[name] for name in ("embed", "head")}
    wanted = [{"blocks": jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])} for i in range(3)] + [others]
    plain, wrapped, got = OF_TENSORS[name], jaxdist.per_block(OF_TENSORS[name]), params
    with jax.numpy_dtype_promotion("standard"):
        states, state = [plain.init(part) for part in wanted], wrapped.init(params)
        for grad in grads:
            for i, part in enumerate(wanted):
                own = {"blocks": jax.tree.map(lambda leaf, i=i: leaf[i], grad["blocks"])} if i < 3 else grad
                updates, states[i] = plain.update({key: own[key] for key in part}, states[i], part)
                wanted[i] = optax.apply_updates(part, updates)
            updates, state = wrapped.update(grad, state, got)
            got = optax.apply_updates(got, updates)
    blocks = jax.tree.map(lambda *rows: jnp.stack(rows), *(part["blocks"] for part in wanted[:3]))
    assert oracle.error(got, {**wanted[3], "blocks": blocks}) < 1e-6
    if name == "injected":
        assert state.blocks.hyperparams["learning_rate"].shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", others_slow(OF_TENSORS, "clip", "decay"))
def test_per_block_takes_the_same_step_in_every_layout(name: str) -> None:
    batch = {"inputs": np.arange(64).reshape(8, 8) % 32, "targets": np.arange(64).reshape(8, 8) % 7}
    batch |= {"weights": np.ones((8, 8), np.float32)}

    def params_after(strategy: str, **sizes: int) -> object:
        with jax.numpy_dtype_promotion("standard"):
            tx, mesh = jaxdist.per_block(OF_TENSORS[name]), make_mesh(**sizes)
            model = gpt(dataclasses.replace(MODEL, style="llama"), max_length=8, param_dtype=jnp.float64)
            options = StepOptions(strategy=strategy, precision="fp64")
            state = place_params(model.init(jax.random.key(0)), tx, state_target(model, tx, mesh, options))
            step = make_train_step(model, tx, mesh, options)
            for _ in range(3):
                state, _ = step(state, batch)
        return jax.device_get(state.params)

    with jax.enable_x64(True):
        assert oracle.error(params_after("zero3", data=2, fsdp=2, tensor=2), params_after("ddp")) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", levels(("adafactor", "muon", "adamw", "sgd", "lion"), everyday=5))
def test_a_block_moves_as_if_it_were_alone(name: str) -> None:
    """An optimizer that takes means over a parameter takes them over one block's: stacked blocks are as many layers.

    The gradients of block 1 are a thousand times smaller. Kernels are matrices of the input by all outputs.
    """
    options = OptimizerConfig(name=name, lr=1e-2, warmup_steps=2, weight_decay=0.1, clip_norm=0)

    def alone(tree: Any, block: int) -> Any:
        def one(path: Any, leaf: jax.Array) -> jax.Array:
            return leaf[block].reshape(leaf.shape[1], -1) if "kernel" in str(path) else leaf[block].ravel()

        return jax.tree_util.tree_map_with_path(one, tree["blocks"])

    def steps(params: Any, grads: list[Any]) -> Any:
        tx = make_optimizer(options, steps=5)
        state, update = tx.init(params), jax.jit(tx.update)
        for grad in grads:
            updates, state = update(grad, state, params)
            params = optax.apply_updates(params, updates)
        return params

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params, grads = random_tree(STACKED_SHAPES, 0), [random_tree(STACKED_SHAPES, seed) for seed in (1, 2, 3)]
        size = np.array([1.0, 1e-3, 1.0])
        by_block = lambda leaf: leaf * jnp.asarray(size).reshape(-1, *[1] * (leaf.ndim - 1))  # noqa: E731
        grads = [{**tree, "blocks": jax.tree.map(by_block, tree["blocks"])} for tree in grads]
        got = steps(params, grads)
        for block in range(LAYERS):
            want = steps(alone(params, block), [alone(tree, block) for tree in grads])
            assert oracle.error(alone(got, block), want) < 1e-10


def test_adafactor_is_optax_with_a_decay_that_follows_the_learning_rate() -> None:
    """On one layer, with a rate of one value; and its statistics of a kernel with many output dims are factored."""
    shapes = {"kernel": (WIDTH, 256), "bias": (256,)}
    options = OptimizerConfig(name="adafactor", lr=1e-2, schedule="constant", weight_decay=0.1, clip_norm=0)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        stock = optax.adafactor(1e-2, weight_decay_rate=1e-2 * 0.1, weight_decay_mask=decay_mask)
        ours, params, grad = make_optimizer(options, steps=9), random_tree(shapes, 0), random_tree(shapes, 1)
        want, _ = stock.update(grad, stock.init(params), params)
        got, _ = ours.update(grad, ours.init(params), params)
        assert oracle.error(got, want) < 1e-12
        fading = make_optimizer(dataclasses.replace(options, schedule="linear", final_lr_ratio=0.0), steps=9)
        state, still = fading.init(params), jax.tree.map(jnp.zeros_like, grad)
        for _ in range(9):
            last, state = fading.update(still, state, params)
        assert not np.asarray(last["kernel"]).any()  # at a rate of 0 nothing moves, decay included
    factors = ours.init(random_tree(STACKED_SHAPES, 0)).blocks[0]
    assert factors.v_row["blocks"]["qkv"]["kernel"].shape == (LAYERS, WIDTH)
    assert factors.v_col["blocks"]["qkv"]["kernel"].shape == (LAYERS, 4 * 3 * 32)


def test_the_eps_of_muon_is_that_of_its_adamw() -> None:
    params, grads = (random_tree(STACKED_SHAPES, seed) for seed in (0, 1))
    found = []
    for eps in (1e-8, 0.1):
        options = OptimizerConfig(name="muon", schedule="constant", clip_norm=0, weight_decay=0, eps=eps)
        tx = make_optimizer(options, steps=9)
        with jax.numpy_dtype_promotion("standard"):
            found.append(leaves_by_name(tx.update(grads, tx.init(params), params)[0]))
    dims = jax.tree_util.tree_leaves_with_path(muon_dims(params), is_leaf=lambda x: x is None or isinstance(x, tuple))
    changed = {name for name in found[0] if (found[0][name] != found[1][name]).any()}
    assert changed == {path_name(path) for path, x in dims if x is None}


def test_muon_is_optax_muon() -> None:
    """To the state's structure. Adam's part decays no bias."""
    options = OptimizerConfig(name="muon", lr=1e-2, schedule="constant", weight_decay=0.1, clip_norm=0, momentum=0.9)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        ours = make_optimizer(options, steps=9)
        stock = optax.contrib.muon(
            optax.constant_schedule(1e-2),
            beta=0.9,
            weight_decay=0.1,
            adam_b1=options.b1,
            adam_b2=options.b2,
            adam_weight_decay=0.0,
            muon_weight_dimension_numbers=muon_dims,
            consistent_rms=0.2,
        )
        params, grads = random_tree(STACKED_SHAPES, 0), [random_tree(STACKED_SHAPES, seed) for seed in (1, 2)]
        names = lambda state: [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]  # noqa: E731
        states = ours.init(params), stock.init(params)
        assert {name.replace(".inner_state", "") for name in names(states[0])} == {
            name.replace(".inner_state", "") for name in names(states[1])
        }
        for grad in grads:
            got, first = ours.update(grad, states[0], params)
            want, second = stock.update(grad, states[1], params)
            states = first, second
            assert oracle.error(got["blocks"], want["blocks"]) < 1e-12
            assert oracle.error(got["head"], want["head"]) < 1e-12


def own_loss(params: Any, batch: Any, keys: Any) -> tuple[jax.Array, int]:
    return ((jnp.tanh(batch @ params["w"]) @ params["v"] - 1) ** 2).sum(), batch.shape[0]


SAM = optax.contrib.sam(optax.adam(1e-2), optax.sgd(0.05))
STRICT = {
    "sam": SAM,
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), SAM),
    "muon, then sam": optax.chain(scale_by_muon(0.9), SAM),
}


@pytest.mark.parametrize(("name", "strategy"), levels(itertools.product(STRICT, ("zero3", "ddp")), everyday=3))
def test_an_optimizer_that_takes_no_other_arguments(name: str, strategy: str) -> None:
    """It trains as with optax alone, on one device."""
    optimizer, given = STRICT[name], {"strategy": strategy, "min_shard_bytes": 0}
    params = {"w": jax.random.normal(jax.random.key(0), (8, 8)), "v": jnp.ones((8, 4))}
    mesh, opt_state = make_mesh(fsdp=4, devices=jax.devices()[:4]), optimizer.init(params)
    state, step = init_state(params, optimizer, mesh, **given), make_train_step(own_loss, optimizer, mesh, **given)
    for seed in range(5):
        batch = np.random.default_rng(seed).normal(size=(8, 8)).astype(np.float32)
        state, _ = step(state, batch)
        with jax.numpy_dtype_promotion("standard"):
            grads = jax.grad(lambda params, batch=batch: own_loss(params, batch, None)[0] / 8)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
    jax.tree.map(lambda ours, plain: np.testing.assert_allclose(ours, plain, atol=1e-5), state.params, params)


NEEDS_LOSS = {
    "reduce_on_plateau": (optax.contrib.reduce_on_plateau(), "value="),
    "momo": (optax.contrib.momo(), "value="),
    "lbfgs": (optax.lbfgs(), "value=, grad=, value_fn="),
    "a chain": (optax.chain(SAM, optax.polyak_sgd()), "value="),
}


@pytest.mark.parametrize("name", NEEDS_LOSS)
def test_an_optimizer_that_needs_the_loss(name: str) -> None:
    """It is refused as soon as that can be known: a chain, when the step is traced."""
    optimizer, needs = NEEDS_LOSS[name]
    mesh, batch = make_mesh(fsdp=2, devices=jax.devices()[:2]), jnp.ones((8, 8))
    params = {"w": jnp.ones((8, 8)), "v": jnp.ones((8, 4))}
    with pytest.raises(UserError, match=f"^optimizer: its update needs {needs}, which a step does not give; allowed: "):
        make_train_step(own_loss, optimizer, mesh).trace(init_state(params, optimizer, mesh), batch)


def test_a_mistake_inside_of_an_optimizer_stays_what_it_is() -> None:
    wrong = optax.GradientTransformation(lambda params: (), lambda grads, state, params=None: (len(3), state))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"object of type 'int' has no len\(\)"):
        call_update(wrong, (), (), (), shardings=())
