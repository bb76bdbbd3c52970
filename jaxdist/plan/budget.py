"""A committed budget: the collectives that a configuration may have, so that no change adds one unseen."""

from pathlib import Path
from typing import Any

from jaxdist.config.json_reader import read_json_file
from jaxdist.errors import UserError
from jaxdist.plan.traced.ledger import Collective, Ledger

KEY_FIELDS = ("op", "axes", "dtype", "phase", "purpose")


def _totals(ledger: Ledger) -> dict[tuple[str, ...], tuple[int, Collective]]:
    """{key: (input bytes a step, the last collective with this key)}.

    A key is the values of `KEY_FIELDS`. The source line is none of them: it moves with every edit.
    """
    totals: dict[tuple[str, ...], tuple[int, Collective]] = {}
    for each in ledger.collectives:
        key = (each.op, "+".join(each.axes), each.dtype, each.phase, each.purpose)
        before, _ = totals.get(key, (0, each))
        totals[key] = before + each.bytes_per_call * each.calls, each
    return totals


def budget_of(ledger: Ledger) -> dict[str, Any]:
    """The content of a budget file: input bytes a step by op, axes, dtype, phase and purpose."""
    entries = [(*key, nbytes) for key, (nbytes, _) in sorted(_totals(ledger).items())]
    return {
        "mesh": ledger.mesh,
        "collectives": [dict(zip((*KEY_FIELDS, "bytes"), entry, strict=True)) for entry in entries],
    }


def read_budget(path: Path) -> dict[tuple[str, ...], int]:
    """{(op, axes, dtype, phase, purpose): bytes} of a file. Raises `UserError` if it is not a budget."""
    try:
        entries = read_json_file(path)["collectives"]
        return {tuple(entry[key] for key in KEY_FIELDS): int(entry["bytes"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--budget {path}: not a budget ({type(error).__name__}: {error}); write one with --write-budget"
        ) from None


def over_budget(ledger: Ledger, budget: dict[tuple[str, ...], int]) -> list[str]:
    """A line for every collective that is not in the budget or has more bytes than there, with its source."""
    lines = []
    for key, (nbytes, each) in _totals(ledger).items():
        if nbytes > budget.get(key, 0):
            allowed = f"the budget has {budget[key]:,}" if key in budget else "not in the budget"
            lines.append(
                f"{each.source}: {each.op} over {key[1]}, {each.purpose} ({each.phase}): "
                f"{nbytes:,} bytes a step, {allowed}"
            )
    return lines
