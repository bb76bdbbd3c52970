"""Parameters that exist already: the same bits in every layout, and one line for what does not fit."""

import json
import re
import shutil
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from levels import others_slow
from saved_runs import NEEDS, bits, config_of, random_params, save_run

from jaxdist.build import Parts, assemble, forward_only
from jaxdist.checkpoint import Checkpoints
from jaxdist.checkpoint.huggingface.convert import export
from jaxdist.checkpoint.reader import open_steps
from jaxdist.config.load import _completed, load_config, to_yaml
from jaxdist.config.reader import read_config
from jaxdist.config.schema import Config, MeshConfig, ModelConfig, ParallelConfig
from jaxdist.config.sections.distill import DistillConfig
from jaxdist.config.sections.init import InitConfig
from jaxdist.config.sections.optimizer import LoraConfig, OptimizerConfig
from jaxdist.distill.teaching import load_teacher, read_teacher
from jaxdist.errors import UserError
from jaxdist.init import init_state, state_target
from jaxdist.mesh import make_mesh
from jaxdist.parallel.pipeline.stages import arrange_rows
from jaxdist.pretrained import Pretrained, open_pretrained
from jaxdist.specs import leaves_by_name
from jaxdist.trainer.first_state import first_state


def gpt2(**changes: Any) -> Config:
    """A GPT-2 whose vocabulary two devices divide."""
    return config_of("gpt2-tied", **changes | {"model": {"vocab": 258} | changes.get("model", {})})


LAYOUTS = {
    "zero3 x tensor": (MeshConfig(fsdp=4, tensor=2), ParallelConfig("zero3", min_shard_bytes=0)),
    "interleaved": (MeshConfig(pipe=2, data=4), ParallelConfig(schedule="interleaved", chunks=2, microbatches=2)),
    "uneven stages": (
        MeshConfig(pipe=2, fsdp=2, tensor=2),
        ParallelConfig("zero1", schedule="one_f_one_b", microbatches=2, stages=(1, 3), min_shard_bytes=0),
    ),
}


