"""ViT: every layout is one device's in float64, metrics too; parameters are as many as the paper's; what is refused."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import child
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import oracle
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from levels import levels

import jaxdist
from jaxdist import load_config, registry
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.model import ModelDef
from jaxdist.models.vit import Head, patches_of, vit
from jaxdist.nn import model_def
from jaxdist.nn.loss import label_accuracy, label_cross_entropy
from jaxdist.observe import read_metrics
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.program import in_precision
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import place_params, specs_of_arrays
from jaxdist.step import make_train_step
from jaxdist.trainer.batches.load import load_data
from jaxdist.trainer.evaluation import make_eval_step

ROWS, CLASSES = 32, 5
SMALL = ModelConfig(
    name="vit", image_size=6, patch_size=3, channels=2, classes=CLASSES, layers=2, width=16, heads=4, mlp_width=24
)


def model_of(policy: str = "fp64", **changes: Any) -> ModelDef:
    return vit(SMALL.replace(**changes), max_length=1, param_dtype=POLICIES[policy].param)


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Ragged: some samples count nothing, one by its label, and the others not alike."""
    rng = np.random.default_rng(step)
    label = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    label[3] = -1
    weights = rng.integers(0, 3, ROWS).astype(np.float32)
    return {"image": rng.normal(size=(ROWS, 6, 6, 2)), "label": label, "weights": weights}


def logits_of(params: Any, image: jax.Array) -> jax.Array:
    """Written plainly, on one device."""
    norm = functools.partial(oracle.norm, eps=1e-12, centre=True)
    cut = [image[:, y : y + 3, x : x + 3].reshape(len(image), -1) for y in (0, 3) for x in (0, 3)]
    h = oracle.linear(jnp.stack(cut, 1), params["embed"]["patches"])
    first = jnp.tile(params["embed"]["class_token"], (len(image), 1, 1))
    h = jnp.concatenate([first, h], 1) + params["embed"]["positions"]["table"]
    for i in range(2):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        qkv = oracle.linear(norm(h, own["norm1"]), own["attention"]["qkv"]["linear"])
        q, k, v = jnp.moveaxis(qkv.reshape(*h.shape[:2], 4, 3, 4), 3, 0)
        weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k) / 2)
        h = h + oracle.linear(jnp.einsum("bhst,bthk->bshk", weights, v).reshape(h.shape), own["attention"]["out"])
        hidden = jax.nn.gelu(oracle.linear(norm(h, own["norm2"]), own["mlp"]["up"]), approximate=False)
        h = h + oracle.linear(hidden, own["mlp"]["down"])
    return oracle.linear(norm(h[:, 0], params["head"]["norm"]), params["head"]["classifier"])


