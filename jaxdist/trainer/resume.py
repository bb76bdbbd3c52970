"""Resuming: the record beside a checkpoint, which settings must not differ from it, and which may but are said."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxdist.config.load import settings_by_key
from jaxdist.config.schema import Config
from jaxdist.config.sections.local import LOCAL
from jaxdist.data import Source, kind_of
from jaxdist.errors import UserError, first_of
from jaxdist.mesh import sizes_of
from jaxdist.parallel.options import StepOptions
from jaxdist.precision.policy import POLICIES

FORCE = ", or checkpoint.resume=force to go on all the same"
LEARNS = ("temperature", "mixing")  # of section distill
PRECISION_MAY_CHANGE = ("loss_scale", "max_consecutive_skips")  # on resuming


def _as_saved(values: dict[str, Any]) -> dict[str, Any]:
    """The values as JSON gives them back: lists in place of tuples."""
    return json.loads(json.dumps(values))


def content_settings(section: Any) -> dict[str, Any]:
    """The settings of a section that change what a run computes, not only how (`Rule.how`). Those of a section in it
    have dotted names; of one that is off, there is only the first, which says so."""
    found: dict[str, Any] = {}
    for each in fields(section):
        value: Any = getattr(section, each.name)
        if hasattr(type(value), "__dataclass_fields__"):
            inner = list(content_settings(value).items())
            found |= {f"{each.name}.{key}": own for key, own in inner[: None if value.on else 1]}
        elif not each.metadata["rule"].how:
            found[each.name] = value
    return found


def identity(config: Config, source: Source, teacher: str | None = None) -> dict[str, Any]:
    """The settings that make a run this experiment. Resuming with another value of one is refused.

    teacher: the digest of its parameters.
    """
    # Documents that no packing knows are joined, whatever the key says.
    documents = "mask" if config.data.apart else "join"
    data = {
        **content_settings(config.data),
        "documents": documents,
        "mixture": [[part.name, part.samples] for part in source.parts],
    }
    precision = {key: value for key, value in asdict(config.precision).items() if key not in PRECISION_MAY_CHANGE}
    lora = {key: value for key, value in asdict(config.optimizer.lora).items() if key != "dropout"}
    lora = lora if lora["rank"] else {"rank": 0}
    whole = {
        "model": content_settings(config.model.resolved()),
        "data": {**data, "dtype": kind_of(source), "sha256": source.info["sha256"]},
        "precision": precision,
        "optimizer": {"name": config.optimizer.name, "freeze": config.optimizer.freeze, "lora": lora},
        "train": {"seed": config.train.seed, "ema": config.train.ema},
        "distill": {"teacher": teacher, **{key: getattr(config.distill, key) if teacher else None for key in LEARNS}},
    }
    return _as_saved(whole)


def record(
    config: Config, source: Source, teacher: str | None = None, *, passed: int = 0, forced: Sequence[Any] = ()
) -> dict[str, Any]:
    """The record that is saved beside a state. passed and forced: see `jaxdist.trainer.run.Progress`."""
    more = {"forced": list(forced)} if forced else {}
    return (
        identity(config, source, teacher)
        | {"config": _as_saved(settings_by_key(config)), "batches_passed": passed}
        | more
    )


def _held(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What says which arrays a checkpoint holds for outer steps, by key. settings: by their full keys."""
    of = {key: settings[f"{LOCAL}.{key}"] for key in ("outer.name", "outer.momentum", "fragments", "wire_dtype")}
    adam = of["outer.name"] == "adam"  # has its two means with any momentum
    return of | {
        "outer.name": adam,
        "outer.momentum": adam or of["outer.momentum"] > 0,
        "wire_dtype": of["wire_dtype"] == "int8",  # keeps errors
    }


def check_replicas(saved: dict[str, Any], config: Config, folder: Path) -> None:
    """Raise `UserError` where either the checkpoint or the run has replicas that train by themselves, and not both; or
    where both have them and the checkpoint holds other arrays than the run's outer steps need.

    saved: the record of the checkpoint.
    """
    now = settings_by_key(config)
    before = now | {f"{LOCAL}.every": 0} | saved.get("config", {})
    differs, kept = "", ""
    if bool(before[f"{LOCAL}.every"]) != config.parallel.local.on:
        differs = "every"
        kept = "nothing that replicas keep" if config.parallel.local.on else "what each replica keeps"
    elif config.parallel.local.on:
        held = _held(before)
        differs = next((key for key, value in _held(now).items() if value != held[key]), "")
        kept = "the state of outer steps for that"
    if differs:
        key = f"{LOCAL}.{differs}"
        raise UserError(
            f"{key}: {json.dumps(now[key])}, but the run in {folder} had {json.dumps(before[key])}, and its checkpoint"
            f" holds {kept}; set it back, or start another run with --run-dir and init.from"
        )


