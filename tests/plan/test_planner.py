"""`jaxdist plan`: candidates, links, seconds, ties, reasons, and the files that it writes."""

import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from levels import levels

from jaxdist.build import assemble, planned_mesh
from jaxdist.cli.main import main
from jaxdist.cli.plan import _whatever_the_mesh
from jaxdist.cli.work.check_run import check_run
from jaxdist.collectives.cost import Link
from jaxdist.config.json_reader import read_json_file
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.mesh import AXES
from jaxdist.observe.report import RunRecord
from jaxdist.observe.report.read import PLAN_FILE
from jaxdist.observe.report.sections.plan import compared, plan_section
from jaxdist.plan.calibration.measure import calibrate
from jaxdist.plan.changes import changed
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.memory.peak import PEAK
from jaxdist.plan.closed.sent import Transfer, rounds
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.explain import IN_HOST_MEMORY, explain
from jaxdist.plan.remedies.table import flops_of_passes
from jaxdist.plan.search import choose
from jaxdist.plan.search.choose import Predicted, predict_families, search, tie_of
from jaxdist.plan.search.cluster import PlanCluster, gpu_cluster
from jaxdist.plan.search.reasons import others, turns
from jaxdist.plan.search.result import LayoutPlan, argue, layout_named, layout_plan_to_json, plan_layout, write_plan
from jaxdist.plan.search.second_process import SecondProcess
from jaxdist.plan.search.seconds import Seconds, computing_of, hidden_share, seconds_of
from jaxdist.plan.search.space import (
    MOST_MICROBATCHES,
    Layout,
    axis_splits,
    checked,
    layout_of,
    layouts,
    microbatch_counts,
)
from jaxdist.plan.search.text import search_text
from jaxdist.plan.search.work import model_work
from jaxdist.precision.policy import precision_of

pytestmark = pytest.mark.xdist_group("planner")  # what one test has traced (`KNOWN`) serves the others
ROOT = Path(__file__).parents[2]
TINY = (
    "model={layers: 2, width: 32, heads: 1}",
    "data.seq_len=16",
    "data.global_batch=4",
    "optimizer.name=adamw",
    "mesh={data: 1, fsdp: 1, tensor: 1}",
    "parallel={strategy: ddp, min_shard_bytes: 0}",
    "parallel.microbatches=1",
)

NOTHING = {"parameters": 0, "optimizer state": 0}  # bytes at rest
KNOWN = Known()  # shared: the tests plan the same model


def tiny(*overrides: str) -> Config:
    return load_config(ROOT / "configs" / "quickstart.yaml", [*TINY, *overrides], planned=True)


def cluster(hosts: int = 1, per_host: int = 2, **changes: Any) -> PlanCluster:
    made = gpu_cluster(
        "h200", precision_of(tiny().precision), hosts=hosts, per_host=per_host, link="80gbit", inside=None
    )
    return made._replace(**changes)


@pytest.fixture(scope="module")
def plan() -> LayoutPlan:
    """Of the tiny model on two GPUs, the best layouts traced."""
    return plan_layout(tiny(), cluster(), basis="a table", traced=2, compiled=0, known=KNOWN)


def test_links_are_shared_by_what_a_host_has_of_other_groups() -> None:
    """A host has 8 devices and 10 GB/s; a ring of devices that lie a host's width apart has an eighth of that."""
    made = cluster(hosts=4, per_host=8)
    sizes = {"pipe": 1, "data": 4, "fsdp": 8, "expert": 1, "context": 1, "tensor": 1}
    assert made.link(("fsdp",), sizes) == (made.inside, False)
    link, far = made.link(("data",), sizes)
    assert far and link.bytes_per_s == pytest.approx(10e9 / 8)
    link, far = made.link(("data", "fsdp"), sizes)  # one ring through all: each host's link is its alone
    assert far and link.bytes_per_s == pytest.approx(10e9)
    wide = {"pipe": 1, "data": 2, "fsdp": 16, "expert": 1, "context": 1, "tensor": 1}
    link, far = made.link(("fsdp",), wide)  # 8 of the 16 are on a host
    assert far and link.bytes_per_s == pytest.approx(10e9)
    assert made.link(("tensor",), {"fsdp": 16, "tensor": 2})[1] is False
    assert [rounds(op, 8) for op in ("psum", "all_gather", "reduce_scatter", "ppermute")] == [6, 3, 3, 1]


