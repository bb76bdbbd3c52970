"""ZeRO-2 (Rajbhandari et al. 2020, section 5.2): like ZeRO-1, but gradients too are never whole beyond one unit.

In deterministic mode gradients stay whole until the end of a step, as in ZeRO-1.
"""

from jaxdist.config.entries import StrategyFacts
from jaxdist.parallel.options import StrategyOptions
from jaxdist.parallel.strategies._moves import Moves
from jaxdist.parallel.strategies._sharded import sharded
from jaxdist.parallel.strategy import Strategy

FACTS = StrategyFacts(sharded=True, next="zero3")


def sends(options: StrategyOptions) -> Moves:
    """Gathers once a step, reduce-scatters at each use."""
    # A sum over microbatches that came after a sum over devices would depend on the number of devices.
    return Moves(gather_each=False, reduce_each=not options.grad_sync.deterministic)


def zero2(options: StrategyOptions) -> Strategy:
    """As `sends` says: see `sharded`."""
    return sharded(options, sends(options))
