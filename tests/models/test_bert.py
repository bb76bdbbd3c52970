"""BERT: counts, every kind of layout against the same written plainly on one device in float64, padding, metrics, and
Hugging Face's logits."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import oracle
import pytest
import saved_runs
from jax.sharding import NamedSharding
from levels import levels, others_slow

from jaxdist.checkpoint.huggingface.convert import export
from jaxdist.checkpoint.reader import open_steps
from jaxdist.cli.work.checkpoint import import_model
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config, DataConfig, ModelConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.model import ModelDef
from jaxdist.models.bert import bert
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import place_params, specs_of_arrays
from jaxdist.step import make_train_step
from jaxdist.trainer.batches.load import load_data
from jaxdist.trainer.evaluation import make_eval_step

ROWS, LENGTH, VOCAB, LABELS, HEADS = 16, 8, 48, 3, 4
HEADS_OF = ("mlm", "classification")
slow = pytest.mark.slow


def config_of(head: str, **options: Any) -> ModelConfig:
    sizes = {"layers": 2, "width": 16, "heads": HEADS, "vocab": VOCAB, "classes": LABELS, "dropout": 0.0}
    return ModelConfig(name="bert", head=head, **sizes | options)


def model_of(head: str, **options: Any) -> ModelDef:
    layer = {key: options.pop(key) for key in ("sequence_parallel", "collective_matmul") if key in options}
    return bert(config_of(head, **options), max_length=LENGTH, param_dtype=jnp.float64, **layer)


def batch_of(step: int, head: str) -> dict[str, np.ndarray]:
    """Ragged: padding grows with the row, and the last row is all padding; a row counts nothing; two segments."""
    rng = np.random.default_rng(step)
    length = np.linspace(LENGTH, 0, ROWS).round()
    batch = {
        "inputs": rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32),
        "attention_mask": (np.arange(LENGTH) < length[:, None]).astype(np.int32),
        "token_type_ids": (np.arange(LENGTH) > length[:, None] // 2).astype(np.int32),
    }
    if head == "classification":
        own = {"label": rng.integers(0, LABELS, ROWS).astype(np.int32), "weights": rng.random(ROWS).astype(np.float32)}
    else:
        targets = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
        own = {"targets": targets, "weights": (rng.random((ROWS, LENGTH)) < 0.4).astype(np.float32)}
    own["weights"][ROWS // 2] = 0
    return batch | own


def norm(x: jax.Array, params: Any) -> jax.Array:
    return oracle.norm(x, params, eps=1e-12, centre=True)


def plain_hidden(params: Any, batch: Any) -> jax.Array:
    embed, inputs = params["embed"], batch["inputs"]
    h = embed["tokens"]["table"][inputs] + embed["positions"]["table"][: inputs.shape[1]]
    h = norm(h + embed["types"]["table"][batch["token_type_ids"]], embed["norm"])
    seen = batch["attention_mask"][:, None, None, :] == 1
    for i in range(2):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        qkv = jnp.tensordot(h, own["attention"]["qkv"]["linear"]["kernel"], 1)
        qkv = qkv + own["attention"]["qkv"]["linear"]["bias"]
        q, k, v = (qkv[..., part, :] for part in range(3))
        scores = jnp.where(seen, jnp.exp(jnp.einsum("bshk,bthk->bhst", q, k) / np.sqrt(q.shape[-1])), 0)
        total = scores.sum(-1, keepdims=True)
        context = jnp.einsum("bhst,bthk->bshk", scores / jnp.where(total == 0, 1, total), v)
        h = norm(h + oracle.linear(context.reshape(h.shape), own["attention"]["out"]), own["norm1"])
        hidden = jax.nn.gelu(oracle.linear(h, own["mlp"]["up"]), approximate=False)
        h = norm(h + oracle.linear(hidden, own["mlp"]["down"]), own["norm2"])
    return h


def plain_logits(params: Any, batch: Any) -> jax.Array:
    h, head = plain_hidden(params, batch), params["head"]
    if "pooler" in head:
        return oracle.linear(jnp.tanh(oracle.linear(h[:, 0], head["pooler"])), head["classifier"])
    h = norm(jax.nn.gelu(oracle.linear(h, head["dense"]), approximate=False), head["norm"])
    return h @ params["embed"]["tokens"]["table"].T + head["decoder"]["bias"]


@jax.jit
def plain_sums(params: Any, batch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of weighted losses, of weights, of the weights of what is right."""
    targets, logits = batch["label"] if "label" in batch else batch["targets"], plain_logits(params, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    weights = batch["weights"].astype(losses.dtype)
    return (losses * weights).sum(), weights.sum(), jnp.where(logits.argmax(-1) == targets, weights, 0).sum()


def plain_loss(params: Any, batch: Any) -> jax.Array:
    total, weight, _ = plain_sums(params, batch)
    return total / weight


@functools.cache
def one_device(head: str) -> tuple[Any, list[tuple[Any, Any]], Any]:
    """(parameters before three steps, (loss, gradients) of each, parameters after them)."""
    tx, first = layouts.optimizer(), oracle.drawn(model_of(head).shapes)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            found = jax.value_and_grad(plain_loss)(params, batch)
            updates, opt_state = tx.update(found[1], opt_state, params)
        return found, optax.apply_updates(params, updates), opt_state

    params, opt_state, steps = first, jax.jit(tx.init)(first), []
    for i in range(3):
        found, params, opt_state = step(params, opt_state, batch_of(i, head))
        steps.append(jax.device_get(found))
    return first, steps, jax.device_get(params)


def check(head: str, mesh: dict[str, int], *, strategy: str = "zero3", model: Any = None, **options: Any) -> None:
    """Losses, all gradients, the parameters after three steps, and an evaluation are those of one device."""
    made, (first, steps, last) = model_of(head, **model or {}), one_device(head)
    tx, placed = layouts.optimizer(), make_mesh(**mesh)
    target = state_target(made, tx, placed, strategy=strategy)
    step = make_train_step(made, tx, placed, strategy=strategy, precision="fp64", return_grads=True, **options)
    state = place_params(first, tx, target)
    for i, (want, grads) in enumerate(steps):
        state, metrics = step(state, jax.device_put(batch_of(i, head), NamedSharding(placed, BATCH_SPEC)))
        assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-10)
        assert oracle.error(metrics["grads"], grads) < 1e-10
    assert oracle.error(state.params, last) < 1e-10
    every = StepOptions(strategy=strategy, precision=POLICIES["fp64"], **options)
    evaluate = make_eval_step(made, placed, specs_of_arrays(state.params), get_strategy(every))
    batch, name = batch_of(9, head), "label" if head == "classification" else "targets"
    with jax.numpy_dtype_promotion("standard"):
        likely = np.asarray(jax.jit(plain_logits)(last, batch).argmax(-1), np.int32)
        batch[name] = np.where(np.arange(likely.size).reshape(likely.shape) % 2, likely, batch[name])  # some are right
        total, weight, right = map(float, plain_sums(last, batch))
    found = evaluate(state.params, jax.device_put(batch, NamedSharding(placed, BATCH_SPEC)))
    assert 0 < right < weight and tuple(map(float, found["accuracy"])) == (right, weight)
    assert [float(each) for each in found["loss"]] == pytest.approx([total, weight], rel=1e-10)


