"""The one place where a strategy and its wrappers are put together."""

from jaxdist import registry
from jaxdist.config.rules.prefetch import check_prefetch
from jaxdist.parallel.strategy import Strategy, StrategyOptions
from jaxdist.parallel.wrappers.keep_fp32 import widening
from jaxdist.parallel.wrappers.shard_over_pipe import spreading


def get_strategy(name: str, options: StrategyOptions) -> Strategy:
    """The `Strategy` made by `parallel/strategies/<name>.py`, or by a dotted path, `widening` what stays in fp32,
    `spreading` over pipelines. Raises `UserError` for options that exclude each other."""
    deterministic = options.sync.deterministic
    check_prefetch(options.prefetch, reshard_after_forward=options.reshard_after_forward, deterministic=deterministic)
    make = registry.load("jaxdist.parallel.strategies", name, key="parallel.strategy")
    return spreading(widening(make, options), options)
