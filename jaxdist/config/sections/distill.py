"""Section `distill` of the configuration."""

from dataclasses import dataclass

from jaxdist.config.rules.fields import setting


@dataclass(frozen=True)
class DistillConfig:
    """A trained model that the model learns from: docs/distillation.md."""

    teacher: str | None = setting(
        None, "the teacher: a run directory, a step's folder or a Hugging Face folder; null: none", how=True
    )
    ema: bool = setting(False, "the teacher is the moving average of its run's parameters (train.ema)")
    temperature: float = setting(2.0, "what logits of both are divided by, for the divergence", above=0)
    mixing: float = setting(
        0.5, "weight of the divergence from the teacher; 1 - mixing: of the cross-entropy; 0: no teacher", at_least=0,
        at_most=1,
    )  # fmt: skip
    strategy: str = setting("zero3", "how the teacher's parameters are sharded", folder="jaxdist.parallel.strategies")
    precision: str | None = setting(
        None,
        "number types that the teacher computes in; null: those of the run",
        choices=("fp64", "fp32", "bf16", "fp16"),
    )
    cache: str | None = setting(
        None, "folder of the teacher's largest logits, which jaxdist distill makes; null: it computes anew", how=True
    )
    top_k: int = setting(64, "logits of a token that jaxdist distill keeps in distill.cache", at_least=1, how=True)

    @property
    def on(self) -> bool:
        """Whether a run learns from a teacher."""
        return bool(self.mixing) and (self.teacher is not None or self.cache is not None)
