"""How gradients are reduced: the section `parallel.grad_sync` of a configuration. Imports no jax."""

import functools
from dataclasses import dataclass
from typing import Any

from jaxdist.config.entries import bound
from jaxdist.config.rules.fields import setting
from jaxdist.config.rules.grad_sync import WIRE_DTYPES, check_ordered, check_wire, link_rate


@dataclass(frozen=True)
class GradSync:
    """How gradients are reduced.

    algorithm: of `jaxdist.collectives`. It also gathers the parameters that zero1 and zero2 gather once a step.
    bucket_mb: gradients are fused into flat buffers of at most this many MB; a larger leaf goes alone.
    wire_dtype: None, "bfloat16", or "int8" with error feedback (the state carries the residual). It is for all-reduces:
        reduce-scatters over fsdp, of zero1 to zero3, then send what they sum.
    link: what algorithms "auto" and "two_level" reckon with.
    deterministic: the same bits on any number of devices. Gradients are computed for one virtual shard after the other
        and summed in a fixed order.
    virtual_shards: how many virtual shards the global batch has. This and the number of batch shards must be powers of
        two.

    >>> jaxdist.StepOptions(grad_sync=jaxdist.GradSync("ring", bucket_mb=10.0)).grad_sync.algorithm
    'ring'
    """

    algorithm: str = setting("native", "of sums, and of what is gathered once", folder="jaxdist.collectives.algorithms")
    bucket_mb: float = setting(25.0, "gradients are reduced in buckets of this many MB", above=0)
    wire_dtype: str | None = setting(
        None,
        "what all-reduces send instead of fp32; int8: with error feedback; null: the gradients' type",
        choices=WIRE_DTYPES,
    )
    link: str = setting("auto", "what auto, two_level reckon with: local, nvlink, infiniband, tcp, or a rate: 200mbit")
    deterministic: bool = setting(False, "the same bits on 1, 2, 4, ... devices (data, fsdp, microbatches)")
    virtual_shards: int = setting(8, "deterministic: parts of the batch with a gradient each; a power of 2", at_least=1)

    @functools.cached_property
    def chosen(self) -> Any:
        """The algorithm: its name, or the `Algorithm` that an entry with options of its own makes of them."""
        made = bound(GradSync, self, "algorithm")
        return made() if callable(made) else made

    @property
    def reduction(self) -> dict[str, Any]:
        """Arguments of `all_reduce` and `reduce_scatter`."""
        if self.deterministic:
            return {"algorithm": "ordered"}
        wire = self.wire_dtype if self.wire_dtype != "int8" else None
        return {"algorithm": self.chosen, "wire_dtype": wire, "link": None if self.link == "auto" else self.link}

    @property
    def gathering(self) -> dict[str, Any]:
        """Arguments of `all_gather`, for parameters: they are not rounded, and in any order they are the same bits."""
        return {} if self.deterministic else {key: self.reduction[key] for key in ("algorithm", "link")}

    def check(self, *, reduce_dtype: str) -> None:
        """Raise `UserError` for what does not go together. reduce_dtype: the type in which gradients are summed."""
        link_rate(self.link, auto=True)
        check_wire(self.wire_dtype, self.algorithm)
        if self.deterministic:
            check_ordered(self.algorithm, self.wire_dtype, reduce_dtype=reduce_dtype)
