"""ZeRO-3 = FSDP (Rajbhandari et al. 2020; Zhao et al. 2023): nothing is whole beyond one unit.

In deterministic mode gradients stay whole until the end of a step.
"""

from jaxdist.config.entries import StrategyFacts
from jaxdist.parallel.options import StrategyOptions
from jaxdist.parallel.strategies._sharded import sharded
from jaxdist.parallel.strategy import Strategy

FACTS = StrategyFacts(sharded=True, regathers=True)


def zero3(options: StrategyOptions) -> Strategy:
    """Gathers at each use, reduce-scatters at each use: see `sharded`."""
    return sharded(options, gather_each=True, reduce_each=True)
