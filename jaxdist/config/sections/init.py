"""Section `init` of the configuration."""

from dataclasses import dataclass

from jaxdist.config.rules.fields import setting


@dataclass(frozen=True)
class InitConfig:
    """The parameters that a new run starts with. A run that is resumed has its own. `init: FOLDER` is short for `{from:
    FOLDER}`."""

    from_: str | None = setting(
        None,
        "a run directory, the folder of a step, a Hugging Face folder or a safetensors file; null: random ones",
        how=True,
    )
    ema: bool = setting(False, "of a run with train.ema: its moving average in place of its parameters", how=True)
    partial: tuple[str, ...] = setting(
        (),
        "parameters that may be missing or of another shape, and start at random, by patterns: [head.*]; also keys of"
        " the model that may differ: [model.rope_theta]",
        how=True,
    )
