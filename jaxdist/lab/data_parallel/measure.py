"""Measures a step of DataParallel, or of its balanced form, beside one of `ddp` on the same batch."""

import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxdist.init import init_state
from jaxdist.lab.data_parallel.cases import ModelCase
from jaxdist.lab.data_parallel.closed_forms import STEP_PHASES, Load, loads
from jaxdist.lab.data_parallel.program import DataParallel
from jaxdist.lab.data_parallel.wires import Wires
from jaxdist.mesh import make_mesh
from jaxdist.plan.traced.ledger import ledger
from jaxdist.specs import PyTree
from jaxdist.step import make_train_step

STEPS = 3  # that are timed; the step before them compiles


class MeasuredStep(NamedTuple):
    """A step of DataParallel.

    counted: by phase, the (bytes sent, bytes received) of each device, as counted on every transfer.
    expected: the bytes of each phase by the closed forms.
    memory: the most bytes on each device.
    seconds: by phase, of (device 0, the mean of the others), where each program ran by itself and was waited for.
    step_s: of a whole step that waits for nothing before its end.
    losses: of the first steps.
    """

    counted: dict[str, list[tuple[int, int]]]
    expected: dict[str, Load]
    memory: list[int]
    seconds: dict[str, tuple[float, float]]
    step_s: float
    losses: list[float]

    @property
    def agrees(self) -> bool:
        """Whether every device sent and received what the closed forms say, to the byte."""
        found = {phase: [(*each[0], *other) for other in each[1:]] for phase, each in self.counted.items()}
        return found == {phase: [load] * (len(self.memory) - 1) for phase, load in self.expected.items()}

    @property
    def sums(self) -> list[tuple[int, int]]:
        """(bytes sent, bytes received) of each device in the whole step."""
        by_device = zip(*self.counted.values(), strict=True)
        return [(sum(sent for sent, _ in each), sum(received for _, received in each)) for each in by_device]

    @property
    def alone(self) -> float:
        """The share of the step in which device 0 works and the others have nothing to do."""
        longest = sum(max(pair) for pair in self.seconds.values())
        return sum(root for root, others in self.seconds.values() if not others) / longest


class Beside(NamedTuple):
    """A step of `ddp`: bytes that each device sends, the most bytes on each device, seconds, losses."""

    sent: float
    memory: int
    step_s: float
    losses: list[float]


def lab_optimizer() -> optax.GradientTransformation:
    """AdamW, whose state is two numbers a parameter."""
    return optax.adamw(1e-3)


def measure(case: ModelCase, devices: list[jax.Device], *, balanced: bool) -> MeasuredStep:
    """Run some steps, and account for the last ones."""
    program = DataParallel(case, lab_optimizer(), devices, balanced=balanced)
    wires = Wires()
    held = program.place(*jax.jit(case.init)(jax.random.key(0)))
    batch = jax.device_put(_drawn(case, len(devices)), devices[0])
    held, loss = program.step(wires, held, batch)
    losses = [loss]
    wires.restart()
    held, loss = program.step(wires, held, batch)
    losses.append(loss)
    counted = {phase: _bytes(wires, phase, devices) for phase in STEP_PHASES}
    memory = [wires.peak[device.id] for device in devices]
    began = time.perf_counter()
    for _ in range(STEPS):
        held, loss = program.step(wires, held, batch)
        losses.append(loss)
    jax.block_until_ready(held)
    step_s = (time.perf_counter() - began) / STEPS
    seconds = _by_phase(program, held, batch, wires, devices)
    expected = loads(case.sizes(len(devices)), len(devices), balanced=balanced)
    counted = {phase: each for phase, each in counted.items() if any(map(any, each))}
    return MeasuredStep(counted, expected, memory, seconds, step_s, [float(loss) for loss in losses])


def _drawn(case: ModelCase, devices: int) -> tuple[PyTree, PyTree]:
    return case.draw(np.random.default_rng(0), case.rows * devices)


def _bytes(wires: Wires, phase: str, devices: list[jax.Device]) -> list[tuple[int, int]]:
    return [(wires.sent[phase, device.id], wires.received[phase, device.id]) for device in devices]


def _by_phase(
    program: DataParallel, held: Any, batch: PyTree, wires: Wires, devices: list[jax.Device]
) -> dict[str, tuple[float, float]]:
    """Seconds of each phase on (device 0, each of the others), the mean of some steps."""
    wires.restart()
    wires.fenced = True
    for _ in range(STEPS):
        held, _ = program.step(wires, held, batch)
    found = {}
    for phase in STEP_PHASES:
        root, *others = (wires.seconds.get((phase, device.id), 0.0) / STEPS for device in devices)
        if root or any(others):
            found[phase] = root, sum(others) / len(others)
    return found


def measure_ddp(case: ModelCase, devices: list[jax.Device]) -> Beside:
    """The same steps by `ddp`, on the same batch from the same parameters."""
    mesh = make_mesh(data=len(devices), devices=devices)
    params, model_state = jax.jit(case.init)(jax.random.key(0))
    optimizer = lab_optimizer()
    state = init_state(case.model, optimizer, mesh)
    state = state._replace(params=jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, state.params)))
    del params, model_state
    step = make_train_step(case.model, optimizer, mesh)
    inputs, labels = _drawn(case, len(devices))
    batch = inputs | labels
    sent = ledger(step, state, batch).wire_bytes
    program = step.lower(state, batch).compile()
    memory = program.memory_analysis()
    losses = []
    for number in range(2 + STEPS):
        if number == 2:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state, metrics = program(state, batch)
        losses.append(metrics["loss"].block_until_ready())
    step_s = (time.perf_counter() - began) / STEPS
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Beside(sent, int(peak + memory.temp_size_in_bytes), step_s, [float(loss) for loss in losses])