PIPE = {"schedule": "one_f_one_b", "microbatches": 2}
SEQUENCE = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "mlm-zero3-tensor-sequence": ("mlm", {"fsdp": 2, "tensor": 2}, {"model": SEQUENCE}),
    "classification-1f1b-tensor": ("classification", {"pipe": 2, "tensor": 2}, PIPE),
    "mlm-one-device": ("mlm", {}, {"strategy": "ddp"}),
    "mlm-ddp-accumulate": ("mlm", {"data": 4}, {"strategy": "ddp", "microbatches": 2}),
    "mlm-zero1": ("mlm", {"data": 2, "fsdp": 2}, {"strategy": "zero1", "remat": "full"}),
    "mlm-zero2-chunked": ("mlm", {"fsdp": 2, "tensor": 2}, {"strategy": "zero2", "model": {"loss_chunk": 5}}),
    "mlm-tensor-4": ("mlm", {"tensor": 4}, {"strategy": "ddp", "remat": "dots"}),
    "mlm-1f1b-tensor": ("mlm", {"pipe": 2, "tensor": 2}, PIPE),
    "mlm-gpipe": ("mlm", {"pipe": 2, "fsdp": 2}, {"schedule": "gpipe", "microbatches": 4}),
    "mlm-zero-bubble": ("mlm", {"pipe": 2}, {"schedule": "zero_bubble", "microbatches": 4}),
    "mlm-prefetch": ("mlm", {"fsdp": 4}, {"prefetch": 1}),
    "mlm-collective-matmul": ("mlm", {"tensor": 2}, {"model": SEQUENCE | {"collective_matmul": True}}),
    "mlm-unrolled": ("mlm", {"fsdp": 2}, {"model": {"scan_blocks": 0}}),
    "classification-one-device": ("classification", {}, {"strategy": "ddp"}),
    "classification-zero3": ("classification", {"fsdp": 8}, {"remat": "full"}),
    "classification-sequence": ("classification", {"fsdp": 2, "tensor": 4}, {"model": SEQUENCE}),
    "classification-zero2": ("classification", {"data": 2, "fsdp": 2}, {"strategy": "zero2", "microbatches": 2}),
    "classification-prefetch": ("classification", {"fsdp": 2, "tensor": 2}, {"prefetch": 1}),
}


