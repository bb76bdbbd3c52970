"""ResNet: its size, its training in every layout as on one device in plain Flax, and torchvision's numbers."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx
from levels import levels

import jaxdist
from jaxdist.config.load import load_config
from jaxdist.config.schema import ModelConfig
from jaxdist.data.samples import Samples
from jaxdist.data.source import Source
from jaxdist.errors import UserError
from jaxdist.jaxpr.walk import every_equation
from jaxdist.models.resnet import ResNet, classify, from_torchvision, resnet
from jaxdist.trainer.batches import load

EXACT = 1e-10
SMALL = {"depth": 18, "blocks": (1, 1), "width": 2, "stem": "small", "channels": 1, "classes": 3, "image_size": 4}
NETS = {
    "small": SMALL,
    "resnet18": {**SMALL, "blocks": (), "image_size": 8},
    "bottleneck": {**SMALL, "depth": 50, "stem": "imagenet", "image_size": 16},
}
ROWS = 16


def config_of(net: str) -> ModelConfig:
    return ModelConfig(name="resnet", **NETS[net])


@pytest.mark.parametrize("kind", [np.uint16, np.int16])
def test_pixels_of_16_bits_are_refused(kind: Any) -> None:
    loss = resnet(config_of("small"))
    batch = {"image": np.zeros((2, 4, 4, 1), kind), "label": np.zeros(2, np.int32)}
    with pytest.raises(UserError, match=rf"^image: its pixels are {kind.__name__}; allowed: uint8 or other "):
        jax.eval_shape(loss, loss.params, batch, None, loss.model_state)
    batch["image"] = batch["image"].astype(np.int32)  # what a loader makes of int64
    jax.eval_shape(loss, loss.params, batch, None, loss.model_state)


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [
        (18, 11_689_512),
        (101, 44_549_160),
        pytest.param(50, 25_557_032, marks=pytest.mark.slow),
        pytest.param(34, 21_797_672, marks=pytest.mark.slow),
        pytest.param(152, 60_192_808, marks=pytest.mark.slow),
    ],
)
def test_the_number_of_parameters_is_torchvisions(depth: int, parameters: int) -> None:
    loss = resnet(ModelConfig(name="resnet", depth=depth))
    assert loss.parameters == parameters
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((loss.params, loss.model_state)))


UNCOUNTED = [4, 5, 11]  # rows of weight 0, among them all of one device's


def make_batch(net: str, step: int) -> Any:
    rng, size = np.random.default_rng(step), NETS[net]["image_size"]
    image = rng.normal(size=(ROWS, size, size, 1)) + np.linspace(-1, 1, ROWS)[:, None, None, None]  # devices' differ
    weights = rng.integers(1, 4, ROWS) / 2
    weights[UNCOUNTED], image[UNCOUNTED] = 0, 100
    return {"image": image, "label": rng.integers(0, 3, ROWS, np.int32), "weights": weights}


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


@functools.cache
def plain_flax(net: str) -> Any:
    """(gradients, parameters, statistics) of three steps on one device, with stock layers and without jaxdist. It is
    given the rows that count."""
    graph, params, statistics = nnx.split(
        ResNet(config_of(net), nnx.Rngs(jax.random.key(0)), jnp.float64), nnx.Param, ...
    )
    tx, all_grads = optimizer(), []
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, statistics: Any, opt_state: Any, batch: Any) -> Any:
        def mean(params: Any) -> Any:
            model = nnx.merge(graph, params, statistics, copy=True)
            total, weight, _ = classify(model, batch)
            return total / weight, nnx.state(model, nnx.BatchStat)

        grads, statistics = jax.grad(mean, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return grads, optax.apply_updates(params, updates), statistics, opt_state

    for i in range(3):
        with jax.numpy_dtype_promotion("standard"):
            batch = {name: np.delete(leaf, UNCOUNTED, axis=0) for name, leaf in make_batch(net, i).items()}
            grads, params, statistics, opt_state = step(params, statistics, opt_state, batch)
        all_grads.append(jax.device_get(nnx.to_pure_dict(grads)))
    return all_grads, *(jax.device_get(nnx.to_pure_dict(tree)) for tree in (params, statistics))


STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
LAYOUTS = [
    ("resnet18", strategy, *shape)
    for i, shape in enumerate(((1, 2), (2, 2), (8, 1), (2, 4), (1, 8), (4, 1)))
    for strategy in STRATEGIES[i % 2 :: 2]
]
EVERYDAY = [("small", "zero3", 2, 2)]


@pytest.mark.parametrize(
    ("net", "strategy", "data", "fsdp"),
    [
        *EVERYDAY,
        *levels([("bottleneck", "zero3", 1, 4), *LAYOUTS], slow=9, common=3),
        *levels([("small", "ddp", 2, 1)]),
    ],
    ids=str,
)
def test_it_trains_as_in_plain_flax_on_one_device(net: str, strategy: str, data: int, fsdp: int) -> None:
    """And a step that is not finite leaves the running statistics, to the bit."""
    with jax.enable_x64(True):
        mesh, tx, loss = (
            jaxdist.make_mesh(data=data, fsdp=fsdp),
            optimizer(),
            resnet(config_of(net), param_dtype=jnp.float64),
        )
        options: dict[str, Any] = {"strategy": strategy, "precision": "fp64", "min_shard_bytes": 0}
        state = jaxdist.init_state(loss, tx, mesh, **options)
        sharded = "fsdp" in str(state.params["head"]["kernel"].sharding.spec)
        assert sharded == (strategy != "ddp" and fsdp > 1), "it is built in its layout"
        step, grads = jaxdist.make_train_step(loss, tx, mesh, return_grads=True, **options), []
        for i in range(3):
            state, metrics = step(state, make_batch(net, i))
            grads.append(jax.device_get(metrics["grads"]))
        got, want = (grads, *jax.device_get((state.params, state.model_state))), plain_flax(net)
        for found, expected in zip(got, want, strict=True):
            assert oracle.error(found, expected) < EXACT
        batch = make_batch(net, 3)
        batch["image"][6] = np.nan
        state, _ = step(state, batch)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.model_state), got[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "half"), [("bf16", "bfloat16"), *levels([("fp16", "float16"), ("O1", "float16"), ("O2", "float16")])]
)
def test_half_precision_convolves_in_it_and_keeps_statistics_in_float32(precision: str, half: str) -> None:
    """Norms are in float32 under fp16 and O2, and what they hand on is not."""
    loss, mesh, tx = resnet(config_of("small")), jaxdist.make_mesh(data=2), optimizer()
    batch = jax.tree.map(lambda leaf: np.asarray(leaf, leaf.dtype.name.replace("64", "32")), make_batch("small", 0))
    target = jaxdist.state_target(loss, tx, mesh, precision=precision)
    traced = jaxdist.make_train_step(loss, tx, mesh, precision=precision).trace(target, batch).jaxpr
    operands = [
        {atom.aval.dtype.name for atom in site.equation.invars}
        for site in every_equation(traced)
        if site.equation.primitive.name == "conv_general_dilated"
    ]
    assert len(operands) == 17 and all(each == {half} for each in operands)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(target.model_state)} == {"float32"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.depth=19", "model.depth: 19; allowed: 18, 34, 50, 101, 152"),
        ("mesh.tensor=2", "mesh.tensor: 2 is given, but no layer of model resnet"),
        ("mesh.pipe=2", "mesh.pipe: 2 is given, but no layer of model resnet"),
        ("parallel.prefetch=1", "parallel.prefetch: 1 is for models with blocks, and model.name 'resnet' is a loss"),
        ("parallel.sequence_parallel=true", "parallel.sequence_parallel: true is for models with blocks"),
        ("parallel.stages=[1, 2]", r"parallel.stages: \[1, 2\] is for models with blocks"),
        ("parallel.schedule=gpipe", "model.name: 'resnet' is for one stage, parallel.schedule gpipe has several"),
        ("memory.remat=sqrt", "memory.remat: 'sqrt' is for blocks"),
        ("precision.policy=fp8", "precision: fp8 is for models of jaxdist.nn layers"),
        ("parallel.grad_sync.deterministic=true", "parallel.grad_sync.deterministic: true, but the batch statistics"),
    ],
)
def test_what_a_loss_cannot_have_is_one_line(override: str, message: str) -> None:
    file = Path(__file__).parents[2] / "configs" / "resnet_digits.yaml"
    with pytest.raises(UserError, match=f"^{message}") as error:
        load_config(file, ["mesh.data=1", "mesh.fsdp=1", override], planned=True)
    assert "\n" not in str(error.value)


IMAGE, LABEL = np.ones((2, 4, 4, 1)), np.ones(2, int)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"inputs": LABEL, "label": LABEL},
            "^model: a batch needs image and label, and has no image, but inputs, label",
        ),
        ((IMAGE, LABEL), "^model: a batch is a tuple; allowed: a dict of image, label"),
        (
            {"image": IMAGE.transpose(0, 3, 1, 2), "label": LABEL},
            r"^model.channels: 1, but .* the shape \[1, 4, 4\]; .* is image.transpose\(0, 2, 3, 1\); a grey",
        ),
        (
            {"image": IMAGE, "label": LABEL, "weights": np.ones((2, 1))},
            r"^model: weights of the batch have the shape \[2, 1\]; allowed: \[2\]",
        ),
    ],
)
def test_a_batch_without_images_is_one_line(batch: Any, message: str) -> None:
    loss = resnet(config_of("small"))
    with pytest.raises(UserError, match=message) as error:
        jax.eval_shape(loss, loss.params, batch, None, loss.model_state)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.image_size=8", None),
        (
            "model.image_size=16",
            r"model.image_size: 16, but data.source 'digits' gives image \[8, 8, 1\], and .*16, 1\]",
        ),
        ("model.channels=3", r"model.channels: 3, but data.source 'digits' gives image \[8, 8, 1\]"),
    ],
)
def test_images_of_another_shape_are_one_line(
    override: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = {"image": jax.ShapeDtypeStruct((8, 8, 1), np.float32), "label": jax.ShapeDtypeStruct((), np.int32)}
    samples = Samples(1, leaves, lambda numbers: {})
    monkeypatch.setattr(load, "load_source", lambda _: Source(samples, samples, 0, {"name": "digits"}))
    config = load_config(Path(__file__).parents[2] / "configs" / "resnet_digits.yaml", [override], planned=True)
    with contextlib.nullcontext() if message is None else pytest.raises(UserError, match=f"^{message}"):
        load.load_data(config)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [18, 50, 101])
def test_logits_are_torchvisions(depth: int) -> None:
    """In float32 by running statistics, and in float64 by those of the batch. In float32 the latter differ between
    torchvision's own float32 and float64 by 6e-5 of the largest logit at 50 layers, by 3e-4 at 101."""
    reason = "torchvision is not installed here; the comparison with it did not run"
    torch, models = (pytest.importorskip(name, reason=reason) for name in ("torch", "torchvision.models"))
    torch.manual_seed(0)
    theirs = getattr(models, f"resnet{depth}")()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for leaf in theirs.state_dict().values():
            if leaf.ndim == 1:  # of norms, and the bias of the head: none at its start
                leaf.add_(0.1 * torch.rand(leaf.shape, generator=generator))
    image = np.random.default_rng(0).normal(size=(4, 64, 64, 3))
    with jax.enable_x64(True):
        for dtype, evaluating, bound in (("float32", True, 1e-5), ("float64", False, EXACT)):
            theirs = getattr(theirs, {"float32": "float", "float64": "double"}[dtype])().train(not evaluating)
            weights = {name: leaf.numpy().copy() for name, leaf in theirs.state_dict().items()}
            with torch.no_grad():
                want = theirs(torch.from_numpy(image.transpose(0, 3, 1, 2).astype(dtype))).numpy()
            ours = nnx.eval_shape(
                lambda dtype=dtype: ResNet(ModelConfig(name="resnet", depth=depth), nnx.Rngs(0), dtype)
            )
            graph, params, statistics = nnx.split(ours, nnx.Param, ...)
            for part, values in zip((params, statistics), from_torchvision(weights), strict=True):
                nnx.replace_by_pure_dict(part, values)
            model = nnx.merge(graph, params, statistics)
            model.set_attributes(use_running_average=evaluating, raise_if_not_found=False)
            with jax.numpy_dtype_promotion("standard"):  # stock BatchNorm joins float64 with float32
                got = np.asarray(jax.jit(lambda model, image: model(image))(model, image.astype(dtype)))
            assert got.dtype == dtype and np.abs(got - want).max() < bound * np.abs(want).max()