def changed_settings(saved: dict[str, Any], config: Config) -> dict[str, list[Any]]:
    """Settings that differ: {key: [value in a checkpoint's record, value now]}, for keys that are in both."""
    before = saved.get("config", saved.get("schedule", {}))  # older versions saved the optimizer's keys only
    now = _as_saved(settings_by_key(config))
    del now["checkpoint.resume"]
    return {key: [before[key], value] for key, value in now.items() if key in before and before[key] != value}


def laid_out(mesh: Mesh, options: StepOptions, rows: int) -> dict[str, Any]:
    """How a run of `jaxdist.fit` is laid out, as its record holds it beside `config`. rows: of a global batch; 0 where
    no batch was read."""
    precision, strategy = options.precision, options.strategy
    named = (name for name, policy in POLICIES.items() if policy == precision._replace(loss_scale=policy.loss_scale))
    return {
        **{f"mesh.{axis}": size for axis, size in sizes_of(mesh).items()},
        "strategy": strategy if isinstance(strategy, str) else getattr(strategy, "__name__", "your own"),
        "microbatches": options.on(mesh).microbatches,
        "precision": next(named, None) or " ".join(jnp.dtype(each).name for each in precision[:3]),
        **({"rows": rows} if rows else {}),
    }


def changed_layout(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """What differs of `laid_out`, as of `changed_settings`; nothing where an older version saved none."""
    before = saved.get("layout", {})
    return {key: [before[key], value] for key, value in now.items() if before.get(key, value) != value}


def show_changes(changed: dict[str, list[Any]], limit: int | None = None) -> str:
    """Such as "optimizer.lr 0.01 -> 0.02, mesh.data 2 -> 4", of at most `limit` keys."""
    texts = [f"{key} {json.dumps(before)} -> {json.dumps(now)}" for key, (before, now) in changed.items()]
    return first_of(texts, limit or len(texts))


def _same_place(before: Any, now: Any) -> bool:
    """Whether two values of a key are spellings of one path that is there."""
    if not (isinstance(before, str) and isinstance(now, str)):
        return False
    try:
        first, second = (Path(each).expanduser() for each in (before, now))
        return first.exists() and second.exists() and first.samefile(second)
    except (OSError, RuntimeError, ValueError):  # a user or a folder of another host, or no path at all
        return False


def _other_data(now: str, before: str, changed: Mapping[str, list[Any]], folder: Path) -> str:
    """What is said of data with other hashes: perhaps by which keys, if it is not what lies in the same places."""
    keys = {key: values for key, values in changed.items() if key.startswith("data.") and key != "data.prefetch"}
    keys = {key: values for key, values in keys.items() if not _same_place(*values)}
    # The one hash is of contents and of how they are read: it does not tell which of them has changed.
    said = f", perhaps by {show_changes(keys, 5)}, or what lies there has changed" if keys else ""
    key = next(iter(keys), "data.path")
    return f"{key}: other data ({now:.8}...) than the run in {folder} was started with ({before:.8}...){said}"


def check_identity(
    saved: dict[str, Any],
    now: dict[str, Any],
    folder: Path,
    *,
    force: bool = False,
    changed: Mapping[str, list[Any]] = MappingProxyType({}),
) -> dict[str, list[Any]]:
    """The keys of `identity` that differ: {key: [value in a checkpoint's record, value now]}.

    saved: the record. now: of `identity`. changed: of `changed_settings`, which say why the data are others. Raises
    `UserError` naming what differs, unless `force` is set.
    """
    # Older versions knew no other values of these keys.
    older: dict[str, dict[str, Any]] = {
        "data": {"packing": "none", "documents": "join", "mixture": []},
        "train": {"ema": None},
    }
    older["model"] = {"window": None, "rope_type": "default", "moe.experts": 0, "label_smoothing": 0.0}
    older["distill"] = dict.fromkeys(("teacher", *LEARNS))
    if saved.get("data", {}).get("source") == "tokens" and "token_dtype" in saved["data"]:
        older["data"]["dtype"] = saved["data"]["token_dtype"]
    saved = saved | {section: values | saved.get(section, {}) for section, values in older.items()}
    found = {}
    for section in now:
        for key, value in now[section].items():
            before = saved.get(section, {}).get(key, value)  # an older version did not know the key
            if before != value:
                found[f"{section}.{key}"] = [before, value]
    if found and not force:
        key, (before, value) = next(iter(found.items()))
        others = {name: values for name, values in found.items() if name != key}
        also = f" (besides, {show_changes(others, 5)})" if others else ""
        what = f"{key}: {value!r}, but the run in {folder} was started with {before!r}"
        if key == "data.sha256":
            what = _other_data(value, before, {k: v for k, v in changed.items() if k not in found}, folder)
        raise UserError(
            f"{what}{also}; set it back, or start another run with --run-dir{'' if 'train.ema' in found else FORCE}"
        )
    return found