pytestmark = pytest.mark.xdist_group("pretrained")  # the folder and the layouts are shared


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose blocks were saved by a pipeline, and the same as a Hugging Face folder."""
    folder, config = tmp_path_factory.mktemp("origin"), gpt2()
    export(save_run(folder / "run", config, random_params(config)), folder / "hf")
    (folder / "run" / "config.yaml").write_text(to_yaml(config))
    return folder


@cache
def parts_of(layout: str) -> Parts:
    mesh, parallel = LAYOUTS[layout]
    config = gpt2(mesh=mesh, parallel=parallel)
    return assemble(config, make_mesh(**asdict(mesh)))


def started(config: Config, said: list[str] | None = None) -> tuple[Parts, Any, dict[str, str]]:
    """What a run with this configuration begins with."""
    mesh = make_mesh(**asdict(config.mesh))
    parts = assemble(config, mesh)
    return parts, *first_state(config, parts, mesh, (said if said is not None else []).append)


@NEEDS
@pytest.mark.parametrize("kind", ["run", "hf"])
@pytest.mark.parametrize("layout", others_slow(LAYOUTS, "uneven stages"))
def test_the_same_bits_in_every_layout(layout: str, kind: str, origin: Path) -> None:
    parts = parts_of(layout)
    with open_pretrained(origin / kind) as found:
        loaded = found.load(parts.target, say=lambda line: None)
    wanted = random_params(gpt2())
    if layout != "zero3 x tensor":
        wanted = {**wanted, "blocks": arrange_rows(wanted["blocks"], parts.order)}
    assert bits(loaded) == bits(wanted)
    for name, leaf in leaves_by_name(parts.target.params).items():
        assert leaves_by_name(loaded)[name].sharding == leaf.sharding, name


@pytest.mark.slow
@NEEDS
@pytest.mark.parametrize("kind", others_slow(["run", "hf"], "hf"))
def test_other_sizes(kind: str, origin: Path) -> None:
    said, whole = list[str](), leaves_by_name(random_params(gpt2()))
    config = replace(gpt2(), init=InitConfig(str(origin / kind)))
    shorter = replace(config, data=config.data.replace(seq_len=7))
    params = leaves_by_name(started(shorter, said)[1].params)
    name = "embed.positions.table"
    np.testing.assert_array_equal(params[name], whole[name][:7])
    with pytest.raises(UserError, match=r"embed.positions.table \[12, 32\], here \[13, 32\]; give model.from"):
        started(replace(config, data=config.data.replace(seq_len=13)))
    larger = replace(config, model=config.model.replace(vocab=260))
    if kind == "run":
        with pytest.raises(UserError, match=r"embed.tokens.table \[258, 32\], here \[260, 32\]"):
            started(larger)
        return
    rows = np.asarray(leaves_by_name(started(larger, said)[1].params)["embed.tokens.table"])
    table = whole["embed.tokens.table"]
    np.testing.assert_array_equal(rows[:258], table)
    np.testing.assert_allclose(rows[259], np.mean(np.asarray(table, np.float64), axis=0), rtol=1e-6)
    assert said[-1].endswith("the vocabulary has 258 rows there, 2 were added: the mean of the others")


@NEEDS
def test_bytes_are_no_ids_of_a_tokenizer(origin: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = Path(shutil.copytree(origin / "hf", tmp_path / "hf"))
    config = replace(gpt2(), init=InitConfig(str(folder)))
    started(config)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="data.source: text, whose ids are bytes, .*data.source=jsonl, or make ids"):
        started(config)


@pytest.mark.slow
def test_what_may_differ_starts_as_in_a_new_run(origin: Path) -> None:
    said = list[str]()
    init = InitConfig(str(origin / "run"), partial=("embed.tokens.*", "head.*", "model.norm_eps"))
    config = replace(gpt2(model={"vocab": 300, "tied": False, "norm_eps": 1e-6}), init=init)
    with pytest.raises(UserError, match=r"asks for model.norm_eps=1e-05 \(is 1e-06\)"):
        started(replace(config, init=replace(init, partial=("embed.tokens.*", "head.*", "model.tied"))))
    config = replace(config, init=replace(init, partial=(*init.partial, "model.tied")))
    with pytest.raises(UserError, match=r"init.partial: 'haed.\*' fits no parameter; allowed: patterns of blocks"):
        started(replace(config, init=replace(init, partial=("haed.*", "model.*"))))
    parts, state, found = started(config, said)
    fresh = init_state(parts.model, parts.optimizer, make_mesh(), parts.options)
    before, new = leaves_by_name(random_params(gpt2())), leaves_by_name(fresh.params)
    for name, leaf in leaves_by_name(state.params).items():
        source = new if name in ("embed.tokens.table", "head.projection.table") else before
        np.testing.assert_array_equal(leaf, source[name], err_msg=name)
    assert said[-1] == "init.from: embed.tokens.table, head.projection.table start at random"
    assert bits(state.opt_state) == bits(fresh.opt_state) and int(state.step) == 0
    assert found["from"] == str(origin / "run") and len(found["digest"]) == 64


def test_the_keys_of_another_head_are_spelled_out() -> None:
    """With those of them that the place has no use for, which are not asked for."""
    masked = ModelConfig(name="bert").resolved()
    mine = ModelConfig(name="bert", head="classification", classes=3).resolved()
    place: Any = SimpleNamespace(model=masked, _key="init.from", described="there")
    wanted = ["head.*", "model.head", "model.classes"]
    with pytest.raises(UserError) as error:
        Pretrained.check_architecture(place, mine, ["head.*"])
    assert str(error.value) == (
        'init.from: there asks for model.head="mlm" (is "classification"); set them, give model.from the same place, or'
        f" let them differ: init.partial={json.dumps(wanted)}"
    )
    Pretrained.check_architecture(place, mine, wanted)
    page = " ".join((Path(__file__).parents[2] / "docs" / "finetuning.md").read_text(encoding="utf-8").split())
    assert f"partial: [{', '.join(repr(each) for each in wanted)}]" in page


@pytest.mark.slow
def test_adapters_start_at_random_beside_a_base(origin: Path) -> None:
    optimizer = OptimizerConfig(lora=LoraConfig(rank=2))
    config = replace(gpt2(), optimizer=optimizer, init=InitConfig(str(origin / "run")))
    parts, state, _ = started(config)
    fresh = leaves_by_name(init_state(parts.model, parts.optimizer, make_mesh(), parts.options).params)
    before = leaves_by_name(random_params(gpt2()))
    adapters = [name for name in fresh if ".lora." in name]
    assert len(adapters) == 8
    for name, leaf in leaves_by_name(state.params).items():
        np.testing.assert_array_equal(leaf, fresh[name] if name in adapters else before[name], err_msg=name)


@pytest.mark.slow
def test_adapters_of_a_run_are_neither_left_out_nor_scaled(origin: Path, tmp_path: Path) -> None:
    def tuned(**lora: Any) -> Config:
        return replace(gpt2(), optimizer=OptimizerConfig(lora=LoraConfig(**lora)), init=InitConfig(str(tmp_path)))

    made = assemble(tuned(rank=2), make_mesh())
    params = jax.tree.map(lambda leaf: jax.numpy.full(leaf.shape, 0.5, leaf.dtype), made.target.params)
    save_run(tmp_path, tuned(rank=2), params)
    for lora, said in (
        ({}, "rank=2 (is 0);"),
        ({"rank": 4}, "rank=2 (is 4);"),
        ({"rank": 2, "alpha": 1.0}, "alpha=16"),
    ):
        with pytest.raises(UserError, match=re.escape("has LoRA's adapters: set optimizer.lora." + said)):
            started(tuned(**lora))
    asked = replace(gpt2(), distill=DistillConfig(teacher=str(tmp_path)))
    teacher = load_teacher(asked, make_mesh(), forward_only)
    read_teacher(asked, teacher, lambda line: None)
    assert bits(teacher.params) == bits(params)


def test_digests_tell_parameters_apart(origin: Path, tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        with open_pretrained(folder) as found:
            return found.digest()

    config = gpt2()
    save_run(tmp_path / "other", config, random_params(config, seed=1))
    found = {digest(origin / "run"), digest(origin / "run" / "checkpoints" / "3"), digest(tmp_path / "other")}
    assert len(found) == 2


@NEEDS
def test_a_file_with_our_names(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    params = random_params(gpt2())
    save_file({name: np.asarray(leaf) for name, leaf in leaves_by_name(params).items()}, tmp_path / "x.safetensors")
    parts = parts_of("zero3 x tensor")
    with open_pretrained(tmp_path / "x.safetensors") as found:
        assert found.model is None
        assert bits(found.load(parts.target.params, say=lambda line: None)) == bits(params)


@NEEDS
@pytest.mark.parametrize("kind", ["run", "hf"])
def test_an_architecture_without_keys(kind: str, origin: Path, tmp_path: Path) -> None:
    file, wanted = tmp_path / "run.yaml", gpt2().model.resolved()
    file.write_text(f"model: {{from: {origin / kind}}}\ndata: {{seq_len: 12, path: {__file__}}}\n")
    config = load_config(file)
    assert config.model.resolved() == wanted and config.model.from_ is None
    assert load_config(file, ["model.layers=2", "model.dropout=0.5"]).model.resolved() == wanted.replace(
        layers=2, dropout=0.5
    )
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
DIFFER = "hidden_dropout_prob 0.3, attention_probs_dropout_prob 0"
CLASSIFIES = {"architectures": ["BertForSequenceClassification"]}
KEPT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}


@pytest.mark.parametrize(
    ("found", "rate"),
    [
        (BERT, 0.1),
        (BERT | KEPT, 0.3),
        (BERT | KEPT | {"classifier_dropout": None}, 0.3),
        (BERT | {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0.0}, 0.0),
        (BERT | KEPT | {"attention_probs_dropout_prob": 0.0}, DIFFER),
        (BERT | KEPT | {"classifier_dropout": 0.5}, 0.3),  # of a head that is not there
        (BERT | KEPT | CLASSIFIES | {"classifier_dropout": 0.5}, "classifier_dropout 0.5"),
        ({"model_type": "vit"}, 0.0),
        ({"model_type": "vit"} | KEPT, 0.3),
        ({"model_type": "gpt2"}, 0.1),  # the default of transformers
        ({"model_type": "gpt2", "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}, 0.2),
        ({"model_type": "gpt2", "resid_pdrop": 0.2}, "resid_pdrop 0.2, embd_pdrop 0.1, attn_pdrop 0.1"),
        ({"model_type": "llama"}, 0.0),
        ({"model_type": "mixtral", "attention_dropout": 0.2}, "attention_dropout 0.2, other layers 0"),
    ],
)
def test_dropout_is_the_folder_s(found: dict[str, Any], rate: float | str, tmp_path: Path) -> None:
    """Unless the user gives it, in the file or on top, which is also the way out where there are several rates."""
    (tmp_path / "config.json").write_text(json.dumps(found))
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{from: {tmp_path}}}")
    read = partial(read_config, Config, file, completed=_completed)
    if isinstance(rate, str):
        with pytest.raises(UserError, match=rf"^model.dropout: is not given, .*{rate}.*give it: model.dropout=0.\d"):
            read(())
    else:
        assert read(()).model.dropout == rate
    if found.get("classifier_dropout") and rate == 0.3:
        with pytest.raises(UserError, match=r"classifier_dropout 0.5\).* has its own in its config.yaml$"):
            read(["model.head=classification"])
    assert read(["model.dropout=0.25"]).model.dropout == 0.25
    file.write_text(f"model: {{from: {tmp_path}, dropout: 0.25}}")
    assert read(()).model.dropout == 0.25


@pytest.mark.slow
def test_the_average_of_a_run(tmp_path: Path) -> None:
    from jaxdist.trainer.train import train

    (tmp_path / "text.py").write_text("def f(x): return x + 1\n" * 200)
    (tmp_path / "run.yaml").write_text(
        f"""
