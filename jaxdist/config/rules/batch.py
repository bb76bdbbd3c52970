"""The rows of a batch: into what they must divide. Imports no jax."""

import math
from collections.abc import Mapping

GLOBAL_BATCH = "data.global_batch"


def check_rows(batch: int, parts: Mapping[str, int], key: str = GLOBAL_BATCH) -> None:
    """Raise `UserError` unless the rows of a global batch divide into these parts.

    parts: how many by each setting, such as {"data": 4, "fsdp": 2, "expert": 1, "microbatches": 2}.
    key: what says the number of rows: the key of a configuration, or the argument of a call in Python.
    """
    if not batch or batch % math.prod(parts.values()):
        from jaxdist.config.wrong_calls import refuse_rows

        refuse_rows(batch, parts, key, of_call=key != GLOBAL_BATCH)
