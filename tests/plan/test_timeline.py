"""Pipelines in time: bubbles are those of the papers, what is kept is counted again, pictures show every piece of
work."""

import itertools
import re
from collections import Counter
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from jaxdist.parallel.pipeline.table import Ticks, allocate_slots
from jaxdist.parallel.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from jaxdist.plan.report.draw_timeline import draw_timeline
from jaxdist.plan.report.timeline import Timeline, WorkCosts, simulate, table_text

COSTS = (WorkCosts(), WorkCosts(1.0, 2.0, 0.25), WorkCosts(3.0, 0.5, 1.0))
EXAMPLES = [
    gpipe.table(3, 5),
    one_f_one_b.table(4, 2),
    interleaved.table(3, 6, 2),
    zero_bubble.table(4, 9),
    zero_bubble.table(5, 4),
    one_f_one_b.table(1, 3),
]


@pytest.mark.parametrize("costs", COSTS)
def test_bubbles_without_chunks(costs: WorkCosts) -> None:
    for stages in (*range(1, 9), 16):
        for m in (1, 2, 3, 4, 7, 16, 31, 40):
            for module in (gpipe, one_f_one_b):
                line = simulate(module.table(stages, m), costs)
                assert line.total == pytest.approx((m + stages - 1) * sum(costs))
                assert line.bubble == pytest.approx((stages - 1) / (m + stages - 1))


@pytest.mark.parametrize("costs", COSTS)
def test_bubbles_with_chunks(costs: WorkCosts) -> None:
    for stages, rounds, chunks in itertools.product((1, 2, 3, 4, 8), (1, 2, 5), range(1, 5)):
        m = rounds * stages
        line = simulate(interleaved.table(stages, m, chunks), costs)
        assert line.total == pytest.approx((m * chunks + stages - 1) * sum(costs) / chunks)
        assert line.bubble == pytest.approx((stages - 1) / (chunks * m + stages - 1))


def test_totals_of_zero_bubble() -> None:
    """At equal costs. The last stage begins after S - 1 forwards and has 3 M to do: 3 M + S - 1 cannot be undercut."""
    for stages in range(1, 17):
        near = (1, stages - 1, stages, 2 * stages - 3, 2 * stages - 2, 2 * stages - 1, 2 * stages, 40)
        for m in sorted({m for m in near if m >= 1}):
            total = simulate(zero_bubble.table(stages, m)).total
            if m >= 2 * stages - 2:
                assert total == 3 * m + stages - 1
            else:
                assert total == (2 * m + 3 * stages - 3 if m >= stages else 3 * m + 2 * stages - 2)
                assert total > 3 * m + stages - 1


def test_zero_bubble_has_a_third_of_the_bubble() -> None:
    for stages in range(2, 17):
        for m in (2 * stages - 1, 2 * stages, 5 * stages):
            joint, split = (simulate(module.table(stages, m)) for module in (one_f_one_b, zero_bubble))
            assert joint.total * joint.bubble == pytest.approx(3 * (stages - 1))
            assert split.total * split.bubble == pytest.approx(stages - 1)


def test_a_split_backward_pass_is_never_slower() -> None:
    for stages, m, costs in itertools.product((1, 2, 5, 8), (1, 4, 9, 20), COSTS):
        split, joint = (simulate(module.table(stages, m), costs) for module in (zero_bubble, one_f_one_b))
        assert split.busy == pytest.approx(joint.busy)
        assert split.total <= joint.total + 1e-9


def test_by_hand() -> None:
    """Two stages, two microbatches, F 1, B 2, W 0.5."""
    line = simulate(one_f_one_b.table(2, 2), WorkCosts(1.0, 1.5, 0.5))
    assert line.lengths.tolist() == [1, 3, 3, 2]
    assert line.starts.tolist() == [0, 1, 4, 7]
    assert [tuple(work) for work in line.work] == [
        ("F", 0, 0, 0, 0, 0, 1),
        ("F", 0, 1, 1, 0, 1, 2),
        ("F", 1, 1, 0, 0, 1, 2),
        ("B", 1, 1, 0, 0, 2, 4),
        ("B", 0, 2, 0, 0, 4, 6),
        ("F", 1, 2, 1, 0, 4, 5),
        ("B", 1, 2, 1, 0, 5, 7),
        ("B", 0, 3, 1, 0, 7, 9),
    ]
    assert (line.total, line.busy.tolist(), line.bubble) == (9, [6, 6], pytest.approx(1 / 3))
    assert line.live.tolist() == [[1, 0], [2, 1], [2, 1], [1, 0]]
    assert line.most_live.tolist() == [2, 1]


def test_uneven_stages_by_hand() -> None:
    """Three blocks on the first of two stages, one on the second: 1.5 and 0.5 of what two would cost."""
    line = simulate(one_f_one_b.table(2, 2), blocks=(3, 1))
    assert line.lengths.tolist() == [1.5, 1.5, 3, 3]
    assert [(work.kind, work.stage, work.start, work.end) for work in line.work] == [
        ("F", 0, 0, 1.5),
        ("F", 0, 1.5, 3),
        ("F", 1, 1.5, 2),
        ("B", 1, 2, 3),
        ("B", 0, 3, 6),
        ("F", 1, 3, 3.5),
        ("B", 1, 3.5, 4.5),
        ("B", 0, 6, 9),
    ]
    assert (line.total, line.busy.tolist(), line.bubble) == (9, [9, 3], pytest.approx(1 / 3))
    chunked = simulate(interleaved.table(2, 2, 2), blocks=(1, 2, 3, 2))  # in the order of the model
    assert {(work.chunk, work.stage): work.end - work.start for work in chunked.work if work.kind == "F"} == {
        (0, 0): 0.25,
        (0, 1): 0.5,
        (1, 0): 0.75,
        (1, 1): 0.5,
    }


