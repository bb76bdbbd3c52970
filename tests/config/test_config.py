"""Configurations that are right: defaults, files, overrides, the mesh, and the generated reference."""

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.config.checks import check_layout
from jaxdist.config.load import load_config, to_yaml
from jaxdist.config.reader import parse_yaml
from jaxdist.config.resolve import known_devices, resolve_mesh
from jaxdist.config.rules.fields import all_keys, check_value
from jaxdist.config.rules.pipeline import uneven
from jaxdist.config.schema import Config, MeshConfig, ModelConfig
from jaxdist.config.sections.precision import PrecisionConfig
from jaxdist.errors import UserError, nearest

ROOT = Path(__file__).parents[2]
CPU = "devices.platform=cpu"


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def load(folder: Path, text: str | bytes, *overrides: str) -> Config:
    path = folder / "config.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_config(path, overrides)


def test_defaults(tmp_path: Path) -> None:
    config = Config()
    assert load(tmp_path, "{}") == load(tmp_path, "train: {steps: 200}") == config
    assert (config.model.width, config.optimizer.lr, config.parallel.grad_sync.bucket_mb) == (128, 3e-3, 25.0)
    assert asdict(config.mesh) == {"pipe": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    with pytest.raises(FrozenInstanceError):
        config.train.steps = 3  # type: ignore[misc]


def test_defaults_keep_their_own_rules() -> None:
    for name, key in all_keys(Config):
        assert key.rule.doc and "\n" not in key.rule.doc, name
        if not key.nested and not key.rule.folder:
            assert check_value(key.default, key.kind, key.optional, key.rule, name) == key.default


@pytest.mark.parametrize(
    "text",
    [
        "train:\n  steps: 7\n",
        "train:\r\n  steps: 7\r\n",
        b"\xef\xbb\xbftrain:\n  steps: 7\n",
        "---\n# a comment\ntrain:  # another\n  steps: 7\n...\n",
        "'train': {\"steps\": 7}",
        "%YAML 1.1\n---\ntrain: {steps: +7}",
    ],
)
def test_ways_to_write_a_file(text: str | bytes, tmp_path: Path) -> None:
    assert load(tmp_path, text) == replace(Config(), train=replace(Config().train, steps=7))


@pytest.mark.parametrize("text", ["3e-3", "3E-3", "0.003", ".003", "3.e-3", "+3e-03", "0.00_3"])
def test_floats(text: str, tmp_path: Path) -> None:
    assert load(tmp_path, f"optimizer: {{lr: {text}}}").optimizer.lr == 3e-3
    assert load(tmp_path, "{}", f"optimizer.lr={text}").optimizer.lr == 3e-3


def test_an_int_is_a_float_where_one_is_wanted(tmp_path: Path) -> None:
    lr = load(tmp_path, "optimizer: {lr: 1}").optimizer.lr
    assert lr == 1.0 and type(lr) is float
    assert load(tmp_path, "train: {steps: 1_000}").train.steps == 1000


def test_overrides(tmp_path: Path) -> None:
    text = "train: {steps: 5, seed: 3}\nmesh: {data: 4}\n"
    config = load(
        tmp_path, text, "train.steps=6", "train.steps=7", "mesh={fsdp: 2}", "parallel.grad_sync.algorithm=ring"
    )
    assert (config.train.steps, config.train.seed) == (7, 3)
    assert (config.mesh.data, config.mesh.fsdp) == (4, 2)
    assert (config.parallel.grad_sync.algorithm, config.parallel.grad_sync.bucket_mb) == ("ring", 25.0)
    assert (
        load(tmp_path, "model: {kv_heads: 2, tied: true}", "model.kv_heads=", "model.tied=null").model == ModelConfig()
    )
    assert load(tmp_path, "{}", "model.tied=false", " train.steps =9").model.tied is False


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ("import ", "import "),
        ("def f(x):", "def f(x):"),
        ("a=b", "a=b"),
        ("", ""),
        ("7", "7"),
        ("'null'", "null"),
        ("[", "["),
        ('"a\\nb"', "a\nb"),
        ("a # b", "a # b"),
    ],
)
def test_text_on_the_command_line_is_taken_as_it_stands(given: str, prompt: str, tmp_path: Path) -> None:
    assert load(tmp_path, "{}", f"train.sample_prompt={given}").train.sample_prompt == prompt


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("precision: bf16", (), PrecisionConfig("bf16")),
        ("precision: {policy: bf16}", (), PrecisionConfig("bf16")),
        ("{}", ("precision=bf16",), PrecisionConfig("bf16")),
        ("precision: bf16", ("precision.reduce_dtype=float32",), PrecisionConfig("bf16", "float32")),
        ("{}", ("precision.reduce_dtype=float32", "precision=bf16"), PrecisionConfig("bf16", "float32")),
        ("precision: O2", (), PrecisionConfig("O2")),
        ("precision: O1", ("precision.half=bfloat16",), PrecisionConfig("O1", half="bfloat16")),
        ("precision: {policy: fp16, keep_fp32: [head.*]}", (), PrecisionConfig("fp16", keep_fp32=("head.*",))),
        ("precision: {policy: bf16, per_op: true}", (), PrecisionConfig("bf16", per_op=True)),
        ("precision: {policy: bf16, reduce_dtype: float32}", ("precision=fp64",), PrecisionConfig("fp64", "float32")),
    ],
)
def test_precision_shorthand(text: str, overrides: tuple[str, ...], expected: PrecisionConfig, tmp_path: Path) -> None:
    assert load(tmp_path, text, *overrides).precision == expected


