"""Mixtures of experts in Hugging Face's format: which expert and which block a tensor is of, config.json both ways,
what is refused, adapters. Logits and files are held in test_huggingface.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_logits import exported as exported_folder
from levels import levels
from saved_runs import LENGTH, MIXTURES, NEEDS, bits, config_of, logits, random_params, restored, save_run

from jaxdist.build import assemble
from jaxdist.checkpoint.huggingface.convert import check_model, config_json, export, model_of_config
from jaxdist.checkpoint.huggingface.names import family, tensors
from jaxdist.checkpoint.huggingface.peft import Merged, export_adapter
from jaxdist.checkpoint.huggingface.safetensors import SINGLE, TensorFiles
from jaxdist.checkpoint.reader import open_steps
from jaxdist.cli.work.checkpoint import average, import_model
from jaxdist.config.load import load_config, settings_by_key, with_settings
from jaxdist.config.schema import Config, DataConfig, MeshConfig, ParallelConfig
from jaxdist.config.sections.init import InitConfig
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.config.sections.optimizer import LoraConfig, OptimizerConfig
from jaxdist.data import load_source
from jaxdist.errors import UserError
from jaxdist.mesh import make_mesh
from jaxdist.pretrained import open_pretrained
from jaxdist.trainer.first_state import first_state
from jaxdist.trainer.resume import check_identity, identity

pytestmark = pytest.mark.xdist_group("huggingface_moe")  # the folders are shared by the tests


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each family, as `export` writes it."""
    folder = tmp_path_factory.mktemp("exported")
    return {name: exported_folder(name, folder) for name in MIXTURES}


def table_of(name: str) -> dict[str, Any]:
    return {each.name: each for each in tensors(config_of(name).model.resolved(), positions=LENGTH)}


def test_experts_by_hand() -> None:
    """w1 is the gate and w3 what it multiplies; a router has a row for each expert there, and a column here."""
    rng = np.random.default_rng(0)
    up, down, router = (rng.normal(size=size) for size in ((4, 32, 2, 24), (4, 24, 32), (32, 4)))
    table = table_of("mixtral")
    of = "model.layers.{}.block_sparse_moe"
    assert (table[f"{of}.experts.2.w1.weight"].take(up) == up[2, :, 0].T).all()
    assert (table[f"{of}.experts.3.w3.weight"].take(up) == up[3, :, 1].T).all()
    assert (table[f"{of}.experts.1.w2.weight"].take(down) == down[1].T).all()
    assert (table[f"{of}.gate.weight"].take(router) == router.T).all()
    names = [each for each in table_of("qwen3_moe") if ".experts.5." in each]
    assert names == [f"model.layers.{{}}.mlp.experts.5.{each}_proj.weight" for each in ("gate", "up", "down")]


@pytest.mark.slow
@NEEDS
def test_blocks_before_the_mixtures_are_the_first_layers(exported: dict[str, Path]) -> None:
    from safetensors.numpy import load_file

    params, found = random_params(config_of("dots1")), load_file(exported["dots1"] / SINGLE)
    dense, blocks = params["embed"]["dense"][0], params["blocks"]
    assert (found["model.layers.0.mlp.up_proj.weight"] == dense["mlp"]["up"]["kernel"][:, 1].T).all()
    assert (found["model.layers.0.self_attn.o_proj.weight"] == dense["attention"]["out"]["kernel"].T).all()
    for row in range(3):
        own = f"model.layers.{row + 1}"
        assert (found[f"{own}.mlp.gate.e_score_correction_bias"] == blocks["mlp"]["router"]["bias"][row]).all()
        shared = blocks["mlp"]["shared"]["down"]["kernel"][row]
        assert (found[f"{own}.mlp.shared_experts.down_proj.weight"] == shared.T).all()
    assert not [name for name in found if "layers.0.mlp.gate." in name or "layers.4" in name or "statistics" in name]


