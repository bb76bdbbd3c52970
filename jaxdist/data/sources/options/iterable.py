"""Options of the source `iterable`."""

from dataclasses import dataclass

from jaxdist.config.rules.fields import setting
from jaxdist.config.schema import DataConfig


@dataclass(frozen=True)
class Options(DataConfig):
    """A Python object that gives samples."""

    buffer: int = setting(1024, "so many samples are shuffled together", at_least=1)
