"""The architecture that a place says, as keys of section `model`."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxdist.checkpoint.huggingface.convert import dropout_of_config, model_of_config
from jaxdist.checkpoint.huggingface.family import CONFIG
from jaxdist.checkpoint.huggingface.safetensors import read_json
from jaxdist.config.load import settings_of
from jaxdist.config.reader import parse_yaml
from jaxdist.errors import UserError
from jaxdist.files.regular import read_regular

_KEY = "model.from"


def _text(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8
        raise UserError(f"{_KEY}: {path} is not to be read: {error}") from None


def architecture(folder: Path, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The keys of section `model` for a Hugging Face folder, by its config.json, or for a run, by its config.yaml.

    given: what the user gives beside it, by key: `dropout` stands for all rates of a config.json, and `head` says which
        of them there are.

    Raises `UserError` for another place, and for a model that no configuration makes.
    """
    if (folder / "config.yaml").exists():
        tree = parse_yaml(_text(folder / "config.yaml"), str(folder / "config.yaml"))
        keys = tree.get("model") if isinstance(tree, dict) else None
    elif (folder / CONFIG).exists():
        found = read_json(folder / CONFIG)
        keys = settings_of(model_of_config(found)[0])
        if "dropout" not in given:
            head = given.get("head", keys.get("head"))
            keys["dropout"] = dropout_of_config(found, classifies=head == "classification")
    else:
        said = "holds neither config.json nor config.yaml" if folder.is_dir() else "is no folder"
        raise UserError(
            f"{_KEY}: {str(folder)!r} {said}; allowed: a Hugging Face folder, or a run directory (a"
            " run is resumed without it by its own config.yaml)"
        )
    if not isinstance(keys, dict):
        raise UserError(f"{_KEY}: {str(folder)!r} has no section model in its config.yaml; give another run directory")
    return {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items() if key != "from"}
