"""Options of the source `masked`."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxdist.config.rules.fields import setting
from jaxdist.config.schema import Config, DataConfig
from jaxdist.errors import UserError


@dataclass(frozen=True)
class Options(DataConfig):
    """Windows of a text with masked tokens (BERT)."""

    masked_source: str = setting("text", "the source whose ids are masked", choices=("text", "tokens"))
    mask_rate: float = setting(0.15, "fraction of positions that are to be predicted", above=0, at_most=1)
    mask_token_rate: float = setting(0.8, "fraction of these that become the mask token", at_least=0, at_most=1)
    random_token_rate: float = setting(0.1, "fraction of these that become a random token", at_least=0, at_most=1)
    mask_token: int | None = setting(None, "id of the mask token; null: the one above the text's, 256", at_least=0)
    maskings: int = setting(10, "so many maskings of each window, before they repeat", at_least=1)


def check_options(config: Config, mesh: Mapping[str, int]) -> None:
    """Raise `UserError` for rates that are more than all."""
    for data in config.data.parts() or (config.data,):
        token, random = getattr(data, "mask_token_rate", 0.0), getattr(data, "random_token_rate", 0.0)
        if token + random > 1:
            raise UserError(
                f"data.random_token_rate: {random} and data.mask_token_rate {token} are more than 1 together; allowed:"
                f" at most {1 - token:g}"
            )
