"""Hugging Face's tensors: bit for bit there and back, the same logits as `transformers`, what is refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from family_logits import COLUMNS, digest, stored, theirs
from family_logits import exported as exported_folder
from family_logits import tokens as tokens_of_both
from levels import levels
from saved_runs import LENGTH, MIXTURES, MODELS, NEEDS, bits, config_of, logits, random_params, restored, save_run

from jaxdist.build import make_model
from jaxdist.checkpoint.huggingface.convert import check_model, export
from jaxdist.checkpoint.huggingface.names import family, tensors
from jaxdist.checkpoint.huggingface.safetensors import INDEX, SINGLE, TensorFiles
from jaxdist.checkpoint.reader import open_steps
from jaxdist.cli.runs.checkpoint import main as checkpoint_main
from jaxdist.cli.work.checkpoint import import_model
from jaxdist.config.schema import Config, DataConfig, MeshConfig, ParallelConfig
from jaxdist.config.sections.precision import PrecisionConfig
from jaxdist.errors import UserError
from jaxdist.parallel.pipeline.stages import arrange_rows, order_of_blocks
from jaxdist.precision.policy import precision_of
from jaxdist.specs import path_name

EVERYDAY = ("llama3", "mistral", "qwen3", "mixtral")
pytestmark = pytest.mark.xdist_group("huggingface")  # files are shared by the tests


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", MODELS | MIXTURES)
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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERYDAY else [pytest.mark.slow]) for name in MODELS | MIXTURES]
)
def test_logits_and_files_are_as_transformers_had_them(name: str, tmp_path: Path) -> None:
    """Where there is no torch, too: tests/family_logits.py exported each model, and transformers ran the folder."""
    config, want = config_of(name), stored()[name]
    folder = exported_folder(name, tmp_path)
    assert digest(folder) == want["sha256"]
    assert json.loads((folder / "config.json").read_text())["model_type"] == want["kind"]
    got = logits(config, random_params(config), tokens_of_both())[..., COLUMNS]
    assert oracle.error(got, np.asarray(want["logits"])) < 1e-5


@NEEDS
@pytest.mark.parametrize("name", levels(MODELS, everyday=len(MODELS)))
def test_there_and_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Every parameter, in the target's layout; and every byte of the files."""
    config = config_of(
        name,
        model={"vocab": 260},
        mesh=MeshConfig(fsdp=2, tensor=2 if name.startswith("gpt2") else 1),
        parallel=ParallelConfig(strategy="zero3", min_shard_bytes=0),
    )
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
    ("gpt2-tied", 2, 2, ()),
    ("llama-untied", 2, 1, (1, 3)),
    ("llama-tied", 2, 2, (1, 1, 1, 1)),
    ("gpt2-untied", 1, 2, (1, 3)),
    ("llama-bias", 4, 1, ()),
]


