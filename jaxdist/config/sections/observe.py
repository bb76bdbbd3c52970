"""Section `observe` of the configuration: what a run shows and writes."""

from dataclasses import dataclass

from jaxdist.config.rules.fields import section, setting


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases. `observe.wandb: my-project` is short for `{project: my-project}`."""

    project: str | None = setting(None, "the project that the run belongs to; null: W&B gets nothing", how=True)
    mode: str = setting(
        "online",
        "online: sent while the run goes on; offline: kept in wandb/ of the run directory, for `wandb sync`",
        choices=("online", "offline"),
        how=True,
    )


@dataclass(frozen=True)
class ProfileConfig:
    """A trace of a few steps, in profile/ of the run directory: docs/watching.md."""

    start: int | None = setting(None, "the first step of the trace; null: no trace", at_least=1, how=True)
    steps: int = setting(3, "how many steps it has", at_least=1, how=True)


@dataclass(frozen=True)
class ObserveConfig:
    """What a run shows and writes."""

    log_every: int = setting(10, "steps between lines on the console", at_least=1)
    console: str = setting("auto", "auto: rich on a terminal, else plain", choices=("auto", "plain", "rich"))
    report: bool = setting(True, "whether report.html is written at the end")
    samples: bool = setting(False, "samples.jsonl: a hash of each sample, by step, as the devices got it; slows steps")
    tensorboard: bool = setting(False, "metrics for TensorBoard, in tensorboard/ of the run directory", how=True)
    wandb: WandbConfig = section(WandbConfig, "metrics for Weights & Biases", shorthand="project")
    mlflow: str | None = setting(
        None, "the experiment of MLflow that the run belongs to, where MLFLOW_TRACKING_URI says; null: none", how=True
    )
    plan: str | None = setting(
        None,
        "a plan.json of jaxdist plan, kept in the run directory: the report shows its prediction beside the run",
        how=True,
    )
    profile: ProfileConfig = section(ProfileConfig, "a trace of a few steps")
