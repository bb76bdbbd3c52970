"""Mistakes on the command lines of all scripts: one line on standard error with the argument, what is allowed, and
--help; status 2."""

import inspect
import sys
from pathlib import Path

import pytest
from script_modules import load_module

from jaxdist.cli.launch import main as launch

ROOT = Path(__file__).parents[2]
PARSERS = ("CommandParser", "ArgumentParser", "jaxdist.cli", "run_launcher", "run_lab")
SCRIPTS = [
    path
    for path in sorted([*(ROOT / "scripts").glob("*.py"), *(ROOT / "scripts" / "bench").glob("*.py")])
    if any(name in path.read_text() for name in PARSERS)
]


def status_of(path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a script, in this process."""
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    module = load_module(path)
    main = next(getattr(module, name) for name in ("main", "run_launcher", "run_lab") if name in vars(module))
    try:
        parameters = inspect.signature(main).parameters
        if "prog" in parameters:
            return int(main(arguments, path.name))
        return int(main(arguments) if parameters else main())
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


def test_all_scripts_are_here() -> None:
    assert len(SCRIPTS) >= 16


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_mistake_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(path, ["--no-such-option"], monkeypatch) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert (line.startswith("error: ") and "--no-such-option" in line) or "required" in line
    assert "; allowed: " in line and line.endswith(" --help says more")


@pytest.mark.parametrize(
    ("script", "arguments", "begins"),
    [
        ("explain.py", ["--rows", "3"], "error: the following arguments are required: CONFIG; allowed: "),
        ("doctor.py", ["--platform", "tpu"], "error: argument --platform: invalid choice: 'tpu' (choose from "),
        ("checkpoint.py", ["export", "run"], "error: the following arguments are required: --output; allowed: "),
    ],
)
def test_the_line_names_the_argument(
    script: str, arguments: list[str], begins: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(ROOT / "scripts" / script, arguments, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(begins) and f"{Path(script).name} --help" in line.replace("export ", "")


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("explain.py", ["--config", "a.yaml", "--rows", "x"], "--rows: 'x'; allowed: an integer >= 0"),
        ("launch.py", ["-n", "x", "--", "true"], "-n/--procs: 'x'; allowed: an integer >= 1 and <= 100000"),
        ("virtual_hosts.py", ["-n", "65"], "-n/--hosts: 65; allowed: an integer >= 1 and <= 64"),
        ("doctor.py", ["--simulated", "0"], "--simulated: 0; allowed: an integer >= 1 and <= 512"),
        ("doctor.py", ["--port", "99999"], "--port: 99999; allowed: an integer >= 1 and <= 65535"),
        ("doctor.py", ["--mib", "nan"], "--mib: nan; allowed: a number > 0 and <= 65536"),
        ("plan.py", ["quickstart", "--hosts", "-1"], "--hosts: -1; allowed: an integer >= 1 and <= 1000000"),
        ("plan.py", ["quickstart", "--hlo", "x"], "--hlo: has no effect without --compile; add it"),
        ("plan.py", ["quickstart", "--compile", "--quick"], "--quick: has no effect with --compile; leave one of the "),
        ("launch.py", ["-n", "2", "jaxdist", "train"], "command: 'jaxdist' has no -- before it; allowed: OPTIONS -- "),
        (
            "launch.py",
            ["-n", "1", "--log-dir", "sh", "sh", "a"],
            "command: 'sh' has no -- before it; allowed: OPTIONS -- COMMAND; write launch.py -n 1 --log-dir sh -- sh a",
        ),
        ("virtual_hosts.py", ["-n", "2", "sh", "-c", "a b"], "command: 'sh' has no -- before it"),
        ("checkpoint.py", ["average", "x", "--output", "y", "--last", "0"], "--last: 0; allowed: an integer >= 1"),
        ("bench/kills.py", ["--layouts", "three"], "--layouts: three; allowed: one, two"),
        ("bench/step.py", ["--steps", "0"], "--steps: 0; allowed: an integer >= 1"),
        ("bench/step.py", ["--json", "no/x"], "--json: 'no/x': its folder does not exist; "),
    ],
)
def test_what_an_option_may_be_is_told_before_the_work(
    script: str, arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(ROOT / "scripts" / script, arguments, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {told}")


def test_a_command_without_its_dashes_is_shown_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--ray"]):
        assert launch(["-n", "2", *more, "jaxdist", "train", "my runs.yaml"]) == 2
        meant = " ".join(["write jaxdist launch -n 2", *more, "-- jaxdist train 'my runs.yaml'"])
        assert capsys.readouterr().err.endswith(f"; {meant}\n")


def test_local_sgd_is_measured_from_any_folder_with_settings_in_any_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = load_module(ROOT / "scripts" / "bench" / "local_sgd.py")
    runs: list[list[str]] = []
    monkeypatch.setattr(script, "train", lambda overrides: runs.append(overrides) or {"eval/loss": 1.0})
    words = [
        "losses",
        "train.steps=8",
        "--every",
        "2",
        "3",
        "train.seed=1",
        "--outer",
        "sgd",
        "model.width=8",
        "--seeds",
    ]
    monkeypatch.setattr(sys, "argv", ["local_sgd.py", *words, "1"])
    assert script.main() == 0
    assert "| H=3, sgd, lr 1 |" in capsys.readouterr().out
    assert len(runs) == 4
    for overrides in runs:
        assert {"train.steps=8", "train.seed=1", "model.width=8", "train.eval_every=600"} <= set(overrides)
    assert script.parameters([]) == 842496