@NEEDS
@pytest.mark.parametrize(("name", "pipe", "chunks", "stages"), levels(LAYOUTS))
def test_blocks_are_written_in_the_order_of_the_model(
    name: str, pipe: int, chunks: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    """Whatever the pipeline was; and a pipeline gets them in its own order."""
    plain, params = config_of(name), random_params(config_of(name))
    schedule = "interleaved" if chunks > 1 else "one_f_one_b"
    piped = config_of(
        name,
        mesh=MeshConfig(pipe=pipe),
        parallel=ParallelConfig(schedule=schedule, chunks=chunks, stages=stages, microbatches=4),
    )
    export(save_run(tmp_path / "plain", plain, params), tmp_path / "a")
    stored = save_run(tmp_path / "piped", piped, params)
    order = order_of_blocks(4, stages=pipe, chunks=chunks, blocks=stages)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert np.array_equal(stored.param(".".join(key.key for key in path)), leaf)
    export(stored, tmp_path / "b")
    assert (tmp_path / "a" / SINGLE).read_bytes() == (tmp_path / "b" / SINGLE).read_bytes()
    import_model(tmp_path / "a", piped, tmp_path / "again")
    assert bits(restored(tmp_path / "again", piped).params["blocks"]) == bits(arrange_rows(params["blocks"], order))


@NEEDS
def test_the_tokenizer_of_the_data_goes_with_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    (hf := tmp_path / "hf").mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(f"{hf}/tokenizer.json")
    (hf / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    config = replace(config_of("llama3"), data=DataConfig("jsonl", seq_len=LENGTH).replace(tokenizer=str(hf)))
    save_run(tmp_path / "run", config, random_params(config))
    command = ["export", str(tmp_path / "run"), "--output"]
    assert checkpoint_main([*command, str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.endswith(f"; and tokenizer.json, tokenizer_config.json of {hf}\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (hf / name).read_bytes()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, 1)
    hf.rename(tmp_path / "gone")
    assert checkpoint_main([*command, str(tmp_path / "out2")]) == 0
    assert f"; without a tokenizer: data.tokenizer: '{hf}' does not exist" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODELS | MIXTURES)
def test_every_element_has_one_place(name: str) -> None:
    """Views cover each leaf exactly once, and nothing is copied."""
    config = config_of(name)
    model = make_model(config, precision_of(config.precision), stages=1, training=True)
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes):
        name = path_name(path)
        leaves[name] = np.zeros(leaf.shape[1:] if name.startswith("blocks") else leaf.shape, np.int64)
    table = tensors(config.model.resolved(), positions=LENGTH)
    for i, each in enumerate(table):
        assert np.shares_memory(each.view(leaves[each.leaf]), leaves[each.leaf])
        before = leaves[each.leaf].copy()
        each.put(leaves[each.leaf], np.full(each.shape, i + 1))
        assert not before[leaves[each.leaf] != before].any(), each.name
    assert {each.leaf for each in table} == set(leaves) - set(family(config.model.resolved()).zeros)
    assert all(leaves[each.leaf].all() for each in table)
    assert len({each.name for each in table}) == len(table)


def test_one_head_by_hand() -> None:
    """Head 1 of c_attn's keys, and the query heads 2 and 3, which share a key, of q_proj."""
    gpt2 = config_of("gpt2-tied").model.resolved()
    c_attn = next(each for each in tensors(gpt2, positions=1) if each.name.endswith("c_attn.weight"))
    kernel = np.random.default_rng(0).normal(size=(32, 4, 3, 8))
    assert (c_attn.take(kernel)[:, 32 + 8 : 32 + 16] == kernel[:, 1, 1]).all()
    llama = config_of("llama-untied").model.resolved()
    q_proj = next(each for each in tensors(llama, positions=1) if each.name.endswith("q_proj.weight"))
    kernel = np.random.default_rng(0).normal(size=(32, 2, 4, 8))
    assert (q_proj.take(kernel)[16:32] == kernel[:, 1, :2].reshape(32, 16).T).all()


@pytest.mark.slow
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


@pytest.mark.slow
@NEEDS
@pytest.mark.parametrize("name", levels(["gpt2-tied", "llama-untied"], everyday=2))
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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"bias": False}, r"model.bias: false, but Hugging Face's GPT-2 has biases in every layer; allowed: true"),
        (
            {"norm": "rmsnorm"},
            r"model: positions learned, norm rmsnorm and mlp gelu have no .*allowed: learned, layernorm",
        ),
        ({"positions": "rope"}, r"model: positions rope, norm layernorm and mlp gelu"),
        ({"mlp": "swiglu"}, r"model: positions learned, norm layernorm and mlp swiglu"),
        ({"kv_heads": 2}, r"model.kv_heads: 2, but Hugging Face's GPT-2 has as many as model.heads; allowed: 4"),
        (
            {"window": 4},
            r"model.window: 4, but Hugging Face's GPT-2 has no window; allowed: null; or model.style=llama",
        ),
        ({"head_width": 4}, r"model.head_width: 4, but Hugging Face's GPT-2 has heads of width / heads; allowed: 8"),
        (
            {"style": "llama", "qk_norm": True, "qkv_bias": True},
            r"model: bias false, qkv_bias true, qk_norm true and window null have no Hugging Face format here together",
        ),
        ({"style": "llama", "bias": True, "window": 4}, r"model: bias true, qkv_bias true, qk_norm false and window 4"),
        (
            {"name": "picture_model.classifier"},
            r"model.name: 'picture_model.classifier' has no Hugging Face format here; allowed: gpt",
        ),
    ],
)
def test_models_without_a_format_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match="^" + message) as error:
        tensors(config_of("gpt2-tied", model=model).model.resolved(), positions=LENGTH)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as `export` writes them."""
    folder, found = tmp_path_factory.mktemp("exported"), {}
    for name in ("gpt2-tied", "llama-untied"):
        config = config_of(name, model={"layers": 1})
        export(save_run(folder / f"{name}-run", config, random_params(config)), folder / name)
        found[name] = folder / name
    return found


def judge(folder: Path, config: Config, changes: dict[str, Any]) -> tuple[int, list[str]]:
    found = json.loads((folder / "config.json").read_text()) | changes
    with TensorFiles(folder) as files:
        return check_model(files, found, config.model.resolved(), positions=config.data.seq_len)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 77,
}
REFUSED = [
    (
        "llama-untied",
        {"mlp_width": 32},
        {},
        r"model.layers.0.mlp.gate_proj.weight: is \[24, 32\] in the file, this"
        r" configuration makes it \[32, 32\]; config.json asks for model.mlp_width=24 \(is 32\)$",
    ),
    ("llama-untied", {"kv_heads": 4}, {}, r"\S+k_proj.weight: is \[16, 32\] .* asks for model.kv_heads=2 \(is 4\)"),
    ("llama-untied", {"layers": 2}, {}, r"model.layers.1.\S+: is not in the file.*model.layers=1 \(is 2\)"),
    ("llama-untied", {"vocab": 256}, {}, r"model.embed_tokens.weight: is \[259, 32\].*\[256, 32\]; .*vocab=259"),
    ("llama-untied", {"heads": 2, "kv_heads": 1}, {}, r".* asks for model.heads=4 \(is 2\), .*kv_heads=2"),
    ("llama-untied", {"norm_eps": 1e-5}, {}, r"config.json: asks for model.norm_eps=1e-06 \(is 1e-05\); set them"),
    ("llama-untied", {"rope_theta": 1e4}, {}, r"config.json: asks for model.rope_theta=500000.0 \(is 10000.0\)"),
    ("llama-untied", {"tied": True}, {}, r"config.json: asks for model.tied=false \(is true\)"),
    ("llama-untied", {"bias": True}, {}, r"\S+q_proj.bias: is not in the file, and this configuration has it"),
    ("llama-untied", {"style": "gpt2", "kv_heads": None}, {}, r"config.json: model_type is 'llama'; .*style=llama"),
    ("llama-untied", {}, {"hidden_act": "gelu"}, r"config.json: hidden_act is 'gelu', which no configuration makes"),
    ("llama-untied", {}, {"rope_parameters": {"rope_type": "yarn"}}, r"config.json: rotary .* of type 'yarn', which"),
    ("llama-untied", {}, {"rope_parameters": {"rope_type": "llama3"}}, r"config.json: factor of rotary .*: nothing"),
    ("llama-untied", {}, {"rope_scaling": LLAMA3 | {"low_freq_factor": "x"}}, r"config.json: low_freq_factor.*'x' is"),
    (
        "llama-untied",
        {},
        {"rope_scaling": LLAMA3, "rope_theta": 5e5},
        r'config.json: asks for model.rope_type="llama3" \(is "default"\), model.rope_factor=2.0 \(is 8.0\),'
        r" model.rope_positions=77 \(is 8192\); set them",
    ),
    (
        "llama-untied",
        {},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
        r'.*asks for model.rope_type="linear" .*, model.rope_factor=2.0 \(is 8.0\); set',
    ),
    ("llama-untied", {}, {"partial_rotary_factor": 0.5}, r"config.json: partial_rotary_factor is 0.5, which no"),
    ("llama-untied", {}, {"rope_parameters": [1]}, r"config.json: rotary positions of type a list"),
    *(
        ("llama-untied", {}, {key: value}, rf"config.json: {key}: {shown}.*; allowed: {allowed}")
        for key, value, shown, allowed in (
            ("hidden_size", "x", "'x' is text", "an integer >= 1"),
            ("hidden_size", None, "nothing", "an integer >= 1"),
            ("vocab_size", None, "nothing", "an integer >= 1"),
            ("vocab_size", "259", "'259' is text", "an integer >= 1"),
            ("vocab_size", [259], "a list", "an integer >= 1"),
            ("num_attention_heads", 0, "0 is out of range", "an integer >= 1"),
            ("num_attention_heads", True, "true is a boolean", "an integer >= 1"),
            ("intermediate_size", {}, "a mapping", "an integer >= 1"),
            ("rms_norm_eps", "1e-6", "'1e-6' is text", "a number > 0"),
            ("tie_word_embeddings", None, "nothing", "true or false"),
        )
    ),
    ("gpt2-tied", {}, {"n_embd": None}, r"config.json: n_embd: nothing \(null\) is given; allowed: an integer >= 1"),
    ("gpt2-tied", {}, {"n_positions": None}, r"config.json: n_positions: nothing \(null\) is given; allowed: an int"),
    ("llama-untied", {}, {"rope_parameters": {"rope_theta": "x"}}, r"config.json: rope_theta: 'x' is text; allowed"),
    ("llama-untied", {}, {"rope_parameters": None, "rope_theta": "x"}, r"config.json: rope_theta: 'x' is text"),
    ("llama-untied", {}, {"model_type": ["llama"]}, r"config.json: model_type is a list; allowed: gpt2, llama"),
    ("llama-untied", {}, {"model_type": {}}, r"config.json: model_type is a mapping; allowed: gpt2, llama"),
    ("llama-untied", {}, {"rope_parameters": None, "rope_scaling": "default"}, r"config.json: rotary .* 'default'"),
    ("llama-untied", {}, {"attention_bias": True}, r"config.json: attention_bias and mlp_bias differ"),
    ("llama-untied", {}, {"head_dim": 16}, r"config.json: asks for model.head_width=16 \(is 8\); set"),
    ("llama-untied", {}, {"head_dim": None, "num_attention_heads": 5}, r"config.json: num_attention_heads 5 does not"),
    (
        "llama-untied",
        {},
        {"model_type": "gemma2"},
        r"config.json: model_type is 'gemma2'; allowed: gpt2, llama, mistral",
    ),
    ("llama-untied", {}, {"model_type": "mistral"}, r"config.json: asks for model.window=4096 \(is null\); set"),
    ("llama-untied", {}, {"model_type": "qwen2"}, r"config.json: asks for model.qkv_bias=true \(is false\); set"),
    (
        "llama-untied",
        {},
        {"model_type": "qwen3", "head_dim": 8},
        r"config.json: asks for model.qk_norm=true \(is false",
    ),
    (
        "llama-untied",
        {},
        {"model_type": "qwen3", "attention_bias": True},
        r"config.json: attention_bias is true, which no",
    ),
    ("llama-untied", {}, {"model_type": "gpt2"}, r"config.json: model_type is 'gpt2'; .*model.style=gpt2 \(is llama\)"),
    *(
        ("llama-untied", {}, {"model_type": kind, "use_sliding_window": True} | more, message)
        for kind, more, message in (
            (
                "qwen2",
                {"num_hidden_layers": 9, "max_window_layers": 3},
                r"config.json: layers of full_attention and sli",
            ),
            (
                "qwen3",
                {"layer_types": ["full_attention", "x"]},
                r"config.json: layers of full_attention and x, which no",
            ),
            ("qwen3", {"layer_types": 3}, r"config.json: layers of 3, which no"),
            ("qwen2", {"max_window_layers": "x"}, r"config.json: max_window_layers: 'x' is text; allowed: an integer"),
            (
                "qwen2",
                {"sliding_window": 0},
                r"config.json: sliding_window: 0 is out of range; allowed: an integer >= 1",
            ),
        )
    ),
    ("gpt2-tied", {}, {"n_positions": 9}, r"config.json: asks for data.seq_len=9 \(is 12\)"),
    ("gpt2-tied", {}, {"activation_function": "relu"}, r"config.json: activation_function is 'relu'"),
    ("gpt2-tied", {}, {"scale_attn_by_inverse_layer_idx": True}, r"config.json: scale_attn_by_inverse_layer_idx"),
]


@NEEDS
@pytest.mark.parametrize(("name", "model", "changes", "message"), REFUSED)
def test_another_model_than_the_configuration_is_refused(
    name: str, model: dict[str, Any], changes: dict[str, Any], message: str, exported: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match="^" + message) as error:
        judge(exported[name], config_of(name, model={"layers": 1} | model), changes)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@NEEDS
def test_what_other_writers_do(exported: dict[str, Path], tmp_path: Path) -> None:
    """Names without a prefix, masks among the tensors, tied heads written out: as in older files of GPT-2."""
    from safetensors.numpy import load_file, save_file

    config = config_of("gpt2-tied", model={"layers": 1})
    assert judge(exported["gpt2-tied"], config, {"n_inner": None, "num_key_value_heads": None}) == (259, ["float32"])
    found = load_file(exported["gpt2-tied"] / SINGLE)
    bare = {name.removeprefix("transformer."): value for name, value in found.items()}
    text = (exported["gpt2-tied"] / "config.json").read_text()
    for i, extra in enumerate(
        (
            {"h.0.attn.bias": np.ones((1, 1, 12, 12), bool)},
            {"lm_head.weight": bare["wte.weight"]},
            {"lm_head.weight": bare["wte.weight"] + 1},
            {"h.0.attn.odd": np.ones(3, np.float32)},
            {"ln_f.weight": np.ones(32, np.int32)},
            {"ln_f.bias": np.full(32, np.nan, np.float32)},
        )
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        save_file(bare | extra, folder / SINGLE)
        (folder / "config.json").write_text(text)
        if i < 2:
            import_model(folder, config, folder / "run")
            export(open_steps(folder / "run")[0], folder / "out")
            assert (folder / "out" / SINGLE).read_bytes() == (exported["gpt2-tied"] / SINGLE).read_bytes()
            continue
        message = (
            r"^lm_head.weight: is not the embedding",
            r"^h.0.attn.odd: is in the file, and this configuration",
            r"^'ln_f.weight': is of type I32 in the file; allowed: F64, F32",
            r"^ln_f.bias: holds numbers that are not finite",
        )[i - 2]
        with pytest.raises(UserError, match=message):
            import_model(folder, config, folder / "run")
        assert not (folder / "run").exists()


@NEEDS
@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../secret.safetensors"}}, r"names the file '../secret.safetensors'; allowed: files"),
        ({"weight_map": {"a": "/etc/secret.safetensors"}}, r"names the file '/etc/secret.safetensors'"),
        ({"weight_map": {"a": "b\\c.safetensors"}}, r"names the file"),
        ({"weight_map": {"a": "model.bin"}}, r"names the file 'model.bin'; allowed: files \*.safetensors beside it"),
        ({"weight_map": {"a": ".."}}, r"names the file '..'"),
        ({"weight_map": {"a": 3}}, r"has no weight_map"),
        ({"weight_map": ["a"]}, r"has no weight_map"),
        ({"weight_map": {"odd": SINGLE}}, r"model.safetensors: has no tensor 'odd', which \S+ says is there"),
        ({"weight_map": {"a": "gone.safetensors"}}, r"gone.safetensors: not a file of safetensors"),
        ([], r"holds no JSON object"),
        ("{", r"not to be read as JSON"),
    ],
)
def test_malicious_and_damaged_indices_are_refused(
    index: Any, message: str, exported: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for path in (folder / SINGLE, tmp_path / "secret.safetensors"):
        path.write_bytes((exported["gpt2-tied"] / SINGLE).read_bytes())
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(UserError, match=message) as error:
        TensorFiles(folder)
    assert "\n" not in str(error.value)


@NEEDS
def test_damaged_and_pickled_files_are_refused(exported: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has neither model.safetensors nor"):
        TensorFiles(tmp_path)
    with pytest.raises(UserError, match=r"gone: is no folder"):
        TensorFiles(tmp_path / "gone")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=r"has pytorch_model.bin and no .*never read, for they can run"):
        TensorFiles(tmp_path)
    whole = (exported["gpt2-tied"] / SINGLE).read_bytes()
    for bad in (whole[:-1], whole[:100], b"", b"\xff" * 64):
        (tmp_path / SINGLE).write_bytes(bad)
        with pytest.raises(UserError, match=r"model.safetensors: not a file of safetensors"):
            TensorFiles(tmp_path)


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UserError, match=r"^importing needs the package safetensors; pip install 'jaxdist\[hf\]'$"):
        TensorFiles(tmp_path)
