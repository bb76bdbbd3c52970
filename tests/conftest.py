"""Eight simulated CPU devices, strict dtype promotion, warnings are errors (see pyproject.toml)."""

import gc
import os

import child

os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *child.FLAGS]
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# No persistent compilation cache: programs with collectives in conditions that jax 0.10.2 loads from it crash or hang.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import pytest

gc.set_threshold(200_000, 100, 1000)  # tracing makes many objects, and few cycles
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A case that is marked exhaustive, of a test that is marked slow, is left out of slow runs."""
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
