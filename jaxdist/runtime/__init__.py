"""A process of a job: how it starts (platform, processes, devices), is watched, and stops."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdist import SpawnError as SpawnError
    from jaxdist import spawn as spawn

__all__ = ["SpawnError", "spawn"]


def __getattr__(name: str) -> Any:
    """Imported when first used: this folder is read before a configuration is."""
    if name in __all__:
        return getattr(importlib.import_module("jaxdist"), name)  # `launcher` stands above this folder
    raise AttributeError(f"module 'jaxdist.runtime' has no attribute {name!r}")
