"""Every public function and class has an example in its docstring, and it does what it says."""

import dataclasses
import doctest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist

NAMES = {"dataclasses": dataclasses, "jax": jax, "jaxdist": jaxdist, "jnp": jnp, "nnx": nnx, "np": np, "optax": optax}
PUBLIC = [name for name in jaxdist.__all__ if callable(getattr(jaxdist, name))]  # not the folders, and not BATCH_SPEC
DEAR = {"generate", "linen_loss"}  # they compile for seconds
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_ONLY_FIRST_FAILURE


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in DEAR)) for name in PUBLIC])
def test_the_example_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    public: Any = getattr(jaxdist, name)
    found = doctest.DocTestParser().get_doctest(public.__doc__ or "", dict(NAMES), name, None, None)
    assert found.examples, f"{name}: no example in its docstring"
    said: list[str] = []
    assert not doctest.DocTestRunner(optionflags=FLAGS).run(found, out=said.append).failed, "".join(said)
