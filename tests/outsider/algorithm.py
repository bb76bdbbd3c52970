"""A collective algorithm that is another, `like`."""

from dataclasses import dataclass
from typing import Any

from jaxdist import registry
from jaxdist.config.rules.fields import setting


@dataclass(frozen=True)
class Options:
    """Keys of `parallel.grad_sync`."""

    like: str = setting("ring", "the algorithm", folder="jaxdist.collectives.algorithms")


def borrowed(*, like: str) -> Any:
    print(f"algorithm: like {like}")
    return registry.load("jaxdist.collectives.algorithms", like, key="like")
