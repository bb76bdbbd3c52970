"""What `scripts/explain.py --remedies` promises is what the changed configuration then takes; and when a run is short
of memory, it says so."""

import json
import math
import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import child
import jax
import pytest
from pages import on_page

from jaxdist.cli.work import explain as command
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.plan import changes
from jaxdist.plan.changes import REMEDIES, changed, typed
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.memory.peak import memory_of
from jaxdist.plan.compiled.hardware import get_gpu
from jaxdist.plan.compiled.memory import Footprint
from jaxdist.plan.explain import explain
from jaxdist.plan.remedies import table as plan
from jaxdist.plan.remedies.fitting import advice, cheapest, device_room, host_room, smaller_microbatches
from jaxdist.plan.remedies.table import Remedy, StepCost, Table, assumed_cluster, cost_of, remedies, remedies_to_json
from jaxdist.plan.remedies.text import remedies_text
from jaxdist.plan.search.choose import step_seconds
from jaxdist.runtime.gpu_memory import memory_share
from jaxdist.step import TrainStep
from jaxdist.trainer.failures import out_of_memory
from jaxdist.trainer.train import train

ROOT = Path(__file__).parents[2]
TINY = (
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "data.seq_len=16",
    "data.global_batch=8",
    "mesh.data=1",
    "mesh.fsdp=2",
    "mesh.tensor=1",
    "optimizer.name=sgd",
    "parallel.min_shard_bytes=0",
)
PEAK = "peak, compiled (state, batch and temporary)"
NOW = StepCost(Footprint(arguments=900, outputs=900, aliased=900, temporary=100, host=0), flops=100.0, wire_bytes=0.0)
OOM = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nmore lines"


def configured(*overrides: str) -> Config:
    return load_config(ROOT / "configs" / "quickstart.yaml", [*TINY, *overrides], planned=True)


def fake_cost(config: Config) -> StepCost:
    """Full remat halves temporary memory, microbatches double it, host memory takes the moments."""
    temporary = 100 // (2 if config.memory.remat == "full" else 1) * config.parallel.microbatches
    host = 600 * config.memory.offload.optimizer
    return StepCost(
        Footprint(900 - host, 900 - host, 900 - host, temporary, host),
        flops=100.0 + 33 * (config.memory.remat == "full"),
        wire_bytes=NOW.wire_bytes,
    )


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "cost_of", fake_cost)


def offered(*overrides: str) -> dict[str, str]:
    """Overrides by the name of the remedy, before they are checked."""
    config = configured(*overrides)
    found = {}
    for name, change in REMEDIES:
        values = change(config)
        if changed(config, values) != config:
            found[name] = " ".join(typed(key, value) for key, value in values.items())
    return found


def test_a_run_that_fits_loads_no_planner() -> None:
    code = "import sys, jaxdist.trainer.train; sys.exit(any('.plan.search.' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], env=child.environment()).returncode == 0


