"""Hugging Face's tensors: bit for bit there and back, the same logits as `transformers`, what is refused."""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from levels import levels

from jaxdist.assemble import assemble, make_model, precision_of
from jaxdist.checkpoint import Checkpoints
from jaxdist.checkpoint.huggingface import check, config_json, export
from jaxdist.checkpoint.names import Tensor, tensors
from jaxdist.checkpoint.stored import Stored, open_steps
from jaxdist.checkpoint.tensorfile import INDEX, SINGLE, TensorFiles
from jaxdist.checkpoint_command import import_model, run
from jaxdist.config import Config, DataConfig, MeshConfig, ModelConfig, ParallelConfig, PrecisionConfig, resolve_model
from jaxdist.errors import UserError
from jaxdist.mesh import make_mesh
from jaxdist.parallel.arrange import arrange_rows, order_of_blocks
from jaxdist.session import record
from jaxdist.state import TrainState

MODELS = {
    "gpt2-tied": ModelConfig(style="gpt2", tied=True),
    "gpt2-untied": ModelConfig(style="gpt2", tied=False, mlp_width=40),
    "llama-untied": ModelConfig(style="llama", kv_heads=2, mlp_width=24, rope_theta=5e5, norm_eps=1e-6),
    "llama-tied": ModelConfig(style="llama", tied=True, kv_heads=1, mlp_width=24),
    "llama-bias": ModelConfig(style="llama", bias=True, mlp_width=24),
}
LENGTH = 12
NEEDS = pytest.mark.skipif("not __import__('importlib').util.find_spec('safetensors')", reason="safetensors is missing")


def config_of(name: str, **changes: Any) -> Config:
    """4 blocks, width 32, 4 heads; odd sizes of vocabulary and sequence."""
    model = asdict(MODELS[name]) | {"layers": 4, "width": 32, "heads": 4, "vocab": 259} | changes.pop("model", {})
    data = DataConfig(path=__file__, seq_len=LENGTH, global_batch=8)
    return Config(model=ModelConfig(**model), data=data, **changes)


def random_params(config: Config, seed: int = 0) -> Any:
    """No two numbers alike, no zeros: biases and scales too. Blocks in the order of the model."""
    made = make_model(config, precision_of(config.precision), stages=1, training=True)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, leaf.dtype), made.shapes)


def save_run(folder: Path, config: Config, params: Any, step: int = 3) -> Stored:
    """A run directory with these parameters, put into the order of the configuration's pipeline."""
    parallel = config.parallel
    order = order_of_blocks(config.model.layers, stages=config.mesh.pipe, chunks=parallel.chunks,
                            blocks=parallel.stages)  # fmt: skip
    params = {**params, "blocks": arrange_rows(params["blocks"], order)}
    source: Any = SimpleNamespace(info={"sha256": "ab" * 32})
    with Checkpoints(folder / "checkpoints", keep=9) as checkpoints:
        checkpoints.save(step, TrainState(jnp.int32(step), params, {"mu": params}), record(config, source))
    return open_steps(folder, step=step)[0]


def bits(tree: Any) -> dict[str, tuple[Any, bytes]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (leaf.dtype, np.asarray(leaf).tobytes()) for path, leaf in leaves}


def restored(run_dir: Path, config: Config, step: int = 0) -> TrainState:
    """In the layout that the trainer asks for."""
    parts = assemble(config, make_mesh(**asdict(config.mesh)))
    with Checkpoints(run_dir / "checkpoints", keep=1) as checkpoints:
        return checkpoints.restore(step, parts.target)


def logits(config: Config, params: Any, tokens_BS: np.ndarray) -> np.ndarray:
    """Of the model on one device, block after block."""
    model = make_model(config, precision_of(config.precision), stages=1, training=False)
    keys = jax.random.split(jax.random.key(0), len(tokens_BS))

    def region(params: Any, tokens: jax.Array) -> jax.Array:
        h = model.embed(params["embed"], {"inputs": tokens}, keys)
        for i in range(model.layers):
            h = model.block(jax.tree.map(lambda leaf: leaf[i], params["blocks"]), h, keys)
        return model.logits(params["head"], params["embed"] if model.tied else None, h)

    whole = jax.shard_map(region, mesh=make_mesh(), in_specs=P(), out_specs=P())
    return np.asarray(jax.jit(whole)(jax.device_get(params), tokens_BS))


