"""What must not change between a checkpoint and its resumption, and what may but is said."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from jaxdist.config.schema import Config
from jaxdist.data import Source, kind_of
from jaxdist.errors import UserError

MAY_CHANGE = ("loss_scale", "max_consecutive_skips")  # of section precision, on resuming


def identity(config: Config, source: Source) -> dict[str, Any]:
    """What must not change between a checkpoint and its resumption: it would be another experiment under the same
    name."""
    data = {**what(config.data), "mixture": [[part.name, part.samples] for part in source.parts]}
    whole = {
        "model": what(config.model),
        "data": {**data, "dtype": kind_of(source), "sha256": source.info["sha256"]},
        "precision": {key: value for key, value in asdict(config.precision).items() if key not in MAY_CHANGE},
        "optimizer": {"name": config.optimizer.name, "freeze": config.optimizer.freeze},
        "train": {"seed": config.train.seed},
    }
    return json.loads(json.dumps(whole))  # as it will come back


def what(section: Any) -> dict[str, Any]:
    """The keys of a section that say what is computed, or from what; not how (`Rule.how`)."""
    return {each.name: getattr(section, each.name) for each in fields(section) if not each.metadata["rule"].how}


def settings_of(config: Config) -> dict[str, Any]:
    """All keys by their names, "optimizer.lr", with the values as a checkpoint holds them."""

    def flat(tree: dict[str, Any], start: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            found |= flat(value, f"{start}{key}.") if isinstance(value, dict) else {start + key: value}
        return found

    known: dict[str, Any] = json.loads(json.dumps(flat(asdict(config), "")))
    return known


def record(config: Config, source: Source, *, passed: int = 0, forced: Sequence[Any] = ()) -> dict[str, Any]:
    """What is saved beside a state. passed: batches that were passed over. forced: see `Run.forced`."""
    more = {"forced": list(forced)} if forced else {}
    return identity(config, source) | {"config": settings_of(config), "batches_passed": passed} | more


def changed_settings(saved: dict[str, Any], config: Config) -> dict[str, list[Any]]:
    """key -> [value in a checkpoint's record, value now], for all that differ and are in both."""
    before = saved.get("config", saved.get("schedule", {}))  # older versions saved the optimizer's keys only
    before = before | {f"model.{key}": value for key, value in saved.get("model", {}).items()}  # and null for defaults
    now = settings_of(config)
    del now["checkpoint.resume"]
    return {key: [before[key], value] for key, value in now.items() if key in before and before[key] != value}


def show_changes(changed: dict[str, list[Any]], limit: int | None = None) -> str:
    """Such as "optimizer.lr 0.01 -> 0.02, mesh.data 2 -> 4", of at most `limit` keys."""
    texts = [f"{key} {json.dumps(before)} -> {json.dumps(now)}" for key, (before, now) in changed.items()]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if limit and len(texts) > limit else "")


def differences(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """key -> [value in a checkpoint's record, value now], where `identity` differs."""
    # Older versions had no other.
    older: dict[str, dict[str, Any]] = {"data": {"packing": "none", "mixture": []}}
    if saved.get("data", {}).get("source") == "tokens" and "token_dtype" in saved["data"]:
        older["data"]["dtype"] = saved["data"]["token_dtype"]
    saved = saved | {section: values | saved.get(section, {}) for section, values in older.items()}
    found = {}
    for section in now:
        for key, value in now[section].items():
            before = saved.get(section, {}).get(key, value)  # an older version did not know the key
            if before != value:
                found[f"{section}.{key}"] = [before, value]
    return found


def check_identity(
    saved: dict[str, Any], now: dict[str, Any], folder: Path, *, force: bool = False
) -> dict[str, list[Any]]:
    """Raise `UserError` naming what differs, unless `force`d to go on. Returns what differs all the same."""
    found = differences(saved, now)
    if found and not force:
        key, (before, value) = next(iter(found.items()))
        others = {name: values for name, values in found.items() if name != key}
        also = f" (besides, {show_changes(others, 5)})" if others else ""
        raise UserError(
            f"{key}: {value!r}, but the run in {folder} was started with {before!r}{also}; set it back, or start "
            "another run with --run-dir, or checkpoint.resume=force to go on all the same"
        )
    return found