def test_what_may_be_hidden() -> None:
    config, made = tiny("mesh={fsdp: 2}", "parallel.strategy=zero3"), cluster()

    def sent(phase: str, what: str, axis: str) -> Transfer:
        return Transfer("psum", (axis,), 2, 1e6, (1,), phase, what)

    shares = {
        each: hidden_share(sent(*each), config, made)
        for each in (
            ("backward", "gradients", "fsdp"),
            ("once a step", "gradients", "fsdp"),
            ("forward", "activations", "tensor"),
            ("forward", "activations", "pipe"),
            ("once a step", "metrics", "data"),
        )
    }
    assert list(shares.values()) == [0.95, 0.0, 0.5, 0.0, 0.0]


OFFLOADING = 2.0  # what it costs in `by_formula`


def by_formula(layout: Layout, config: Config, cluster: PlanCluster, known: Known) -> Predicted:
    """A prediction in which both memory and time turn on all that members of a family differ in: a gather and a sum a
    microbatch, what is computed again, a bubble."""
    parallel, memory = config.parallel, config.memory
    kept = {"none": 8.0, "dots": 4.0, "full": 1.0}[str(memory.remat)] / parallel.microbatches
    again = {"none": 0.0, "dots": 0.2, "full": 1.0}[str(memory.remat)]
    bubble = 4.0 * (config.mesh.pipe - 1) / parallel.microbatches
    seconds = 3.0 + again + bubble + 0.6 * parallel.microbatches + OFFLOADING * memory.offload.optimizer
    spent = Seconds(seconds, 0.0, {}, 0.0, 0.0)
    return Predicted(layout, config, spent, {PEAK: kept + 2.0 - memory.offload.optimizer}, 0.0)


