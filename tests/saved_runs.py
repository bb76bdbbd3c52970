"""Run directories with random parameters, for tests of checkpoints in other formats."""

import operator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.build import assemble, make_model
from jaxdist.checkpoint import Checkpoints
from jaxdist.checkpoint.huggingface.family import stacked_blocks
from jaxdist.checkpoint.reader import Stored, open_steps
from jaxdist.config.schema import Config, DataConfig, ModelConfig
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.data import Source
from jaxdist.mesh import make_mesh
from jaxdist.model import BlockOrder
from jaxdist.parallel.pipeline.stages import arrange_rows, order_of_blocks
from jaxdist.precision.policy import precision_of
from jaxdist.state import TrainState
from jaxdist.trainer.resume import record

MODELS = {
    "gpt2-tied": ModelConfig(style="gpt2", tied=True),
    "gpt2-untied": ModelConfig(style="gpt2", tied=False, mlp_width=40),
    "llama-untied": ModelConfig(style="llama", kv_heads=2, mlp_width=24, rope_theta=5e5, norm_eps=1e-6),
    "llama-tied": ModelConfig(style="llama", tied=True, kv_heads=1, mlp_width=24),
    "llama-bias": ModelConfig(style="llama", bias=True, mlp_width=24),
    "llama3": ModelConfig(
        style="llama", kv_heads=2, mlp_width=24, rope_theta=1e2, rope_type="llama3", rope_factor=4.0, rope_positions=40
    ),
    "llama-linear": ModelConfig(style="llama", mlp_width=24, rope_type="linear", rope_factor=3.0, head_width=6),
    "mistral": ModelConfig(style="llama", kv_heads=2, mlp_width=24, window=5),
    "mistral-nemo": ModelConfig(style="llama", kv_heads=1, mlp_width=24, head_width=4),
    "qwen2": ModelConfig(style="llama", kv_heads=2, mlp_width=24, qkv_bias=True, tied=True, norm_eps=1e-6),
    "qwen2-window": ModelConfig(style="llama", kv_heads=2, mlp_width=24, qkv_bias=True, window=4),
    "qwen3": ModelConfig(style="llama", kv_heads=2, mlp_width=24, qk_norm=True, head_width=16, tied=True),
}
MIXTURES = {
    "mixtral": ModelConfig(
        style="llama", kv_heads=2, moe=MoEConfig(experts=4, top_k=2, hidden=24, bias_rate=None), window=7
    ),
    "qwen3_moe": ModelConfig(
        style="llama",
        kv_heads=2,
        qk_norm=True,
        head_width=16,
        tied=True,
        mlp_width=40,
        moe=MoEConfig(experts=6, top_k=3, hidden=20, normalised=False, bias_rate=None),
    ),
    "dots1": ModelConfig(
        style="llama",
        qk_norm=True,
        mlp_width=40,
        moe=MoEConfig(experts=6, top_k=2, hidden=12, shared=2, dense=1, scores="sigmoid", scaling=2.5),
    ),
}
LENGTH = 12
NEEDS = pytest.mark.skipif("not __import__('importlib').util.find_spec('safetensors')", reason="safetensors is missing")


def config_of(name: str, **changes: Any) -> Config:
    """4 blocks, width 32, 4 heads (mistral-nemo: 6, which divide no 32); odd sizes of vocabulary and sequence."""
    heads = 6 if name == "mistral-nemo" else 4
    model = (
        vars((MODELS | MIXTURES)[name])
        | {"layers": 4, "width": 32, "heads": heads, "vocab": 259}
        | changes.pop("model", {})
    )
    data = DataConfig(path=__file__, seq_len=LENGTH, global_batch=8)
    return Config(model=ModelConfig(**model), data=data, **changes)


def random_params(config: Config, seed: int = 0) -> Any:
    """No two numbers alike, no zeros: biases and scales too. What counts experts is 0, as in every state. Blocks in the
    order of the model."""
    made = make_model(config, precision_of(config.precision), stages=1, training=True)
    rng = np.random.default_rng(seed)

    def drawn(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1].key == "statistics":
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(rng.normal(size=leaf.shape) * 0.3, leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, made.shapes)


def save_run(folder: Path, config: Config, params: Any, step: int = 3) -> Stored:
    """A run directory with these parameters, put into the order of the configuration's pipeline."""
    parallel = config.parallel
    stacked = len(stacked_blocks(config.model))
    order = order_of_blocks(stacked, stages=config.mesh.pipe, chunks=parallel.chunks, blocks=parallel.stages)
    params = {**params, "blocks": arrange_rows(params["blocks"], order)}
    source = Source(np.zeros(1, np.uint8), np.zeros(1, np.uint8), 256, {"sha256": "ab" * 32})
    carried = BlockOrder(tuple(order.tolist()), config.mesh.pipe)
    state = TrainState(jnp.int32(step), params, {"mu": params}, model_state=carried)
    with Checkpoints(folder / "checkpoints", keep=9) as checkpoints:
        checkpoints.save(step, state, record(config, source))
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
            h = model.block(jax.tree.map(operator.itemgetter(i), params["blocks"]), h, keys)
        return model.logits(params["head"], params["embed"] if model.tied else None, h)

    whole = jax.shard_map(region, mesh=make_mesh(), in_specs=P(), out_specs=P())
    return np.asarray(jax.jit(whole)(jax.device_get(params), tokens_BS))
