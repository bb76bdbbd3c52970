"""`jaxdist calibrate`: the fit of links, the file, and what plans read from it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.plan.calibration import measure
from jaxdist.plan.calibration.blocks import LocalShape, can_narrow, measure_blocks, narrowed
from jaxdist.plan.calibration.file import (
    Calibration,
    Compute,
    MeasuredLink,
    calibrated_subject,
    read_calibration,
    stale,
    write_calibration,
)
from jaxdist.plan.calibration.links import fitted, measure_link
from jaxdist.plan.calibration.measure import devices_by_host, shapes_of
from jaxdist.plan.calibration.repeated import Timed
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.closed.sent import rounds
from jaxdist.plan.search.cluster import calibrated_cluster
from jaxdist.plan.search.seconds import measured_units
from jaxdist.plan.search.work import model_work
from jaxdist.plan.traced.ledger import wire_bytes

ROOT = Path(__file__).parents[2]
TINY = (
    "model={layers: 2, width: 32, heads: 2}",
    "data.seq_len=16",
    "data.global_batch=4",
    "optimizer.name=adamw",
    "mesh={data: 1, fsdp: 1, tensor: 1}",
    "parallel={strategy: ddp}",
)


def tiny() -> Any:
    return load_config(ROOT / "configs" / "quickstart.yaml", TINY, planned=True)


def made(**changes: Any) -> Calibration:
    compute = (
        Compute("none", 1, 2, 1.0, 0.5, 0.03),
        Compute("none", 1, 4, 2.0, 0.7, 0.01),
        Compute("full", 1, 2, 1.2, 0.5, 0.02),
        Compute("full", 1, 4, 2.4, 0.7, 0.02),
        Compute("none", 2, 4, 1.2, 0.35, 0.02),
    )
    link = MeasuredLink(1e-3, 1e6, 0.04)
    usual = Calibration(
        "cpu", 4, 1, calibrated_subject(tiny()), compute, 1e-9, None, link, 1.25e6, {"versions": {"jax": "1"}}
    )
    return usual._replace(**changes)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_link_is_found(noise: float) -> None:
    """Of 12.5 MB/s and 2 ms a round, though one of the ops takes 30 % longer than the line says."""
    n, timed = 4, {}
    for i, op in enumerate(("psum", "all_gather", "reduce_scatter", "ppermute")):
        for size in (1024, 2**20):
            seconds = rounds(op, n) * 2e-3 + wire_bytes(op, 4 * size, n) / 12.5e6
            timed[op, size] = Timed(seconds * (1 + noise * (i == 1)), 0.05)
    found = fitted(timed, n, declared=12.5e6)
    assert found.bytes_per_s == pytest.approx(12.5e6, rel=0.15) and found.latency_s == pytest.approx(2e-3, rel=0.3)
    with pytest.raises(UserError, match=r"calibrate: .* MB/s was measured on a link of 6 MB/s: .*--burst"):
        fitted(timed, n, declared=6e6)
    assert fitted(timed, n, declared=25e6, abreast=2) == found  # two devices share the link
    with pytest.raises(UserError, match=r"calibrate: 2\d\.\d+ MB/s was measured on a link of 12.5 MB/s"):
        fitted(timed, n, declared=12.5e6, abreast=2)


def test_the_file(tmp_path: Path) -> None:
    found, path = made(), tmp_path / "calibration.json"
    write_calibration(found, path)
    assert read_calibration(path) == found
    assert stale(found, tiny(), {"jax": "1"}) == []
    assert stale(found, tiny(), {"jax": "2"}) == ["jax 1 then, 2 now"]
    other = load_config(ROOT / "configs" / "quickstart.yaml", [*TINY, "data.seq_len=32"], planned=True)
    assert stale(found, other, {"jax": "1"}) == ["another seq_len"]
    for text in ("{", "[]", '{"format": 99}', '{"format": 1, "compute": []}'):
        path.write_text(text)
        with pytest.raises(UserError, match="--calibration: .*make it again: jaxdist calibrate"):
            read_calibration(path)


def test_units_at_other_shapes() -> None:
    """On the line through the rows that were measured; parts of layers by their share; other remats by FLOPs."""
    found, work = made(), model_work(tiny(), Known())
    assert measured_units(found, "none", 1, 3, work) == (pytest.approx(1.5), pytest.approx(0.6))
    assert measured_units(found, "full", 1, 4, work) == (pytest.approx(2.4), pytest.approx(0.7))
    assert measured_units(found, "none", 1, 8, work) == (pytest.approx(4.0), pytest.approx(1.4))
    assert measured_units(found, "none", 2, 4, work) == (pytest.approx(1.2), pytest.approx(0.35))
    plain = work.forward + work.forward + work.forward
    again = work._replace(plain=plain, block=plain + work.forward)
    assert measured_units(found, "dots", 1, 4, again)[0] == pytest.approx(2.0 * 4 / 3)


def test_a_calibrated_cluster() -> None:
    found = calibrated_cluster(made())
    assert found.devices == 4 and found.spread == pytest.approx(0.04) and found.hidden == {}
    assert found.link(("data",), {"data": 4})[0].bytes_per_s == 1e6
    assert found.bandwidth == pytest.approx(1e9) and found.memory == float("inf")


def test_links_inside_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured, in all hosts at once; a file without is read as if they were those between hosts. Once what
    stays in a host was free."""
    probed: list[Any] = []

    def measured(ends: Any, **_: Any) -> MeasuredLink:
        probed.append([[*each] for each in ends])
        return MeasuredLink(1e-4, 2e6, 0.01)

    monkeypatch.setattr(measure, "count_hosts", lambda: 2)
    monkeypatch.setattr(measure, "devices_by_host", lambda _: [[0, 1], [2, 3]])
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="cpu")] * 4)
    monkeypatch.setattr(measure, "measure_blocks", lambda *_, **__: (made().compute, 1e-9))
    monkeypatch.setattr(measure, "measure_link", measured)
    found = measure.calibrate(tiny(), declared=None, burst=0, measured={}, progress=print)
    assert probed == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]] and found.inside == found.between
    unmeasured = calibrated_cluster(found._replace(inside=None))
    link, far = unmeasured.link(("tensor",), {"data": 2, "tensor": 2})
    assert not far and link.bytes_per_s == 2e6 and link.latency_s == 1e-4


