"""`model.label_smoothing`: the loss of training is optax's in every layout, that of evaluations is the plain one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from levels import levels

import jaxdist
from jaxdist.build import assemble
from jaxdist.config.schema import Config, DataConfig, ModelConfig, ParallelConfig
from jaxdist.errors import UserError
from jaxdist.models.options.bert import check_options
from jaxdist.models.resnet import resnet
from jaxdist.nn import label_cross_entropy
from jaxdist.specs import BATCH_SPEC
from jaxdist.trainer.evaluation import eval_totals
from jaxdist.trainer.run import RunPlan

ROWS, CLASSES, SMOOTHING = 16, 5, 0.2
IMAGES = {"image_size": 4, "channels": 1, "classes": CLASSES}
MODELS = {
    "vit": {**IMAGES, "patch_size": 2, "layers": 2, "width": 16, "heads": 2},
    "resnet": {**IMAGES, "depth": 18, "blocks": (1, 1), "width": 2, "stem": "small"},
    "bert": {"head": "classification", "classes": CLASSES, "layers": 2, "width": 16, "heads": 2, "dropout": 0.0},
}
LAYOUTS = {"zero3": {"data": 2, "fsdp": 2}, "tensor": {"fsdp": 2, "tensor": 2}}


def batch_of(name: str, step: int) -> Any:
    rng = np.random.default_rng(step)
    leaf = {"inputs": rng.integers(0, 264, (ROWS, 8), np.int32)}
    if name != "bert":
        leaf = {"image": rng.normal(size=(ROWS, 4, 4, 1)).astype(np.float32)}
    label, weights = rng.integers(0, CLASSES, ROWS, np.int32), rng.integers(0, 3, ROWS).astype(np.float32)
    return {**leaf, "label": label, "weights": weights}


def losses(name: str, sizes: dict[str, int], smoothing: float = SMOOTHING) -> tuple[list[float], float]:
    """Of three steps, and of an evaluation before them."""
    model = ModelConfig(name=name, **MODELS[name], label_smoothing=smoothing)
    parallel = ParallelConfig(strategy="zero3", min_shard_bytes=0)
    config = Config(model=model, data=DataConfig(seq_len=8, global_batch=ROWS), parallel=parallel)
    mesh = jaxdist.make_mesh(**sizes)
    parts = assemble(config, mesh)
    state = jaxdist.init_state(parts.model, parts.optimizer, mesh, parts.options)
    plan: Any = RunPlan(config, mesh, None, parts)  # type: ignore[arg-type]
    batches = [jax.device_put(batch_of(name, i), NamedSharding(mesh, BATCH_SPEC)) for i in range(3)]
    total, weight = eval_totals(plan)(state.params, state.model_state, batches[0])["loss"]
    found = []
    for batch in batches:
        state, metrics = parts.step(state, batch)
        found.append(float(metrics["loss"]))
    return found, float(total / weight)


def by_optax(logits: jax.Array, label: jax.Array, weights: jax.Array, smoothing: float) -> Any:
    smooth = optax.smooth_labels(jax.nn.one_hot(label, CLASSES, dtype=logits.dtype), smoothing)
    return (optax.softmax_cross_entropy(logits, smooth) * weights).sum(), weights.sum()


@pytest.mark.parametrize("name", levels(MODELS))
def test_training_has_the_loss_of_optax(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device and in layouts. Evaluations know nothing of it."""
    with monkeypatch.context() as patch:
        patch.setattr(f"jaxdist.models.{name}.label_cross_entropy", by_optax)
        trained, _ = losses(name, {})
    plain = losses(name, {}, 0.0)
    assert abs(plain[0][0] - trained[0]) > 1e-4
    for sizes in ({}, *(sizes for kind, sizes in LAYOUTS.items() if kind == "zero3" or name != "resnet")):
        found, evaluated = losses(name, sizes)
        assert found == pytest.approx(trained, rel=1e-5) and evaluated == pytest.approx(plain[1], rel=1e-5)


def test_the_loss_is_optax_s_and_without_smoothing_the_program_is_the_same() -> None:
    logits = np.random.default_rng(0).normal(size=(3, CLASSES)).astype(np.float32)
    given = logits, np.arange(3, dtype=np.int32), np.ones(3, np.float32)
    for smoothing in (0.0, SMOOTHING, 0.9):
        found, want = (float(of(*map(jnp.asarray, given), smoothing)[0]) for of in (label_cross_entropy, by_optax))
        assert found == pytest.approx(want, rel=1e-6)
    traced = [
        str(jax.make_jaxpr(lambda *each, more=more: label_cross_entropy(*each, *more))(*given))
        for more in ((), (0.0,), (0.1,))
    ]
    assert traced[0] == traced[1] != traced[2]


def test_an_evaluation_of_a_resnet_s_loss_is_plain() -> None:
    """That of `jaxdist.fit`, which knows no configuration."""
    found = []
    for smoothing in (0.0, SMOOTHING):
        loss = resnet(ModelConfig(name="resnet", **MODELS["resnet"], label_smoothing=smoothing))
        assert loss.init is not None and loss.evaluation is not None
        params, statistics = jax.eval_shape(loss.init, jax.random.key(0))
        given = params, batch_of("resnet", 0), None, statistics
        found += [str(jax.make_jaxpr(each)(*given)) for each in (loss, loss.evaluation)]
    assert found[0] != found[2] and found[1] == found[3]


def test_a_head_without_classes_refuses_it() -> None:
    config = Config(model=ModelConfig(name="bert", label_smoothing=0.1))
    with pytest.raises(UserError, match=r"^model\.label_smoothing: 0\.1 has no effect with model\.head 'mlm'; allowed"):
        check_options(config, {"tensor": 1})
