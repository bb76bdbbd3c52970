"""Section `optimizer` of the configuration."""

from dataclasses import dataclass
from typing import Any

from jaxdist.config.rules.fields import section, setting
from jaxdist.config.sections.items import item_of
from jaxdist.errors import UserError

LORA = "*.lora.*"  # the names of adapters
ADAPTERS_ONLY = ("*", f"!{LORA}")  # freezes all but these


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: low-rank adapters of linear layers, beside which nothing is trained."""

    rank: int = setting(0, "rank of the adapters; 0: no adapters, and all parameters are trained", at_least=0)
    alpha: float = setting(16.0, "an adapter adds alpha / rank times its product", above=0)
    targets: tuple[str, ...] = setting(
        ("*attention.*",),
        "layers of the blocks that get one, by patterns, or by Hugging Face's names: [q_proj, v_proj]",
    )
    dropout: float = setting(0.0, "probability of dropping an input of an adapter in training", at_least=0, below=1)

    def check(self, *, collective_matmul: bool) -> None:
        """Raise `UserError` where adapters do not fit the other settings."""
        if self.rank and collective_matmul:
            raise UserError(
                "parallel.collective_matmul: true multiplies by the kernel alone, and optimizer.lora adds to its"
                " product; allowed: false; or optimizer.lora.rank=0"
            )


@dataclass(frozen=True)
class GroupConfig:
    """Parameters with a learning rate and a weight decay of their own."""

    match: str = setting("*", "a pattern of their names: 'embed.*', or with the number of a block 'blocks.0.*'")
    lr: float | None = setting(None, "their peak learning rate, 0: they stay; null: optimizer.lr", at_least=0)
    decay: float | None = setting(None, "their weight decay; null: optimizer.weight_decay", at_least=0)

    @classmethod
    def item(cls, value: Any, key: str) -> "GroupConfig":
        """An item of the list `optimizer.groups` in a configuration, which messages call `key`."""
        return item_of(cls, value, key)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: str = setting("adamw", "the optimizer", choices=("adamw", "sgd", "lion", "adafactor", "muon"), dotted=True)
    lr: float = setting(3e-3, "peak learning rate", above=0)
    schedule: str = setting(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant"), dotted=True
    )
    warmup_steps: int = setting(
        0, "steps over which the rate rises from 0; above train.steps it is half of these", at_least=0
    )
    final_lr_ratio: float = setting(0.1, "last learning rate as a fraction of lr", at_least=0, at_most=1)
    b1: float = setting(0.9, "decay of the first moment", at_least=0, below=1)
    b2: float = setting(0.95, "decay of the second moment", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the denominator", above=0)
    momentum: float = setting(0.9, "momentum of sgd and muon", at_least=0, below=1)
    weight_decay: float = setting(0.1, "weight decay, decoupled; in sgd added to the gradient", at_least=0)
    clip_norm: float = setting(1.0, "largest global norm of the gradients; 0: no clipping", at_least=0)
    freeze: tuple[str, ...] = setting(
        (), "parameters that are not trained, by patterns: [embed.*, '*.bias']; '!head.*': but for these"
    )
    lora: LoraConfig = section(LoraConfig, "low-rank adapters (LoRA)")

    groups: tuple[GroupConfig, ...] = setting(
        (), "parameters with rates of their own, the first that fits: [{match: 'embed.*', lr: 1e-4, decay: 0}]"
    )

    @property
    def frozen(self) -> tuple[str, ...]:
        """The patterns of `freeze`, and with adapters those of everything else."""
        return self.freeze if not self.lora.rank else tuple(dict.fromkeys((*ADAPTERS_ONLY, *self.freeze)))
