"""Origins of an equation: its phase of the step, and the layer or parameter whose scope it is in."""

import re

from jaxdist.parallel.pipeline.relay import BACKWARD, FORWARD

# Parts of a name stack that nobody wrote: transformations, primitives, einsums.
_WRAPPER = re.compile(r"\b\w+\(|\)")
_NOISE = re.compile(
    r"^(rematted_computation|checkpoint|while|body|cond|branch_\d+_fun|closed_call|shard_map|.*->.*"
    rf"|{FORWARD}|{BACKWARD})?$"
)


def phase_of(names: str) -> str:
    """The phase of an equation: "forward", "backward", "recompute" or "once a step".

    names: the named scopes around it, see `jaxdist.jaxpr.walk.Site`
    """
    scopes = names.split("/")
    # "transpose(rematted_computation)" is the backward pass of the forward pass that ran again (`sqrt_remat`).
    if any("rematted_computation" in scope and not scope.startswith("transpose(") for scope in scopes):
        return "recompute"
    if "jvp" in names and "transpose(" in names:
        return "backward"
    if "jvp" in names:
        return "recompute" if BACKWARD in scopes else "forward"
    # In a pipeline, the embedding of the forward tick and the halves of a backward pass are not differentiated there.
    return "forward" if FORWARD in scopes else "backward" if BACKWARD in scopes else "once a step"


def scope_of(names: str) -> str:
    """The scopes that somebody named: "blocks.attention" of "/jvp()/while/body/blocks/attention/BSD,DE->BSE"."""
    written = [name for name in _WRAPPER.sub("", names).split("/") if not _NOISE.match(name)]
    return ".".join(dict.fromkeys(written))