@pytest.mark.parametrize("case", levels(LAYOUTS, slow=3))
def test_a_layout_trains_as_one_device(case: str) -> None:
    head, mesh, options = LAYOUTS[case]
    with jax.enable_x64(True):
        check(head, mesh, **options)


@slow
@pytest.mark.parametrize("head", HEADS_OF)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near(head: str, precision: str) -> None:
    """In two layouts; but not the same."""
    model, tx = bert(config_of(head), max_length=LENGTH), optax.sgd(0.1)
    params, losses = oracle.drawn(model.shapes), []
    for sizes in ({"fsdp": 2}, {"tensor": 2}):
        mesh = make_mesh(**sizes)
        target = state_target(model, tx, mesh, strategy="zero3")
        step = make_train_step(model, tx, mesh, strategy="zero3", precision=precision)
        batch = jax.device_put(batch_of(0, head), NamedSharding(mesh, BATCH_SPEC))
        losses.append(float(step(place_params(params, tx, target), batch)[1]["loss"]))
    want = float(plain_loss(params, batch_of(0, head)))
    assert losses == pytest.approx([want, want], rel=1e-2) and losses[0] != want


@pytest.mark.parametrize(("head", "count"), [("mlm", 109_514_298), ("classification", 109_483_778)])
def test_the_parameters_of_bert_base_are_counted(head: str, count: int) -> None:
    """As `transformers` counts those of bert-base-uncased, BertForMaskedLM and BertForSequenceClassification."""
    sizes = {"layers": 12, "width": 768, "heads": 12, "vocab": 30522}
    assert bert(ModelConfig(name="bert", head=head, **sizes), max_length=512).parameters == count


