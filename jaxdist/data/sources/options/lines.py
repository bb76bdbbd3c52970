"""Options of the source `lines`."""

from dataclasses import dataclass

from jaxdist.config.rules.fields import setting
from jaxdist.config.schema import DataConfig


@dataclass(frozen=True)
class Options(DataConfig):
    """Lines of Python files and their kinds."""

    files: int | None = setting(200, "files that are read, spread over all of them; null: all", at_least=2)