model: {{layers: 1, width: 16, heads: 2}}
data: {{path: {tmp_path / "text.py"}, seq_len: 16, global_batch: 8}}
train: {{steps: 3, eval_every: 0, sample_tokens: 0, ema: 0.5}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""
    )
    config = load_config(tmp_path / "run.yaml")
    assert train(config, tmp_path / "run") == 0
    (stored,) = open_steps(tmp_path / "run")
    wanted = {False: stored.param, True: leaves_by_name(stored.rest()["opt_state"]["ema"]).__getitem__}
    target = assemble(config, make_mesh()).target.params
    for ema in (False, True):
        with open_pretrained(tmp_path / "run", ema=ema) as found:
            loaded = found.load(target, say=lambda line: None)
            assert found.described.startswith("the average of step 3 of" if ema else "step 3 of")
        for name, leaf in leaves_by_name(loaded).items():
            np.testing.assert_array_equal(leaf, wanted[ema](name), err_msg=name)
    assert not np.array_equal(wanted[False]("head.norm.bias"), wanted[True]("head.norm.bias"))


@pytest.mark.parametrize("where", [".", "2"])
@pytest.mark.parametrize("meta", [{}, {"model": {"depth": 3}, "train": 1}], ids=["no record", "a record of his own"])
def test_checkpoints_of_a_loop_of_one_s_own(where: str, meta: dict[str, Any], tmp_path: Path) -> None:
    """The newest step of their folder, or one step; whatever the user has written beside them."""
    params, mesh = {"w": np.arange(64.0, dtype=np.float32).reshape(16, 4)}, make_mesh(fsdp=4)
    state = init_state(params, optax.adam(0.1), mesh, strategy="zero3", min_shard_bytes=0)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(1, state._replace(params={"w": state.params["w"] + 1}), meta)
        checkpoints.save(2, state, meta)
    target = state_target(params, optax.identity(), make_mesh(fsdp=2), strategy="zero3", min_shard_bytes=0).params
    with open_pretrained(tmp_path / where) as found:
        loaded = found.load(target, say=lambda line: None)
        assert found.described == f"step 2 of {tmp_path}" and found.model is None
    np.testing.assert_array_equal(loaded["w"], params["w"])
    assert loaded["w"].sharding == target["w"].sharding
    with pytest.raises(UserError, match="keeps no moving average"):
        open_pretrained(tmp_path / where, ema=True)