LAYOUTS = [
    ("dots1", MeshConfig(fsdp=2, expert=2), ParallelConfig("zero3", min_shard_bytes=0)),
    ("mixtral", MeshConfig(pipe=2, expert=2), ParallelConfig(schedule="one_f_one_b", microbatches=4, stages=(1, 3))),
    ("qwen3_moe", MeshConfig(tensor=2), ParallelConfig()),
]


@pytest.mark.slow
@NEEDS
@pytest.mark.parametrize(("name", "mesh", "parallel"), levels(LAYOUTS, everyday=3))
def test_there_and_back_bit_for_bit(name: str, mesh: MeshConfig, parallel: ParallelConfig, tmp_path: Path) -> None:
    """Into another layout, out of it again, and as the start of a run; what counts experts begins at 0."""
    config = config_of(name, mesh=mesh, parallel=parallel, model={"vocab": 260})
    plain = config_of(name, model={"vocab": 260})
    params = random_params(plain)
    export(save_run(tmp_path / "run", plain, params), tmp_path / "in")
    import_model(tmp_path / "in", config, tmp_path / "again")
    export(open_steps(tmp_path / "again")[0], tmp_path / "out")
    for file in (SINGLE, "config.json"):
        assert (tmp_path / "in" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    import_model(tmp_path / "out", plain, tmp_path / "back")
    assert bits(restored(tmp_path / "back", plain).params) == bits(params)
    config = replace(config, init=InitConfig(from_=str(tmp_path / "in")))
    devices = make_mesh(**{axis: getattr(mesh, axis) for axis in ("pipe", "fsdp", "expert", "tensor")})
    state, _ = first_state(config, assemble(config, devices), devices, lambda line: None)
    assert bits(state.params["embed"]) == bits(params["embed"])


@pytest.mark.slow
@NEEDS
def test_steps_of_a_run_with_blocks_in_a_list(exported: dict[str, Path], tmp_path: Path) -> None:
    """As the start of a run, and averaged."""
    config = config_of("dots1")
    import_model(exported["dots1"], config, tmp_path / "run")
    average(tmp_path / "run", tmp_path / "mean", last=1)
    started = replace(config, init=InitConfig(from_=str(tmp_path / "mean")))
    state, _ = first_state(started, assemble(started, make_mesh()), make_mesh(), lambda line: None)
    assert bits(state.params) == bits(random_params(config))


# {model_type: (keys of config.json as the folders of their makers have them, what they mean here)}: Mixtral-8x7B-v0.1,
# Qwen3-30B-A3B and dots.llm1.inst.
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "mixtral": json.loads("""[
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-05,
         "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "output_router_logits": false,
         "sliding_window": null, "max_position_embeddings": 32768, "vocab_size": 32000, "hidden_act": "silu",
         "tie_word_embeddings": false},
        {"moe.experts": 8, "moe.top_k": 2, "moe.hidden": 14336, "moe.scores": "softmax", "moe.normalised": true,
         "moe.scaling": 1.0, "moe.bias_rate": null, "moe.shared": 0, "moe.dense": 0, "moe.balance_loss": 0.0,
         "kv_heads": 8, "head_width": 128, "rope_theta": 1e6, "window": null, "qk_norm": false, "norm_eps": 1e-5}
    ]"""),
    "qwen3_moe": json.loads("""[
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
         "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
         "num_experts_per_tok": 8, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
         "rope_theta": 1000000.0, "rope_scaling": null, "sliding_window": null, "use_sliding_window": false,
         "max_window_layers": 48, "rms_norm_eps": 1e-06, "max_position_embeddings": 40960, "vocab_size": 151936,
         "attention_bias": false, "hidden_act": "silu", "tie_word_embeddings": false},
        {"moe.experts": 128, "moe.top_k": 8, "moe.hidden": 768, "moe.normalised": true, "moe.bias_rate": null,
         "mlp_width": 6144, "head_width": 128, "qk_norm": true, "window": null, "kv_heads": 4}
    ]"""),
    "dots1": json.loads("""[
        {"hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 62,
         "num_attention_heads": 32, "num_key_value_heads": 32, "n_routed_experts": 128, "n_shared_experts": 2,
         "num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
         "moe_layer_freq": 1, "rope_theta": 10000000, "rope_scaling": null, "sliding_window": null,
         "rms_norm_eps": 1e-05, "max_position_embeddings": 32768, "vocab_size": 152064, "attention_bias": false,
         "hidden_act": "silu", "tie_word_embeddings": false},
        {"moe.experts": 128, "moe.top_k": 6, "moe.hidden": 1408, "moe.shared": 2, "moe.dense": 1,
         "moe.scores": "sigmoid", "moe.scaling": 2.5, "moe.normalised": true, "moe.bias_rate": 0.001,
         "mlp_width": 10944, "qk_norm": true, "window": null, "head_width": 128, "rope_theta": 1e7}
    ]"""),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_config_json_there_and_back(kind: str) -> None:
    """The keys of the makers' folders, what they mean here, and that an export says the same."""
    found, want = PUBLISHED[kind]
    model, positions = model_of_config(found | {"model_type": kind})
    own = settings_by_key(model)
    assert {key: own[key] for key in want} == want and positions == found["max_position_embeddings"]
    written = config_json(model, positions=positions, dtype="bfloat16")
    assert model_of_config(written) == (model, positions)
    silent = {"router_aux_loss_coef", "output_router_logits"}  # of a loss that is not ours
    same = {key: value for key, value in found.items() if key not in silent and written[key] != value}
    assert not same and not silent & written.keys()


def test_what_transformers_writes_in_place_of_it() -> None:
    """Version 5 saves Qwen3-MoE's number of experts by another name; a window is that of all layers."""
    found = PUBLISHED["qwen3_moe"][0] | {"model_type": "qwen3_moe", "num_local_experts": 16}
    del found["num_experts"]
    assert model_of_config(found)[0].moe.experts == 16
    window = {"use_sliding_window": True, "sliding_window": 77}
    assert model_of_config(found | window)[0].window == 77
    dots = PUBLISHED["dots1"][0] | {"model_type": "dots1", "sliding_window": 77}
    assert model_of_config(dots)[0].window is None  # from layer 62 on, of 62
    assert model_of_config(dots | {"max_window_layers": 0})[0].window == 77
    with pytest.raises(UserError, match="layers of full_attention and sliding_attention"):
        model_of_config(dots | {"max_window_layers": 3})


REFUSED = [
    ("qwen3_moe", {"decoder_sparse_step": 2}, r"config.json: decoder_sparse_step is 2, which no .*; allowed: 1$"),
    ("qwen3_moe", {"mlp_only_layers": [3]}, r"config.json: mlp_only_layers is a list, which no .*; allowed: \[\]"),
    ("qwen3_moe", {"attention_bias": True}, r"config.json: attention_bias is true"),
    ("qwen3_moe", {"num_experts": 1}, r"config.json: num_experts: 1 is out of range; allowed: an integer >= 2"),
    ("qwen3_moe", {"num_experts": None}, r"config.json: num_experts: nothing \(null\)"),
    ("qwen3_moe", {"num_experts": 10**6}, r"config.json: asks for 4000000 experts of blocks, and there are \d+ tens"),
    ("qwen3_moe", {"num_experts_per_tok": 7}, r"model.moe.top_k: 7 of 6 experts; allowed: 1 to 6"),
    ("dots1", {"n_group": 2}, r"config.json: n_group is 2, which no configuration makes; allowed: 1"),
    ("dots1", {"topk_group": 2}, r"config.json: topk_group is 2, which no configuration makes; allowed: 1"),
    ("dots1", {"moe_layer_freq": 2}, r"config.json: moe_layer_freq is 2, which no configuration makes; allowed: 1"),
    ("dots1", {"n_shared_experts": 0}, r"config.json: n_shared_experts: 0 is out of range; allowed: an integer >= 1"),
    ("dots1", {"n_routed_experts": None}, r"config.json: n_routed_experts: nothing \(null\)"),
    ("dots1", {"first_k_dense_replace": 2**31 - 1}, r"model.moe.dense: 2147483647 of 4 blocks leaves no mixture"),
    ("mixtral", {"num_local_experts": 5}, r"\S+moe.gate.weight: is \[4, 32\] in the file, .* makes it \[5, 32\]$"),
    ("mixtral", {"intermediate_size": 0}, r"config.json: intermediate_size: 0 is out of range"),
    ("mixtral", {"model_type": "qwen2_moe"}, r"config.json: model_type is 'qwen2_moe'; allowed: gpt2, .*mixtral, qwen"),
]


@NEEDS
@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_other_folders_are_refused(
    name: str, changes: dict[str, Any], message: str, exported: dict[str, Path], tmp_path: Path
) -> None:
    found = json.loads((exported[name] / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(found))
    (tmp_path / SINGLE).hardlink_to(exported[name] / SINGLE)
    with pytest.raises(UserError, match=f"^{message}") as error:
        open_pretrained(tmp_path)
    assert "\n" not in str(error.value)


DIFFERENT: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"moe.top_k": 1}, r"config.json: asks for model.moe.top_k=2 \(is 1\); set them"),
    ("mixtral", {"moe.hidden": 12}, r"\S+w1.weight: is \[24, 32\] .*asks for model.moe.hidden=24 \(is 12\)"),
    ("mixtral", {"qk_norm": True}, r"\S+mlp.gate.weight: is not in the file.* asks for model.qk_norm=false"),
    ("mixtral", {"moe.experts": 0}, r"\S+mlp.gate_proj.weight: is not .* asks for model.moe.experts=4 \(is 0\)"),
    ("qwen3_moe", {"moe.normalised": True}, r"config.json: asks for model.moe.normalised=false \(is true\)"),
    ("dots1", {"moe.scaling": 1.0}, r"config.json: asks for model.moe.scaling=2.5 \(is 1.0\)"),
    ("dots1", {"moe.dense": 0}, r"\S+layers.0.mlp.gate.\S+: is not in the file, .*model.moe.dense=1 \(is 0\)"),
    ("dots1", {"mlp_width": 64}, r"\S+layers.0.mlp.gate_proj.weight: is .* asks for model.mlp_width=40 \(is 64\)"),
]


