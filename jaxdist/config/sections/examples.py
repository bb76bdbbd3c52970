"""Keys of the data sources of examples for fine-tuning. Imports no jax."""

from dataclasses import dataclass
from datetime import date
from typing import Any

from jaxdist.config.rules.fields import setting
from jaxdist.errors import UserError


@dataclass(frozen=True)
class ExampleOptions:
    """How examples become rows of token ids."""

    tokenizer: str | None = setting(
        None, "a folder with tokenizer.json, or bytes; null: that of model.from or init.from, or else bytes", how=True
    )
    chat_template: str | None = setting(
        None, "a file with a chat template of jinja; null: the one in the tokenizer's folder", how=True
    )
    chat_date: str = setting(
        "2024-07-26", "the day that a chat template is told is today: every day's batches are equal"
    )
    completion_only: bool = setting(True, "only completions, and the assistant's messages, count in the loss")
    truncation: str = setting(
        "right", "which end of a too long example is cut; drop: it is left out", choices=("right", "left", "drop")
    )


def check_examples(data: Any) -> None:
    """Raise `UserError` for a day that is none."""
    day = getattr(data, "chat_date", "2024-07-26")
    try:
        date.fromisoformat(day)
    except ValueError as error:
        raise UserError(f"data.chat_date: {day!r} is no day; allowed: such as 2024-07-26") from error
