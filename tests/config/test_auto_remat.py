"""`memory.remat: auto`: what it is on which devices, and where products do not fit."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxdist import build
from jaxdist.build import assemble
from jaxdist.config.checks import default_remat
from jaxdist.config.entries import ModelFacts
from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.mesh import abstract_mesh, make_mesh
from jaxdist.parallel.options import StepOptions
from jaxdist.plan import auto_remat
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.compiled.hardware import GPUS, get_gpu

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
H200 = QUICKSTART.parent / "gpt_355m_h200.yaml"


@pytest.mark.parametrize(
    ("overrides", "on_gpus", "on_cpus"),
    [
        ((), "dots", "none"),
        (("memory.remat=sqrt",), "sqrt", "sqrt"),
        (("memory.offload.activations=true",), "offload", "offload"),
        (("parallel.grad_sync.deterministic=true", "optimizer.name=adamw"), "none", "none"),
        (("model={name: resnet}", "data={source: digits}", "mesh={data: 8, fsdp: 1, tensor: 1}"), "none", "none"),
    ],
)
def test_what_auto_is(overrides: tuple[str, ...], on_gpus: str, on_cpus: str) -> None:
    for gpu, expected in ((True, on_gpus), (False, on_cpus)):
        planned = [*overrides, f"devices.platform={'gpu' if gpu else 'auto'}"]
        assert load_config(QUICKSTART, planned, planned=True).memory.remat == expected
        read = load_config(QUICKSTART, list(overrides))
        assert default_remat(read, gpu=gpu) == expected


def test_an_assembled_step_knows_it_too() -> None:
    config = load_config(QUICKSTART)
    assert config.memory.remat == "auto"
    assert assemble(config, make_mesh(**asdict(config.mesh))).options.remat == "none"
    with pytest.raises(UserError, match=r"memory\.remat: 'auto'.*allowed: one of none, full, dots, sqrt, offload, or"):
        StepOptions(remat="auto")


@pytest.mark.parametrize(
    ("gpus", "rows", "expected"),
    [(8, 512, "dots"), (8, 64, "dots"), (1, 512, "full"), (1, 128, "dots"), (1, 64, "none")],
)
def test_what_fits_is_kept(
    gpus: int, rows: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of 1024 tokens. Everything is kept on one GPU alone, where blocks are in no loop."""
    one = ["parallel.strategy=ddp", "precision.reduce_dtype=null"] if gpus == 1 else []
    given = load_config(
        H200, [f"mesh.fsdp={gpus}", f"data.global_batch={rows}", "parallel.prefetch=null", *one], planned=True
    )
    asked = replace(given, memory=replace(given.memory, remat="auto"))
    monkeypatch.setattr(auto_remat, "start", lambda config, watched: config)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=GPUS["h200"].description)])
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    assert given.memory.remat == "dots"
    found = auto_remat.start_fitting(asked).memory.remat
    assert found == ("auto" if expected == "dots" else expected)  # auto stays, for other devices
    said = capsys.readouterr().out
    lines = {
        "full": "auto is full here: with dots a GPU may need ",
        "none": "auto is none here: everything fits: ",
        "dots": "",
    }
    assert (f"memory.remat: {lines[expected]}" in said) if expected != "dots" else not said
    assert auto_remat.start_fitting(given).memory.remat == "dots"  # as it was asked for


@pytest.mark.parametrize(("scan_blocks", "expected"), [("null", "none"), ("0", "none"), ("1", "dots"), ("2", "dots")])
def test_in_a_loop_not_everything_is_kept(scan_blocks: str, expected: str) -> None:
    """What blocks keep is copied there, also in rounds of two."""
    one = ["mesh.fsdp=1", "parallel={strategy: ddp, prefetch: null}", "precision.reduce_dtype=null"]
    config = load_config(H200, [*one, "data.global_batch=8", f"model.scan_blocks={scan_blocks}"], planned=True)
    assert auto_remat.fitting_mode(config, get_gpu("h200"))[0] == expected


def test_what_has_no_closed_form_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that are not in the table; samples whose shapes only the data know; a loss whose module does not say so,
    which gets none."""
    config = load_config(H200, ["data.global_batch=100000"], planned=True)
    config = replace(config, memory=replace(config.memory, remat="auto"))
    monkeypatch.setattr(auto_remat, "start", lambda config, watched: config)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=GPUS["h200"].description)])
    assert auto_remat.start_fitting(config).memory.remat == "full"
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="of nobody")])
    assert auto_remat.start_fitting(config).memory.remat == "auto"

    def windows(config: Any) -> None:
        raise UserError("data.source: shapes are known only when it is read")

    monkeypatch.setattr("jaxdist.plan.closed.memory.peak.batch_of", lambda config, mesh: windows(config))
    assert auto_remat.needed_bytes(load_config(H200, planned=True), Known()) is None
    own = load_config(QUICKSTART, ["model={name: resnet}", "data={source: digits}", "mesh={fsdp: 1, tensor: 1}"])
    assert auto_remat.needed_bytes(own, Known()) is None
    monkeypatch.setattr(ModelFacts, "of", lambda name: ModelFacts())  # as of a module without FACTS
    assert default_remat(own, gpu=True) == "dots"
    monkeypatch.setattr(build, "cuda_capability", lambda config, mesh: "9.0")
    assert build.assemble(own, abstract_mesh(data=1)).options.remat == "none"
