"""Starting up: platform, processes, devices; watching and stopping; the launcher, and `spawn` beside it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdist.runtime.spawning import SpawnError as SpawnError
    from jaxdist.runtime.spawning import spawn as spawn

__all__ = ["SpawnError", "spawn"]


def __getattr__(name: str) -> Any:
    """Imported when first used: this folder is read before a configuration is."""
    if name in __all__:
        from jaxdist.runtime import spawning

        return getattr(spawning, name)
    raise AttributeError(f"module 'jaxdist.runtime' has no attribute {name!r}")
