"""Options of the source `huggingface`."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxdist.config.schema import Config
from jaxdist.config.sections.examples import ExampleOptions, check_examples


@dataclass(frozen=True)
class Options(ExampleOptions):
    """Examples in rows of tables."""


def check_options(config: Config, mesh: Mapping[str, int]) -> None:
    """Raise `UserError` for a day that is none."""
    check_examples(config.data)
