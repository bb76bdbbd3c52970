"""The batch: into what `data.global_batch` must divide, and what its leaves must be. Imports no jax."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.config.entries import WINDOW, SourceFacts, entries_of
from jaxdist.config.rules.pipeline import divisors, multiples_around, near
from jaxdist.errors import UserError


def check_rows(batch: int, parts: Mapping[str, int]) -> None:
    """Raise `UserError` unless the rows of a global batch divide into these parts.

    parts: how many by each setting, such as {"data": 4, "fsdp": 2, "expert": 1, "microbatches": 2}.
    """
    count = math.prod(parts.values())
    if batch % count == 0:
        return
    text = (
        f"data.global_batch: {batch} does not divide by {count}"
        f" ({' x '.join(f'{name} {size}' for name, size in parts.items())});"
        f" nearest batch sizes that work: {near(multiples_around(batch, count), batch)}"
    )
    if microbatches := parts.get("microbatches"):
        ranks = count // microbatches
        counts = near(divisors(batch // ranks), microbatches) if batch and batch % ranks == 0 else "none"
        text += f"; parallel.microbatches that work with {batch}: {counts}"
    raise UserError(text)


def check_source(data: Any, leaves: Sequence[str], taker: str, *, next_token: bool = True) -> None:
    """Raise `UserError` for a source that cannot give these leaves. What a user's own gives is seen when it is read.

    data: the section of that name.
    taker: what takes them, such as "model.name 'vit'".
    next_token: whether the target of a position may be the token after it.
    """
    for entry in entries_of(data):
        facts = SourceFacts.of(entry.name)
        if not entry.shipped or facts.may_give(leaves, next_token=next_token):
            continue
        wrong = f"gives {', '.join(facts.leaves or WINDOW)}, and {taker} takes {', '.join(leaves)}"
        if facts.may_give(leaves):
            wrong = f"asks for the next token, which {taker} sees"
        allowed = ", ".join(SourceFacts.giving(leaves, next_token=next_token))
        raise UserError(
            f"data.source: {entry.name!r} {wrong}; allowed: {allowed}; or a source of your own, by a dotted path"
        )