@pytest.mark.slow
def test_the_table_is_what_explain_then_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte: both come from compiling. Remedies are applied as one would type them."""
    chosen = ("remat full", "optimizer state in host memory")
    monkeypatch.setattr(changes, "REMEDIES", [each for each in REMEDIES if each[0] in chosen])
    table = remedies(configured(), progress=lambda text: None)
    assert {each.name for each in table.remedies} == {*chosen, " + ".join(chosen)} and not any(
        each.refused for each in table.remedies
    )
    for each in table.remedies:
        found = explain(configured(*each.overrides), compiled=True)
        assert each.cost is not None
        assert (found.memory[PEAK], found.ledger.wire_bytes) == (each.cost.memory.peak, each.cost.wire_bytes)
    by_name = {each.name: each for each in table.remedies}
    peaks = [each.cost.memory.peak for each in table.remedies if each.cost]
    assert peaks == sorted(peaks) and table.now.memory.peak > peaks[0]
    remat, host = by_name["remat full"].cost, by_name["optimizer state in host memory"].cost
    assert remat is not None and host is not None
    assert 0.1 < remat.flops / table.now.flops - 1 < 0.34  # the forward pass of the blocks, a third of the whole
    assert remat.wire_bytes >= table.now.wire_bytes > 0 and host[1:] == table.now[1:]
    # Nothing but the momentum, which is as large as the parameters, has left the device.
    moved = table.now.memory.arguments - host.memory.arguments
    assert moved == host.memory.host == explain(configured()).memory["parameters"]


def test_what_is_offered() -> None:
    found = offered()
    assert found["twice the microbatches"] == "parallel.microbatches=2"
    assert found["remat full"] == "memory.remat=full" and "remat none" not in found
    assert found["optimizer state in host memory"] == "memory.offload.optimizer=true"
    assert found["twice the tensor axis"] == "mesh.fsdp=1 mesh.tensor=2"
    assert not {"the next ZeRO stage", "shards instead of replicas"} & found.keys()  # zero3, no replicas
    assert offered("mesh.data=2")["shards instead of replicas"] == "mesh.data=1 mesh.fsdp=4"
    assert offered("mesh.data=2")["twice the tensor axis"] == "mesh.data=1 mesh.tensor=2"
    assert offered("parallel.strategy=zero1")["the next ZeRO stage"] == "parallel.strategy=zero2"
    alone = ("parallel.strategy=ddp", "mesh.data=2", "mesh.fsdp=1")
    assert offered(*alone)["the next ZeRO stage"] == "parallel.strategy=zero1 mesh.data=1 mesh.fsdp=2"
    found = offered("memory.remat=full", "memory.offload.optimizer=true", "data.seq_len=512")
    assert not {"remat full", "optimizer state in host memory"} & found.keys()
    assert found["logits in chunks"] == "model.loss_chunk=256"
    split = offered("data.seq_len=512", "mesh.context=2", "parallel.schedule=accumulate")
    assert split["logits in chunks"] == "model.loss_chunk=128"  # half of the tokens are on another device
    for overrides in ((), alone):  # whatever is offered can be typed
        for text in offered(*overrides).values():
            configured(*overrides, *text.split())


@pytest.mark.slow
@pytest.mark.usefixtures("faked")
def test_ranked_refused_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured("data.global_batch=2")
    arguments = {
        "timeline": None,
        "compile": False,
        "devices_per_host": 8,
        "rows": 1,
        "parameters": False,
        "activations": False,
        "remedies": True,
        "gpu": "h200",
        "json": tmp_path / "out.json",
        "plot": None,
        "write_budget": None,
        "budget": None,
    }
    assert command.run_explain(config, Namespace(**arguments)) == []
    shown, progress = capsys.readouterr()
    assert (
        re.match(r"compiling the step as it is\ncompiling change 1/", progress) and ": memory.remat=full\n" in progress
    )
    rows = [line.split() for line in shown[shown.index("remedy ") :].splitlines()]
    assert rows[1][:2] == ["memory.remat=full", "memory.offload.optimizer=true"]
    assert rows[1][2:10] == ["350", "B", "650", "B", "65.0%", "+33.0%", "0", "B"]
    alone = {row[0]: row[1:9] for row in rows[2:] if row and "=" not in (row[1:2] or ["="])[0]}
    assert alone["memory.offload.optimizer=true"] == ["400", "B", "600", "B", "60.0%", "+0.0%", "0", "B"]
    assert alone["memory.remat=full"] == ["950", "B", "50", "B", "5.0%", "+33.0%", "0", "B"]
    assert "memory.offload.optimizer=true: 600 B a device is stored in host memory" in shown
    left_out = "left out: parallel.microbatches=2: data.global_batch: 2 does not divide by 4"
    assert left_out in shown and "left out: memory.remat=offload: simulated devices have no host memory" in shown
    found = json.loads((tmp_path / "out.json").read_text())["remedies"]
    assert found["now"]["peak"] == 1000 and found["now"]["wire_bytes"] == 0
    first, last = found["remedies"][0], found["remedies"][-1]
    assert (first["overrides"], first["saves"]) == (["memory.remat=full", "memory.offload.optimizer=true"], 650)
    assert first["cost"]["host"] == 600 and first["cost"]["temporary"] == 50
    assert last["refused"] and last["cost"] is None and last["saves"] is None


def test_what_costs_memory_is_shown_as_that() -> None:
    worse = plan.Remedy("worse", ("a=1",), NOW._replace(memory=NOW.memory._replace(temporary=1100), wire_bytes=2048.0))
    text = remedies_text(Table(NOW, [worse]))
    assert ["a=1", "1.95", "KiB", "-1000", "B", "-100.0%", "+0.0%", "2.00", "KiB"] in map(str.split, text.splitlines())
    assert remedies_to_json(Table(NOW, [worse]))["remedies"][0]["saves"] == -1000


def test_a_loss_without_facts_has_no_seconds(tmp_path: Path) -> None:
    """It is a loss that does not say so (`ModelFacts`): nothing of it is known by blocks."""
    own, text = tmp_path / "own.yaml", "{{model: {{name: {}}}, data: {{source: images, path: x.npz}}}}"
    own.write_text(text.format("outsider.normed.normed"))
    config = load_config(own, ["mesh.data=2"], planned=True)
    assert step_seconds(config, assumed_cluster(config, "h200"), Known()) is None


def test_pairs_change_different_keys_one_after_the_other() -> None:
    config = configured("mesh.data=2", "parallel.strategy=zero1", "data.seq_len=512")
    names = ("twice the microbatches", "remat dots", "remat full", "the next ZeRO stage", "shards instead of replicas")
    found = {each.name: each for each in changes.pairs(config, names)}
    assert "remat dots + remat full" not in found and len(found) == 9
    both = found["twice the microbatches + remat full"]
    assert both.overrides == ("parallel.microbatches=2", "memory.remat=full")
    assert both.config is not None and both.config.memory.remat == "full" and both.config.parallel.microbatches == 2
    sharded = found["the next ZeRO stage + shards instead of replicas"].config
    assert sharded is not None and (sharded.parallel.strategy, sharded.mesh.fsdp) == ("zero2", 4)
    # The second has nothing left to do: the next stage has made shards of the replicas.
    replicas = configured("mesh.data=2", "mesh.fsdp=1", "parallel.strategy=zero1")
    assert changes.pairs(replicas, ("the next ZeRO stage", "shards instead of replicas")) == []


@pytest.mark.usefixtures("faked")
def test_pairs_of_what_saves_most_and_seconds() -> None:
    """Pairs are made of the four that save most; a step with more to compute takes longer."""
    config = configured("parallel.microbatches=2")
    cluster = assumed_cluster(config, "h200")
    table = remedies(config, cluster=cluster, progress=lambda text: None)
    costs = {each.name: each.cost for each in table.remedies}
    full, both = costs["remat full"], costs["remat full + optimizer state in host memory"]
    assert full is not None and both is not None and table.now.seconds is not None
    assert full.seconds is not None and both.seconds is not None
    assert table.now.seconds < full.seconds < both.seconds and both.memory.peak < full.memory.peak
    text = remedies_text(table, predicted_for="2 x h200")
    assert f"predicted for 2 x h200, not measured (docs/planner.md); as it is {1e3 * table.now.seconds:.3g} ms" in text
    assert "memory.remat=full memory.offload.optimizer=true" in text
    assert remedies_to_json(table)["now"]["seconds"] == table.now.seconds


def test_no_half_to_give_to_tensor() -> None:
    with pytest.raises(UserError, match="neither mesh.data 1 nor mesh.fsdp 3 is even"):
        dict(REMEDIES)["twice the tensor axis"](replace(configured(), mesh=replace(configured().mesh, fsdp=3)))


YAML = """
model: {{layers: 2, width: 16, heads: 2}}
data: {{path: {path}, seq_len: 16, global_batch: 8}}
mesh: {{fsdp: 2}}
parallel: {{strategy: zero3, min_shard_bytes: 0}}
train: {{steps: 2, eval_every: 0, sample_tokens: 0}}
devices: {{platform: cpu}}
observe: {{console: plain, report: false}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "data").mkdir()
    for i in range(3):
        (tmp_path / "data" / f"{i}.py").write_text("x = 1 + 1\n" * 500)
    (tmp_path / "tiny.yaml").write_text(YAML.format(path=tmp_path / "data"))
    return load_config(tmp_path / "tiny.yaml")