def test_lists_of_texts(tmp_path: Path) -> None:
    config = load(tmp_path, "optimizer: {freeze: [embed.*, '*.bias']}\n")
    assert config.optimizer.freeze == ("embed.*", "*.bias")
    assert load(tmp_path, to_yaml(config)) == config
    (tmp_path / "list.yaml").write_text("optimizer: {freeze: [embed.*, '*.bias']}\n")
    assert load_config(tmp_path / "list.yaml", ["optimizer.freeze=[head.*]"]).optimizer.freeze == ("head.*",)
    assert load_config(tmp_path / "list.yaml", ["optimizer.freeze=[]"]).optimizer.freeze == ()


def test_lists_of_integers(tmp_path: Path) -> None:
    text = "mesh: {pipe: 2}\nparallel: {schedule: gpipe, stages: [1, 3]}\n"
    config = load(tmp_path, text, "optimizer.name=sgd", CPU)
    assert config.parallel.stages == uneven(config.parallel.stages) == (1, 3)
    assert load(tmp_path, to_yaml(config)) == config
    even = load(tmp_path, text, "parallel.stages=[2,2]", CPU)  # nothing is empty
    assert even.parallel.stages == (2, 2) and uneven(even.parallel.stages) == uneven(()) == ()
    check_layout(replace(config, mesh=MeshConfig(pipe=-1)))  # a size that is not known yet is not judged


def test_activations_in_host_memory_are_a_mode_of_remat(tmp_path: Path) -> None:
    for other in ("", "remat: full, "):
        config = load(tmp_path, f"memory: {{{other}offload: {{activations: true}}}}\n")
        assert config.memory.remat == "offload" and load(tmp_path, to_yaml(config)) == config
    with pytest.raises(UserError, match="^memory.offload.activations: true is memory.remat 'offload', and 'sqrt'"):
        load(tmp_path, "memory: {remat: sqrt, offload: {activations: true}}\n")


def test_a_text_or_a_list_of_texts(tmp_path: Path) -> None:
    names = ("attention.out", "mlp.hidden")
    config = load(tmp_path, "memory: {remat: [attention.out, mlp.hidden]}\n")
    assert config.memory.remat == names
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config
    assert load_config(tmp_path / "again.yaml", ["memory.remat=dots"]).memory.remat == "dots"
    assert load(tmp_path, "memory: {remat: full}\n").memory.remat == "full"
    (tmp_path / "text.yaml").write_text("memory: {remat: full}\n")
    assert load_config(tmp_path / "text.yaml", ["memory.remat=[attention.out,mlp.hidden]"]).memory.remat == names


def test_round_trip(tmp_path: Path) -> None:
    text = "model: {style: llama, kv_heads: 2, tied: true}\nprecision: bf16\noptimizer: {eps: 1e-12, lr: 1}\n"
    config = load(tmp_path, text, "mesh.data=-1", "parallel.strategy=zero3", CPU)
    assert config.mesh.data == 8
    assert load(tmp_path, to_yaml(config)) == config
    assert load(tmp_path, to_yaml(Config())) == Config()


@pytest.mark.parametrize(
    "overrides", [("model.heads=8", "model.width=256"), ("model.style=llama",), ("model.mlp=swiglu", "model.width=96")]
)
def test_null_stays_null_in_a_written_configuration(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """So that it follows the keys that are changed when that file is read again."""
    written = load(tmp_path, "{}")
    nulls = ("kv_heads", "mlp_width", "positions", "norm", "mlp", "tied", "bias")
    assert all(getattr(written.model, key) is None for key in nulls)
    again, fresh = load(tmp_path, to_yaml(written), *overrides).model, load(tmp_path, "{}", *overrides).model
    assert again == fresh and again.resolved() == fresh.resolved() != written.model.resolved()


@settings(deadline=None)  # a busy machine is no fault
@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\t\n\r:#'\"-~=<e1_.{}[]!&*"), max_size=20)
)
def test_round_trip_of_text(tmp_path_factory: pytest.TempPathFactory, prompt: str) -> None:
    config = replace(Config(), train=replace(Config().train, sample_prompt=prompt))
    assert parse_yaml(to_yaml(config), "")["train"]["sample_prompt"] == prompt


