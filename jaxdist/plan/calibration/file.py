"""The file of a calibration: what was measured, on what, and whether it still holds."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.collectives.cost import Link
from jaxdist.config.json_reader import read_json_file
from jaxdist.config.load import settings_of
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.files.regular import replace_file

CALIBRATION_FORMAT = 1
REMATS = ("none", "dots", "full")  # that plans compare, from what keeps most to what keeps least


class Compute(NamedTuple):
    """Seconds of both passes of a model's own units on one device, at local shapes.

    remat: `memory.remat`. tensor: of how many parts each layer is one. rows: sequences of a microbatch.
    block: of one block. ends: of embedding, head and what a step does once. spread: relative, of the repetitions.
    """

    remat: str
    tensor: int
    rows: int
    block: float
    ends: float
    spread: float


class MeasuredLink(NamedTuple):
    """A link. latency_s: of one round. bytes_per_s: that one device sends. spread: relative, of what was measured."""

    latency_s: float
    bytes_per_s: float
    spread: float

    @property
    def link(self) -> Link:
        """As plans use it."""
        return Link(self.latency_s, self.bytes_per_s)


class Calibration(NamedTuple):
    """A calibration.

    device: the kind of the devices. hosts, per_host: how many. subject: the model and what else its seconds depend on.
    compute: of the model's units. optimizer: seconds for a byte of parameters and of state. inside, between: the links;
    None where there is none. declared: the rate of the link between hosts in bytes a second, if it was given.
    conditions: versions, time, load of the machine.
    """

    device: str
    hosts: int
    per_host: int
    subject: Mapping[str, Any]
    compute: tuple[Compute, ...]
    optimizer: float
    inside: MeasuredLink | None
    between: MeasuredLink | None
    declared: float | None
    conditions: Mapping[str, Any]

    @property
    def spread(self) -> float:
        """The relative difference below which two predictions are a tie: the larger of the usual spread of computation
        and those of the links, and 2 % at least."""
        links = [each.spread for each in (self.inside, self.between) if each is not None]
        return max(0.02, statistics.median(each.spread for each in self.compute), *links)


def calibrated_subject(config: Config) -> dict[str, Any]:
    """What the seconds of a block depend on: the model, its sequences, number types, optimizer."""
    return {
        "model": _plain(settings_of(config.model)),
        "seq_len": config.data.seq_len,
        "precision": _plain(settings_of(config.precision)),
        "optimizer": config.optimizer.name,
    }


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples are lists."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def write_calibration(found: Calibration, path: Path) -> None:
    """Write it as JSON."""
    tree = found._asdict() | {"format": CALIBRATION_FORMAT, "compute": [each._asdict() for each in found.compute]}
    for name in ("inside", "between"):
        link = getattr(found, name)
        tree[name] = link and link._asdict()
    replace_file(path, (json.dumps(tree, indent=1) + "\n").encode())


def read_calibration(path: Path) -> Calibration:
    """Read it. Raises `UserError` for a file that is none."""
    try:
        tree = read_json_file(path)
        if not isinstance(tree, dict) or tree.pop("format", None) != CALIBRATION_FORMAT:
            raise UserError(f"--calibration: {path} has another format; make it again: jaxdist calibrate")
        tree["compute"] = tuple(Compute(**each) for each in tree["compute"])
        for name in ("inside", "between"):
            tree[name] = tree[name] and MeasuredLink(**tree[name])
        return Calibration(**tree)
    except FileNotFoundError:
        raise UserError(f"--calibration: {path} does not exist; make it: jaxdist calibrate --out {path}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"--calibration: {path} is no calibration ({error}); make it again: jaxdist calibrate"
        ) from None


def stale(found: Calibration, config: Config, versions: Mapping[str, Any]) -> list[str]:
    """What is different now from when it was measured; [] if nothing is."""
    differs = [
        f"{name} {found.conditions.get('versions', {}).get(name)} then, {value} now"
        for name, value in versions.items()
        if found.conditions.get("versions", {}).get(name) != value
    ]
    now = calibrated_subject(config)
    return differs + [f"another {name}" for name, value in now.items() if found.subject.get(name) != value]
