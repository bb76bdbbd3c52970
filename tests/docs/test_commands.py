"""The commands on the pages run: those that a laptop runs in seconds, in order, in one folder. The others stand in a
table, by the reason why they do not."""

import contextlib
import functools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import child
import pytest
from levels import others_slow
from pages import PAGES, blocks, command_of, lines_of

# Added to what trains, so that it takes seconds: the pages train longer, or a larger model.
TINY = "model.layers=2 model.width=32"
SMALL = f"train.steps=2 train.eval_every=0 train.sample_tokens=0 {TINY} data.global_batch=8"
SHORT = "train.steps=2 train.eval_every=0 train.sample_tokens=0"  # where the model is given
# {page: [(a command, or its beginning; what is added)]}, in the order in which they run: later ones use earlier files.
RUN: dict[str, list[tuple[str, str]]] = {
    "README.md": [
        ("jaxdist train quickstart mesh.data=1 mesh.fsdp=4 mesh.tensor=2", f"--run-dir runs/c {SMALL}"),
        ("jaxdist train quickstart --run-dir runs/a", SMALL),
        ('jaxdist generate runs/a --prompt "def "', "--max-tokens 4"),
        ("jaxdist init my-project", ""),
    ],
    "docs/report.md": [
        ("jaxdist report runs/NAME   ", ""),
        ("jaxdist report runs/a runs/b --output both.html", ""),
        ("jaxdist report runs/NAME --remedies", ""),
    ],
    "docs/pipeline.md": [
        (
            "python scripts/train.py --config configs/quickstart.yaml mesh.pipe=4",
            f"{SMALL} model.layers=4 data.global_batch=16",
        )
    ],
    "docs/compiler.md": [("python scripts/train.py --config configs/quickstart.yaml mesh.data=1", SMALL)],
    "docs/watching.md": [("jaxdist eval runs/mine  ", ""), ("jaxdist eval runs/mine --all", "")],
    "docs/generation.md": [('jaxdist generate runs/mine --prompt "import " --max-tokens 200', "--max-tokens 4")],
    "docs/finetuning.md": [
        ("jaxdist train quickstart --run-dir runs/base train.steps=40", SMALL),
        ("jaxdist checkpoint export runs/base --output models/base", ""),
        ("jaxdist train tune.yaml --run-dir runs/tuned", SHORT),
        ("jaxdist explain --config configs/quickstart.yaml optimizer.name=adamw optimizer.lora.rank=8", ""),
    ],
    "docs/install.md": [("jaxdist doctor", "")],
    "docs/costs.md": [("jaxdist cost --model vit-huge", ""), ("jaxdist cost --size 1.5GB", "")],
    "docs/long_context.md": [
        ("jaxdist train quickstart mesh=", SMALL),
        ("jaxdist train long_context", f"{SHORT} data.seq_len=64"),
    ],
    "docs/experts.md": [("jaxdist train moe_quickstart", f"{SMALL} model.moe.hidden=16")],
    "docs/local_sgd.md": [("jaxdist train quickstart mesh=", SMALL)],
    "docs/planner.md": [
        ("jaxdist plan llama_7b_h200", "--quick"),  # its ten traces take a minute
        ("jaxdist launch -n 2 -- jaxdist calibrate", f"--link 400gbit {TINY}"),
        ("jaxdist plan my.yaml", TINY),
    ],
    "docs/verify.md": [("jaxdist verify quickstart model.layers=2", ""), ("jaxdist verify quickstart mesh.pipe=2", "")],
    "docs/bert.md": [("python scripts/train.py --config configs/bert_stdlib.yaml", SMALL)],
    "docs/distillation.md": [
        ("jaxdist train distill_quickstart model.width=128", SHORT),
        ("jaxdist train distill_quickstart distill.teacher=runs/teacher", SHORT),
        ("jaxdist distill distill_quickstart", "train.steps=2"),
        ("jaxdist train distill_quickstart distill.cache=runs/logits", f"{SHORT} --run-dir runs/student2"),
    ],
    "docs/own_loss.md": [
        ("python scripts/train.py --config configs/resnet_digits.yaml", "train.steps=2 train.eval_every=0")
    ],
    "docs/elastic.md": [
        ("jaxdist elastic quickstart", f"train.steps=20 {TINY} data.global_batch=8"),
        ("jaxdist replay runs/elastic", ""),
    ],
    "docs/parameter_server.md": [("jaxdist explain quickstart parallel.strategy=zero1", "")],
    "docs/course/README.md": [
        ("python docs/course/04_ring.py --picture ring.svg", ""),
        ("python docs/course/check.py 4 ANSWER", ""),
    ],
    "docs/performance.md": [
        ("jaxdist bench quickstart --steps 10 --with ", f"--steps 2 {SMALL}"),
        ("python scripts/bench/gpu_suite.py", "--tiny --parts agree"),
    ],
}
# {page: the page whose runs its commands use}
AFTER = dict.fromkeys(("docs/report.md", "docs/generation.md", "docs/watching.md"), "README.md")
# {why: the beginnings of commands, with their pages}
NOT_RUN = {
    "the same as another line of this file": [
        ("README.md", "jaxdist train quickstart  "),
        ("docs/install.md", "jaxdist train quickstart"),
        ("docs/course/README.md", "python docs/course/04_ring.py  "),
        ("docs/multihost.md", "python scripts/doctor.py  "),
        ("docs/multihost.md", "python scripts/train.py --config configs/quickstart.yaml"),
        ("docs/multihost.md", "python scripts/launch.py -n 4 -- python scripts/train.py"),
    ],
    "a tutorial runs the same, with fewer processes or with files that are there": [
        ("README.md", "jaxdist launch -n 4 -- jaxdist train quickstart"),
        ("README.md", "jaxdist train my.yaml model.from=qwen"),
        ("docs/finetuning.md", "jaxdist data talks.jsonl"),
        ("docs/finetuning.md", "jaxdist checkpoint export runs/mine --adapter"),
        ("docs/finetuning.md", "jaxdist checkpoint export runs/mine --merged"),
    ],
    "it needs a model that is not there": [
        ("docs/generation.md", "jaxdist generate runs/mine/checkpoints/300"),
        ("docs/generation.md", "jaxdist generate hf/llama"),
    ],
    "it needs several hosts": [
        ("docs/multihost.md", "srun python scripts/doctor.py"),
        ("docs/multihost.md", "python scripts/launch.py -n 1 --nnodes 2"),
        ("docs/tutorials/several_hosts.md", "jaxdist launch -n 8 --nnodes 2"),
        ("docs/tutorials/several_hosts.md", "jaxdist launch -n 8 --nnodes 2"),
    ],
    "it needs the right to make network namespaces": [
        ("docs/multihost.md", "sudo python scripts/virtual_hosts.py"),
        ("docs/parameter_server.md", "sudo python scripts/bench/parameter_server.py"),
        ("docs/slow_links.md", "python scripts/bench/slow_links.py"),
        ("docs/local_sgd.md", "sudo python scripts/bench/local_sgd.py hosts"),
    ],
    "it installs packages, or needs some that are not in the extra `test`": [
        ("docs/course/README.md", "python -m pip install jupytext"),
        ("docs/course/README.md", "python scripts/docs/course.py"),
        ("docs/performance.md", "python -m pip install"),
        ("docs/performance.md", "python scripts/bench/gloo.py"),
        ("docs/plan.md", "python -m pip install"),
        ("docs/plan.md", "python scripts/plan.py --compile --gpu h200"),
        ("docs/experts.md", "jaxdist plan --compile --gpu h200"),
    ],
    "it needs Ray on several hosts, or installs it": [
        ("docs/elastic.md", "python -m pip install"),
        ("docs/elastic.md", "RAY_ADDRESS="),
        ("docs/ray.md", "jaxdist launch --ray"),
    ],
    "it takes minutes": [
        ("docs/local_sgd.md", "python scripts/bench/local_sgd.py losses"),
        ("docs/experts.md", "python scripts/bench/experts.py"),
    ],
    "it needs the GPUs that were planned": [("docs/planner.md", "jaxdist train plan/plan.yaml")],
    "FILE is any configuration": [("docs/compiler.md", "python scripts/train.py --config FILE")],
}
IN_PLACE = {
    "my.yaml": "configs/quickstart.yaml",
    "runs/NAME": "runs/a",
    "runs/b": "runs/c",
    "runs/mine": "runs/a",
    "my/texts": "docs",
    "ANSWER": "322.5",
}


