"""What local SGD sends: an inner step nothing between replicas, an outer step exactly 2(R-1)/R N."""

import re

import jax
import numpy as np
import pytest
from layouts import Case, optimizer
from replicas import local_parts, placed

from jaxdist.config.load import load_config
from jaxdist.config.sections.local import LocalConfig
from jaxdist.plan.compiled.hlo import compiled_collectives
from jaxdist.plan.explain import explain
from jaxdist.plan.report.text import explanation_text
from jaxdist.plan.traced.ledger import ledger
from jaxdist.plan.traced.outer_steps import outer_ledgers, sent_by_outer
from jaxdist.specs import bytes_per_device

OUTER = "gradients_of_the_outer_step"
CASES = [
    pytest.param(Case("gpt2", True, "zero3", 1, (2, 2, 2)), LocalConfig(10), id="zero3"),
    pytest.param(
        Case("gpt2", True, "ddp", 2, (4, 1, 2)), LocalConfig(10, fragments=2), id="fragments", marks=pytest.mark.slow
    ),
    pytest.param(
        Case("gpt2", True, "zero1", 4, (2, 1, 2), pipe=2, schedule="one_f_one_b"),
        LocalConfig(10),
        id="pipe",
        marks=pytest.mark.slow,
    ),
]


def groups_of(text: str) -> list[list[int]]:
    """The groups of devices of all collectives in a compiled program."""
    found: list[list[int]] = []
    for explicit in re.findall(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", text):
        found += [[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", explicit)]
    for shape, dims, order in re.findall(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        numbers = [[int(i) for i in each.split(",")] for each in (shape, dims, order) if each]
        ids = np.arange(np.prod(numbers[1])).reshape(numbers[1])
        found += (ids.transpose(numbers[2]) if order else ids).reshape(numbers[0]).tolist()
    for sizes, axes in re.findall(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):  # jax 0.12
        names = re.findall(r"'(\w+)'=", sizes)
        ids = np.arange(np.prod([int(n) for n in re.findall(r"=(\d+)", sizes)])).reshape(
            [int(n) for n in re.findall(r"=(\d+)", sizes)]
        )
        over = [names.index(axis) for axis in re.findall(r"'(\w+)'", axes)]
        found += (
            np.moveaxis(ids, over, range(-len(over), 0)).reshape(-1, np.prod([ids.shape[i] for i in over])).tolist()
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "local"), CASES)
def test_only_outer_steps_send_between_replicas(case: Case, local: LocalConfig) -> None:
    state, step = local_parts(case, local, optimizer(), "fp32")
    batch, mesh = placed(0, state), state.step.sharding.mesh
    inner = ledger(step, state, batch).collectives
    assert inner
    assert not [each for each in inner if "data" in each.axes]
    text = step.lower(state, batch).compile().as_text()
    place = {device.id: where for where, device in np.ndenumerate(mesh.devices)}
    groups = [group for group in groups_of(text) if len(group) > 1]
    assert groups
    assert len(re.findall(r"(?:replica_groups|source_target_pairs)=", text)) and compiled_collectives(text)
    for group in groups:
        assert len({place[device][mesh.axis_names.index("data")] for device in group}) == 1, group

    replicas, sent = case.mesh[0], 0.0
    for each in outer_ledgers(step, state, batch):
        assert {axes for one in each.collectives for axes in one.axes} == {"data"}
        sent += sum(one.wire_bytes for one in each.collectives if one.purpose == OUTER)
        others = [one for one in each.collectives if one.purpose != OUTER]
        assert {one.purpose for one in others} == {"loss_and_weight"}
        assert sum(one.bytes_per_call for one in others) == 4 * 8
    whole = sum(bytes_per_device(leaf, leaf.sharding.spec, mesh) for leaf in jax.tree.leaves(state.params))
    assert sent == 2 * (replicas - 1) / replicas * whole
    rest = 2 * (replicas - 1) / replicas * 4 * 8 * local.fragments
    assert sent_by_outer(step, state, batch) == pytest.approx((sent + rest) / local.every, rel=1e-12)


@pytest.mark.slow
def test_explain_says_how_often_something_is_sent() -> None:
    given = ["mesh={data: 4, fsdp: 1, tensor: 1}", "parallel.local.every=10"]
    said = explanation_text(explain(load_config("configs/quickstart.yaml", given, planned=True)))
    assert said.startswith("Inner step: it has no collective, each replica trains by itself\n\nOuter step, once in 10 ")
    rows = [line for line in said.splitlines() if line.startswith("psum")]
    assert rows and all("  once an outer step  " in row for row in rows) and "once a step" not in said