def sums_of(params: Any, batch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums of losses, weights, and weights of what is right."""
    logits, weights = logits_of(params, batch["image"]), batch["weights"] * (batch["label"] >= 0)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["label"], 0))
    return (each * weights).sum(), weights.sum(), (weights * (logits.argmax(-1) == batch["label"])).sum()


def loss_of(params: Any, batch: Any) -> jax.Array:
    total, weight, _ = sums_of(params, batch)
    return total / weight


@functools.cache
@jax.numpy_dtype_promotion("standard")
def one_device() -> tuple[Any, list[Any], Any]:
    """(parameters, (loss, gradients) of three steps of AdamW with clipping, parameters after them)."""
    tx, first = layouts.optimizer(), oracle.drawn(model_of().shapes)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        found = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(found[1], opt_state, params)
        return found, optax.apply_updates(params, updates), opt_state

    params, opt_state, steps = first, jax.jit(tx.init)(first), []
    for i in range(3):
        found, params, opt_state = step(params, opt_state, batch_of(i))
        steps.append(jax.device_get(found))
    return first, steps, jax.device_get(params)


class Case(NamedTuple):
    strategy: str
    mesh: tuple[int, int, int, int]  # pipe, data, fsdp, tensor
    schedule: str = "accumulate"
    microbatches: int = 1
    remat: str = "none"
    prefetch: int = 0
    scan_blocks: int = 1

    def __str__(self) -> str:
        return "-".join("x".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in self)


CASES = [
    Case("zero3", (1, 2, 2, 2), microbatches=2, remat="full"),
    Case("zero2", (2, 1, 2, 2), "one_f_one_b", 2),
    Case("ddp", (1, 4, 1, 2)),
    Case("zero1", (1, 1, 8, 1), microbatches=2),
    Case("zero3", (2, 1, 4, 1), "gpipe", 4, "full"),
    Case("zero3", (1, 1, 4, 1), prefetch=1),
    Case("zero2", (1, 1, 2, 4), remat="attention.context", scan_blocks=2),
    Case("ddp", (2, 2, 1, 1), "zero_bubble", 2),
]


@pytest.mark.parametrize("case", levels(CASES, slow=2, common=1), ids=str)
def test_layouts_train_and_evaluate_as_one_device(case: Case) -> None:
    """Losses, all gradients, the parameters after three steps; then the loss and the accuracy of an evaluation."""
    with jax.enable_x64(True):
        first, steps, last = one_device()
        tx, mesh = (
            layouts.optimizer(),
            make_mesh(**dict(zip(("pipe", "data", "fsdp", "tensor"), case.mesh, strict=True))),
        )
        model = model_of(scan_blocks=case.scan_blocks)
        options = StepOptions(
            strategy=case.strategy,
            schedule=case.schedule,
            microbatches=case.microbatches,
            precision=POLICIES["fp64"],
            remat=(case.remat,) if "." in case.remat else case.remat,
            prefetch=case.prefetch,
            return_grads=True,
            min_shard_bytes=0,
        )
        target = state_target(model, tx, mesh, options)
        step, state = make_train_step(model, tx, mesh, options), place_params(first, tx, target)
        place = lambda i: jax.device_put(batch_of(i), NamedSharding(mesh, BATCH_SPEC))  # noqa: E731
        for i, (want, grads) in enumerate(steps):
            state, metrics = step(state, place(i))
            assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-10)
            assert oracle.error(metrics["grads"], grads) < 1e-10
        assert oracle.error(state.params, last) < 1e-10
        found = make_eval_step(model, mesh, specs_of_arrays(state.params), get_strategy(options))(
            state.params, place(9)
        )
        with jax.numpy_dtype_promotion("standard"):
            total, weight, right = map(float, jax.jit(sums_of)(last, batch_of(9)))
        assert 0 < right < weight and tuple(map(float, found["accuracy"])) == (right, weight)
        assert [float(each) for each in found["loss"]] == pytest.approx([total, weight], rel=1e-10)


def evaluated(head: type, *, policy: str = "fp32") -> Any:
    """What an evaluation by the model with another head would be, as it is traced."""
    full = SMALL.resolved()

    def build(rngs: nnx.Rngs) -> Any:
        from jaxdist.models.vit import ViT

        module = ViT(full, rngs, fp8=False)
        module.head = head(full, rngs)
        return module

    model, mesh = (
        in_precision(model_def(build, param_dtype=POLICIES[policy].param), POLICIES[policy]),
        make_mesh(fsdp=2),
    )
    options = StepOptions(strategy="zero3", precision=POLICIES[policy])
    params = state_target(model, optax.sgd(0.1), mesh, options).params
    step = make_eval_step(model, mesh, specs_of_arrays(params), get_strategy(options))
    batch = {name: leaf.astype(np.float32) if name == "image" else leaf for name, leaf in batch_of(0).items()}
    return jax.eval_shape(step, params, batch)


def returning(found: Any) -> type:
    return type("Other", (Head,), {"metrics": lambda self, h, batch, embed: found(h, batch)})


REFUSED = {
    "a list": (lambda h, batch: [h.sum()], "metrics of the head: gave metrics of type list; allowed: a dict"),
    "a mean": (lambda h, batch: {"size": h.mean()}, "metrics of the head: metric 'size' must be two scalars"),
    "rows": (lambda h, batch: {"size": (batch["weights"], 1)}, "metric 'size' must be two scalars"),
    "a part of the time": (lambda h, batch: {"time/h": (h.sum(), 1)}, "metric 'time/h' is jaxdist's own"),
    "a taken name": (lambda h, batch: {"loss": (h.sum(), 1)}, "metrics of the head: metric 'loss' is jaxdist's own"),
    "a leaf": (lambda h, batch: batch["targets"], r"metrics of Other: reads batch\['targets'\], which the batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metrics_of_a_head_that_are_wrong(name: str) -> None:
    found, said = REFUSED[name]
    with pytest.raises(UserError, match="^" + said if said.startswith("metrics") else said) as error:
        evaluated(returning(found))
    assert "\n" not in str(error.value)


def test_metrics_of_a_head() -> None:
    """Numbers of any type are summed in fp32; another argument is one line; a head without them has none."""
    other = returning(lambda h, batch: {"rows": (batch["label"].size, 1), "half": (h.astype(jnp.bfloat16).sum(), True)})
    for policy in ("fp32", "O1"):
        found = evaluated(other, policy=policy)
        assert found.keys() == {"loss", "rows", "half"}
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    with pytest.raises(UserError, match=r"metrics of Short is called with \(h, batch, embed\), and does not take that"):
        evaluated(type("Short", (Head,), {"metrics": lambda self, h: {}}))
    assert evaluated(type("None_", (Head,), {"metrics": None})).keys() == {"loss"}


@pytest.mark.parametrize(
    ("name", "count"), [("vit_base_h200", 86_567_656), ("vit_huge_h200", 632_045_800), ("vit_digits", 202_186)]
)
def test_parameters_are_as_many_as_in_the_paper(name: str, count: int) -> None:
    """ViT-Base/16 and ViT-Huge/14 for 224 x 224 and 1,000 labels; the shapes alone are made."""
    config = load_config(child.ROOT / "configs" / f"{name}.yaml", planned=True).model
    assert vit(config, max_length=1).parameters == count


def test_patches_are_rows_of_pixels() -> None:
    image = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    found = patches_of(jnp.asarray(image), 2)
    assert found.shape == (2, 6, 12)
    assert np.array_equal(found[1, 5], image[1, 2:4, 4:6].ravel()) and np.array_equal(
        found[0, 1], image[0, :2, 2:4].ravel()
    )


@pytest.mark.slow
def test_bytes_are_scaled_and_other_images_refused() -> None:
    """0 to 255 are -1 to 1; the size is said before anything is computed."""
    model, mesh = model_of("fp32"), make_mesh()
    params = jax.tree.map(jnp.asarray, oracle.drawn(model.shapes)["embed"])
    keys = jax.random.split(jax.random.key(0), 2)

    def embed(image: Any) -> Any:
        run = lambda image: model.embed(params, {"image": image}, keys)  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())(image)

    image = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 2)).astype(np.uint8)
    np.testing.assert_allclose(embed(image), embed((image / 127.5 - 1).astype(np.float32)), atol=1e-6)
    with pytest.raises(UserError, match=r"^vit: images are \[6, 7, 2\], and the model takes \[6, 6, 2\]; set model"):
        embed(image[:, :, [0, 0, 1, 2, 3, 4, 5]])
    with pytest.raises(
        UserError, match=r"^image: its pixels are uint16; allowed: uint8 or other integers from 0 to 255"
    ):
        embed(image.astype(np.uint16))


@pytest.mark.parametrize(("label", "finite"), [(CLASSES - 1, True), (CLASSES, False), (-1, True)])
def test_labels_that_the_model_does_not_have(label: int, finite: bool) -> None:
    """nan, so that the guard of the step sees it; a negative label counts nothing."""
    model = model_of("fp32")
    params, h = oracle.drawn(model.shapes)["head"], jnp.ones((2, 5, 16))
    batch = {"label": jnp.array([label, 1]), "weights": jnp.ones(2)}
    total, weight = model.head(params, None, h, batch)
    assert bool(jnp.isfinite(total)) is finite and float(weight) == (1 if label < 0 else 2)


@pytest.mark.parametrize(
    "label", [np.zeros((2, 1), np.int32), np.zeros((2, 3), np.int32), np.zeros(2, np.float32), np.zeros(3, np.int32)]
)
def test_labels_of_another_kind_are_refused(label: np.ndarray) -> None:
    """A column, one-hot, floats, one too many."""
    for of in (label_cross_entropy, label_accuracy):
        with pytest.raises(
            UserError, match=r"^batch: label is \w+\[.*\] for 2 samples of a device; allowed: one integer"
        ):
            of(jnp.zeros((2, 3)), jnp.asarray(label), jnp.ones(2))


def test_labels_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    given = {"image": np.zeros((40, 8, 8, 1), np.float32), "label": np.arange(40, dtype=np.int32) % 11}
    np.savez(tmp_path / "a.npz", **given)
    overrides = ["data.source=images", f"data.path={tmp_path / 'a.npz'}"]
    for name in ("vit_digits", "resnet_digits"):
        with pytest.raises(UserError, match=r"^model.classes: 10 is too small for 'images', whose labels need 11$"):
            load_data(load_config(child.ROOT / "configs" / f"{name}.yaml", overrides))
        config = load_config(child.ROOT / "configs" / f"{name}.yaml", [*overrides, "model.classes=11"])
        assert load_data(config).labels == 11


WRONG = [
    (["model.patch_size=5"], r"model.patch_size: 5 does not divide model.image_size 8; allowed: 1, 2, 4, 8"),
    (["model.heads=5"], r"model.heads: 5 does not divide model.width 64; head counts that work: .*4, 8"),
    (
        ["mesh.tensor=8", "mesh.data=1", "mesh.fsdp=1"],
        r"mesh.tensor: 8 does not divide model.heads 4; .* 1, 2, 4; .*: 8",
    ),
    (["model.mlp_width=33"], r"mesh.tensor: 2 does not divide model.mlp_width 33; tensor sizes that work: 1; .*32, 34"),
    (["data.source=text"], r"data.source: 'text' gives inputs, targets, weights, and model.name 'vit' takes image, l"),
    (["data.source=lines"], r".*attention_mask, label, and model.name 'vit' .*; allowed: digits, images, iterable; or"),
    (["mesh.context=2"], r"mesh.context: 2 is given, but no attention of model vit is split over this axis"),
    (["parallel.sequence_parallel=true"], r"parallel.sequence_parallel: true needs a model that .*'vit' takes no such"),
]


@pytest.mark.parametrize(("overrides", "said"), WRONG, ids=lambda each: each[0] if isinstance(each, list) else "")
def test_what_does_not_fit_is_one_line(overrides: list[str], said: str) -> None:
    from jaxdist.build import make_model
    from jaxdist.precision.policy import precision_of

    with pytest.raises(UserError, match="^" + said) as error:
        config = load_config(child.ROOT / "configs" / "vit_digits.yaml", overrides)
        make_model(config, precision_of(config.precision), stages=1, training=True)
    assert "\n" not in str(error.value)


DIGITS = ["--config", "configs/vit_digits.yaml", "devices.platform=cpu", "observe.report=false"]


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The records of a run that has evaluations."""
    pytest.importorskip("sklearn", reason="scikit-learn (extra examples) is not installed: nothing is trained")
    command = [sys.executable, "scripts/train.py", *DIGITS, "--run-dir", str(folder), *overrides]
    done = subprocess.run(command, cwd=child.ROOT, env=child.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if "eval/loss" in record]
    shown = re.findall(r"eval .* accuracy ([\d.]+)", done.stdout)
    assert [float(each) for each in shown] == pytest.approx([each["eval/accuracy"] for each in found], abs=1e-4)
    assert not any("accuracy" in record for record in records)  # steps do not compute it
    return found


@pytest.mark.exhaustive  # and what README's table says
def test_digits_are_learned(tmp_path: Path) -> None:
    """By the command of README. The commonest digit of those held out is 13 % of them."""
    assert train(tmp_path / "run")[-1]["eval/accuracy"] >= 0.97


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16", "O1"])
def test_half_precision_learns(precision: str, tmp_path: Path) -> None:
    layout = ("mesh.data=1", "mesh.fsdp=1", "devices.simulated=2")
    steps = ("train.steps=150", "train.eval_every=150", "optimizer.warmup_steps=10")
    assert train(tmp_path / "run", f"precision={precision}", *layout, *steps)[-1]["eval/accuracy"] > 0.8


@pytest.mark.slow
def test_fit_evaluates_metrics_of_a_head(tmp_path: Path) -> None:
    """As its loss; and they reach metrics.jsonl."""
    data = [{**batch_of(i), "image": batch_of(i)["image"].astype(np.float32)} for i in range(2)]
    done = jaxdist.fit(
        model_of("fp32"),
        optax.sgd(0.0),
        data,
        steps=2,
        mesh=make_mesh(fsdp=2, tensor=2),
        strategy="zero3",
        run_dir=tmp_path,
        eval_data=data,
        settings={"train.eval_every": 2, "observe.console": "plain"},
    )
    with jax.numpy_dtype_promotion("standard"):
        sums = np.sum([jax.device_get(sums_of(jax.device_get(done.state.params), batch)) for batch in data], axis=0)
    assert done.metrics["eval/accuracy"] == pytest.approx(sums[2] / sums[1], rel=1e-6)
    assert done.metrics["eval/loss"] == pytest.approx(sums[0] / sums[1], rel=1e-5)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["eval/accuracy"] == done.metrics["eval/accuracy"]


def test_vit_is_a_shipped_model() -> None:
    assert "vit" in registry.names("jaxdist.models")
    config = load_config(child.ROOT / "configs" / "vit_digits.yaml", planned=True).model
    assert vit(config, max_length=1, fp8=True).fp8 and not vit(config, max_length=1).fp8
    assert config.describe() == "vit: 4 blocks, width 64, 4 heads, 16 patches"
