"""One rule, one text: what a YAML file is refused for, a program in Python is refused for in the same words."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from jaxdist.config.load import load_config
from jaxdist.config.resolve import SHRINK_ORDER
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.precision import LossScale
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.parallel.microbatch import check_batch_shape
from jaxdist.parallel.options import StepOptions
from jaxdist.precision.policy import Precision, make_precision, precision_of
from jaxdist.runtime.join.environment import find_job
from jaxdist.step import make_train_step

CPU = "devices.platform=cpu"


def step(mesh: dict[str, int] | None = None, rows: int = 8, **options: Any) -> None:
    """Make a step of a small model, and trace it."""
    model, tx, on = gpt(ModelConfig(layers=2, width=16, heads=2, vocab=32), max_length=8), optax.sgd(0.1), make_mesh()
    on = make_mesh(**mesh) if mesh else on
    made = make_train_step(model, tx, on, **options)
    batch: dict[str, Any] = dict.fromkeys(("inputs", "targets"), np.zeros((rows, 8), np.int32))
    target = state_target(model, tx, on, strategy=options.get("strategy", "ddp"))
    made.lower(target, batch | {"weights": np.ones((rows, 8), np.float32)})


def table(schedule: str, *counts: int) -> None:
    importlib.import_module(f"jaxdist.parallel.schedules.{schedule}").table(*counts)


ORDERED = "parallel.grad_sync.deterministic=true"
SAME: list[tuple[tuple[str, ...], Callable[[], object]]] = [
    (("parallel.grad_sync={algorithm: auto, link: fast}",), lambda: step(grad_sync=GradSync("auto", link="fast"))),
    (("parallel.grad_sync.bucket_mb=0",), lambda: step(grad_sync=GradSync(bucket_mb=0.0))),
    (("parallel.grad_sync.wire_dtype=int8",), lambda: step(grad_sync=GradSync(wire_dtype="int8"))),
    (
        ("parallel.grad_sync={algorithm: tree, wire_dtype: int8}",),
        lambda: step(grad_sync=GradSync("tree", wire_dtype="int8")),
    ),
    (("parallel.grad_sync.algorithm=rong",), lambda: step(grad_sync=GradSync("rong"))),
    ((ORDERED, "parallel.grad_sync.algorithm=ring"), lambda: step(grad_sync=GradSync("ring", deterministic=True))),
    (
        (ORDERED, "precision.reduce_dtype=bfloat16"),
        lambda: step(grad_sync=GradSync(deterministic=True), precision=make_precision("fp32", "bfloat16")),
    ),
    (
        (ORDERED, "parallel.grad_sync.virtual_shards=6"),
        lambda: step(grad_sync=GradSync(deterministic=True, virtual_shards=6)),
    ),
    (
        (ORDERED, "mesh.data=3", "data.global_batch=24"),
        lambda: step({"data": 3}, grad_sync=GradSync(deterministic=True)),
    ),
    (
        (ORDERED, "parallel.grad_sync.virtual_shards=4", "mesh.data=4", "parallel.microbatches=2"),
        lambda: step({"data": 4}, microbatches=2, grad_sync=GradSync(deterministic=True, virtual_shards=4)),
    ),
    ((ORDERED, "parallel.schedule=gpipe"), lambda: step(schedule="gpipe", grad_sync=GradSync(deterministic=True))),
    (
        ("parallel.schedule=pairwise", "parallel.microbatches=3", "data.global_batch=9"),
        lambda: step(schedule="pairwise", microbatches=3, rows=9),
    ),
    (
        ("parallel.prefetch=1", "parallel.reshard_after_forward=false"),
        lambda: step(strategy="zero3", prefetch=1, reshard_after_forward=False),
    ),
    (
        ("parallel.prefetch=1", ORDERED),
        lambda: step(strategy="zero3", prefetch=1, grad_sync=GradSync(deterministic=True)),
    ),
    (("parallel.prefetch=1", "memory.remat=sqrt"), lambda: step(strategy="zero3", prefetch=1, remat="sqrt")),
    ((ORDERED, "memory.remat=full"), lambda: step(remat="full", grad_sync=GradSync(deterministic=True))),
    (
        ("parallel.schedule=gpipe", "mesh.pipe=2", "parallel.chunks=2", "model.layers=4"),
        lambda: table("gpipe", 2, 1, 2),
    ),
    (
        ("parallel.schedule=interleaved", "mesh.pipe=2", "parallel={chunks: 2, microbatches: 3}"),
        lambda: table("interleaved", 2, 3, 2),
    ),
    (
        ("mesh.data=4", "data.global_batch=30", "parallel.microbatches=3"),
        lambda: check_batch_shape({"x": np.zeros((30, 2))}, make_mesh(data=4), StepOptions(microbatches=3)),
    ),
    (
        (ORDERED, "mesh.data=2", "data.global_batch=30"),
        lambda: step({"data": 2}, rows=30, grad_sync=GradSync(deterministic=True)),
    ),
    (
        ("precision={policy: O2, half: float16, per_op: true, compute_dtype: float32}",),
        lambda: make_precision("O2", half="float16", per_op=True, compute_dtype="float32"),
    ),
    (("precision={policy: bf16, half: float16}",), lambda: make_precision("bf16", half="float16")),
    (("precision={policy: fp8, per_op: true}",), lambda: make_precision("fp8", per_op=True)),
    (("precision={policy: fp32, keep_fp32: [head.*]}",), lambda: make_precision("fp32", keep_fp32=["head.*"])),
]


@pytest.mark.parametrize(
    ("overrides", "call"), SAME, ids=lambda each: "+".join(each) if isinstance(each, tuple) else ""
)
def test_a_file_and_a_program_are_refused_in_the_same_words(
    overrides: tuple[str, ...], call: Callable[[], object], tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    with pytest.raises(UserError) as by_file:
        load_config(path, [CPU, *overrides])
    with pytest.raises(UserError) as by_program:
        call()
    told = str(by_file.value)
    if told.startswith("data.global_batch"):  # a program has no such key
        told = re.sub(r"^data.global_batch: (\d+) does", r"batch: \1 rows do", told).replace("parallel.", "")
        told = told.replace("nearest batch sizes", "nearest numbers of rows")
    assert str(by_program.value) == told


def test_a_number_of_processes_is_read_in_one_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "config.yaml", "^WORLD_SIZE: 'two' in the environment is no rank or process count; allowed"
    path.write_text("{}")
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": "5000", "WORLD_SIZE": "two", "RANK": "0"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        load_config(path, [CPU])
    with pytest.raises(UserError, match=said):
        find_job(job)


@pytest.mark.parametrize("axis", ["context", "expert"])
@pytest.mark.parametrize("size", [2, -1])
def test_no_message_proposes_an_axis_that_the_model_refuses(axis: str, size: int, tmp_path: Path) -> None:
    """Where the mesh does not fit the devices either, that axis is what is named, and not a mesh that has it."""
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    for overrides in (["mesh.data=8"], ["mesh.data=16", "devices.fit=shrink"], ["mesh.data=3"]):
        with pytest.raises(UserError, match=f"^mesh.{axis}: {size} is given, but no .* of model bert .* 1; use"):
            load_config(path, [CPU, "model.name=bert", f"mesh.{axis}={size}", *overrides])
    assert {"context", "expert"} < set(SHRINK_ORDER)  # for models of somebody else's
    with pytest.raises(UserError, match="did you mean parallel.sequence_parallel"):
        load_config(path, [CPU, "mesh.sp=2"])
    for name in ("cp", "ep"):
        with pytest.raises(UserError) as caught:
            load_config(path, [CPU, f"mesh.{name}=2"])
        assert "did you mean" not in str(caught.value)


def test_what_the_section_says_is_what_code_uses(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("precision: {policy: fp16, reduce_dtype: float16, loss_scale: {growth_interval: 7}}")
    precision = precision_of(load_config(path, []).precision)
    plain = make_precision("fp16", "float16")
    assert precision._replace(loss_scale="dynamic") == plain
    assert precision.scale_rule == LossScale("dynamic", growth_interval=7) != plain.scale_rule == LossScale("dynamic")
    fixed = precision_of(load_config(path, ["precision.loss_scale={mode: fixed, growth_interval: 2000}"]).precision)
    assert fixed.scale_rule == LossScale("fixed") == Precision(*fixed[:3], loss_scale=65536.0).scale_rule
    assert fixed.scale_rule is not None and fixed.scale_rule.factors == (1.0, 1.0)
    none = precision_of(load_config(path, ["precision.loss_scale={mode: none, growth_interval: 2000}"]).precision)
    assert none.scale_rule is None
