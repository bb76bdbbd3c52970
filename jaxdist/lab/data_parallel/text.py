"""The figures of DataParallel as tables."""

from jaxdist.lab.data_parallel.closed_forms import Load, Sizes, ddp_bytes, loads, total
from jaxdist.lab.data_parallel.measure import Beside, MeasuredStep
from jaxdist.plan.machines import DEVICES, pcie
from jaxdist.plan.traced.sharding import aligned

_MIB = 2**20
_FORMULAS = {
    "replicate": "N to each of the others",
    "scatter": "X/P to each of the others",
    "gather": "O/P from each of the others",
    "scatter back": "O/P to each of the others",
    "reduce": "N from each of the others",
}


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:,.2f}"


def _ratio(root: float, other: float) -> str:
    return f"{root / other:.2f} : 1" if other else "-"


def lines_of(found: MeasuredStep, ddp: Beside, *, simulated: bool) -> list[str]:
    """A measured step beside one of ddp. simulated: whether the devices are parts of one processor."""
    count = len(found.memory)
    head = ("MiB", *(f"device {i}" for i in range(count)), "device 0 : others", "ddp, each")
    sent, received = zip(*found.sums, strict=True)
    rows = [head]
    for name, figures, each in (
        ("sent", sent, ddp.sent),
        ("received", received, ddp.sent),
        ("memory", found.memory, ddp.memory),
    ):
        others = sum(figures[1:]) / (count - 1)
        rows.append((name, *map(_mib, figures), _ratio(figures[0], others), _mib(each)))
    lines = aligned(rows, right=range(1, count + 3))
    lines += ["", *_phases(found), ""]
    lines.append(
        "every device sent and received what the closed forms say, to the byte"
        if found.agrees
        else "ERROR: bytes differ from the closed forms"
    )
    lines.append(f"device 0 alone has work in {found.alone:.0%} of the phases' time")
    lines.append(f"a whole step, nothing waited for: {found.step_s * 1e3:.1f} ms; of ddp: {ddp.step_s * 1e3:.1f} ms")
    for name, losses in (("losses", found.losses), ("of ddp", ddp.losses)):
        lines.append(f"{name}: " + ", ".join(f"{loss:.6f}" for loss in losses[:3]))
    if simulated:
        lines.append("simulated devices share this machine's processor: their times say nothing about real ones")
    return lines


def _phases(found: MeasuredStep) -> list[str]:
    """Bytes and seconds of each phase, of device 0 and of one of the others."""
    rows: list[tuple[str, ...]] = [
        ("phase", "0 sends", "receives", "other sends", "receives", "closed form", "ms, device 0", "each other")
    ]
    for phase, (root, other) in found.seconds.items():
        each = found.counted.get(phase, [(0, 0), (0, 0)])
        figures = [_mib(nbytes) if nbytes else "-" for pair in each[:2] for nbytes in pair]
        formula = "" if phase not in found.counted else _FORMULAS[phase]
        if phase == "gather" and "scatter back" not in found.expected:
            formula = "loss and weight from each"
        times = [f"{seconds * 1e3:.2f}" if seconds else "-" for seconds in (root, other)]
        rows.append((phase, *figures, formula, *times))
    return aligned(rows, right=(1, 2, 3, 4, 6, 7))


def closed_form_lines(sizes: Sizes, devices: int) -> list[str]:
    """Both forms and ddp by the closed forms, with the time on two links."""
    bus, nvlink = pcie(3), DEVICES["v100"].nvlink
    rows: list[tuple[str, ...]] = [
        ("MiB", "0 sends", "receives", "other sends", "receives", "device 0 : others", "ms, PCIe 3", "ms, V100 NVLink")
    ]
    ring = round(ddp_bytes(sizes.parameters, devices))
    loads_of = {
        "DataParallel": total(loads(sizes, devices, balanced=False)),
        "balanced": total(loads(sizes, devices, balanced=True)),
        "ddp": Load(ring, ring, ring, ring),
    }
    for name, load in loads_of.items():
        # All passes through device 0, one transfer after the other; parameters go out before gradients come in.
        nbytes = ring if name == "ddp" else load.root_sends + load.root_receives
        times = [f"{nbytes / rate * 1e3:,.1f}" for rate in (bus, nvlink)]
        rows.append((name, *map(_mib, load), _ratio(load.root_sends, load.other_sends), *times))
    travels = (
        f"N {_mib(sizes.parameters)}, running statistics {_mib(sizes.state)}, inputs {_mib(sizes.inputs)}, outputs O"
    )
    return [*aligned(rows, right=range(1, 8)), f"MiB that travel: {travels} {_mib(sizes.outputs)}"]
