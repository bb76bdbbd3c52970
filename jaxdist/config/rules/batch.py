"""`data.global_batch`: into what it must divide. Imports no jax."""

import math
from collections.abc import Mapping

from jaxdist.config.rules.pipeline import divisors, multiples_around, near
from jaxdist.errors import UserError


def check_rows(batch: int, parts: Mapping[str, int]) -> None:
    """Raise `UserError` unless the rows of a global batch divide into these parts.

    parts: how many by each setting, such as {"data": 4, "fsdp": 2, "expert": 1, "microbatches": 2}.
    """
    count = math.prod(parts.values())
    if batch and batch % count == 0:
        return
    text = (
        f"data.global_batch: {batch} {'does not divide by' if batch else 'is no batch, give a multiple of'} {count}"
        f" ({' x '.join(f'{name} {size}' for name, size in parts.items())});"
        f" nearest batch sizes that work: {near(multiples_around(batch, count), batch)}"
    )
    if microbatches := parts.get("microbatches"):
        ranks = count // microbatches
        counts = near(divisors(batch // ranks), microbatches) if batch and batch % ranks == 0 else "none"
        text += f"; parallel.microbatches that work with {batch}: {counts}"
    raise UserError(text)