def theirs(name: str, torch: Any, transformers: Any) -> Any:
    """A model of `transformers` with random numbers in every parameter."""
    fields = config_json(resolve_model(config_of(name).model), positions=LENGTH, dtype="float32")
    kind = fields.pop("model_type")
    made = {"gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM)}[kind]  # fmt: skip
    torch.manual_seed(0)
    model = made[1](made[0](**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Theirs saved by them and imported; then ours exported and loaded by them, every bit as it was."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    model, config = theirs(name, torch, transformers), config_of(name)
    model.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    import_model(tmp_path / "theirs", config, tmp_path / "run")
    tokens = np.random.default_rng(0).integers(0, 259, (3, LENGTH))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    params = restored(tmp_path / "run", config).params
    got = logits(config, params, tokens.astype(np.int32))
    error = np.abs(got - want).max() / np.abs(want).max()
    print(f"{name}: logits up to {np.abs(want).max():.2f}, largest difference {np.abs(got - want).max():.2e}")
    assert np.abs(want).max() > 1 and error < 1e-5
    export(open_steps(tmp_path / "run")[0], tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    mine, its = again.state_dict(), model.state_dict()
    assert mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in its)
    with torch.no_grad():
        assert torch.equal(again.eval()(torch.tensor(tokens)).logits, torch.tensor(want))


@NEEDS
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Every parameter, in the target's layout; and every byte of the files."""
    config = config_of(name, model={"vocab": 260}, mesh=MeshConfig(fsdp=2, tensor=2 if name.startswith("gpt2") else 1),
                       parallel=ParallelConfig(strategy="zero3", min_shard_bytes=0))  # fmt: skip
    params = random_params(config)
    export(save_run(tmp_path / "run", config, params), tmp_path / "out")
    said = import_model(tmp_path / "out", config, tmp_path / "again")
    assert said == f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters"
    state = restored(tmp_path / "again", config)
    assert bits(state.params) == bits(params) and int(state.step) == 0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state))
    export(open_steps(tmp_path / "again")[0], tmp_path / "out2")
    for file in (SINGLE, "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "out2" / file).read_bytes()


LAYOUTS = [
    ("gpt2-tied", 2, 2, ()), ("llama-untied", 2, 1, (1, 3)), ("llama-tied", 2, 2, (1, 1, 1, 1)),
    ("gpt2-untied", 1, 2, (1, 3)), ("llama-bias", 4, 1, ()),
]  # fmt: skip


@NEEDS
@pytest.mark.parametrize(("name", "pipe", "chunks", "stages"), levels(LAYOUTS, everyday=2))
def test_blocks_are_written_in_the_order_of_the_model(
    name: str, pipe: int, chunks: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    """Whatever the pipeline was; and a pipeline gets them in its own order."""
    plain, params = config_of(name), random_params(config_of(name))
    schedule = "interleaved" if chunks > 1 else "one_f_one_b"
    piped = config_of(name, mesh=MeshConfig(pipe=pipe), parallel=ParallelConfig(
        schedule=schedule, chunks=chunks, stages=stages, microbatches=4))  # fmt: skip
    export(save_run(tmp_path / "plain", plain, params), tmp_path / "a")
    stored = save_run(tmp_path / "piped", piped, params)
    order = order_of_blocks(4, stages=pipe, chunks=chunks, blocks=stages)
    assert order[stored.rows].tolist() == [0, 1, 2, 3]
    export(stored, tmp_path / "b")
    assert (tmp_path / "a" / SINGLE).read_bytes() == (tmp_path / "b" / SINGLE).read_bytes()
    import_model(tmp_path / "a", piped, tmp_path / "again")
    assert bits(restored(tmp_path / "again", piped).params["blocks"]) == bits(arrange_rows(params["blocks"], order))


@pytest.mark.parametrize("name", MODELS)
def test_every_element_has_one_place(name: str) -> None:
    """Views cover each leaf exactly once, and nothing is copied."""
    config = config_of(name)
    model = make_model(config, precision_of(config.precision), stages=1, training=True)
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes):
        name = ".".join(key.key for key in path)
        leaves[name] = np.zeros(leaf.shape[1:] if name.startswith("blocks") else leaf.shape, np.int64)
    table = tensors(resolve_model(config.model), positions=LENGTH)
    for i, each in enumerate(table):
        assert np.shares_memory(each.view(leaves[each.leaf]), leaves[each.leaf])
        before = leaves[each.leaf].copy()
        each.put(leaves[each.leaf], np.full(each.shape, i + 1))
        assert not before[leaves[each.leaf] != before].any(), each.name
    assert all(leaf.all() for leaf in leaves.values()) and {each.leaf for each in table} == set(leaves)
    assert len({each.name for each in table}) == len(table)


def test_one_head_by_hand() -> None:
    """Head 1 of c_attn's keys, and the query heads 2 and 3, which share a key, of q_proj."""
    gpt2 = resolve_model(config_of("gpt2-tied").model)
    c_attn = next(each for each in tensors(gpt2, positions=1) if each.name.endswith("c_attn.weight"))
    kernel = np.random.default_rng(0).normal(size=(32, 4, 3, 8))
    assert (c_attn.take(kernel)[:, 32 + 8 : 32 + 16] == kernel[:, 1, 1]).all()
    llama = resolve_model(config_of("llama-untied").model)
    q_proj = next(each for each in tensors(llama, positions=1) if each.name.endswith("q_proj.weight"))
    kernel = np.random.default_rng(0).normal(size=(32, 2, 4, 8))
    assert (q_proj.take(kernel)[16:32] == kernel[:, 1, :2].reshape(32, 16).T).all()


@NEEDS
def test_files_of_several_parts_and_half_precision(tmp_path: Path) -> None:
    config = config_of("llama-untied", precision=PrecisionConfig(policy="bf16", param_dtype="bfloat16"))
    params = random_params(config)
    said = export(save_run(tmp_path / "run", config, params), tmp_path / "out", file_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert f"of bfloat16 in {len(files)} files" in said and len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    import_model(tmp_path / "out", config, tmp_path / "again")
    assert bits(restored(tmp_path / "again", config).params) == bits(params)
    wide = config_of("llama-untied")
    assert "bfloat16 cast to float32" in import_model(tmp_path / "out", wide, tmp_path / "wide")
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    assert bits(restored(tmp_path / "wide", wide).params) == bits(cast)


@NEEDS
@pytest.mark.parametrize("name", ["gpt2-tied", "llama-untied"])
def test_padding_of_the_vocabulary(name: str, tmp_path: Path) -> None:
    """Added rows are the mean; losses rise by at most log(vocab / rows); left out again, all is as it was."""
    config, padded = config_of(name), config_of(name, model={"vocab": 264})
    params = random_params(config)
    stored = save_run(tmp_path / "run", config, params)
    export(stored, tmp_path / "out")
    said = import_model(tmp_path / "out", padded, tmp_path / "again")
    assert said.endswith("; the vocabulary has 259 rows there, 5 were added: the mean of the others")
    got = restored(tmp_path / "again", padded).params
    table = np.asarray(got["embed"]["tokens"]["table"])
    np.testing.assert_allclose(table[259:], np.tile(table[:259].mean(0), (5, 1)), atol=1e-6)
    tokens = np.arange(LENGTH, dtype=np.int32)[None]
    first, second = (jax.nn.logsumexp(logits(*each, tokens), -1) for each in ((config, params), (padded, got)))
    assert (second > first).all() and (second - first < np.log(264 / 259) + 1e-6).all()
    said = export(open_steps(tmp_path / "again")[0], tmp_path / "back", vocab=259)
    assert said.endswith("; left out: the last 5 of 264 rows of the vocabulary")
    assert (tmp_path / "back" / SINGLE).read_bytes() == (tmp_path / "out" / SINGLE).read_bytes()
    with pytest.raises(UserError, match="--vocab: 260; allowed: 1 to 259"):
        export(stored, tmp_path / "none", vocab=260)
    assert not (tmp_path / "none").exists()
