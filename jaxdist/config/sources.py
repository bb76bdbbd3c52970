"""Whether a data source fits a model, as far as a configuration tells. Imports no jax."""

from collections.abc import Sequence
from typing import Any

from jaxdist.config.entries import WINDOW_LEAVES, SourceFacts, entries_of
from jaxdist.errors import UserError


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
        wrong = f"gives {', '.join(facts.leaves or WINDOW_LEAVES)}, and {taker} takes {', '.join(leaves)}"
        if facts.may_give(leaves):
            wrong = f"asks for the next token, which {taker} sees"
        allowed = ", ".join(SourceFacts.giving(leaves, next_token=next_token))
        raise UserError(
            f"data.source: {entry.name!r} {wrong}; allowed: {allowed}; or a source of your own, by a dotted path"
        )
