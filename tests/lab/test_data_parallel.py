"""DataParallel and its balanced form: gradients as on one device, bytes of each by the closed forms, the command."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import child
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx

from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.lab.data_parallel.cases import ModelCase, make_case, make_gpt, make_resnet
from jaxdist.lab.data_parallel.closed_forms import Load, Sizes, ddp_bytes, loads, total
from jaxdist.lab.data_parallel.measure import MeasuredStep, measure, measure_ddp
from jaxdist.lab.data_parallel.picture import draw_phases
from jaxdist.lab.data_parallel.program import Computed, DataParallel
from jaxdist.lab.data_parallel.wires import Wires
from jaxdist.models.resnet import ResNet
from jaxdist.plan.report.draw_rounds import data_of

EXACT = 1e-12
GPT = ModelConfig(name="gpt").replace(layers=1, width=8, heads=2, vocab=40)
RESNET = ModelConfig(name="resnet").replace(
    depth=101, blocks=(1, 1), width=2, stem="small", channels=1, classes=3, image_size=4
)
DEVICES, ROWS = 3, 2
FORMS = pytest.mark.parametrize(
    "balanced", [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="balanced")]
)


def gradients(case: ModelCase, params: Any, batch: Any, *, balanced: bool) -> Computed:
    """Those of one step, and the new running statistics, from these parameters."""
    devices = jax.devices()[:DEVICES]
    program = DataParallel(case, optax.sgd(0.1), devices, balanced=balanced)
    _, state = case.init(jax.random.key(0))
    return program.gradients(Wires(), program.place(params, state), jax.device_put(batch, devices[0]))


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "balanced"])
def test_gradients_of_a_gpt_are_those_of_one_device(balanced: bool) -> None:
    """Also where the tokens of the devices weigh unlike."""
    with jax.enable_x64(True):
        case = make_gpt(GPT, seq_len=6, rows=ROWS, dtype=jnp.float64)
        inputs, labels = case.draw(np.random.default_rng(1), DEVICES * ROWS)
        labels["weights"] = np.random.default_rng(2).random(labels["weights"].shape).astype(np.float32)
        params = oracle.drawn(jax.eval_shape(case.init, jax.random.key(0))[0])
        found = gradients(case, params, (inputs, labels), balanced=balanced)
        wide = {"int32": jnp.int64}  # the oracle's own positions are of 64 bits here
        batch = {name: jnp.asarray(leaf, wide.get(leaf.dtype.name)) for name, leaf in (inputs | labels).items()}
        want = functools.partial(oracle.loss, batch=batch, config=GPT.resolved())
        loss, grads = jax.jit(jax.value_and_grad(want))(params)
        assert {leaf.dtype for leaf in jax.tree.leaves(found.grads)} == {np.dtype("float64")}
        assert abs(float(found.loss) - float(loss)) < EXACT
        assert oracle.error(found.grads, grads) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [False, True], ids=["plain", "balanced"])
def test_gradients_of_a_resnet_are_those_of_one_device(balanced: bool) -> None:
    """One device that normalises the rows of each of the others by themselves, as PyTorch's devices do."""
    with jax.enable_x64(True):
        case = make_resnet(RESNET, rows=ROWS, dtype=jnp.float64)
        inputs, labels = case.draw(np.random.default_rng(1), DEVICES * ROWS)
        params = oracle.drawn(jax.eval_shape(case.init, jax.random.key(0))[0])
        found = gradients(case, params, (inputs, labels), balanced=balanced)
        nets = [ResNet(RESNET, nnx.Rngs(0), jnp.float64) for _ in range(2)]
        for net in nets:
            nnx.update(net, params)
        shares = jnp.asarray(inputs["image"]).reshape(DEVICES, ROWS, *inputs["image"].shape[1:])

        @nnx.jit
        def want(net: ResNet) -> jax.Array:
            logits = jnp.concatenate([net(share) for share in shares])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels["label"]).mean()

        with jax.numpy_dtype_promotion("standard"):
            loss, grads = nnx.value_and_grad(want)(nets[0])
            nets[1](shares[0])
        assert abs(float(found.loss) - float(loss)) < EXACT
        assert oracle.error(found.grads, nnx.to_pure_dict(grads)) < EXACT
        kept = nnx.to_pure_dict(nnx.state(nets[1], nnx.BatchStat))
        assert oracle.error(found.state, kept) < EXACT  # the running statistics of device 0