@pytest.mark.parametrize(
    ("limit", "offloading"),
    levels(itertools.product((9.0, 5.0, 3.9, 3.0, 2.4, 2.2, 1.2), (0.05, 0.5, 2.0)), everyday=4),
)
def test_what_a_search_leaves_out_is_no_faster(
    limit: float, offloading: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slow links one microbatch that is computed again is faster than four that are kept; with a fast host, state
    there and activations here."""
    monkeypatch.setattr("test_planner.OFFLOADING", offloading)
    monkeypatch.setattr(choose, "predicted", by_formula)
    config, small = tiny("data.global_batch=16"), cluster(per_host=4, memory=limit)
    families = list(layouts(config, 4, per_host=4))
    for family in families:
        monkeypatch.setattr(choose, "layouts", lambda *_, family=family, **__: [family])
        try:
            found = search(config, small, KNOWN)
        except UserError:  # none is allowed
            continue
        every = search(config, small, KNOWN, among=family)
        assert (found.fitting[:1] or [None])[0] == (every.fitting[:1] or [None])[0]


@pytest.mark.slow
def test_a_second_process_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config, alone = tiny(), search(tiny(), cluster(), KNOWN)
    monkeypatch.setattr(choose, "WORTH_A_PROCESS", 1)
    known, told = Known(), list[str]()
    both = search(config, cluster(), known, progress=told.append)
    assert both._replace(took=0.0) == alone._replace(took=0.0)
    others = [each for each in KNOWN.traced() if each not in known.traced()]
    assert known.traced() and not [each for each in others if each[0] != "work"]  # and tells what it has traced
    monkeypatch.setattr(choose, "predict_families", _ends_the_process)
    monkeypatch.setenv("FIRST_PROCESS", str(os.getpid()))
    assert search(config, cluster(), Known())._replace(took=0.0) == alone._replace(took=0.0)


def _mistaken(*_: Any) -> Any:
    raise UserError("mesh.data: 3; allowed: 2")


def test_a_mistake_in_the_second_process_is_a_mistake(capfd: pytest.CaptureFixture[str]) -> None:
    process = SecondProcess(_mistaken, 1)
    with pytest.raises(UserError, match="mesh.data: 3; allowed: 2"):
        process.result()
    process.stop()
    assert capfd.readouterr().err == ""


def test_the_second_process_ends_with_the_first() -> None:
    process = SecondProcess(time.sleep, 600)
    process.here.close()  # as when the first one is killed
    assert process.process.wait(timeout=60) == 1


def _ends_the_process(*given: Any) -> Any:
    """A second process that is killed; what it was to do is then done by the first one."""
    if os.environ["FIRST_PROCESS"] != str(os.getpid()):
        os._exit(9)
    return predict_families(*given)


def test_a_model_without_sequence_parallelism() -> None:
    """Once a ViT that is split over `tensor` was asked for it, and its plan ended with the refusal."""
    digits = load_config(ROOT / "configs" / "vit_digits.yaml", planned=True)
    families = [each for family in layouts(digits, 2, per_host=8) for each in family]
    assert any(each.values["mesh.tensor"] == 2 for each in families)
    assert not any(each.values["parallel.sequence_parallel"] for each in families)
    families = [each for family in layouts(tiny(), 2, per_host=8) for each in family]
    assert {each.values["parallel.sequence_parallel"] for each in families} == {False, True}


@pytest.mark.parametrize("policy", ["bf16", "O2"])
def test_experts_in_half_precision(policy: str) -> None:
    """Routers stay in fp32, as in a step; plans of mixtures of experts in half precision once were refused."""
    config = tiny("model.moe.experts=2", f"precision.policy={policy}")
    work = model_work(config, Known())
    assert work.block.flops > 2.9 * work.forward.flops > 0


@pytest.mark.parametrize(
    "trained",
    [
        [],
        ["optimizer.lora.rank=2", "optimizer.lora.targets=[all-linear]"],
        ["optimizer.freeze=[embed.*,blocks.*]"],
        ["optimizer.freeze=[embed.*,blocks.*,'!blocks.mlp.*']", "memory.remat=full"],
    ],
    ids=["all", "lora", "head", "mlp"],
)
def test_what_is_frozen_takes_no_time(trained: list[str]) -> None:
    """The work of a model has the FLOPs of the traced step, and the optimizer passes over what is trained."""
    config, known = tiny("model.heads=2", "parallel.prefetch=0", "mesh.data=2", *trained), Known()
    work, parts = model_work(config, known), assemble(config, planned_mesh(config))
    traced = flops_of_passes(parts, batch_of(config, planned_mesh(config)))
    assert 2 * (2 * work.block.flops + work.ends.flops) == pytest.approx(traced)
    state = {"parameters": 3, "optimizer state": 0}
    spent = seconds_of(config, cluster(bandwidth=1.0, flops=math.inf), [], state, known).optimizer
    assert spent == 9 if not trained else 0 < spent < 7


def test_a_pipeline_of_frozen_blocks() -> None:
    """Of 1F1B with S stages whose backward pass takes nothing: no weight is trained, and no gradient goes through."""
    pipe = ("mesh={pipe: 2}", "parallel.schedule=one_f_one_b", "parallel.microbatches=2")
    found = seconds_of(tiny(*pipe, "optimizer.freeze=[embed.*,blocks.*]"), cluster(), [], NOTHING, Known())
    assert found.bubble == pytest.approx(found.computing / 2)


DEEP = """
from dataclasses import dataclass

from own_blocks import GPT

from jaxdist import model_def
from jaxdist.config.rules.fields import setting


@dataclass(frozen=True)
class Options:
    depth: int = setting(4, "number of blocks", at_least=1)


def tower(config, *, max_length, param_dtype):
    return model_def(
        lambda rngs: GPT(rngs, layers=config.depth, length=max_length), tied=True, param_dtype=param_dtype
    )
"""


def test_a_model_whose_options_have_no_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its blocks do not divide into, and axes that none of its layers is split over, are refused. Once the first
    of these ended the plan, and the choice was a layout that does not train."""
    (tmp_path / "deep.py").write_text(DEEP)
    for path in (tmp_path, ROOT / "docs" / "examples"):
        monkeypatch.syspath_prepend(path)
    (tmp_path / "mine.yaml").write_text(
        "model: {name: deep.tower, depth: 3}\ndata: {seq_len: 16, global_batch: 4}\nparallel: {strategy: ddp}\n"
    )
    config, known = load_config(tmp_path / "mine.yaml", planned=True), Known()
    layers = known.model_in_order(config).layers
    families = [*layouts(config, 2, per_host=2, layers=layers)]
    assert layers == 3 and not any(each.values["parallel.chunks"] > 1 for family in families for each in family)
    among = [next(f[0] for f in families if f[0].values[f"mesh.{axis}"] == 2) for axis in ("pipe", "tensor", "data")]
    found = search(config, cluster(), known, among=among)
    assert {*found.refused} == {"mesh.pipe", "mesh.tensor"} and found.fitting
    with pytest.raises(UserError, match=r"model\.name: 'deep\.tower' has no key `layers`; allowed: "):
        calibrate(config, declared=None, burst=0, measured={}, progress=print)


def test_products_that_float8_does_not_take_are_no_faster() -> None:
    """Those of embedding, head and scores stay in bf16; once a plan gave all of them the rate of float8."""
    config = tiny("mesh.data=2", "precision.policy=fp8", "parallel.prefetch=0")
    made = gpu_cluster("h200", precision_of(config.precision), hosts=1, per_host=2, link=None, inside=None)
    spent, work = computing_of(config, made._replace(bandwidth=math.inf, flops=1e9, float8=2e9), Known())
    assert 0 < work.block.float8 < work.block.flops and work.ends.float8 == 0
    narrow, flops = 2 * 2 * work.block.float8, 2 * (2 * work.block.flops + work.ends.flops)
    assert spent == pytest.approx((flops - narrow) / 1e9 + narrow / 2e9)
    assert made.float8 == pytest.approx(2 * made.flops, rel=1e-3) and "in float8" in made.described()
    assert cluster().float8 is None


def test_seconds_by_hand() -> None:
    """One byte a second, nothing computed: what cannot be hidden is the wire's time and the latency of its rounds."""
    config = tiny("mesh={data: 2}")
    slow = cluster(inside=Link(0.25, 1.0), flops=math.inf, bandwidth=math.inf, to_host=1.0, hidden={"gradients": 0.95})
    sent = [Transfer("psum", ("data",), 2, 3.0, (2,), "once a step", "gradients")]
    found = seconds_of(config, slow, sent, {"parameters": 0, "optimizer state": 8}, KNOWN)
    assert found.waiting == {("data",): pytest.approx(2 * (3.0 + 2 * 0.25))}
    assert found.computing == found.bubble == found.optimizer == found.host == 0.0
    offloaded = seconds_of(config, slow, [], {**NOTHING, IN_HOST_MEMORY: 8}, KNOWN)
    assert offloaded.parts() == {"host memory": 16.0}
    # Beside computation that takes no time, nothing is hidden; beside long computation, 95 % of it.
    hidden = [sent[0]._replace(phase="backward")]
    assert seconds_of(config, slow, hidden, NOTHING, KNOWN).waiting[("data",)] == pytest.approx(7.0)
    busy = seconds_of(config, slow._replace(flops=1e3), hidden, NOTHING, KNOWN)
    assert busy.computing > 1e3 and busy.waiting[("data",)] == pytest.approx(0.05 * 7.0)


def test_latency_counts_once_for_what_is_combined() -> None:
    """Of two kernels' gradients that travel together, not of two activations, which wait for each other."""
    config, slow = tiny("mesh.data=2"), cluster(inside=Link(0.5, 1.0), flops=math.inf, bandwidth=math.inf, hidden={})
    one = Transfer("psum", ("data",), 2, 3.0, (2,), "backward", "gradients")
    other = one._replace(wire_bytes=5.0, calls=(1,))
    found = [
        seconds_of(config, slow, [each._replace(what=what) for each in (one, other)], NOTHING, KNOWN).waiting[("data",)]
        for what in ("gradients", "activations")
    ]
    assert found == [pytest.approx(2 * 3 + 5 + 2 * 2 * 0.5), pytest.approx(2 * 3 + 5 + 3 * 2 * 0.5)]


def test_a_pipeline_waits_for_its_bubble() -> None:
    """Of 1F1B with S stages and M microbatches whose F, B and W take the same: (S - 1) / M."""
    pipe = ("mesh={pipe: 2}", "parallel.schedule=one_f_one_b", "parallel.microbatches=2")
    found = seconds_of(tiny(*pipe), cluster(), [], NOTHING, KNOWN)
    assert found.bubble == pytest.approx(found.computing / 2)


def test_splits_are_all_sizes_with_that_product() -> None:
    found = list(axis_splits(8, ["data", "fsdp", "tensor"]))
    assert len(found) == 10 and all(math.prod(each.values()) == 8 for each in found)


def members(config: Config, devices: int, per_host: int = 8) -> Iterator[Layout]:
    for family in layouts(config, devices, per_host=per_host):
        yield from family


def test_candidates() -> None:
    """Tensor parallelism stays in a host, strategies shard where there is something to shard over, and what a
    configuration does not allow is its own error."""
    config = tiny("model.heads=4", "data.global_batch=8")
    found = [each.values for each in members(config, 8, per_host=2)]
    assert max(each["mesh.tensor"] for each in found) == 2
    assert {each["parallel.strategy"] for each in found if each["mesh.fsdp"] == 1} == {"ddp"}
    assert {each["parallel.strategy"] for each in found if each["mesh.fsdp"] > 1} == {"zero1", "zero2", "zero3"}
    assert {each["mesh.expert"] for each in found} == {each["mesh.context"] for each in found} == {1}
    assert len({tuple(sorted(each.items(), key=str)) for each in found}) == len(found)
    odd = next(each for each in members(tiny("model.layers=3"), 2) if each.values["mesh.pipe"] == 2)
    refused = checked(tiny("model.layers=3"), odd, gpu=True)
    with pytest.raises(UserError) as error:
        load_config(ROOT / "configs" / "quickstart.yaml", [*TINY, "model.layers=3", *odd.arguments()], planned=True)
    assert refused == str(error.value)
    experts = tiny("model.moe.experts=4", "model.layers=2")
    assert {each.values["mesh.expert"] for each in members(experts, 2)} == {1, 2}
    long = tiny("data.seq_len=16384", "data.global_batch=1")
    assert {each.values["mesh.context"] for each in members(long, 2)} == {1, 2}


def candidate(seconds: float, **values: Any) -> Predicted:
    usual = layout_of(tiny()).values | {f"mesh.{axis}": 1 for axis in AXES}
    layout = Layout(tuple((usual | {key.replace("__", "."): value for key, value in values.items()}).items()))
    return Predicted(layout, tiny(), Seconds(seconds, 0.0, {}, 0.0, 0.0), {PEAK: 1}, 0.0)


def test_ties_go_to_the_simplest() -> None:
    fast = candidate(1.0, mesh__pipe=2, parallel__schedule="one_f_one_b")
    plain = candidate(1.09, mesh__data=2)
    slow = candidate(1.11, mesh__data=2, memory__remat="full")
    tie = tie_of([fast, plain, slow], 0.1)
    assert tie.members == [plain, fast] and tie.fastest == 1.0
    assert tie_of([fast, plain, slow], 0.05).winner == fast


def test_a_plan(plan: LayoutPlan, tmp_path: Path) -> None:
    """The choice is the fastest within the spread, all candidates are accounted for, and plan.yaml trains it."""
    found = plan.search
    assert found.fitting == sorted(found.fitting, key=lambda each: each.seconds.total)
    assert plan.winner.seconds.total <= (1 + plan.cluster.spread) * found.fitting[0].seconds.total
    assert {each.how for each in found.fitting[:2]} <= {"traced", "closed form"} and not plan.notes
    assert sum(each.how == "traced" for each in found.fitting) == 2
    assert found.refused and all("." in key for key in found.refused)
    lost = {each.candidate.layout for each in plan.others}
    assert plan.others and not lost & {each.layout for each in plan.tie.members}
    paths = write_plan(plan, tmp_path / "out")
    loaded = load_config(paths[1], planned=True)
    assert loaded.observe.plan == str(paths[0]) and layout_of(loaded).values == layout_of(plan.winner.config).values
    told = json.loads(paths[0].read_text())
    assert told == json.loads(json.dumps(layout_plan_to_json(plan)))
    assert told["choice"]["seconds"] == pytest.approx(sum(told["choice"]["parts"].values()))
    assert paths[2].read_text().startswith("<?xml")


def test_what_muon_sends_is_in_the_plan() -> None:
    """As the ledger counts it: else a plan says that its closed forms are wrong."""
    config = tiny("optimizer.name=muon", "mesh.fsdp=2", "parallel.strategy=zero3", "optimizer.lr=1e-2")
    found = choose.predicted(layout_of(config), config, cluster(), KNOWN)
    assert found.sent == explain(config).ledger.wire_bytes
    assert (
        found.sent
        > choose.predicted(layout_of(config), tiny("mesh.fsdp=2", "parallel.strategy=zero3"), cluster(), KNOWN).sent
    )


def test_an_argued_layout(plan: LayoutPlan) -> None:
    config = tiny()
    asked = layout_named(["mesh.pipe=2", "parallel.schedule=one_f_one_b", "parallel.microbatches=2"], config, 2)
    argued = argue(config, asked, plan.cluster, plan.tie, KNOWN)
    assert argued.candidate.seconds.bubble > 0 and " x: " in argued.why
    with pytest.raises(UserError, match="the sizes of the mesh multiply to 4, and the plan is for 2 devices"):
        layout_named(["mesh.fsdp=4"], config, 2)
    with pytest.raises(UserError, match="'optimizer.lr=1' is no key of a layout"):
        layout_named(["optimizer.lr=1"], config, 2)
    for text, said in (
        ("mesh.fsdp=", r"mesh\.fsdp: nothing \(null\) is given"),
        ("mesh.fsdp=[2", r"mesh\.fsdp='\[2': line 1, .*not YAML"),
        ("mesh.fsdp=x", r"mesh\.fsdp: 'x' is text; allowed: an integer"),
        ("mesh.shards=2", r"mesh\.shards: unknown key"),
    ):
        with pytest.raises(UserError, match=said):
            layout_named([text], config, 2)
    uneven = layout_named(["mesh.pipe=2", "parallel.stages=[1,1]", "memory.offload.optimizer=true"], config, 2)
    assert uneven.values["parallel.stages"] == (1, 1) and uneven.values["memory.offload.optimizer"] is True


def test_an_argued_layout_that_does_not_fit(plan: LayoutPlan) -> None:
    """It has its seconds and all its memory; once it took infinite seconds where it needed much more than there is."""
    small = cluster(memory=plan.winner.peak / 10)
    asked = layout_named(["mesh.data=2"], tiny(), 2)
    argued = argue(tiny(), asked, small, plan.tie, KNOWN)
    assert math.isfinite(argued.candidate.seconds.total) and argued.why.startswith("does not fit: ")
    assert "inf" not in search_text(plan._replace(asked=argued))


def test_a_plan_of_devices_whose_memory_is_not_judged(
    plan: LayoutPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of CPUs that were measured: plan.json has no infinity, which no reader takes. A damaged one is named."""
    endless = plan.search._replace(cluster=cluster(memory=math.inf, flops=math.inf))
    write_plan(plan._replace(search=endless), tmp_path)
    told = read_json_file(tmp_path / PLAN_FILE)
    assert told["cluster"]["memory"] is None and told["choice"]["seconds"] == plan.winner.seconds.total
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "step_s": 0.5}\n')
    assert "a step" in "\n".join(check_run(tmp_path, None))
    for text, said in (
        ('{"choice": Infinity}', "plan.json cannot be read: Infinity is not a number"),
        ("{}", "holds no"),
    ):
        (tmp_path / PLAN_FILE).write_text(text)
        with pytest.raises(UserError, match=said):
            check_run(tmp_path, None)
    (tmp_path / PLAN_FILE).unlink()
    with pytest.raises(UserError, match=r"has no plan\.json"):
        check_run(tmp_path, None)


@pytest.mark.slow
def test_nothing_fits() -> None:
    with pytest.raises(
        UserError, match=r"plan: no layout of 2 x h200 fits; the nearest, .* does not fit: .*; allowed: more"
    ):
        plan_layout(tiny(), cluster(memory=300e3), basis="", traced=0, compiled=0, known=KNOWN)
    asked = layout_named(["mesh.fsdp=2", "parallel.strategy=zero3"], tiny(), 2)
    with pytest.raises(UserError, match=r"fits; the nearest, .*; fsdp=2 zero3: does not fit: .*; allowed: more"):
        plan_layout(tiny(), cluster(memory=300e3), basis="", traced=0, compiled=0, known=KNOWN, asked=asked)


def test_the_configured_layout_need_not_go_with_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """It is replaced anyway. Once a smaller batch was refused for the shipped mesh."""
    quickstart = str(ROOT / "configs" / "quickstart.yaml")
    config, given = _whatever_the_mesh(quickstart, ["data.global_batch=2"])
    assert load_config(quickstart, given, planned=True) == config
    assert "the configured mesh is left out, which the plan replaces: data.global_batch" in capsys.readouterr().err
    assert config.parallel.strategy == load_config(quickstart, planned=True).parallel.strategy
    assert config.data.global_batch == 2 and config.mesh.data == config.mesh.fsdp == 1
    config, given = _whatever_the_mesh(quickstart, ["data.global_batch=16"])
    assert config.mesh.data == 2 and given == ["data.global_batch=16"]  # as it is configured
    with pytest.raises(UserError, match="data.global_batch"):
        _whatever_the_mesh(quickstart, ["data.global_batch=0"])


def test_one_stage_takes_as_many_microbatches_as_it_needs() -> None:
    """Once 64 were the most, and a model of which one sequence fits at a time was said to need more devices."""
    config = tiny("data.global_batch=1024")
    counts = {
        each.values["mesh.pipe"]: each.values["parallel.microbatches"]
        for family in layouts(config, 2, per_host=2)
        for each in family
    }
    assert counts == {1: 512, 2: MOST_MICROBATCHES}  # the last ones
    members = [each for family in layouts(config, 2, per_host=2) for each in family]
    assert max(each.values["parallel.microbatches"] for each in members if each.values["mesh.tensor"] == 2) == 1024
    assert microbatch_counts(96, pipeline=False) == [1, 2, 4, 8, 16, 32, 64, 96]
    assert microbatch_counts(96, pipeline=True) == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["model={name: resnet}"], "plan: model.name 'resnet' is a loss, one unit"),
        (["parallel.local.every=2", "mesh.data=2"], "plan: parallel.local.every is set"),
    ],
)
def test_what_is_not_predicted(overrides: list[str], said: str) -> None:
    config = (
        load_config(ROOT / "configs" / "resnet_digits.yaml", planned=True) if "resnet" in said else tiny(*overrides)
    )
    with pytest.raises(UserError, match=said):
        plan_layout(config, cluster(), basis="", traced=0, compiled=0)


def test_less_memory_turns_the_choice() -> None:
    """What fits by being computed again wins only where the rest does not fit."""
    found = search(tiny(), cluster(), KNOWN)
    best = found.fitting[0]
    assert best.layout.values["memory.remat"] == "none"
    room = 1.01 * min(each.peak for each in found.fitting)
    less = search(tiny(), cluster(memory=room), KNOWN)
    assert less.fitting[0].peak <= room < best.peak and best.layout in {each.layout for each in less.tight}
    winner, *lost = less.fitting
    alone = less._replace(fitting=[winner], tight=[*lost, *less.tight])
    told = others(alone, tie_of(alone.fitting, 0.1))
    assert told and all(each.why.startswith("does not fit: ") and "the most is " in each.why for each in told)


@pytest.mark.parametrize("room", [1.1, 1.6, 2.0])
def test_what_would_win_with_a_larger_batch_is_what_a_search_for_it_finds(room: float) -> None:
    """The same layout in more microbatches is no other one."""
    whole = search(tiny(), cluster(), KNOWN)
    less = cluster(memory=room * min(each.peak for each in whole.fitting))
    found = search(tiny(), less, KNOWN)
    told = [turn for turn in turns(tiny(), found, tie_of(found.fitting, less.spread), KNOWN) if "a batch" in turn.what]
    larger = changed(tiny(), {"data.global_batch": 2 * tiny().data.global_batch})
    best = tie_of(search(larger, less, KNOWN).fitting, less.spread).winner.layout
    assert [turn.winner.layout for turn in told] == ([] if room == 2.0 else [best])


def test_a_report_has_the_plan_beside_the_run(plan: LayoutPlan) -> None:
    metrics = [{"step": i, "loss": 1.0, "step_s": 2.0, "sent_bytes": 10, "time": float(i)} for i in range(1, 9)]
    record = RunRecord("mine", metrics=metrics, plan=layout_plan_to_json(plan))
    rows = {each.part: each for each in compared(record)}
    assert rows["a step"].measured == 2.0 and rows["a step"].predicted == plan.winner.seconds.total
    assert rows["computing"].predicted == plan.winner.seconds.computing and rows["sent by a device"].measured == 10
    [(title, text)] = plan_section(record)
    assert title == "Plan" and plan.winner.layout.name() in text
    assert plan_section(record._replace(plan={})) == plan_section(record._replace(plan={"choice": "no"})) == []


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--gpu", "h201"], "--gpu: 'h201' is not known"),
        (["--link", "fast"], "--link: 'fast' is not known"),
        (["--inside", "usb"], "--inside: 'usb' is not known"),
        (["--calibration", "no/such.json"], "--calibration: no/such.json does not exist"),
        (["--calibration", "no/such.json", "--hosts", "2"], "--hosts: has no effect with --calibration"),
        (["--calibration", "no/such.json", "--gpu", "b200"], "--gpu: has no effect with --calibration"),
        (["--check", "no/such/run"], "holds no metrics.jsonl"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "--quick", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "gpus", "said"),
    [
        ("resnet_digits.yaml", 8, r"--check: model\.name 'resnet' is a loss"),
        ("vit_digits.yaml", 3, r"--check: .* has \d devices, and the prediction is for 3; allowed: .*--gpus-per-host"),
    ],
)
def test_runs_that_cannot_be_predicted_are_refused(config: str, gpus: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "configs" / config).read_text())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UserError, match=said):
        check_run(tmp_path, cluster(per_host=gpus))


def test_halves_are_tried_where_tensor_sends_and_no_block_is_gathered_ahead() -> None:
    config = tiny("data.global_batch=8", "model.heads=4")
    families = list(layouts(config, 4, per_host=4, halves=True))
    found = [layout.values for family in families for layout in family]
    halved = [values for values in found if values["parallel.batch_split"] == 2]
    assert {values["parallel.strategy"] for values in halved} == {"ddp", "zero1", "zero2"}
    assert all(values["mesh.tensor"] > 1 and values["mesh.pipe"] == 1 for values in halved)
    for values in halved:
        assert not isinstance(checked(config, Layout(tuple(values.items())), gpu=True), str), values
    rows = {8 // (v["mesh.data"] * v["mesh.fsdp"] * v["mesh.expert"] * v["parallel.microbatches"]) for v in halved}
    assert rows == {2, 4, 8}  # of a microbatch on a device: never one
    assert all({**values, "parallel.batch_split": 1} in found for values in halved)
    assert all(layout.values["parallel.batch_split"] == 1 for each in layouts(config, 4, per_host=4) for layout in each)
    for key in ("parallel.collective_matmul=true", "parallel.grad_sync={deterministic: true, virtual_shards: 8}"):
        other = tiny("data.global_batch=8", "model.heads=4", "parallel.sequence_parallel=true", key)
        tried = [layout.values for each in layouts(other, 4, per_host=4, halves=True) for layout in each]
        assert {values["parallel.batch_split"] for values in tried} == {1}


def test_halves_hide_more_of_tensor_parallelism() -> None:
    transfer = Transfer("all_gather", ("tensor",), 2, 8.0, (1.0,), "forward", "activations")
    whole = tiny("mesh.tensor=2", "model.heads=2", "parallel.sequence_parallel=true")
    halves = tiny("mesh.tensor=2", "model.heads=2", "parallel.sequence_parallel=true", "parallel.batch_split=2")
    shares = [hidden_share(transfer, config, cluster()) for config in (whole, halves)]
    assert shares == [0.5, 0.6]
    small = transfer._replace(calls=(100.0,))  # latency is all that it takes, and nothing computes that long beside it
    waits = [seconds_of(config, cluster(), [small], NOTHING, KNOWN).waiting["tensor",] for config in (whole, halves)]
    assert waits[1] == pytest.approx(2 * waits[0], rel=0.01)
