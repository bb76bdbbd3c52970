"""How replicas train by themselves, and how they meet: the section `parallel.local` of a configuration. Imports no
jax."""

import functools
import logging
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from jaxdist.config.rules.fields import section, setting, show
from jaxdist.config.rules.grad_sync import WIRE_DTYPES, check_wire
from jaxdist.errors import UserError

LOCAL = "parallel.local"


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimizer. It takes the replicas' mean way from the anchor for a gradient."""

    name: str = setting("nesterov", "the outer optimizer", choices=("sgd", "nesterov", "adam"))
    lr: float = setting(1.0, "its learning rate; 1 with momentum 0: the anchor becomes the mean of replicas", above=0)
    momentum: float = setting(0.0, "momentum of sgd and nesterov, the first decay of adam", at_least=0, below=1)


@dataclass(frozen=True)
class LocalConfig:
    """Local SGD and DiLoCo: each coordinate of the mesh axis data is a replica, which takes steps by itself.

    >>> LocalConfig(every=10).on, LocalConfig().on
    (True, False)
    """

    every: int = setting(
        0, "steps that replicas take by themselves between two outer steps; 0: gradients are summed at each", at_least=0
    )
    outer: OuterConfig = section(OuterConfig, "the outer optimizer")
    fragments: int = setting(1, "parts of the model whose outer steps come one after the other", at_least=1)
    keep: float = setting(
        0.0,
        "how much of its own parameters a replica keeps at an outer step; 0: it takes the anchor's",
        at_least=0,
        below=1,
    )
    algorithm: str = setting(
        "native", "collective algorithm of the outer step", folder="jaxdist.collectives.algorithms"
    )
    wire_dtype: str | None = setting(
        None, "what the outer step sends instead of fp32; int8: with error feedback", choices=WIRE_DTYPES
    )
    offload: bool = setting(False, "anchor and outer optimizer's state are in host memory between outer steps")

    @property
    def on(self) -> bool:
        """Whether replicas train by themselves."""
        return bool(self.every)

    def check(self) -> None:
        """Raise `UserError` for what does not go together."""
        check_exchange(self.wire_dtype, self.algorithm, every=self.every, fragments=self.fragments)

    def due(self, number: int, last: int | None = None) -> list[int]:
        """The fragments whose outer step follows step `number`, counted from 1. last: after it all of them do.

        >>> config = LocalConfig(every=4, fragments=2)
        >>> [config.due(number) for number in (1, 2, 3, 4)]
        [[], [1], [], [0]]
        """
        shift = self.every // self.fragments
        return [i for i in range(self.fragments) if number == last or (number + i * shift) % self.every == 0]


def check_exchange(wire_dtype: str | None, algorithm: Any, *, every: int, fragments: int) -> None:
    """Raise `UserError` for an outer step that cannot be."""
    check_wire(wire_dtype, algorithm, section=LOCAL)
    if fragments > max(every, 1):
        raise UserError(
            f"{LOCAL}.fragments: {fragments}, one after the other in {LOCAL}.every {every} steps; allowed: at most"
            f" {max(every, 1)}"
        )


def check_fragments(fragments: int, layers: int) -> None:
    """Raise `UserError` for more fragments than blocks."""
    if fragments > layers:
        raise UserError(f"{LOCAL}.fragments: {fragments}, but the model has {layers} blocks; allowed: at most {layers}")


def refuse(key: str, value: Any, why: str, allowed: str) -> NoReturn:
    """Raise the `UserError` for a key that does not go with replicas that train by themselves."""
    raise UserError(
        f"{key}: {show(value)} does not go with {LOCAL}.every: {why}; allowed: {allowed}, or {LOCAL}.every=0"
    )


@functools.cache  # once
def _tell_idle(key: str) -> None:
    logging.getLogger("jaxdist").warning(f"{LOCAL}.{key}: has no effect, since {LOCAL}.every is 0")


def check_local(config: Any) -> None:
    """Raise `UserError` for keys that do not go with `parallel.local`, if it is on."""
    local, sync = config.parallel.local, config.parallel.grad_sync
    local.check()
    if not local.on:
        usual = LocalConfig()
        for each in fields(local):
            if getattr(local, each.name) != getattr(usual, each.name):
                _tell_idle(each.name)
        return
    if sync.deterministic:
        refuse("parallel.grad_sync.deterministic", True, "replicas differ, by their number", "false")
    if sync.wire_dtype == "int8":
        why = f"what is slow here is the outer step ({LOCAL}.wire_dtype)"
        refuse("parallel.grad_sync.wire_dtype", "int8", why, "null, bfloat16")
    if config.distill.on:
        refuse("distill.mixing", config.distill.mixing, "the teacher's program waits for all replicas", "0")
    if config.train.ema is not None:
        refuse("train.ema", config.train.ema, "evaluations use the anchor, which is a mean already", "null")
    if config.memory.offload.optimizer:
        refuse("memory.offload.optimizer", True, "the state of replicas is updated as one array", "false")
    if config.model.stacked is not None:
        check_fragments(local.fragments, config.model.stacked)
    if local.fragments > 1 and config.mesh.pipe != 1:
        refuse(f"mesh.pipe: {config.mesh.pipe} with {LOCAL}.fragments", local.fragments, "fragments are of blocks", "1")
    every = local.every
    if config.train.eval_every % every:
        raise UserError(
            f"train.eval_every: {config.train.eval_every} is between outer steps, where there is nothing new to"
            f" evaluate; allowed: multiples of {LOCAL}.every={every}, or 0"
        )