@NEEDS
@pytest.mark.parametrize(("name", "changes", "message"), DIFFERENT)
def test_another_model_than_the_configuration_is_refused(
    name: str, changes: dict[str, Any], message: str, exported: dict[str, Path]
) -> None:
    """By keys with their sections, never a whole section."""
    model = with_settings(config_of(name).model, changes).resolved()
    found = json.loads((exported[name] / "config.json").read_text())
    with TensorFiles(exported[name]) as files, pytest.raises(UserError, match=f"^{message}") as error:
        check_model(files, found, model, positions=LENGTH)
    assert "\n" not in str(error.value) and "MoEConfig" not in str(error.value)


@NEEDS
def test_what_is_of_no_block_and_of_training_alone_may_differ(exported: dict[str, Path]) -> None:
    changes = {"moe.dispatch": "capacity", "moe.group": 4, "moe.balance_loss": 0.5, "mlp_width": 99, "moe.hidden": 20}
    model = with_settings(config_of("qwen3_moe").model, changes).resolved()
    found = json.loads((exported["qwen3_moe"] / "config.json").read_text())
    with TensorFiles(exported["qwen3_moe"]) as files:
        check_model(files, found, model, positions=LENGTH)
    with open_pretrained(exported["qwen3_moe"]) as folder:
        folder.check_architecture(model)
        other = with_settings(model, {"moe.top_k": 1, "moe.scores": "sigmoid"})
        wrong = r'asks for model.moe.top_k=3 \(is 1\), model.moe.scores="softmax" \(is "sigmoid"\); set them'
        with pytest.raises(UserError, match=wrong):
            folder.check_architecture(other)
        folder.check_architecture(other, ["model.moe.*"])


