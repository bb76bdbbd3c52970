"""ZeRO-1 (Rajbhandari et al. 2020, section 5.1): optimizer state, and with it parameters, is sharded.

The least communication for gradient accumulation, at the price of a whole copy of parameters and of gradients. With
`grad_sync` by `balanced_fusion` it is a synchronous parameter server in as many parts as there are devices.
"""

from jaxdist.config.entries import StrategyFacts
from jaxdist.parallel.options import StrategyOptions
from jaxdist.parallel.strategies._moves import Moves
from jaxdist.parallel.strategies._sharded import sharded
from jaxdist.parallel.strategy import Strategy

FACTS = StrategyFacts(sharded=True, next="zero2")


def sends(options: StrategyOptions) -> Moves:
    """Gathers once a step, reduce-scatters once a step."""
    return Moves(gather_each=False, reduce_each=False)


def zero1(options: StrategyOptions) -> Strategy:
    """As `sends` says: see `sharded`."""
    return sharded(options, sends(options))
