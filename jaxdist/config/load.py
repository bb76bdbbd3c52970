"""From a YAML file and command-line overrides to a checked configuration, and back to YAML. Imports no jax."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from jaxdist.config.checks import check_config
from jaxdist.config.reader import Dumper, read_config
from jaxdist.config.rules.fields import settings_of
from jaxdist.config.schema import Config


def load_config(path: str | Path, overrides: Sequence[str] = (), *, planned: bool = False) -> Config:
    """The configuration in the YAML file at `path`, with each `section.key=value` of `overrides` on top, in order.

    Every key has been checked, alone and against the others; -1 in the mesh is resolved where the number of devices is
    sure (simulated CPU devices). planned: for programs that only look ahead, on a machine without the devices and the
    data. Errors: `UserError`, one line with the key, its value, and what is allowed.

    >>> config = jaxdist.load_config("configs/quickstart.yaml", ["parallel.strategy=zero2", "optimizer.lr=1e-3"])
    >>> config.parallel.strategy, config.optimizer.lr
    ('zero2', 0.001)
    """
    config = read_config(Config, path, overrides, _completed)
    config = replace(config, model=config.model.replace(from_=None))  # its keys stand there now
    return check_config(config, planned=planned)


def _completed(given: dict[str, Any]) -> dict[str, Any]:
    """The keys of section model that `model.from` stands for."""
    model = given.get("model")
    where = model.get("from") if isinstance(model, dict) else None
    if not isinstance(where, str):
        return {}
    # It reads files of models, so it lies above this module, and is there only where it is asked for.
    keys: dict[str, Any] = importlib.import_module("jaxdist.pretrained.architecture").keys_of(where)
    return {"model": keys}


def to_yaml(config: Config, shown: Callable[[dict[str, Any]], Any] = dict) -> str:
    """The configuration as YAML text with every key in it; `load_config` of it gives an equal configuration. shown:
    makes what is written of the settings, such as a copy without secrets."""
    return yaml.dump(shown(settings_of(config)), Dumper=Dumper, sort_keys=False, allow_unicode=True)