@NEEDS
def test_a_dense_model_is_no_mixture(exported: dict[str, Path], tmp_path: Path) -> None:
    dense = config_of("llama-untied", model={"layers": 1})
    export(save_run(tmp_path / "run", dense, random_params(dense)), tmp_path / "hf")
    model = with_settings(dense.model, {"moe": MoEConfig(experts=4, bias_rate=None)}).resolved()
    found = json.loads((tmp_path / "hf" / "config.json").read_text())
    with TensorFiles(tmp_path / "hf") as files, pytest.raises(UserError, match=r"model.moe.experts=0 \(is 4\)"):
        check_model(files, found, model, positions=LENGTH)
    ignored = with_settings(dense.model, {"moe": MoEConfig(top_k=7)}).resolved()  # of no effect without experts
    with TensorFiles(tmp_path / "hf") as files:
        check_model(files, found, ignored, positions=LENGTH)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"moe.bias_rate": 0.001}, r"model.moe.bias_rate: 0.001, but Hugging Face's Mixtral has no biases"),
        ("mixtral", {"moe.normalised": False}, r"model.moe.normalised: false, but Hugging Face's Mixtral has weights"),
        ("mixtral", {"moe.shared": 1}, r"model.moe.shared: 1, but Hugging Face's Mixtral has no such experts; .* 0$"),
        ("mixtral", {"moe.dense": 1}, r"model.moe.dense: 1, but Hugging Face's Mixtral has experts in all blocks"),
        ("mixtral", {"bias": True}, r"model.bias: true, but Hugging Face's Mixtral has no biases; allowed: false"),
        ("qwen3_moe", {"moe.scaling": 2.0}, r"model.moe.scaling: 2.0, but Hugging Face's Qwen3Moe has no such factor"),
        ("dots1", {"moe.bias_rate": None}, r"model.moe.bias_rate: null, but Hugging Face's Dots1 has biases of the"),
        ("dots1", {"moe.shared": 0}, r"model.moe.shared: 0, but Hugging Face's Dots1 has experts for every token"),
        ("dots1", {"qk_norm": False}, r"model.qk_norm: false, but Hugging Face's Dots1 has norms of queries and keys"),
        ("dots1", {"moe.top_k": 7}, r"model.moe.top_k: 7 of 6 experts; allowed: 1 to 6"),
        ("gpt2-tied", {"moe.experts": 4}, r"model.moe.experts: 4, but Hugging Face's GPT-2 has no experts; allowed: 0"),
    ],
)
def test_models_without_a_format_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match="^" + message) as error:
        family(with_settings(config_of(name).model, changes).resolved())
    assert "\n" not in str(error.value)


