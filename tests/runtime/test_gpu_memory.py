"""The share of a GPU's memory that a run takes: by default, by the environment, and what is no share."""

import os
import re
from pathlib import Path

import pytest

from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.runtime import start
from jaxdist.runtime.gpu_memory import SHARE, VARIABLE, VARIABLES, memory_share, take_memory

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(
    "given", [{}, *({name: "0.5"} for name in VARIABLES), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}]
)
def test_a_run_takes_the_share_unless_the_environment_says_another(given: dict[str, str]) -> None:
    environ = dict(given)
    take_memory(environ)
    assert environ == (given if set(given) & set(VARIABLES) else {**given, VARIABLE: str(SHARE)})


def test_plans_are_for_the_share_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert memory_share() == SHARE
    for name in VARIABLES:
        monkeypatch.setenv(name, ".45")
        assert memory_share() == 0.45
        monkeypatch.setenv(name, "")  # is unset for jax
        assert memory_share() == SHARE


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["0", "1.5", "-1", "half", "nan"])
def test_what_is_no_share_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(f"{name}: {value!r}; allowed: a number > 0 and <= 1")):
        memory_share()


@pytest.mark.parametrize(
    ("backend", "devices", "taken"), [("gpu", False, True), ("gpu", True, False), ("cpu", False, False)]
)
def test_it_is_taken_on_gpus_before_jax_starts(
    backend: str, devices: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(start, "expected_backend", lambda devices: backend)
    monkeypatch.setattr(start, "has_devices", lambda: devices)
    monkeypatch.setattr(start, "set_flags", lambda *arguments, **keywords: None)
    monkeypatch.setattr(start, "choose_platform", lambda *arguments, **keywords: None)
    start.start(load_config(QUICKSTART, []))
    assert (os.environ.pop(VARIABLE, None) == str(SHARE)) == taken
