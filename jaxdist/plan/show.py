"""An explanation as text and as a picture."""

from pathlib import Path

from matplotlib.figure import Figure

from jaxdist.plan.explain import Explanation
from jaxdist.plan.ledger import Collective
from jaxdist.plan.sharding import aligned


def amount(nbytes: float) -> str:
    """ "1.50 GiB", "12.0 KiB", "17 B"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def pytorch_term(each: Collective) -> str:
    """What this is called where the user comes from."""
    if "tensor" in each.axes:
        return "Megatron tensor parallel"
    if each.purpose == "loss_and_weight":
        return "dist.all_reduce(loss)"
    if each.op == "all_gather":
        return "ZeRO broadcast, once a step" if each.phase == "once a step" else "FSDP unshard"
    if each.op == "reduce_scatter":
        return "ZeRO-1 reduce" if each.phase == "once a step" else "FSDP reduce-scatter"
    return "DDP buckets, HSDP all-reduce" if each.purpose == "gradients" else "point to point"


def to_text(explanation: Explanation, *, rows: int = 24) -> str:
    """The report: collectives (the `rows` largest), totals by axes, memory of a device."""
    collectives = sorted(explanation.ledger.collectives, key=lambda each: -each.wire_bytes)
    lines = [("op", "axes", "n", "dtype", "a call", "calls", "sent", "link", "when", "what", "PyTorch", "source")]
    for each in collectives[:rows]:
        what = each.purpose + (" (in a branch)" if each.conditional else "")
        lines.append((each.op, "+".join(each.axes), str(each.group_size), each.dtype, amount(each.bytes_per_call),
                      str(each.calls), amount(each.wire_bytes), each.link, each.phase, what, pytorch_term(each),
                      each.source))  # fmt: skip
    text = ["Collectives of one step, of one device:", *aligned(lines, right=(2, 4, 5, 6))]
    if rest := collectives[rows:]:
        text.append(f"... and {len(rest)} more, {amount(sum(each.wire_bytes for each in rest))} (--rows 0 shows all)")
    total = explanation.ledger.wire_bytes
    axes = [f"over {'+'.join(name)} {amount(sent)}" for name, sent in explanation.ledger.total("axes").items()]
    links = [f"{name} {amount(sent)}" for name, sent in explanation.ledger.total("link").items()]
    parts = f": {', '.join(axes)}; {', '.join(links)}" if total else ""
    text += ["", f"A device sends {amount(total)} a step{parts}"]
    if explanation.added is not None:
        sent = sum(each.wire_bytes for each in explanation.added)
        text.append(f"Added by the compiler around the optimizer: {len(explanation.added)} collectives, {amount(sent)}")
    text += ["", "Memory of a device:"]
    held = [(f"  {name}", amount(size), f"{size:,}") for name, size in explanation.memory.items()]
    text += aligned(held, right=(1, 2))
    return "\n".join(text)


def draw(explanation: Explanation, path: Path, *, bars: int = 16) -> None:
    """Bytes that a device sends in a step: one bar for each purpose, the largest first, coloured by axes; on the right
    the memory of a device."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    sent, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    totals = explanation.ledger.total("purpose")
    names = list(totals)[:bars]
    left = dict.fromkeys(names, 0.0)
    for i, axes in enumerate(explanation.ledger.total("axes")):
        values = [sum(each.wire_bytes for each in explanation.ledger.collectives
                      if each.purpose == name and each.axes == axes) / 2**20 for name in names]  # fmt: skip
        sent.barh(names, values, left=list(left.values()), color=f"C{i}", label="+".join(axes))
        left = {name: left[name] + value for name, value in zip(names, values, strict=True)}
    sent.invert_yaxis()
    more = f", the {bars} largest of {len(totals)}" if len(totals) > bars else ""
    sent.set(xlabel="MiB a step", title=f"sent by one device, by purpose{more}")
    if names:
        sent.legend(title="over", fontsize=8)
    held = [(name, size / 2**20) for name, size in explanation.memory.items()]
    memory.barh([name.replace(", ", ",\n") for name, _ in held], [size for _, size in held], color="0.5")
    memory.invert_yaxis()
    memory.set(xlabel="MiB", title="memory of one device")
    for axes_ in (sent, memory):
        axes_.tick_params(axis="y", labelsize=8)
    figure.savefig(path)