@pytest.mark.parametrize(
    "prompt", ["1e3", "null", "yes", "~", "=", "<<", "017", "1:30", "2020-01-01", ".inf", "", " ", "a: b"]
)
def test_round_trip_of_text_that_looks_otherwise(prompt: str) -> None:
    config = replace(Config(), train=replace(Config().train, sample_prompt=prompt))
    assert parse_yaml(to_yaml(config), "")["train"]["sample_prompt"] == prompt


def test_defaults_of_a_model() -> None:
    gpt2, llama = ModelConfig().resolved(), ModelConfig(style="llama", width=100, heads=5).resolved()
    for model in (gpt2, llama):
        assert [key for key, value in asdict(model).items() if value is None] == [
            "from_",
            "window",
            "scan_blocks",
            "loss_chunk",
        ]
    assert (gpt2.kv_heads, gpt2.mlp_width, gpt2.positions, gpt2.norm, gpt2.mlp) == (
        4,
        512,
        "learned",
        "layernorm",
        "gelu",
    )
    assert (gpt2.tied, gpt2.bias, llama.tied, llama.bias) == (True, True, False, False)
    assert (llama.kv_heads, llama.positions, llama.norm, llama.mlp) == (5, "rope", "rmsnorm", "swiglu")
    assert llama.mlp_width == 320  # 8/3 x 100 = 266.7, up to a multiple of 64
    assert ModelConfig(style="llama", width=96).resolved().mlp_width == 256  # exactly 8/3 x 96
    mixed = ModelConfig(style="llama", mlp="gelu", tied=True, norm="layernorm", mlp_width=7, kv_heads=1)
    assert mixed.resolved().resolved() == mixed.resolved()
    assert replace(mixed.resolved(), positions=None, bias=None, head_width=None, qkv_bias=None) == mixed.replace(
        qk_norm=False
    )
    assert ModelConfig(mlp="swiglu").resolved().mlp_width == 384


def test_resolve_mesh() -> None:
    assert resolve_mesh(MeshConfig(), 8, "exact") == MeshConfig()
    assert resolve_mesh(MeshConfig(data=2), 8, "exact") == MeshConfig(data=2)  # fewer devices than there are
    assert resolve_mesh(MeshConfig(fsdp=-1), 8, "exact") == MeshConfig(fsdp=8)
    assert resolve_mesh(MeshConfig(data=-1, fsdp=2, tensor=2), 8, "exact") == MeshConfig(data=2, fsdp=2, tensor=2)
    assert resolve_mesh(MeshConfig(data=-1, tensor=8), 8, "exact") == MeshConfig(data=1, tensor=8)


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        (MeshConfig(data=4, fsdp=4), 8, MeshConfig(data=2, fsdp=4)),
        (MeshConfig(data=4, fsdp=4), 2, MeshConfig(data=1, fsdp=2)),
        (MeshConfig(data=2, fsdp=2, tensor=4, pipe=2), 2, MeshConfig(pipe=2)),
        (MeshConfig(data=6), 4, MeshConfig(data=3)),
        (MeshConfig(data=3, tensor=2), 4, MeshConfig(tensor=2)),
        (MeshConfig(data=-1, tensor=3), 8, MeshConfig(data=2, tensor=3)),
        (MeshConfig(data=-1, tensor=16), 8, MeshConfig(tensor=8)),
    ],
)
def test_shrink(mesh: MeshConfig, devices: int, expected: MeshConfig) -> None:
    assert resolve_mesh(mesh, devices, "shrink") == expected