def fails(text: str) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError(text)

    return call


@pytest.mark.slow
@pytest.mark.usefixtures("faked")
def test_a_run_without_memory_says_what_would_help(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TrainStep, "__call__", fails(OOM))
    assert train(config, tmp_path / "run") == 1
    said = capsys.readouterr().err
    assert said.startswith("out of memory: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184")
    for text in (
        "Memory of a device:",
        "optimizer state",
        "compiling change 1/",
        "memory.remat=full",
        "microbatches=2",
    ):
        assert text in said
    assert "Traceback" not in said and "more lines" not in said


@pytest.mark.slow
def test_where_nothing_compiles_the_command_is_said(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "jaxdist.trainer.first_state.init_state", fails(OOM)
    )  # before the run directory has a configuration
    monkeypatch.setattr(plan, "cost_of", fails("RESOURCE_EXHAUSTED: again\nand again"))
    assert train(config, tmp_path / "run") == 1
    said = capsys.readouterr().err
    file = tmp_path / "run" / "config.yaml"
    assert "the remedies cannot be compiled here: RESOURCE_EXHAUSTED: again\n" in said and "Memory of a device:" in said
    assert f"and how much: jaxdist explain {file} --remedies\n" in said
    command = rf"jaxdist train {file} parallel\.microbatches=\d+ memory\.remat=\w+"
    assert re.search(rf"by the closed form \(.*\) this does: {command}\n\Z", said)
    assert load_config(file) == config
    monkeypatch.setattr("jaxdist.trainer.first_state.init_state", fails("INTERNAL: something else"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        train(config, tmp_path / "other")


def remedy(name: str, peak: int, flops: float) -> Remedy:
    return Remedy(name, (name,), StepCost(Footprint(0, 0, 0, peak, 0), flops, wire_bytes=0.0))


def test_the_room_of_a_device() -> None:
    h200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: None)
    assert device_room(h200) == memory_share() * get_gpu("h200").memory
    assert device_room(SimpleNamespace(**vars(h200) | {"memory_stats": lambda: {"bytes_limit": 7}})) == 7
    assert device_room(SimpleNamespace(**vars(h200) | {"device_kind": "another"})) == math.inf
    share = device_room(jax.devices()[0])
    assert share == pytest.approx(host_room() / 8, rel=0.1)


def test_the_command_of_a_run_that_fits(tmp_path: Path) -> None:
    """The cheapest remedy that fits; if none does, what the closed form says of more microbatches."""
    config, file = configured("data.global_batch=64"), Path("config.yaml")
    table = Table(NOW, [remedy("a", 10, 9.0), remedy("b", 20, 3.0), remedy("c", 30, 1.0), Remedy("d", (), None, "no")])
    [line] = advice(config, table, 25.0, Path("big") / file)  # NOW takes 1000
    shown = {"25 B": "635.59 MiB", "yaml b$": "yaml parallel.microbatches=2 memory.remat=full"}
    on_page("docs/remedies.md", line, shown)
    assert advice(config, table, math.inf, file) == []
    assert cheapest(table, 2000.0) == table.remedies[2]  # what failed was predicted to fit: half of it is taken
    assert cheapest(table._replace(remedies=[remedy("e", 600, 1.0)]), 2000.0) is None
    folder = tmp_path / "a run"
    (folder / "checkpoints" / "step_2").mkdir(parents=True)
    [line] = advice(config, table, 25.0, folder / "config.yaml")
    assert line.endswith(f"jaxdist train '{folder}/config.yaml' --run-dir '{folder}' b")
    whole = memory_of(config, Known())["peak"]
    for room in (math.inf, whole / 3):
        found = smaller_microbatches(config, room)
        assert found is not None and found[1] <= min(room, whole / 2)
        chosen = configured("data.global_batch=64", *found[0])
        if chosen.parallel.microbatches > 1:  # fewer do not fit
            half = {"parallel.microbatches": chosen.parallel.microbatches // 2, "memory.remat": "full"}
            assert memory_of(changed(chosen, half), Known())["peak"] > min(room, whole / 2)
    [line] = advice(config, table, 5.0, file)
    assert "none of these fits; take more devices, or a smaller data.global_batch" in line
    [line] = advice(config, None, whole / 3, file)
    assert "jaxdist train config.yaml parallel.microbatches=" in line and "none of these" not in line


def test_what_a_process_may_take(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    whole = host_room(limit)
    assert 0 < whole < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit.write_text("max\n")
    assert host_room(limit) == pytest.approx(whole, rel=0.1)
    limit.write_text("1000\n")  # less than it has already
    assert host_room(limit) == 0


def test_what_is_out_of_memory() -> None:
    assert out_of_memory.is_out_of_memory(jax.errors.JaxRuntimeError(OOM))
    assert not out_of_memory.is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: no"))
    assert not out_of_memory.is_out_of_memory(ValueError(OOM))


@pytest.mark.slow
def test_every_remedy_of_the_quickstart() -> None:
    """Each that is offered compiles, and the figures of the first are those of a configuration compiled by itself."""
    config = load_config(ROOT / "configs" / "quickstart.yaml", planned=True)
    table = remedies(config, progress=lambda text: None)
    compiled = [each for each in table.remedies if each.cost is not None]
    assert len(compiled) >= 5
    best = load_config(ROOT / "configs" / "quickstart.yaml", compiled[0].overrides, planned=True)
    assert cost_of(best) == compiled[0].cost
