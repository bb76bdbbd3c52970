"""A strategy that shards parameters, or does not: `shards`."""

from dataclasses import dataclass
from typing import Any

from jaxdist.config.rules.fields import setting
from jaxdist.parallel.strategies.ddp import ddp
from jaxdist.parallel.strategies.zero3 import zero3


@dataclass(frozen=True)
class Options:
    """Keys of `parallel`."""

    shards: bool = setting(False, "whether parameters are split over fsdp")


def choose(options: Any, *, shards: bool) -> Any:
    print(f"strategy: shards {shards}")
    return (zero3 if shards else ddp)(options)