def commands() -> list[tuple[str, str]]:
    """(page, command) of the blocks that are commands alone: those with output are compared by the tests of TESTED. The
    Korean README has the same ones."""
    pages = [page for page in PAGES if page != "README.ko.md"]
    return [
        (page, line)
        for page in pages
        for block in blocks(page)
        if all(map(command_of, lines_of(block)))
        for line in lines_of(block)
    ]


def test_every_command_is_run_or_has_a_reason() -> None:
    every = commands()
    listed = [(page, start) for page, lines in RUN.items() for start, _ in lines]
    listed += [entry for entries in NOT_RUN.values() for entry in entries]
    of = {entry: [line for page, line in every if page == entry[0] and line.startswith(entry[1])] for entry in listed}
    assert [entry for entry, lines in of.items() if not lines] == [], "these stand on no page any more"
    known = {(entry[0], line) for entry, lines in of.items() for line in lines}
    assert [each for each in every if each not in known] == [], "a line of RUN or of NOT_RUN is missing for these"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout to the commands, with the file that docs/finetuning.md asks to write."""
    made = tmp_path_factory.mktemp("commands")
    for name in ("docs", "scripts", "configs"):
        (made / name).symlink_to(child.ROOT / name)
    [tune] = [text for text in blocks("docs/finetuning.md") if text.startswith("model:\n  from: models/base")]
    (made / "tune.yaml").write_text(tune.replace("my/texts", IN_PLACE["my/texts"]), encoding="utf-8")
    programs = made / "bin"
    programs.mkdir()
    for name, words in (("jaxdist", "-m jaxdist "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    return made


@pytest.fixture(scope="module")
def run_page(folder: Path) -> Callable[[str], list[int]]:
    """Run the commands of a page, after those of the page whose files they use; once, if they succeed. Gives their exit
    statuses."""
    environment = child.environment() | child.QUICK
    environment["PATH"] = os.pathsep.join([str(folder / "bin"), environment["PATH"]])

    @functools.cache
    def run(page: str) -> list[int]:
        statuses = []
        if page in AFTER:
            run(AFTER[page])
        for start, more in RUN[page]:
            [line] = {line for each, line in commands() if each == page and line.startswith(start)}
            for name, place in IN_PLACE.items():
                line = line.replace(name, place)
            line = f"{shlex.join(shlex.split(line, comments=True))} {more}"
            shell = ["bash", "-c", line]
            ran = subprocess.run(
                shell, capture_output=True, text=True, cwd=folder, env=environment, timeout=300, check=False
            )
            assert ran.returncode == 0, f"{line}\n{ran.stdout}\n{ran.stderr}"
            assert "Traceback" not in ran.stderr
            statuses.append(ran.returncode)
        return statuses

    return run


@pytest.mark.slow
@pytest.mark.xdist_group("commands of pages")
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(page: str, run_page: Callable[[str], list[int]]) -> None:
    if page == "docs/elastic.md":
        pytest.importorskip("ray", reason="the extra elastic is not installed")
    assert run_page(page) == [0] * len(RUN[page])


# {(page, a command in a table): (what is added, its exit status, what it prints)}, as far as seconds show the claim.
IN_TABLES = {
    ("docs/expectations.md", "jaxdist launch -n 2 -- jaxdist train quickstart"): (SMALL, 0, "4 devices each"),
    ("docs/expectations.md", "jaxdist train quickstart mesh.tensor=3"): ("", 2, "these fit"),
    ("docs/expectations.md", "jaxdist explain llama_8b_fsdp"): ("", 0, "1024"),
    ("docs/expectations.md", "jaxdist explain quickstart --parameters"): ("", 0, "layer and zero3"),
    ("docs/expectations.md", "jaxdist explain quickstart --budget quickstart"): ("", 0, "all_gather"),
    ("README.md", "jaxdist explain quickstart --budget quickstart"): ("parallel.strategy=zero2", 1, "over budget: "),
    ("README.md", "jaxdist verify quickstart"): (f"{TINY} data.global_batch=16 data.seq_len=32", 0, "clean"),
}
# Two processes with several devices each: where they run out of threads, they hang, and only some compilers show it.
EVERYDAY = ("docs/expectations.md", "jaxdist launch -n 2 -- jaxdist train quickstart")


@pytest.mark.parametrize(("page", "command"), others_slow(IN_TABLES, EVERYDAY))
def test_a_command_of_a_table_runs(page: str, command: str, tmp_path: Path) -> None:
    assert f"`{command}`" in (child.ROOT / page).read_text(encoding="utf-8")
    more, status, said = IN_TABLES[page, command]
    line = f"{command} {more}".replace("jaxdist", f"{shlex.quote(sys.executable)} -m jaxdist")
    environment = child.environment() | child.QUICK
    with subprocess.Popen(
        line,
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
    assert (process.returncode, said in output, "Traceback" in output) == (status, True, False), output
