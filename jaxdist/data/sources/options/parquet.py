"""Options of the source `parquet`."""

from dataclasses import dataclass

from jaxdist.config.rules.fields import setting
from jaxdist.config.schema import DataConfig


@dataclass(frozen=True)
class Options(DataConfig):
    """Parquet files."""

    column: str | None = setting(None, "the column; null: text, content, tokens or input_ids", how=True)
