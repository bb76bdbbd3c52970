"""A schedule that may run microbatches in the opposite order, `backwards`. Its facts refuse pipelines."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.config.entries import ScheduleFacts
from jaxdist.config.rules.fields import setting
from jaxdist.parallel.schedules.accumulate import accumulate

FACTS = ScheduleFacts(one_stage=True, chunks=False)


@dataclass(frozen=True)
class Options:
    """Keys of `parallel`."""

    backwards: bool = setting(False, "whether the last microbatch comes first")


def in_turn(program: Any, diff: Any, held: Any, microbatches: Any, *, backwards: bool, **options: Any) -> Any:
    print(f"schedule: backwards {backwards}")
    turned = jax.tree.map(lambda leaf: leaf[::-1], microbatches) if backwards else microbatches
    return accumulate(program, diff, held, turned, **options)
