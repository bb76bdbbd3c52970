"""A mixture of experts in place of a model's MLPs: the section `model.moe` of a configuration. Imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from jaxdist.config.rules.fields import setting
from jaxdist.config.rules.grad_sync import GRAD_SYNC
from jaxdist.config.rules.pipeline import divisors, near
from jaxdist.config.rules.precision import HALVES
from jaxdist.errors import UserError

MOE = "model.moe"


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the MLP of each block. docs/experts.md."""

    experts: int = setting(0, "experts of a block; 0: one MLP, which all tokens go through", at_least=0)
    top_k: int = setting(2, "experts that a token goes to", at_least=1)
    hidden: int | None = setting(None, "hidden size of an expert; null: mlp_width", at_least=1)
    shared: int = setting(0, "experts, of the same size, that every token goes to besides", at_least=0)
    dense: int = setting(0, "blocks at the start that keep one MLP, of mlp_width", at_least=0)
    dispatch: str = setting(
        "dropless",
        "how tokens reach their experts; capacity: those for which an expert has no place are dropped",
        choices=("dropless", "capacity"),
    )
    factor: float = setting(1.25, "capacity: places of an expert, over what it gets if all get the same", above=0)
    group: int = setting(64, "capacity: neighbouring positions that share these places", at_least=1)
    pieces: int = setting(
        1, "capacity: parts of a microbatch, of which one travels while another is computed", at_least=1, how=True
    )
    scores: str = setting(
        "softmax", "scores of the router: over all experts, or of each by itself", choices=("softmax", "sigmoid")
    )
    normalised: bool = setting(True, "whether the weights of a token's experts are made to sum to 1")
    scaling: float = setting(1.0, "a factor of these weights", above=0)
    bias_rate: float | None = setting(
        0.001,
        "how far a bias of each expert's score moves in a step, so that experts get equally many tokens; null: no bias",
        at_least=0,
        below=1,
    )
    balance_loss: float = setting(0.0, "weight of the loss of unequal experts, of each sequence by itself", at_least=0)
    z_loss: float = setting(0.0, "weight of the squared logsumexp of the router's logits", at_least=0)

    @property
    def on(self) -> bool:
        """Whether blocks are mixtures of experts."""
        return bool(self.experts)

    def resolved(self, mlp_width: int) -> Self:
        """The section with the hidden size filled in."""
        return replace(self, hidden=mlp_width if self.hidden is None and self.on else self.hidden)

    def check(self, *, layers: int) -> None:
        """Raise `UserError` for values that do not go together. layers: of the model."""
        if not self.on:
            return
        if self.top_k > self.experts:
            raise UserError(f"{MOE}.top_k: {self.top_k} of {self.experts} experts; allowed: 1 to {self.experts}")
        if self.experts == 1:
            raise UserError(f"{MOE}.experts: 1 leaves nothing to choose; allowed: 2 or more; or 0 for one MLP")
        if self.dense >= layers:
            raise UserError(
                f"{MOE}.dense: {self.dense} of {layers} blocks leaves no mixture; allowed: 0 to {layers - 1}; or"
                f" {MOE}.experts=0"
            )


def check_rounding(of: str, wire_dtype: str | None, reduce_dtype: str, *, goes_by: str, instead: str = "") -> None:
    """Raise `UserError` for sums that would round counts, which go with gradients. of: what counts. goes_by: what moves
    by the counts; empty where they are shown only."""
    if reduce_dtype in HALVES and goes_by:
        raise UserError(
            f"precision.reduce_dtype: {reduce_dtype!r} would round the numbers of tokens that {goes_by} goes by;"
            f" allowed: float32{instead}"
        )
    if wire_dtype is not None:
        raise UserError(
            f"{GRAD_SYNC}.wire_dtype: {wire_dtype!r} would round the counts of tokens that go with the gradients of"
            f" {of}; allowed: null"
        )


def check_moe(config: Any, model: Any, sizes: Mapping[str, int]) -> None:
    """Raise `UserError` for what does not go with `model.moe`. model: resolved. sizes: of the mesh axes."""
    moe: MoEConfig = model.moe
    if not moe.on:
        return
    moe.check(layers=model.layers)
    for axis, key, count in (("expert", "experts", moe.experts), ("tensor", "hidden", moe.hidden or 0)):
        if count % sizes[axis]:
            raise UserError(
                f"mesh.{axis}: {sizes[axis]} does not divide {MOE}.{key} {count}; {axis} sizes that work:"
                f" {near(divisors(count), sizes[axis])}"
            )
    length = config.data.seq_len // (2 * sizes["context"] if sizes["context"] > 1 else 1)
    if moe.dispatch == "capacity" and length % moe.group:
        of = f"data.seq_len {config.data.seq_len}" + (
            f" / two chunks for each of mesh.context {sizes['context']}" if sizes["context"] > 1 else ""
        )
        raise UserError(
            f"{MOE}.group: {moe.group} does not divide the {length} neighbouring positions of a device ({of}); groups"
            f" that work: {near(divisors(length), moe.group)}; or {MOE}.dispatch=dropless"
        )
    types = config.precision.resolved()[0]
    if types.param in HALVES:
        raise UserError(
            f"precision.policy: {config.precision.policy!r} stores parameters in {types.param}, in which the biases of"
            f" {MOE} would stand still; allowed: fp32, bf16, fp16, O1, O2; or {MOE}.experts=0"
        )
    rate = f"{MOE}.bias_rate {moe.bias_rate:g}" if moe.bias_rate else ""
    wire = config.parallel.grad_sync.wire_dtype
    check_rounding(MOE, wire, types.reduce, goes_by=rate, instead=f"; or {MOE}.bias_rate=null")
    if config.parallel.local.on and moe.bias_rate:
        raise UserError(
            f"parallel.local.every: {config.parallel.local.every}, and outer steps would move the biases of"
            f" {MOE}.bias_rate {moe.bias_rate:g} like trained parameters; allowed: 0; or {MOE}.bias_rate=null"
        )