@functools.cache
def measured(*, balanced: bool) -> MeasuredStep:
    return measure(make_gpt(GPT, seq_len=6, rows=ROWS), jax.devices()[:DEVICES], balanced=balanced)


@pytest.mark.slow
@FORMS
def test_bytes_of_each_device_are_the_closed_forms(balanced: bool) -> None:
    """Written a second time, from the shapes of a batch."""
    found = measured(balanced=balanced)
    n = 4 * (40 * 8 + 6 * 8 + 4 * 8 + 4 * 64 + 4 * 64 + 3 * 64 + 64 + 24 + 8 + 32 + 8 + 2 * 8)
    ids = weights = 4 * ROWS * 6  # bytes of a device
    outputs = ids * 40
    others = DEVICES - 1
    root, *rest = found.sums
    if balanced:
        assert root == (others * (n + 2 * ids + weights), others * (n + 8))
        assert rest == [(n + 8, n + 2 * ids + weights)] * others
    else:
        assert root == (others * (n + ids + outputs), others * (n + outputs))
        assert rest == [(n + outputs, n + ids + outputs)] * others
    assert found.agrees


@pytest.mark.slow
def test_a_byte_that_is_not_in_the_closed_forms_is_seen() -> None:
    found = measured(balanced=True)
    counted = found.counted | {"scatter": [*found.counted["scatter"][:-1], (0, 1)]}
    assert not found._replace(counted=counted).agrees
    assert not found._replace(expected=found.expected | {"apply": Load(1, 0, 0, 1)}).agrees
    assert not found._replace(counted={k: v for k, v in found.counted.items() if k != "scatter"}).agrees


@pytest.mark.slow
def test_device_0_holds_and_works_more() -> None:
    plain, balanced = measured(balanced=False), measured(balanced=True)
    state = 3 * plain.expected["reduce"].other_sends  # parameters and AdamW's two numbers for each
    for each in (plain, balanced):
        assert each.memory[0] > each.memory[1] + state / 3 and each.memory[1] == each.memory[2] > 0
        assert 0 < each.alone < 1 and not each.seconds["update"][1]
        assert np.allclose(each.losses, plain.losses, rtol=1e-5)
    assert "loss" in plain.seconds and "loss" not in balanced.seconds


@pytest.mark.slow
def test_ddp_beside_it() -> None:
    """It has the same losses, and sends what a ring sends, with two sums of four bytes."""
    case = make_gpt(GPT, seq_len=6, rows=ROWS)
    beside, found = measure_ddp(case, jax.devices()[:DEVICES]), measured(balanced=False)
    assert np.allclose(beside.losses, found.losses, rtol=1e-5)
    n = case.sizes(DEVICES).parameters
    assert beside.sent == pytest.approx(ddp_bytes(n, DEVICES) + ddp_bytes(8, DEVICES), rel=1e-9)
    assert beside.memory > 3 * n


@pytest.mark.slow
def test_the_textbook_case_by_shapes_alone() -> None:
    """ResNet-101 on 4 devices with 32 images each: parameters and gradients are all that counts."""
    sizes = make_case("resnet101", full=True).sizes(4)
    assert sizes.parameters == 4 * 44_549_160 and sizes.outputs == 4 * 128 * 1000
    assert sizes.state == 8 * 52_672 and sizes.inputs == 4 * 128 * 224 * 224 * 3 and sizes.labels == 4 * 128
    plain, balanced = (total(loads(sizes, 4, balanced=each)) for each in (False, True))
    assert plain.root_sends / plain.other_sends == pytest.approx(3.331, abs=1e-3)
    assert balanced.root_sends / plain.root_sends > 0.999  # gathering labels helps nothing here