@NEEDS
@pytest.mark.parametrize("name", MIXTURES)
def test_model_from_a_folder(name: str, exported: dict[str, Path], tmp_path: Path) -> None:
    """All keys of the mixture are the folder's, and those of training may be set beside it."""
    path = tmp_path / "tune.yaml"
    path.write_text(f"model: {{from: {exported[name]}, moe: {{balance_loss: 0.01}}}}\ndata: {{seq_len: {LENGTH}}}\n")
    model = load_config(path).model.resolved()
    want = with_settings(config_of(name).model.resolved(), {"moe.balance_loss": 0.01})
    assert settings_by_key(model) | {"mlp_width": 0} == settings_by_key(want) | {"mlp_width": 0}
    assert name == "mixtral" or model.mlp_width == want.mlp_width


def test_the_record_of_a_run_names_each_key() -> None:
    """Of a mixture, and of runs from before there were any."""
    config = config_of("qwen3_moe")
    source = load_source(DataConfig(path=__file__, seq_len=LENGTH))
    saved = json.loads(json.dumps(identity(config, source)))
    assert saved["model"]["moe.top_k"] == 3
    other = replace(config, model=with_settings(config.model, {"moe.top_k": 2}))
    with pytest.raises(UserError, match=r"^model.moe.top_k: 2, but the run in \S+ was started with 3; set it back"):
        check_identity(saved, identity(other, source), Path("runs"))
    old = {key: value for key, value in saved["model"].items() if not key.startswith("moe.")}
    with pytest.raises(UserError, match=r"^model.moe.experts: 6, but the run in \S+ was started with 0"):
        check_identity(saved | {"model": old}, identity(config, source), Path("runs"))
    plain = config_of("qwen3")
    saved = json.loads(json.dumps(identity(plain, source)))
    saved["model"] = {key: value for key, value in saved["model"].items() if not key.startswith("moe.")}
    assert not check_identity(saved, identity(plain, source), Path("runs"))


