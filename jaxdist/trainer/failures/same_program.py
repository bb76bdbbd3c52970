"""Facts that must be the same on every rank of a job. They are compared before the first collective.

Ranks with different programs do not fail: some compute wrong numbers in silence, others wait for ever.
"""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from jaxdist.build import Parts
from jaxdist.config.load import settings_by_key
from jaxdist.config.resolve import has_gpus
from jaxdist.config.rules.fields import show
from jaxdist.config.schema import Config
from jaxdist.data import Source
from jaxdist.mesh import sizes_of
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.runtime.start import expected_backend
from jaxdist.specs import PyTree, leaves_by_name

Facts = dict[str, str]

# Hosts may keep their files in different places: the content is compared.
OF_A_HOST = ("data.path", "data.val_path", "devices.compilation_cache")


def facts_of_start(config: Config, versions: Mapping[str, str | None]) -> Facts:
    """The facts that are known before JAX has devices: versions, compiler flags, every key of the configuration, and
    whether JAX will find NVIDIA GPUs. A rank whose driver is broken would train on its CPU."""
    facts = {f"version of {name}": version or "none" for name, version in versions.items()}
    facts["NVIDIA GPUs"] = "used" if expected_backend(config.devices) == "gpu" and has_gpus() else "not used"
    flags = (flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith("--xla_dump"))
    facts["XLA_FLAGS"] = " ".join(sorted(flags)) or "none"
    return facts | {key: show(value) for key, value in settings_by_key(config).items() if key not in OF_A_HOST}


def facts_of_program(config: Config, parts: Parts, mesh: Any, source: Source) -> Facts:
    """The facts that are known before the first step: data, mesh, batch, and the program of a step."""
    data = {"data (SHA-256)": source.info["sha256"]}
    return data | facts_of_step(parts, mesh, batch_of(config, mesh, source))


def facts_of_step(parts: Parts, mesh: Any, batch: PyTree) -> Facts:
    """Mesh, batch, and the program of a step.

    It lowers the step for the layout in which it will be called. JAX keeps the lowered step, and compiles it later.
    """
    devices = " ".join(f"{device.process_index}/{device.id}" for device in mesh.devices.flat)
    lowered = parts.step.lower(parts.target, batch)
    return {
        "mesh": " ".join(f"{axis}={size}" for axis, size in sizes_of(mesh).items()),
        "devices of the mesh": hashed(devices),
        "batch": ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves_by_name(batch).items()),
        "program of a step (SHA-256)": hashed(lowered.as_text()),  # without source locations
    }


def hashed(text: str) -> str:
    """The first 16 digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