@pytest.mark.parametrize("ticks", EXAMPLES)
def test_equal_numbers_of_blocks_change_nothing(ticks: Ticks) -> None:
    plain, equal = simulate(ticks), simulate(ticks, blocks=(5,) * ticks.stages * ticks.chunks)
    assert equal.total == pytest.approx(plain.total) and equal.busy == pytest.approx(plain.busy)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("ticks", EXAMPLES)
def test_work_takes_its_time_one_after_the_other(ticks: Ticks, costs: WorkCosts) -> None:
    line = simulate(ticks, costs)
    split = ticks.weights.shape[2] > 0
    takes = {"F": costs.forward, "B": costs.backward + (0 if split else costs.weights), "W": costs.weights}
    ends = {(work.kind, work.chunk * ticks.stages + work.stage, work.microbatch): work.end for work in line.work}
    assert len(ends) == len(line.work) == ticks.stages * ticks.chunks * ticks.microbatches * (3 if split else 2)
    for work in line.work:
        assert work.end - work.start == pytest.approx(takes[work.kind] / ticks.chunks)
        virtual, last = work.chunk * ticks.stages + work.stage, ticks.chunks * ticks.stages - 1
        before = {"F": ("F", virtual - 1), "B": ("B", virtual + 1), "W": ("B", virtual)}
        if virtual == last:
            before["B"] = ("F", last)
        if (work.kind, virtual) != ("F", 0):
            assert ends[(*before[work.kind], work.microbatch)] <= work.start + 1e-9
    for stage in range(ticks.stages):
        own = [work for work in line.work if work.stage == stage]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))
        assert sum(work.end - work.start for work in own) == pytest.approx(line.busy[stage])
    assert max(work.end for work in line.work) == pytest.approx(line.total)
    assert line.bubble == pytest.approx(1 - line.busy.sum() / ticks.stages / line.total)


def kept(line: Timeline, ticks: Ticks, stage: int, tick: int) -> int:
    """F not after the tick, and a last use not before it, one piece of work after the other."""
    last = "W" if ticks.weights.shape[2] else "B"
    own = [work for work in line.work if work.stage == stage]
    return sum(work.kind == "F" and work.tick <= tick for work in own) - sum(
        work.kind == last and work.tick < tick for work in own
    )


@pytest.mark.parametrize("ticks", EXAMPLES)
def test_what_is_kept_is_counted(ticks: Ticks) -> None:
    line = simulate(ticks)
    assert line.live.shape == (ticks.length, ticks.stages)
    for tick, stage in np.ndindex(line.live.shape):
        assert line.live[tick, stage] == kept(line, ticks, stage, tick)
    assert line.most_live.tolist() == line.live.max(axis=0).tolist()
    assert line.most_live.max() == allocate_slots(ticks).residuals.size


def test_text() -> None:
    assert table_text(one_f_one_b.table(2, 3)).splitlines() == [
        "tick        0 1 2 3 4",
        "stage 0  F  0 1 2 . .",
        "         B  . . 0 1 2",
        "stage 1  F  . 0 1 2 .",
        "         B  . 0 1 2 .",
    ]
    assert table_text(zero_bubble.table(2, 2)).splitlines() == [
        "tick        0 1 2 3",
        "stage 0  F  0 1 . .",
        "         B  . . 0 1",
        "         W  . . 0 1",
        "stage 1  F  . 0 1 .",
        "         B  . 0 1 .",
        "         W  . . . 0",
        "         W  . . . 1",
    ]
    assert table_text(interleaved.table(2, 2, 2)).splitlines()[1:3] == [
        "stage 0  F  0a 1a 0b 1b  .  .  .  .",
        "         B   .  .  .  . 0b 1b 0a 1a",
    ]


@pytest.mark.parametrize(
    "ticks", [interleaved.table(2, 4, 2), pytest.param(zero_bubble.table(3, 5), marks=pytest.mark.slow)]
)
def test_a_picture_has_a_bar_for_every_piece_of_work(ticks: Ticks, tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw_timeline(ticks, tmp_path / f"{name}.svg", name="a < b")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    bars = re.findall(r'style="fill: (#\w{6}); stroke: #ffffff', text)
    shades = (2 if ticks.weights.shape[2] == 0 else 3) * ticks.chunks
    assert len(bars) == len(simulate(ticks).work) + shades  # and one of each in the legend
    assert set(Counter(bars).values()) == {ticks.stages * ticks.microbatches + 1}
    assert len(set(bars)) == shades


def test_a_picture_is_an_image_in_proportion(tmp_path: Path) -> None:
    sizes = []
    for stages in (2, 4):
        draw_timeline(gpipe.table(stages, 3), tmp_path / "gpipe.png", name="gpipe")
        pixels = matplotlib.image.imread(tmp_path / "gpipe.png")
        assert (pixels[..., :3] != 1).any()
        sizes.append(pixels.shape[:2])
    assert sizes[1][0] > sizes[0][0]