def adapted(name: str, targets: tuple[str, ...]) -> Config:
    return config_of(name, optimizer=OptimizerConfig(lora=LoraConfig(rank=2, alpha=3.0, targets=targets)))


def without_adapters(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {name: without_adapters(part) for name, part in tree.items() if name != "lora"}


TARGETS = {"dots1": ("*attention.*", "*.shared.*"), "mixtral": ("q_proj", "o_proj")}


@pytest.mark.slow
@NEEDS
@pytest.mark.parametrize("name", ["dots1", "mixtral"])
def test_adapters_of_attention_and_of_shared_experts(name: str, tmp_path: Path) -> None:
    """Merged they give the same logits; alone they name the layers behind the first blocks, which have none."""
    config, plain = adapted(name, TARGETS[name]), config_of(name)
    params = random_params(config)
    stored = save_run(tmp_path / "run", config, params)
    export(Merged(stored.folder), tmp_path / "merged")
    import_model(tmp_path / "merged", plain, tmp_path / "again")
    tokens = np.random.default_rng(0).integers(0, 259, (3, LENGTH)).astype(np.int32)
    want, base = logits(config, params, tokens), logits(plain, without_adapters(params), tokens)
    got = logits(plain, restored(tmp_path / "again", plain).params, tokens)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max() and np.abs(base - want).max() > 0.1
    export_adapter(stored, tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    with TensorFiles(tmp_path / "adapter" / "adapter_model.safetensors") as files:
        names = files.names
    attention = [f"self_attn.{each}_proj" for each in (("q", "k", "v", "o") if name == "dots1" else ("q", "o"))]
    shared = [f"mlp.shared_experts.{each}_proj" for each in ("gate", "up", "down")] if name == "dots1" else []
    assert said["target_modules"] == attention
    assert said.get("target_parameters", []) == [f"{module}.weight" for module in shared]
    layers = range(1 if name == "dots1" else 0, 4)
    assert names == {
        f"base_model.model.model.layers.{i}.{module}.lora_{letter}.weight"
        for i in layers
        for module in attention + shared
        for letter in "AB"
    }
    assert said.get("layers_to_transform") == (list(layers) if name == "dots1" else None)


@pytest.mark.parametrize("target", ["*router*", "*.experts.*", "mlp.experts"])
def test_routed_experts_and_routers_have_no_adapters(target: str) -> None:
    with pytest.raises(UserError, match=r"^optimizer.lora.targets: '\S+' fits no linear layer of the blocks") as error:
        random_params(adapted("mixtral", (target,)))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", TARGETS)
def test_peft_loads_the_export(name: str, tmp_path: Path) -> None:
    """The base in transformers, and the adapter in PEFT: the logits are ours."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="PEFT is not installed: whether it loads the export was NOT checked")
    config, plain = adapted(name, TARGETS[name]), config_of(name)
    params = random_params(config)
    export(save_run(tmp_path / "base", plain, without_adapters(params)), tmp_path / "base_hf")
    export_adapter(save_run(tmp_path / "run", config, params), tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base_hf")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = np.random.default_rng(0).integers(0, 259, (3, LENGTH))
    with torch.no_grad():
        got = model(torch.tensor(tokens)).logits.numpy()
    want = logits(config, params, tokens.astype(np.int32))
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-5
