"""A key of section `model` that all classifiers have. Imports no jax."""

from typing import Any

from jaxdist.config.rules.fields import setting


def label_smoothing_setting(when: str = "") -> Any:
    """The key `label_smoothing`. when: what must be so."""
    return setting(
        0.0,
        "the share of a label's probability that training spreads evenly over all labels, such as 0.1; evaluations give"
        f" the plain loss{when}",
        at_least=0,
        below=1,
    )
