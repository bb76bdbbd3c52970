"""A committed budget: the collectives that a configuration may have, so that no change adds one unseen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config.json_reader import read_json_file
from jaxdist.errors import UserError
from jaxdist.plan.traced.ledger import Collective, Ledger

SENT = "sent_bytes"
KEY_FIELDS = ("op", "axes", "dtype", "phase", "purpose")


def _totals(ledger: Ledger) -> dict[tuple[str, ...], tuple[int, Collective]]:
    """{key: (bytes that a device sends in a step, the last collective with this key)}.

    What is sent, not what is put in: all-gathers over more devices have smaller inputs, and send more.

    A key is the values of `KEY_FIELDS`. The source line is none of them: it moves with every edit.
    """
    totals: dict[tuple[str, ...], tuple[float, Collective]] = {}
    for each in ledger.collectives:
        key = (each.op, "+".join(each.axes), each.dtype, each.phase, each.purpose)
        before, _ = totals.get(key, (0.0, each))
        totals[key] = before + each.wire_bytes, each
    return {key: (round(nbytes), each) for key, (nbytes, each) in totals.items()}


def budget_of(ledger: Ledger) -> dict[str, Any]:
    """The content of a budget file: bytes that a device sends in a step by op, axes, dtype, phase and purpose."""
    entries = [(*key, nbytes) for key, (nbytes, _) in sorted(_totals(ledger).items())]
    return {
        "mesh": ledger.mesh,
        "collectives": [dict(zip((*KEY_FIELDS, SENT), entry, strict=True)) for entry in entries],
    }


def read_budget(path: Path, mesh: Mapping[str, int] | None = None) -> dict[tuple[str, ...], int]:
    """{(op, axes, dtype, phase, purpose): bytes} of a file. Raises `UserError` if it is not a budget.

    mesh: that it must be for; None: any.
    """
    try:
        found = read_json_file(path)
        budget = {tuple(entry[key] for key in KEY_FIELDS): int(entry[SENT]) for entry in found["collectives"]}
        own = dict(found["mesh"]) if mesh is not None else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--budget {path}: not a budget ({type(error).__name__}: {error}); write one with --write-budget"
        ) from None
    if own is not None and own != mesh:
        sizes, asked = (
            " ".join(f"{axis}={size}" for axis, size in each.items() if size != 1) or "one device"
            for each in (own, mesh or {})
        )
        raise UserError(
            f"--budget {path}: is of the mesh {sizes}, and the configuration has {asked}; allowed: a budget of the same"
            " mesh, as devices of another one send other bytes; write one with --write-budget"
        )
    return budget


def over_budget(ledger: Ledger, budget: dict[tuple[str, ...], int]) -> list[str]:
    """A line for every collective that is not in the budget or has more bytes than there, with its source."""
    lines = []
    for key, (nbytes, each) in _totals(ledger).items():
        if nbytes > budget.get(key, 0):
            allowed = f"the budget has {budget[key]:,}" if key in budget else "not in the budget"
            lines.append(
                f"{each.source}: {each.op} over {key[1]}, {each.purpose} ({each.phase}): "
                f"{nbytes:,} bytes sent a step, {allowed}"
            )
    return lines
