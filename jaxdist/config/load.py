"""From a YAML file and command-line overrides to a checked configuration, and back to YAML. Imports no jax."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from jaxdist.config.checks import check_config
from jaxdist.config.reader import Dumper, read_config
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
    return check_config(read_config(Config, path, overrides), planned=planned)


def to_yaml(config: Config, shown: Callable[[dict[str, Any]], Any] = dict) -> str:
    """The configuration as YAML text with every key in it; `load_config` of it gives an equal configuration. shown:
    makes what is written of the settings, such as a copy without secrets."""
    return yaml.dump(shown(asdict(config)), Dumper=Dumper, sort_keys=False, allow_unicode=True)