@pytest.mark.slow
def test_uneven_rows_are_refused() -> None:
    case = make_gpt(GPT, seq_len=6, rows=ROWS)
    params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(case.init, jax.random.key(0))[0]
    )
    with pytest.raises(UserError, match="batch: 4 rows on 3 devices; allowed: as many on each"):
        gradients(case, params, case.draw(np.random.default_rng(0), 4), balanced=True)


def test_wires_count_what_moves_and_what_is_alive() -> None:
    first, second = jax.devices()[:2]
    before = jax.device_put(jnp.ones(1000), second)  # of somebody else's
    wires, double = Wires(), jax.jit(lambda x: x * 2)
    x = jax.device_put(jnp.ones(16), first)
    assert wires.put("scatter", x, first) is x and not wires.sent
    there = wires.put("scatter", {"a": x, "b": x}, second)
    assert wires.sent == {("scatter", first.id): 128} and wires.received == {("scatter", second.id): 128}
    assert not wires.seconds
    wires.run("apply", double, there["a"])
    assert wires.peak[second.id] == 3 * 64 and first.id not in wires.peak
    wires.fenced = True
    wires.run("apply", double, there["a"])
    assert wires.seconds["apply", second.id] > 0
    wires.restart()
    assert not (wires.sent or wires.received or wires.seconds or wires.peak) and before is not None


def test_closed_forms_of_two_devices() -> None:
    sizes = Sizes(parameters=10, state=2, inputs=8, labels=4, outputs=6, sums=1)
    assert total(loads(sizes, 2, balanced=False)) == Load(12 + 4 + 3, 3 + 10, 3 + 10, 12 + 4 + 3)
    assert total(loads(sizes, 2, balanced=True)) == Load(12 + 6, 1 + 10, 1 + 10, 12 + 6)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "jaxdist.cli.main", "lab", "data-parallel", *arguments]
    return subprocess.run(line, env=child.environment(), capture_output=True, text=True, cwd=child.ROOT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "1"], "--devices: 1; allowed: an integer >= 2 and <= 64"),
        (["--devices", "65"], "--devices: 65; allowed: an integer >= 2"),
        (["--model", "vit"], "invalid choice: 'vit'"),
        (["--json", "nowhere/a.json"], "--json: 'nowhere/a.json': its folder does not exist"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from jaxdist.lab.command import run_lab

    assert run_lab(["data-parallel", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words in err


@pytest.mark.slow
def test_the_page_shows_what_lab_data_parallel_prints(tmp_path: Path) -> None:
    """But for times and memory, which differ from machine to machine and from compiler to compiler."""
    shown = (child.ROOT / "docs" / "data_parallel.md").read_text(encoding="utf-8")
    done = command("--json", str(tmp_path / "a.json"))
    assert done.returncode == 0 and "to the byte" in done.stdout, done.stderr
    kept = [
        line for line in done.stdout.splitlines() if line.startswith(("sent", "received", "DataParallel  ", "ddp  "))
    ]
    assert len(kept) == 4 and all(line in shown for line in kept), kept
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["data_parallel"]["agrees"] and figures["full"]["sizes"]["parameters"] == 4 * 124_439_808


@pytest.mark.slow
def test_the_picture_is_that_of_the_closed_forms() -> None:
    """Its data, not its pixels: matplotlib may draw differently."""
    kept = (child.ROOT / "docs" / "pictures" / "dataparallel.svg").read_text(encoding="utf-8")
    assert data_of(draw_phases()) == data_of(kept), "run scripts/docs/draw_data_parallel.py"
    assert data_of(kept)["balanced DataParallel"]["gather"] == [0, 12, 4, 0]
