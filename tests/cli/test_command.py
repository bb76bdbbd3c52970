"""The command `jaxdist`: its table, its helps, names of configurations, completion, a new project."""

import argparse
import io
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import child
import pytest

from jaxdist.cli.completion import SCRIPTS, candidates
from jaxdist.cli.main import COMMANDS, main
from jaxdist.config.arguments import output_file, output_folder
from jaxdist.config.load import load_config
from jaxdist.config.resolve import unused_gpus
from jaxdist.config.shipped import about, find_budget, find_config, shipped
from jaxdist.errors import UserError


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    return (status, *capsys.readouterr())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_ends_with_two_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said([name, "--help"], capsys)
    examples = out.partition("\nexamples:\n")[2].splitlines()
    assert status == 0 and out.startswith(f"usage: jaxdist {name} ")
    assert len(examples) == 2 and all(f"jaxdist {name}" in line for line in examples), out


@pytest.mark.parametrize("name", [*COMMANDS, "lab data-parallel"])
def test_every_option_has_a_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda parser, file=None: parsers.append(parser))
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    for action in parsers[0]._actions:
        inner = action.choices.values() if isinstance(action, argparse._SubParsersAction) else ()
        for each in (action, *(each for parser in inner for each in parser._actions)):
            assert each.help, each
            assert each.type not in (int, float), f"{each}: unchecked; jaxdist.config.arguments has types"


BAD_FILES = {
    "there": "is a folder; allowed: a file, as ",
    "gone/x.svg": "its folder does not exist; ",
    "file/x.svg": "its folder does not exist; ",
    "~nobody-of-this-name/x.svg": "Could not determine home directory; allowed: a path",
}
WRITES = {
    "explain quickstart": ("--json", "--plot", "--timeline", "--write-budget"),
    "plan quickstart": ("--json", "--hlo"),
    "doctor": ("--plot",),
    "bench quickstart": ("--json",),
    "eval .": ("--json",),
    "calibrate quickstart": ("--out",),
    "cost": ("--json",),
    "report .": ("--output",),
    "lab data-parallel": ("--json",),
}


@pytest.mark.parametrize(("command", "option"), [(name, each) for name, options in WRITES.items() for each in options])
def test_a_file_that_cannot_be_written_is_told_before_the_work(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("file").touch()
    for path, words in BAD_FILES.items():
        status, out, err = said([*command.split(), option, path], capsys)
        assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(f"error: {option}: '{path}': {words}")
    if option in ("--plot", "--timeline"):
        status, _, err = said([*command.split(), option, "x.txt"], capsys)
        assert status == 2 and "allowed: names that end in .png, " in err
    assert {path.name for path in tmp_path.iterdir()} == {"there", "file"}


@pytest.mark.parametrize(
    "command",
    ["plan quickstart --out", "data x --out", "checkpoint export x --output", "checkpoint average x --last 1 --output"],
)
def test_a_folder_below_a_file_is_told_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    status, out, err = said([*command.split(), str(tmp_path / "file" / "x")], capsys)
    assert (status, out, err.count("\n")) == (2, "", 1) and f"{tmp_path / 'file'} is a file; allowed: a folder" in err


def test_what_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for kind, name in ((output_file, "file"), (output_file, "new"), (output_folder, "new/below")):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written; allowed: a f[a-z]+ that"):
            kind(str(tmp_path / name))


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["doctor", "--help"], ["plan", "--help"]])
def test_help_is_quick_and_starts_no_jax(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom jaxdist.cli.main import main\n"
        f"try:\n    main({arguments})\nexcept SystemExit:\n    pass\n"
        "print('jax' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], env=child.environment(), capture_output=True, text=True)
    after = os.times()
    assert done.stderr.split() == ["False", "False"], done.stderr
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < (0.3 if arguments == ["--help"] else 1.0)


def test_the_package_runs_as_the_command() -> None:
    """`python -m jaxdist` prints and returns what the command does."""
    for arguments, status in ((["--help"], 0), (["trian"], 2)):
        ways = ["-m", "jaxdist"], ["-c", "import sys; from jaxdist.cli.main import main; sys.exit(main())"]
        ended = [
            subprocess.run([sys.executable, *way, *arguments], env=child.environment(), capture_output=True, text=True)
            for way in ways
        ]
        assert [each.returncode for each in ended] == [status, status]
        assert ended[0].stdout == ended[1].stdout and ended[0].stderr == ended[1].stderr
        assert bool(ended[0].stdout) == (status == 0)


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(["trian"], capsys)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: trian: unknown command; ") and err.endswith("did you mean jaxdist train?\n")


def test_configurations_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {path.stem for path in (child.ROOT / "configs").glob("*.yaml")} == set(shipped())
    assert all(len(about(path)) > 10 and not about(path).endswith(":") for path in shipped().values())
    assert load_config(find_config("quickstart")).train.steps == 160
    with pytest.raises(UserError, match="'quikstart' is neither a file .* did you mean quickstart"):
        find_config("quikstart")
    (tmp_path / "quickstart").write_text("model: {layers: 1}\n")
    assert find_config("quickstart") == "quickstart"  # a file is meant before a name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "are required: CONFIG"), (["train.steps=3"], "are required: CONFIG"), (["quikstart"], "did you mean")],
)
def test_train_without_a_configuration(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = said(["train", *arguments], capsys)
    assert status == 2 and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["tr"], ["train"]),
        (["train", "quick"], ["quickstart"]),
        (["train", "quickstart", "optimizer.warm"], ["optimizer.warmup_steps="]),
        (["train", "quickstart", "parallel.grad_sync.alg"], ["parallel.grad_sync.algorithm="]),
        (["explain", "--budg"], ["--budget"]),
        (["eval", "quick"], []),
        (["eval", "runs/a", "data.val"], ["data.val_path="]),
        (["launch", "-n", "2", "--", "jaxdist", "train", "quick"], ["quickstart"]),
        (["no-such-command", ""], []),
    ],
)
def test_completion(words: list[str], found: list[str]) -> None:
    assert candidates(words) == found


