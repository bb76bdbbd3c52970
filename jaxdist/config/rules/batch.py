"""The rows of a batch: into what they must divide. Imports no jax."""

import math
from collections.abc import Mapping

from jaxdist.config.rules.pipeline import divisors, multiples_around, near


def check_rows(batch: int, parts: Mapping[str, int], key: str = "data.global_batch") -> None:
    """Raise `UserError` unless the rows of a global batch divide into these parts.

    parts: how many by each setting, such as {"data": 4, "fsdp": 2, "expert": 1, "microbatches": 2}.
    key: what says the number of rows: the key of a configuration, or the argument of a call in Python.
    """
    count, micro = math.prod(parts.values()), parts.get("microbatches", 1)
    if not batch or batch % count:
        from jaxdist.config.wrong_calls import refuse_rows

        of_rank, over = divmod(batch, count // micro)
        counts = near([] if over or not batch else divisors(of_rank), micro)
        works = {"near": near(multiples_around(batch, count), batch), "counts": counts}
        refuse_rows(batch, parts, key, **works, of_call=key != "data.global_batch")
