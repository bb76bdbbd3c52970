"""The one place where a strategy and its wrappers are put together."""

from jaxdist import registry
from jaxdist.errors import UserError
from jaxdist.parallel.strategy import Strategy, StrategyOptions
from jaxdist.parallel.wrappers.keep_fp32 import widening
from jaxdist.parallel.wrappers.shard_over_pipe import spreading


def get_strategy(name: str, options: StrategyOptions) -> Strategy:
    """The `Strategy` made by `parallel/strategies/<name>.py`, or by a dotted path, `widening` what stays in fp32,
    `spreading` over pipelines. Raises `UserError` for options that exclude each other."""
    if options.prefetch not in (0, 1):
        raise UserError(f"prefetch={options.prefetch}: allowed: 0, 1")
    if options.prefetch and not options.reshard_after_forward:
        raise UserError("prefetch=1: gathers again for the backward pass; leave out reshard_after_forward=False")
    if options.prefetch and options.sync.deterministic:
        raise UserError("prefetch=1: changes the order of work; leave it out with deterministic")
    make = registry.load("jaxdist.parallel.strategies", name, key="parallel.strategy")
    return spreading(widening(make, options), options)
