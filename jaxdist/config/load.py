"""From a YAML file and command-line overrides to a checked configuration, and back to YAML. Imports no jax."""

import fnmatch
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from jaxdist import registry
from jaxdist.config.checks import check_config
from jaxdist.config.reader import Dumper, field_of, parse_yaml, read_config, read_overrides
from jaxdist.config.rules.fields import keys
from jaxdist.config.schema import Config
from jaxdist.files.user_path import user_path

_PLACES = "jaxdist.pretrained"  # above this folder, for it reads files of models: loaded where a key asks for it


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
    config = _with_tokenizer(config)
    config = replace(config, model=config.model.replace(from_=None))  # its keys stand there now
    return check_config(config, planned=planned)


def _with_tokenizer(config: Config) -> Config:
    """With the tokenizer of the folder that the model or its parameters come from, where `data.tokenizer` is null."""
    if getattr(config.data, "tokenizer", "") is None:
        for key, where in (("model.from", config.model.from_), ("init.from", config.init.from_)):
            if where is not None and (user_path(where, key=key) / "tokenizer.json").is_file():
                return replace(config, data=config.data.replace(tokenizer=where))
    return config


def _completed(given: dict[str, Any], on_top: Mapping[str, str]) -> dict[str, Any]:
    """The keys of section model that `model.from` stands for. See `read_config`."""
    model = given.get("model")
    if not isinstance(model, dict) or not isinstance(where := model.get("from"), str):
        return {}
    folder = user_path(where, key="model.from")  # before what reads models is loaded
    taken = model | {name.removeprefix("model."): text for name, text in on_top.items()}
    return {"model": registry.load(_PLACES, "architecture", key="model.from")(folder, taken)}


def to_yaml(config: Config, shown: Callable[[dict[str, Any]], Any] = dict) -> str:
    """The configuration as YAML text with every key in it; `load_config` of it gives an equal configuration. shown:
    makes what is written of the settings, such as a copy without secrets."""
    return yaml.dump(shown(settings_of(config)), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def values_of(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    """{dotted key: value} of `section.key=value`s for a configuration, each checked by its key alone. Errors:
    `UserError`."""
    return dict(_flat(read_overrides(Config, parse_yaml(to_yaml(config), "the configuration"), overrides)))


def settings_of(config: Any) -> dict[str, Any]:
    """A section, or a whole configuration, as a tree of dicts with the names of keys."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return settings_of(value) if is_dataclass(value) else value

    return {name: plain(getattr(config, field_of(name))) for name in keys(type(config))}


def settings_by_key(section: Any) -> dict[str, Any]:
    """All settings of a section, or of a whole configuration, by their dotted names, such as "optimizer.lr"."""
    return dict(_flat(settings_of(section)))


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def with_settings(section: Any, values: Mapping[str, Any]) -> Any:
    """The section with other values of keys, by their dotted names. They are not checked."""
    own, inner = dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in values.items():
        first, _, rest = name.partition(".")
        if rest:
            inner.setdefault(first, {})[rest] = value
        else:
            own[field_of(first)] = value
    return replace(section, **own, **{name: with_settings(getattr(section, name), of) for name, of in inner.items()})


def model_differences(wanted: Mapping[str, Any], model: Any) -> list[str]:
    """The keys of a section `model` that lack the wanted values: ["model.moe.top_k=8 (is 2)", ...]. Keys that change
    nothing, neither with these values nor as they are (`ModelConfig.idle`), are left out.

    wanted: values by the dotted names of keys. model: `resolved`.
    """
    own = settings_by_key(model)
    idle = {*model.idle()} & {*with_settings(model, wanted).idle()}
    return [
        f"model.{key}={json.dumps(value)} (is {json.dumps(own[key])})"
        for key, value in wanted.items()
        if own[key] != value and not any(fnmatch.fnmatchcase(key, each) for each in idle)
    ]