@pytest.mark.parametrize("shell", list(SCRIPTS))
def test_scripts_of_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(["completion", shell], capsys)
    assert status == 0 and "jaxdist completion words --" in out
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=out, text=True).returncode == 0


def test_bash_completes(tmp_path: Path) -> None:
    command = tmp_path / "jaxdist"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jaxdist.cli.main "$@"\n')
    command.chmod(0o755)
    code = SCRIPTS["bash"] + "COMP_WORDS=(jaxdist train quick) COMP_CWORD=2; _jaxdist; echo ${COMPREPLY[*]}"
    environ = child.environment() | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["quickstart"]


def test_init_writes_a_project(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my-project"
    assert said(["init", str(folder)], capsys)[0] == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "model.py", "README.md", "slurm.sbatch", ".gitignore"}
    recipe = (folder / "slurm.sbatch").read_text()
    assert 'jaxdist train "${CONFIG:-config.yaml}" --run-dir "$run_dir" "$@"' in recipe and "scripts/" not in recipe
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    assert load_config("config.yaml").model.name == "model.make"
    monkeypatch.delitem(sys.modules, "model", raising=False)
    status, out, err = said(["init", str(folder)], capsys)
    assert (status, out, err.count("\n")) == (2, "", 1) and "exists and is not empty" in err


def test_gpus_without_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdist.config.resolve.GPU_PLUGINS", ())
    assert unused_gpus(tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    assert "pip install 'jaxdist[cuda13]'" in str(unused_gpus(tmp_path))
    monkeypatch.setattr("jaxdist.config.resolve.GPU_PLUGINS", ("json",))  # any module that is there
    assert unused_gpus(tmp_path) is None


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment(tmp_path: Path) -> None:
    """All of it is in the wheel; `.ci/run` also trains from it."""
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    made = subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(child.ROOT)], capture_output=True)
    if made.returncode:
        pytest.skip(f"SKIPPED: no wheel can be built here (an index?): {made.stderr.decode()[-300:]}")
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "-q", "install", "--no-deps", wheel, "PyYAML"], check=True)
    environ = {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}"}
    run = {"cwd": tmp_path, "env": environ, "capture_output": True, "text": True, "check": True}
    listed = subprocess.run(["jaxdist", "train", "--list"], **run).stdout  # type: ignore[call-overload]
    assert {line.split()[0] for line in listed.splitlines()} == set(shipped())
    assert "my-project" in subprocess.run(["jaxdist", "init", "my-project"], **run).stdout  # type: ignore[call-overload]


@pytest.mark.parametrize("word", ["cost", "--help"])
def test_output_that_nobody_reads_ends_a_command_in_silence(word: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jaxdist", word]
    ran = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=child.environment(), check=False)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (128 + 13, "")


def test_a_broken_pipe_of_something_else_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(argv: list[str], prog: str) -> int:
        raise BrokenPipeError("a socket")

    monkeypatch.setattr("jaxdist.cli.cost.main", broken)
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(BrokenPipeError, match="a socket"):
            main(["cost"])


@pytest.mark.parametrize("words", [["cost"], ["--help"], ["--version"]])
def test_a_closed_output_is_no_mistake(words: list[str]) -> None:
    command = f'exec "{sys.executable}" -m jaxdist {" ".join(words)} >&-'
    ran = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, env=child.environment(), check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_budgets_have_names() -> None:
    assert Path(find_budget("quickstart")).name == "quickstart.json"
    assert find_budget("folder/quickstart") == "folder/quickstart"
    with pytest.raises(UserError, match=r"--budget: 'quickstrt' is neither .*; did you mean quickstart\?"):
        find_budget("quickstrt")


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxdist.cli.main._run", interrupted)
    assert main(["plan"]) == 130  # as shells say of SIGINT
