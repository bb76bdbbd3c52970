"""A source of multiples of a number, `factor`. Its facts say that it reads a file."""

from dataclasses import dataclass

import numpy as np

from jaxdist.config.entries import SourceFacts
from jaxdist.config.rules.fields import setting
from jaxdist.data.source import Source

FACTS = SourceFacts(reads_files=True)


@dataclass(frozen=True)
class Options:
    """Keys of `data`, without a base."""

    factor: int = setting(1, "what ids are multiplied by", at_least=1)


def ramp(config) -> Source:  # type: ignore[no-untyped-def]
    print(f"source: factor {config.factor}")
    ids = (np.arange(4096) * config.factor % 32).astype(np.uint8)
    info = {"name": "ramp", "path": config.path, "unit": "tokens", "train": 3072, "held_out": 1024}
    return Source(ids[:3072], ids[3072:], 32, info | {"files": 1, "held_out_files": 1, "sha256": "0" * 64})
