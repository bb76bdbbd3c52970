"""Generation with a key/value cache against generation without, which runs the model that training runs; rows alone and
in a batch; one device and layouts."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.cli.main import main
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.generation.loop import Generator, bucket
from jaxdist.generation.sampling import Sampling, row_keys
from jaxdist.init import state_target
from jaxdist.mesh import batch_shards, make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.program import in_precision
from jaxdist.state import specs_of_arrays

PROMPTS = [np.random.default_rng(size).integers(0, 48, size).tolist() for size in (3, 18, 9)]
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"style": "gpt2"},
    "llama": {"style": "llama", "kv_heads": 2},
    "window": {"style": "llama", "kv_heads": 2, "window": 5, "qk_norm": True, "head_width": 16},
    "llama3": {"style": "llama", "kv_heads": 4, "rope_type": "llama3", "rope_factor": 4.0, "rope_positions": 16},
}
NEW = 24
CONFIGS = Path(__file__).parents[2] / "configs"


def config_of(name: str) -> ModelConfig:
    return ModelConfig(layers=2, width=32, heads=4, vocab=48, **MODELS[name]).resolved()


@functools.cache
def drawn(name: str) -> Any:
    """Parameters so large that logits are far apart, and differ from token to token."""
    shapes = gpt(config_of(name), max_length=64, param_dtype="float64").shapes
    return jax.tree.map(lambda leaf: leaf * 4, oracle.drawn(shapes))


def generator(name: str, sampling: Sampling, *, strategy: str = "ddp", cache: bool = True, **sizes: int) -> Any:
    """(the generator, parameters in their layout)."""
    mesh, options = make_mesh(**sizes), StepOptions(strategy=strategy, precision="fp64")
    model = gpt(config_of(name), max_length=64, param_dtype="float64")
    target = state_target(model, optax.identity(), mesh, options).params
    placed = jax.tree.map(lambda array, like: jax.device_put(array, like.sharding), drawn(name), target)
    made = Generator(model, mesh, specs_of_arrays(target), get_strategy(options), sampling, cache=cache)
    return made, placed


def run(made: Any, prompts: list[list[int]], first: int = 0, seed: int = 0) -> np.ndarray:
    generator, params = made
    keys = row_keys(seed, range(first, first + len(prompts)))
    return np.concatenate(list(generator(params, prompts, keys, NEW)), axis=1)


@functools.cache
def reference(name: str, sampling: Sampling) -> np.ndarray:
    made = generator(name, sampling, cache=False)
    assert made[0].why_no_cache == "it is switched off"
    return run(made, PROMPTS)


def check(name: str, sampling: Sampling, **layout: Any) -> Any:
    with jax.enable_x64(True):
        made = generator(name, sampling, **layout)
        assert made[0].why_no_cache is None
        found, want = run(made, PROMPTS), reference(name, sampling)
        assert found.shape == (3, NEW) and np.array_equal(found, want)
        assert len({tuple(row) for row in found}) == 3 and len(set(found[1].tolist())) > 3  # no row is trivial
        return made


def test_rows_of_a_batch_in_a_layout_are_those_of_one_device_without_a_cache() -> None:
    """A window and grouped heads, and prompts of several lengths."""
    check("window", Sampling(0.7), strategy="zero3", fsdp=2, tensor=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "layout", [{}, {"strategy": "zero1", "fsdp": 2, "data": 2}, {"strategy": "zero3", "fsdp": 2, "tensor": 2}], ids=str
)
def test_greedy_output_needs_no_cache(name: str, layout: dict[str, Any]) -> None:
    check(name, Sampling(0.0), **layout)


def test_a_pipeline_has_the_types_of_its_results() -> None:
    """Each stage has the tokens of all, also without a cache."""
    with jax.enable_x64(True):
        made, params = generator("gpt2", Sampling(0.7), pipe=2)
        found = made.trace(params, 4)
    assert (found.ndim, found.shape[0], found.dtype) == (2, batch_shards(made.mesh), np.int32)


@pytest.mark.slow
def test_a_pipeline_gives_the_text_of_one_device() -> None:
    with jax.enable_x64(True):
        made = generator("gpt2", Sampling(0.7), strategy="zero3", pipe=2, fsdp=2)
        assert np.array_equal(run(made, PROMPTS), reference("gpt2", Sampling(0.7)))


@pytest.mark.slow
def test_a_seed_gives_the_same_text_in_any_batch() -> None:
    sampling = Sampling(0.7, top_k=40, top_p=0.95)
    made = check("gpt2", sampling)
    with jax.enable_x64(True):
        alone = [run(made, [prompt], first=row)[0] for row, prompt in enumerate(PROMPTS)]
        assert np.array_equal(alone, reference("gpt2", sampling))
        assert not np.array_equal(run(made, PROMPTS, seed=1), alone)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16", "O1"])
def test_the_cache_has_the_dtype_of_what_layers_give(policy: str) -> None:
    model, options = gpt(config_of("llama"), max_length=64), StepOptions(precision=policy)
    state = jaxdist.init_state(model, optax.identity(), make_mesh(tensor=2), options)
    tokens, ids = jax.ShapeDtypeStruct((1, 16), np.int32), jax.ShapeDtypeStruct((1,), np.int32)
    mesh, strategy = make_mesh(tensor=2), get_strategy(options)
    specs, model = specs_of_arrays(state.params), in_precision(model, options.precision)
    made = Generator(model, mesh, specs, strategy, Sampling(0.0))
    _, kept = made._start.eval_shape(state.params, tokens, ids, jax.ShapeDtypeStruct((1, 2), np.uint32), new=16)
    dtype = "float32" if policy == "O1" else "bfloat16"  # O1 casts operations, and gives what was written
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(kept.stacks)} == {dtype}
    found = jaxdist.generate(model, state.params, PROMPTS, max_tokens=4, options=options)
    assert [len(each.ids) for each in found] == [4, 4, 4]


def test_what_has_no_cache_says_why() -> None:
    model = gpt(config_of("gpt2"), max_length=64)
    mesh, specs = make_mesh(), jax.tree.map(lambda _: P(), model.shapes)
    of = lambda model, mesh: Generator(model, mesh, specs, get_strategy(StepOptions()), Sampling()).why_no_cache  # noqa: E731
    assert of(model, mesh) is None
    assert "its blocks no cache" in str(of(model._replace(cached=None), mesh))
    assert "pipe" in str(of(model, make_mesh(pipe=2)))


@pytest.mark.slow
def test_the_model_says_how_long_a_text_may_be() -> None:
    assert (
        gpt(config_of("gpt2"), max_length=20).positions == 20
        and gpt(config_of("llama"), max_length=20).positions is None
    )
    model = gpt(config_of("gpt2"), max_length=8)
    params = jax.device_put(oracle.drawn(model.shapes), NamedSharding(make_mesh(), P()))
    with pytest.raises(UserError, match=r"^prompt 1: has 8 tokens, but the model has 8 positions; allowed: up to 7"):
        jaxdist.generate(model, params, [[1], [1] * 8])
    with pytest.raises(UserError, match=r"^prompt 0: has no tokens"):
        jaxdist.generate(model, params, [[]])
    with pytest.raises(UserError, match=r"^prompts: 'a' is a text, and no tokenizer is known"):
        jaxdist.generate(model, params, ["a"])
    one, other = jaxdist.generate(model, params, [[1] * 7, [1]], max_tokens=3)
    assert (len(one.ids), one.ended, len(other.ids), other.ended) == (1, "positions", 3, "max_tokens")


def test_ids_that_the_model_has_not_and_numbers_that_are_none() -> None:
    """Both gave a text of zeros."""
    model = gpt(config_of("llama"), max_length=64)
    params = jax.device_put(oracle.drawn(model.shapes), NamedSharding(make_mesh(), P()))
    for wrong in (48, -1):
        with pytest.raises(UserError, match=f"^prompt 1: has the token id {wrong}, and the model's vocabulary has the"):
            jaxdist.generate(model, params, [[47], [0, wrong, 1]])
    broken = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), params)
    with pytest.raises(
        UserError, match=r"^prompts: the model gives NaN for the token after the first 2 of the text .* 1, 2;"
    ):
        jaxdist.generate(model, broken, [[1, 2]], max_tokens=3)


def test_few_lengths_are_compiled() -> None:
    assert [bucket(length) for length in (1, 16, 17, 100)] == [16, 16, 32, 128]
    assert [bucket(length, 100) for length in (1, 65, 100)] == [16, 100, 100]


@pytest.mark.parametrize("name", ["bert_stdlib", "vit_digits", "resnet_digits"])
def test_a_run_of_a_family_that_writes_no_text(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its configuration says it, before a checkpoint is looked for."""
    (tmp_path / "config.yaml").write_text((CONFIGS / f"{name}.yaml").read_text())
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    family = name.partition("_")[0]
    assert re.fullmatch(
        f"error: FROM: model.name '{family}' cannot generate: it does not predict the next .*; allowed: gpt, or .*\n",
        capsys.readouterr().err,
    )