def sums(head: str, params: Any, batch: Any, *, max_length: int = 64, **options: Any) -> tuple[Any, Any, Any]:
    """(what the head returns, its metrics, logits), in fp32 on one device."""
    model = bert(config_of(head, **options), max_length=max_length)
    keys = jax.random.split(jax.random.key(0), len(batch["inputs"]))
    mesh, batch = make_mesh(data=1), {**jax.tree.map(jnp.asarray, batch), "keys": keys}

    def run(params: Any, batch: Any) -> Any:
        h = model.embed(params["embed"], batch, keys)
        for i in range(model.layers):
            own = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
            h = model.block(own, h, *model.read_by_blocks(batch))
        given = params["head"], params["embed"] if model.tied else None, h, batch
        assert model.metrics is not None
        return model.head(*given), model.metrics(*given), model.logits(*given[:3])

    spec = jax.sharding.PartitionSpec()
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["mlm", pytest.param("classification", marks=slow)])
def test_padding_changes_nothing(head: str) -> None:
    """Other ids in it, and more of it; and a batch without padding needs no mask and no segments."""
    params = oracle.drawn(bert(config_of(head), max_length=64).shapes)
    batch = batch_of(0, head)
    seen = batch["attention_mask"] == 1
    if head == "mlm":
        batch["weights"] *= seen
    else:
        batch["weights"] *= seen[:, 0]
    first, metrics, _ = sums(head, params, batch)
    other = batch | {"inputs": np.where(seen, batch["inputs"], 5)}
    wide = {name: np.pad(leaf, ((0, 0), (0, 9))) if leaf.ndim == 2 else leaf for name, leaf in other.items()}
    for changed in (other, wide):
        np.testing.assert_allclose(sums(head, params, changed)[0], first, rtol=1e-6)
        np.testing.assert_allclose(sums(head, params, changed)[1]["accuracy"], metrics["accuracy"])
    unmasked = {name: leaf for name, leaf in batch.items() if name != "attention_mask"}
    assert abs(sums(head, params, unmasked)[0][0] - first[0]) > 1e-3  # it sees the padding
    full = batch | {"attention_mask": np.ones_like(batch["inputs"]), "token_type_ids": np.zeros_like(batch["inputs"])}
    bare = {name: leaf for name, leaf in full.items() if name not in ("attention_mask", "token_type_ids")}
    np.testing.assert_allclose(sums(head, params, bare)[0], sums(head, params, full)[0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("head", others_slow(HEADS_OF, "classification"))
def test_the_accuracy(head: str) -> None:
    params, batch = oracle.drawn(bert(config_of(head), max_length=64).shapes), batch_of(0, head)
    right = np.asarray(plain_logits(params, batch)).argmax(-1) == (
        batch["label"] if head != "mlm" else batch["targets"]
    )
    weights = batch["weights"]
    assert 0 < (right * weights).sum() < weights.sum()
    found = sums(head, params, batch)[1]["accuracy"]
    np.testing.assert_allclose(found, [(right * weights).sum(), weights.sum()], rtol=1e-6)


@pytest.mark.slow
def test_negative_targets_count_nothing_and_others_are_refused() -> None:
    for head, key in (("mlm", "targets"), ("classification", "label")):
        params, batch = oracle.drawn(bert(config_of(head), max_length=64).shapes), batch_of(0, head)
        batch["weights"][:] = 1
        batch[key].reshape(-1)[::3] = -100
        loss, weight = sums(head, params, batch)[0]
        assert np.isfinite(loss) and float(weight) == (batch[key] >= 0).sum()
        batch[key].reshape(-1)[1] = 99
        assert np.isnan(sums(head, params, batch)[0][0])


@slow
def test_dropout_is_the_same_in_every_layout() -> None:
    losses = []
    for head in HEADS_OF:
        model, tx, found = bert(config_of(head, dropout=0.3), max_length=LENGTH), optax.sgd(0.1), []
        for sizes in ({"data": 2}, {"tensor": 2}):
            mesh = make_mesh(**sizes)
            state = place_params(oracle.drawn(model.shapes), tx, state_target(model, tx, mesh))
            batch = jax.device_put(batch_of(0, head), NamedSharding(mesh, BATCH_SPEC))
            found.append(float(make_train_step(model, tx, mesh)(state, batch)[1]["loss"]))
        assert found[0] == pytest.approx(found[1], rel=1e-6)
        losses += [found[0], float(plain_loss(oracle.drawn(model.shapes), batch_of(0, head)))]
    assert abs(losses[0] - losses[1]) > 1e-3 and abs(losses[2] - losses[3]) > 1e-3


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {name: bert, layers: 1, width: 8, heads: 2}\ndata: {source: masked}\n")
    for override, said in {
        "data.source=text": r"data\.source: 'text' asks for the next token, which model\.head 'mlm' sees; allowed:"
        " iterable, masked; or a source of your own",
        "data.source=lines": r"data\.source: 'lines' gives inputs, attention_mask, label, and model\.head 'mlm' takes"
        " inputs, targets; allowed: iterable, masked;",
        "model.head=classification": r"data\.source: 'masked' gives inputs, targets, weights, and model\.head"
        " 'classification' takes inputs, label; allowed: iterable, lines;",
        "model.head=classification data.source=digits": r"data\.source: 'digits' gives image, label, and model\.head",
        "model.heads=3": r"model\.heads: 3 does not divide",
        "model.vocab=257 mesh.tensor=2": r"mesh\.tensor: 2 does not divide model\.vocab 257",
        "data.mask_token_rate=0.95": r"data\.random_token_rate: 0\.1 and data\.mask_token_rate 0\.95 are more than 1",
    }.items():
        with pytest.raises(UserError, match=said) as error:
            load_config(file, override.split())
        assert "\n" not in str(error.value)
    load_config(file, ["data.source=lines", "model.head=classification"])
    for head in HEADS_OF:  # what an iterable gives is seen when it is read
        load_config(file, ["data.source=iterable", "data.path=a.b", f"model.head={head}"])


def test_labels_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.py").write_text(f"x = {i}\n")
    (tmp_path / "config.yaml").write_text("model: {name: bert, head: classification}\ndata: {source: lines}\n")
    given = [f"data.path={tmp_path}", "data.seq_len=8"]
    with pytest.raises(UserError, match=r"^model.classes: 2 is too small for 'lines', whose labels need 3$"):
        load_data(load_config(tmp_path / "config.yaml", given))
    assert load_data(load_config(tmp_path / "config.yaml", [*given, "model.classes=3"])).labels == 3


@pytest.mark.parametrize(
    "mask", [np.ones((ROWS, LENGTH - 1)), np.ones((ROWS, 1, LENGTH)), np.ones(ROWS)], ids=lambda each: str(each.shape)
)
def test_a_mask_of_another_shape_is_refused(mask: np.ndarray) -> None:
    params = oracle.drawn(bert(config_of("mlm"), max_length=64).shapes)
    with pytest.raises(
        UserError, match=r"^batch: attention_mask is \[.*\], and inputs \[\d+, \d+\]; allowed: the shape"
    ):
        sums("mlm", params, batch_of(0, "mlm") | {"attention_mask": mask})


def in_hugging_face(config: ModelConfig, transformers: Any) -> Any:
    """A model of `transformers` with weights at random, and no dropout."""
    own = transformers.BertConfig(
        vocab_size=config.vocab,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.width,
        max_position_embeddings=LENGTH,
        num_labels=config.classes,
        initializer_range=0.2,
    )
    kind = transformers.BertForMaskedLM if config.head == "mlm" else transformers.BertForSequenceClassification
    model = kind(own).eval()
    for parameter in model.parameters():  # so that no bias is 0 and no scale 1
        parameter.data += 0.1 * parameter.data.new_empty(parameter.shape).normal_()
    return model


def saved_config(head: str) -> Config:
    """For a run directory: any text will do, if its ids fit."""
    return Config(model=config_of(head, vocab=260), data=DataConfig(path=__file__, seq_len=LENGTH, global_batch=8))


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("head", HEADS_OF)
def test_logits_are_those_of_transformers(head: str, tmp_path: Path) -> None:
    """Theirs saved by them and imported; then ours exported and loaded by them, every bit as it was."""
    torch = pytest.importorskip("torch", reason="torch and transformers, for Hugging Face's logits")
    transformers = pytest.importorskip("transformers", reason="transformers, for Hugging Face's logits")
    torch.manual_seed(0)
    config, batch = saved_config(head), batch_of(0, head)
    model = in_hugging_face(config.model, transformers)
    model.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    import_model(tmp_path / "theirs", config, tmp_path / "run")
    keys = {"inputs": "input_ids", "attention_mask": "attention_mask", "token_type_ids": "token_type_ids"}
    given = {theirs: torch.tensor(batch[ours]).long() for ours, theirs in keys.items()}
    with torch.no_grad():
        want = model(**given).logits.numpy()
    params = jax.device_get(saved_runs.restored(tmp_path / "run", config).params)
    found = np.asarray(sums(head, params, batch, vocab=260, max_length=LENGTH)[2])
    some = batch["attention_mask"][:, 0] == 1  # where all is padding, theirs sees all, and ours nothing
    seen = batch["attention_mask"][some] == 1 if head == "mlm" else np.ones(some.sum(), bool)
    error = np.abs(found[some][seen] - want[some][seen]).max() / np.abs(want).max()
    print(f"{head}: logits up to {np.abs(want).max():.2f}, largest difference {error:.1e} of that")
    assert error < 1e-5
    export(open_steps(tmp_path / "run")[0], tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    mine, its = again.state_dict(), model.state_dict()
    assert mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in its)
    with torch.no_grad():
        assert np.array_equal(again(**given).logits.numpy(), want)


@saved_runs.NEEDS
@pytest.mark.parametrize("head", others_slow(HEADS_OF, "mlm"))
def test_there_and_back_bit_for_bit(head: str, tmp_path: Path) -> None:
    config = saved_config(head)
    params = saved_runs.random_params(config)
    export(saved_runs.save_run(tmp_path / "run", config, params), tmp_path / "out")
    import_model(tmp_path / "out", config, tmp_path / "again")
    assert saved_runs.bits(saved_runs.restored(tmp_path / "again", config).params) == saved_runs.bits(params)
    other = saved_config("mlm" if head == "classification" else "classification")
    wanted = {"mlm": r'cls\.predictions.*model\.head="classification"', "classification": r'.*model\.head="mlm"'}
    with pytest.raises(UserError, match=wanted[other.model.head]):
        import_model(tmp_path / "out", other, tmp_path / "other")


@pytest.fixture(scope="module", params=others_slow(HEADS_OF, "mlm"))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    folder, config = tmp_path_factory.mktemp("exported"), saved_config(request.param)
    export(saved_runs.save_run(folder / "run", config, saved_runs.random_params(config)), folder / "out")
    return folder / "out", config


def altered(
    exported: tuple[Path, Config], folder: Path, keys: Any = None, change: Callable[[Any], Any] = lambda found: found
) -> None:
    """Import the files with other keys of config.json, or other tensors."""
    from safetensors.numpy import load_file, save_file

    found = json.loads((exported[0] / "config.json").read_text()) | (keys or {})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(found))
    save_file(change(load_file(exported[0] / "model.safetensors")), folder / "model.safetensors")
    import_model(folder, exported[1], folder / "run")


@pytest.mark.slow
@saved_runs.NEEDS
def test_files_with_names_of_old_are_imported(exported: tuple[Path, Config], tmp_path: Path) -> None:
    """Of norms, as Google's files have them; and the bias of the decoder under its other name."""
    import_model(exported[0], exported[1], tmp_path / "run")
    old = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    old = (*old, ("predictions.bias", "predictions.decoder.bias"))

    def renamed(name: str) -> str:
        for new, other in old:
            name = name.replace(new, other)
        return name

    altered(exported, tmp_path / "old", change=lambda found: {renamed(name): each for name, each in found.items()})
    first, again = (saved_runs.restored(tmp_path / run, exported[1]).params for run in ("run", "old/run"))
    assert saved_runs.bits(first) == saved_runs.bits(again)


@saved_runs.NEEDS
def test_config_json_of_another_bert(exported: tuple[Path, Config], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^config.json: architectures is 5; allowed: a list of names, or null$"):
        altered(exported, tmp_path / "a", {"architectures": 5})
    if exported[1].model.head == "classification":
        altered(exported, tmp_path / "b", {"tie_word_embeddings": False})
        return
    with pytest.raises(
        UserError, match=r"^config.json: tie_word_embeddings is false, which no configuration with model"
    ):
        altered(exported, tmp_path / "c", {"tie_word_embeddings": False})
    bias = "cls.predictions.decoder.bias"
    said = rf"^{bias}: differs from cls.predictions.bias, and this model has one parameter for both; no conf[^;]*$"
    with pytest.raises(UserError, match=said):
        altered(exported, tmp_path / "d", change=lambda found: found | {bias: found["cls.predictions.bias"] + 1})


@pytest.mark.exhaustive
def test_a_small_bert_learns(tmp_path: Path) -> None:
    """By the command, on the standard library: better than the most frequent byte, which is what the header says."""
    command = [sys.executable, "scripts/train.py", "--config", "configs/bert_stdlib.yaml", "--run-dir", str(tmp_path)]
    command += ["train.steps=300", "train.eval_every=300"]
    environment = {**os.environ, **child.environment()}
    done = subprocess.run(command, cwd=child.ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    beat = float(done.stdout.partition("unigram ")[2].split()[0])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert found[-1] > beat + 0.2, (found, beat)
