"""ViT in Hugging Face's format: bit for bit there and back, the logits of `transformers`, what is refused."""

import operator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from saved_runs import NEEDS, bits, random_params, restored, save_run

from jaxdist.build import make_model
from jaxdist.checkpoint.huggingface.convert import check_model, config_differences, config_json, export
from jaxdist.checkpoint.huggingface.names import tensors
from jaxdist.checkpoint.huggingface.safetensors import SINGLE, TensorFiles, read_json
from jaxdist.checkpoint.reader import open_steps
from jaxdist.cli.work.checkpoint import import_model
from jaxdist.config.schema import Config, DataConfig, MeshConfig, ModelConfig, ParallelConfig
from jaxdist.errors import UserError
from jaxdist.mesh import make_mesh
from jaxdist.precision.policy import precision_of

MODEL = {
    "name": "vit", "image_size": 12, "patch_size": 3, "channels": 2, "classes": 7, "layers": 4, "width": 32, "heads": 4,
    "mlp_width": 40,
}  # fmt: skip


def config_of(**changes: Any) -> Config:
    """The data are not read but for their fingerprint."""
    model = MODEL | changes.pop("model", {})
    return Config(model=ModelConfig(**model), data=DataConfig(path=__file__, global_batch=8), **changes)


def logits(config: Config, params: Any, image: np.ndarray) -> np.ndarray:
    """Of the model on one device, block after block."""
    model = make_model(config, precision_of(config.precision), stages=1, training=False)
    keys = jax.random.split(jax.random.key(0), len(image))

    def region(params: Any, image: jax.Array) -> jax.Array:
        h = model.embed(params["embed"], {"image": image}, keys)
        for i in range(model.layers):
            h = model.block(jax.tree.map(operator.itemgetter(i), params["blocks"]), h, keys)
        return model.logits(params["head"], None, h)

    whole = jax.shard_map(region, mesh=make_mesh(), in_specs=P(), out_specs=P())
    return np.asarray(jax.jit(whole)(jax.device_get(params), image))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Theirs saved by them and imported; then ours exported and loaded by them, every bit as it was."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    config = config_of()
    fields = config_json(config.model.resolved(), positions=1, dtype="float32")
    fields.pop("model_type")
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.6)
    model.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    import_model(tmp_path / "theirs", config, tmp_path / "run")
    image = np.random.default_rng(0).normal(size=(5, 12, 12, 2)).astype(np.float32)
    pixels = torch.tensor(image.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        want = model(pixels).logits.numpy()
    got = logits(config, restored(tmp_path / "run", config).params, image)
    error = np.abs(got - want).max() / np.abs(want).max()
    print(f"vit: logits up to {np.abs(want).max():.2f}, largest difference {np.abs(got - want).max():.2e}")
    assert want.shape == (5, 7) and np.abs(want).max() > 1 and error < 1e-5
    export(open_steps(tmp_path / "run")[0], tmp_path / "ours")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    mine, its = again.state_dict(), model.state_dict()
    assert mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in its)
    with torch.no_grad():
        assert torch.equal(again.eval()(pixels).logits, torch.tensor(want))