def test_simulated_devices_are_no_reason_to_shrink(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs 16 devices; 8 are there.*set devices.simulated=16"):
        load(tmp_path, "mesh: {data: 16}", "devices.fit=shrink", CPU)


def test_shrink_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_mesh(MeshConfig(data=16), 8, "shrink") == MeshConfig(data=8)
    assert [record.getMessage() for record in caplog.records] == [
        "mesh: data=16 needs 16 devices; 8 are there, so it shrinks to data=8 (devices.fit=shrink)"
    ]


SIZES = st.sampled_from([1, 1, 1, 2, 3, 4, 6, 8, 9, 16])


@settings(deadline=None)  # a busy machine is no fault
@given(st.tuples(*[SIZES] * 6), st.sampled_from([None, "data", "fsdp", "pipe"]), st.integers(1, 100))
def test_resolve_mesh_always_fits(sizes: tuple[int, ...], rest: str | None, devices: int) -> None:
    mesh = MeshConfig(*sizes)
    if rest is not None:
        mesh = replace(mesh, **{rest: -1})
    shrunk = resolve_mesh(mesh, devices, "shrink")
    assert 1 <= math.prod(asdict(shrunk).values()) <= devices
    for axis, size in asdict(mesh).items():
        assert size == -1 or size % asdict(shrunk)[axis] == 0  # what the size divided, the new size divides
    try:
        exact = resolve_mesh(mesh, devices, "exact")
    except UserError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 500
        fits = str(error).split("these fit: ")[-1].split(";")[0].split(", ") if "these fit" in str(error) else []
        for each in fits:  # each mesh that the message offers does fit
            offered = MeshConfig(**{axis: int(size) for axis, size in (word.split("=") for word in each.split())})
            resolve_mesh(offered, devices, "exact")
    else:
        assert exact == shrunk
        assert rest is None or math.prod(asdict(exact).values()) == devices


def test_rest_needs_known_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdist.config.resolve.GPU_PLUGINS", ("json",))  # a module that is installed
    config = load(tmp_path, "mesh: {data: -1, fsdp: 2}\ndata: {global_batch: 6}\n")
    assert config.mesh.data == -1 and known_devices(config.devices) is None
    check_layout(replace(config, mesh=resolve_mesh(config.mesh, 6, "exact")))
    with pytest.raises(UserError, match=r"data\.global_batch: 6 .* 8 "):
        check_layout(replace(config, mesh=resolve_mesh(config.mesh, 8, "exact")))
    assert load(tmp_path, "mesh: {data: 32}").mesh.data == 32  # the GPUs may be there
    assert load(tmp_path, "mesh: {data: 32}", "devices.platform=gpu").mesh.data == 32
    with pytest.raises(UserError, match="needs 32 devices; 8 are there"):
        load(tmp_path, "mesh: {data: 32}", CPU)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "JAX_NUM_PROCESSES"])
def test_devices_of_all_processes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv({"WORLD_SIZE": "MASTER_ADDR", "JAX_NUM_PROCESSES": "JAX_COORDINATOR_ADDRESS"}[name], "localhost")
    monkeypatch.setenv(name, "4")
    assert load(tmp_path, "mesh: {data: -1}", "devices.simulated=2", CPU).mesh.data == 8


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_devices_are_unknown_where_jax_counts_the_processes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert load(tmp_path, "mesh: {data: -1}", CPU).mesh.data == 8
    monkeypatch.setenv(name, "4")
    assert load(tmp_path, "mesh: {data: 32}", CPU).mesh.data == 32


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(tmp_path, "{}", "data.path=~/config.yaml").data.path == "~/config.yaml"


def test_paths(tmp_path: Path) -> None:
    assert load(tmp_path, "{}", f"data.path={tmp_path}").data.path == str(tmp_path)
    config = load(tmp_path, f"data: {{source: tokens, path: {tmp_path}}}\n")
    assert (config.data.source, config.data.val_path) == ("tokens", None)


def test_a_model_of_ones_own_divides_as_it_likes(tmp_path: Path) -> None:
    config = load(tmp_path, "model: {name: json.loads, heads: 3}\nmesh: {expert: 2, tensor: 2}\n")
    assert config.model.name == "json.loads"


@pytest.mark.parametrize(
    ("word", "name"), [("DATA", "data"), ("dat", "data"), ("fdsp", "fsdp"), ("dp", "data"), ("zebra", None), ("", None)]
)
def test_nearest(word: str, name: str | None) -> None:
    assert nearest(word, ["data", "fsdp", "tensor"]) == name


@pytest.mark.parametrize("word", ["grad_accum", "gradient_accumulation_steps", "accumulate_grad_batches"])
def test_other_names_of_microbatches(word: str) -> None:
    assert nearest(word, ["grad_sync", "microbatches", "prefetch"]) == "microbatches"


def test_reference_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "docs" / "config_reference.py")],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert done.stdout == page, "run: python scripts/docs/config_reference.py > docs/config.md"
    assert all(f"`{name}`" in page for name, key in all_keys(Config) if not key.nested)


def test_imports_no_jax_and_is_quick() -> None:
    # Of this process alone: whatever else the machine is doing.
    code = (
        "import time; t = time.process_time(); import jaxdist.config.schema, sys; assert 'jax' not in sys.modules;"
        " assert 'numpy' not in sys.modules; print(time.process_time() - t)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    assert min(float(run.stdout) for run in runs) < 0.3