def test_parts_of_layers() -> None:
    """A part of a model is as wide as a device's part under tensor parallelism."""
    config = tiny()
    assert can_narrow(config)
    part = narrowed(config, LocalShape("full", 2, 4), 3)
    whole, half = config.model.resolved(), part.model.resolved()
    assert (half.heads, half.head_width, half.mlp_width, half.layers) == (1, 16, whole.mlp_width // 2, 3)
    assert (half.width, part.data.global_batch, part.memory.remat) == (32, 4, "full")
    shapes = shapes_of(config, 2)
    assert {each.remat for each in shapes} == {"none", "dots", "full"} and {each.tensor for each in shapes} == {1, 2}


@pytest.mark.slow
def test_measured_here() -> None:
    """The numbers are positive, and a shape that was measured is found again."""
    compute, optimizer = measure_blocks(tiny(), [LocalShape("none", 1, 2), LocalShape("full", 1, 2)], progress=print)
    assert [each.remat for each in compute] == ["none", "full"] and optimizer > 0
    assert all(each.block + each.ends > 0 for each in compute)
    for ends in ([[each] for each in jax.devices()[:4]], [jax.devices()[:2], jax.devices()[2:4]]):
        link = measure_link(ends, progress=print)
        assert link.latency_s > 0 and link.bytes_per_s > 0


def test_the_devices_of_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a process a GPU, ranks dealt out cyclically: every process has a device in the measurement of the link."""
    every = [SimpleNamespace(process_index=rank, id=rank, platform="gpu", slice_index=rank % 2) for rank in range(4)]
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    found = devices_by_host(every)  # type: ignore[arg-type]
    assert [[each.process_index for each in host] for host in found] == [[0, 2], [1, 3]]
    with pytest.raises(UserError, match="calibrate: hosts have from 1 to 2 devices"):
        devices_by_host(every[:3])  # type: ignore[arg-type]
