"""Parameters that are not trained: no gradient, no communication of one, no optimizer state."""

from collections.abc import Sequence

from optax import MaskedNode

from jaxdist.optim import leave_out
from jaxdist.parallel.strategy import Frozen, Strategy
from jaxdist.specs import PyTree, map_specs


def freezing(strategy: Strategy, patterns: Sequence[str]) -> Strategy:
    """The strategy without gradients for parameters whose path fits a pattern ("embed.*").

    In diff and in gradients a MaskedNode stands for each of them. Their values move from diff to the captured tree. Its
    leaves become pairs: (captured by the strategy, value of a frozen parameter or ()).
    """
    if not patterns:
        return strategy

    def begin(params: PyTree, specs: PyTree, stacked: str | None) -> tuple[PyTree, PyTree]:
        diff, captured = strategy.begin(params, specs, stacked)
        trained = leave_out(diff, patterns)
        frozen = map_specs(lambda _, leaf, kept: leaf if isinstance(kept, MaskedNode) else (), specs, diff, trained)
        return trained, map_specs(lambda _, *pair: pair, specs, captured, frozen)

    def gather(diff: PyTree, captured: PyTree, specs: PyTree) -> PyTree:
        whole = map_specs(
            lambda _, leaf, pair: Frozen(pair[1]) if isinstance(leaf, MaskedNode) else leaf, specs, diff, captured
        )
        return strategy.gather(whole, map_specs(lambda _, pair: pair[0], specs, captured), specs)

    def reduce(grads: PyTree, residual: PyTree, specs: PyTree) -> tuple[PyTree, PyTree]:
        return strategy.reduce(grads, residual, leave_out(specs, patterns))

    return strategy._replace(begin=begin, gather=gather, reduce=reduce)