@pytest.mark.slow
@NEEDS
@pytest.mark.parametrize(
    "mesh", [MeshConfig(fsdp=2, tensor=2), pytest.param(MeshConfig(pipe=2, fsdp=2), marks=pytest.mark.slow)], ids=str
)
def test_there_and_back_bit_for_bit(mesh: MeshConfig, tmp_path: Path) -> None:
    """Every parameter, in the target's layout; and every byte of the files."""
    schedule = {"schedule": "one_f_one_b", "microbatches": 2} if mesh.pipe > 1 else {}
    config = config_of(mesh=mesh, parallel=ParallelConfig(strategy="zero3", min_shard_bytes=0, **schedule))
    params = random_params(config)
    stored = save_run(tmp_path / "run", config, params)
    said = export(stored, tmp_path / "out")
    assert said.startswith("72 tensors, ") and "vocabulary" not in said
    said = import_model(tmp_path / "out", config, tmp_path / "again")
    assert said == f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters"
    assert bits(restored(tmp_path / "again", config).params) == bits(params)
    export(open_steps(tmp_path / "again")[0], tmp_path / "out2")
    for file in (SINGLE, "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "out2" / file).read_bytes()
    with pytest.raises(UserError, match=r"^--vocab: 5, but model.name 'vit' has no vocabulary; leave it out"):
        export(stored, tmp_path / "none", vocab=5)
    other = config_of(model={"heads": 8})
    with pytest.raises(UserError, match=r"^config.json: asks for model.heads=4 \(is 8\); set them"):
        judge(tmp_path / "out", other)
    with pytest.raises(UserError, match=r"classifier.weight: is \[7, 32\] .*\[9, 32\]; .*model.classes=7 \(is 9\)"):
        judge(tmp_path / "out", config_of(model={"classes": 9}))
    gpt = Config(model=ModelConfig(layers=4, width=32, heads=4), data=DataConfig(path=__file__))
    with pytest.raises(UserError, match=r"^config.json: model_type is 'vit'; .* model of type vit \(model.name is gpt"):
        judge(tmp_path / "out", gpt)


@NEEDS
def test_a_pooler_is_passed_over(tmp_path: Path) -> None:
    """Of `ViTModel`, which some files have beside a classifier."""
    from safetensors.numpy import load_file, save_file

    config = config_of()
    export(save_run(tmp_path / "run", config, random_params(config)), tmp_path / "out")
    found, without = load_file(tmp_path / "out" / SINGLE), judge(tmp_path / "out", config)
    pooler = {
        "vit.pooler.dense.weight": np.ones((32, 32), np.float32),
        "vit.pooler.dense.bias": np.ones(32, np.float32),
    }
    save_file(found | pooler, tmp_path / "out" / SINGLE)
    assert judge(tmp_path / "out", config) == without


def judge(folder: Path, config: Config) -> Any:
    with TensorFiles(folder) as files:
        return check_model(
            files, read_json(folder / "config.json"), config.model.resolved(), positions=config.data.seq_len
        )


def test_every_element_has_one_place() -> None:
    """Views cover each leaf exactly once, and nothing is copied."""
    config = config_of()
    model = make_model(config, precision_of(config.precision), stages=1, training=True)
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes):
        name = ".".join(key.key for key in path)
        leaves[name] = np.zeros(leaf.shape[1:] if name.startswith("blocks") else leaf.shape, np.int64)
    table = tensors(config.model.resolved(), positions=1)
    for i, each in enumerate(table):
        assert np.shares_memory(each.view(leaves[each.leaf]), leaves[each.leaf])
        before = leaves[each.leaf].copy()
        each.put(leaves[each.leaf], np.full(each.shape, i + 1))
        assert not before[leaves[each.leaf] != before].any(), each.name
    assert all(leaf.all() for leaf in leaves.values()) and {each.leaf for each in table} == set(leaves)
    patch = next(each for each in table if each.name.endswith("projection.weight"))
    kernel = np.random.default_rng(0).normal(size=(3 * 3 * 2, 32))
    assert (patch.take(kernel)[:, 1, 2, 0] == kernel[(2 * 3 + 0) * 2 + 1]).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "relu"}, r"config.json: hidden_act is 'relu', which no configuration makes; allowed: 'gelu'"),
        ({"qkv_bias": False}, r"config.json: qkv_bias is false, which no configuration makes; allowed: True"),
        ({"id2label": [1, 2]}, r"config.json: id2label is a list; allowed: an object with an entry for each label"),
        ({"image_size": "x"}, r"config.json: image_size: 'x' is text; allowed: an integer >= 1"),
    ],
)
def test_a_config_json_that_no_configuration_makes(changes: dict[str, Any], said: str) -> None:
    model = config_of().model.resolved()
    found = config_json(model, positions=1, dtype="float32")
    assert config_differences(found, model, positions=1) == []
    assert config_differences(found | {"image_size": 24}, model, positions=1) == ["model.image_size=24 (is 12)"]
    with pytest.raises(UserError, match="^" + said):
        config_differences(found | changes, model, positions=1)
