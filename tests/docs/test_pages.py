"""README and the pages of docs: each block is a program, a command, or text that a test compares; links lead somewhere;
README is short."""

import ast
import io
import itertools
import re
import tempfile
from contextlib import nullcontext, redirect_stdout, suppress
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from pages import PAGES, blocks, command_of, lines_of
from syntax import EXAMPLES, ROOT, TESTS

from jaxdist.cli.main import COMMANDS, main
from jaxdist.config.load import load_config
from jaxdist.config.reader import read_config
from jaxdist.config.schema import Config
from jaxdist.config.shipped import find_config
from jaxdist.errors import UserError

SCRIPTS = {"prepare_data": "data", "virtual_hosts": "lab"}  # scripts/NAME.py is `jaxdist NAME`, but for these
# What a block begins with, and the test that runs it or compares it.
TESTED = {
    "python3 -m venv .venv": "test_readme_holds_the_two_commands_that_ci_runs",
    "run        runs/quickstart-": "test_the_header_of_the_quickstart",
    "$ python scripts/train.py --config configs/quickstart.yaml mesh.tensor=3": "test_a_mistake_is_answered",
    "$ python scripts/explain.py --config configs/llama_8b": "test_the_ledger_of_1024_devices",
    "jaxdist/\n": "test_repository",
    "   batch, state (global": "test_the_architecture_is_that_of_the_code",
    "deterministic\n": "test_the_example_prints_what_readme_shows",
    "$ python scripts/bench/kills.py": "test_nothing_is_lost_by_200_kills",
    "$ python scripts/prepare_data.py": "test_the_command",
    "$ python scripts/checkpoint.py ls": "test_the_command_line",
    "$ python scripts/explain.py --config configs/quickstart.yaml --remedies": "test_ranked_refused_and_shown",
    "$ python scripts/train.py --config configs/vit_digits.yaml": "test_digits_are_learned",
    "model      bert (mlm)": "test_a_small_bert_learns",
    "variables = module.init(": "test_a_model_trains_is_saved_and_resumed",
    "params, static = eqx.partition(": "test_a_model_trains_is_saved_and_resumed",
    "configs/launch/ssh.sh": "test_plain_hosts_by_ssh",
    "HOSTS=host0:1": "test_open_mpi",
    "sbatch configs/launch": "test_sbatch",
    "for rank in 0 1 2 3": "test_job_in_the_environment",
    "warning: checkpoint of step 6 is damaged": "test_none_is_left",
    "resumed    after step 400": "test_what_was_changed_is_shown",
    "no step for 60 s": "test_a_watch_says_now_and_then_where_the_ranks_are",
    "stuck: rank 1": "test_lines_name_rank_phase_step_and_time",
    "stopped: corrupt state": "test_a_corrupt_state_is_not_saved_and_ends_the_run",
    "error: optimizer.lr: 0.02 on rank 3": "test_a_difference_is_one_line_with_the_odd_rank_and_both_values",
    "def load(where, source": "test_the_page_shows_the_examples",
    "cd docs/examples": "test_the_example_of_a_configuration_is_a_model",
    **dict.fromkeys(("$ jaxdist init my-job", "$ ls my-job", "$ cd my-job &&"), "test_a_tutorial_prints_what_it_shows"),
    **dict.fromkeys(('{"messages": [{"role"', "$ jaxdist data examples.jsonl"), "test_the_page_shows_these_examples"),
    **dict.fromkeys(
        ("W=3 K=1: ", "for compute in", "0.4 s of comp"), "test_the_page_of_parameter_servers_prints_what_it_shows"
    ),
    "from jaxdist.config.sections.moe import MoEConfig": "test_the_page_shows_a_block_that_works",
    "error: checkpoint of step 4 is of format 2": "test_a_newer_format_is_no_damage",
    "error: --run-dir: 'runs/a' belongs to": "test_one_run_at_a_time",
    "warning: checkpoint of step 200 was": "test_a_run_goes_on_after_a_failed_save",
    "failed: checkpoint of step 600": "test_a_run_goes_on_after_a_failed_save",
    "error: train.seed: 1, but": "test_the_page_shows_what_is_said_of_another_seed",
    "error: checkpoint of step 4: params": "test_what_cannot_work_is_not_forced",
    "error: data.chat_template: the": "test_a_template_that_loops_is_ended",
    "error: data.path: 'data/python/train.bin'": "test_damage_is_found",
    "waited for data 94%": "test_a_run_on_prepared_documents_that_waits_for_them",
    "error: roll call: 10.0.0.7:29500": "test_a_wrong_token_is_one_line_on_both_sides",
    "step 3: grad_norm of step 3 is nan": "test_what_is_not_finite_is_skipped_and_named",
    "error: --nnodes: 3 hosts with": "test_too_few_hosts_are_one_line",
    "$ jaxdist train quickstart model.width=256": "test_the_command_of_a_run_that_fits",
    "class Numbers:": "test_a_model_and_samples_of_ones_own_from_a_configuration",
    "# my_package/models.py\ndef tower(": "test_a_model_and_samples_of_ones_own_from_a_configuration",
    "# my_package/models.py\nfrom dataclasses": "test_a_key_of_its_own",
    "FACTS = ScheduleFacts(": "test_facts_of_a_schedule",
    "def loss(params, batch, keys):\n    student": "test_a_teacher_in_a_loss_of_ones_own",
    "import jax\nimport optax\n\nimport jaxdist\nfrom jaxdist.data.text": "test_generation_from_python",
    "import jax\nimport optax\n\nimport jaxdist\nfrom jaxdist.models.gpt": "test_a_long_context_from_python",
    "model = jaxdist.model_def(GPT, tied=True)\ntrain(": "test_a_pipeline_of_ones_own_blocks",
    "from jaxdist.collectives import Link, cost\n": "test_the_page_of_parameter_servers_prints_what_it_shows",
    "$ python docs/examples/bert_lines.py": "test_the_classifier_of_lines_prints_what_the_page_shows",
    "(umask 077;": "test_a_file_is_a_token_and_a_strange_file_none",
}
WHOLE = {  # pages whose blocks one test runs
    "docs/costs.md": "test_the_page_shows_what_jaxdist_cost_prints",
    "docs/data_parallel.md": "test_the_page_shows_what_lab_data_parallel_prints",
    "docs/collectives.md": "test_the_programs_on_the_page_run",
    "docs/pipeline.md": "test_the_page_shows_what_is_printed",
    "docs/verify.md": "test_the_page_shows_what_verify_prints",
    "docs/tutorials/fine_tune.md": "test_a_tutorial_prints_what_it_shows",
    "docs/tutorials/first_run.md": "test_a_tutorial_prints_what_it_shows",
    "docs/tutorials/own_model.md": "test_a_tutorial_prints_what_it_shows",
    "docs/tutorials/read_the_ledger.md": "test_a_tutorial_prints_what_it_shows",
}
UNTRIED = ("kubectl create secret",)  # no test runs this: it needs a cluster


@cache
def options(*names: str) -> str:
    """What `jaxdist NAME --help` prints, or that of one of its parts."""
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        main([*names, "--help"])
    return printed.getvalue()


def check_command(words: list[str]) -> None:
    """A command of jaxdist or of scripts: it is there, takes the options, and its configuration holds."""
    words = [word for word in words if word not in ("sudo", "srun")]
    if words[0] == "jaxdist":
        name, rest = words[1], words[2:]
    elif words[1:2] and words[1].startswith(("scripts/", "docs/")):
        assert (ROOT / words[1]).is_file(), words
        path, rest = Path(words[1]), words[2:]
        if path.parent.as_posix() != "scripts":
            return
        name = SCRIPTS.get(path.stem, path.stem)
    else:
        assert words[:3] == ["python", "-m", "pip"], words
        return
    assert name in COMMANDS, words
    own = [*itertools.takewhile(lambda word: word != "--", rest)]
    parts = name in ("checkpoint", "lab") and not rest[0].startswith("-")  # a command of its own
    said = options(name, *rest[:parts])
    assert all(re.search(rf"(?<![\w-]){word}\b", said) for word in own if word.startswith("-")), (own, said)
    if name == "train" and "--list" not in own:
        first = own[own.index("--config") + 1] if "--config" in own else own[0]
        overrides = [word.replace("my/texts", str(ROOT / "docs")) for word in own if "=" in word]
        if first.startswith("configs/") or not first.endswith((".yaml", "FILE")):
            load_config(find_config(first), overrides, planned="mesh.data=-1" not in own)
    if other := rest[len(own) + 1 :]:
        check_command(other)


def check_settings(text: str) -> None:
    """Raises `UserError` for a key that there is not, and for a value that its key does not allow."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        read_config(Config, file.name, ())


def kind_of(page: str, text: str) -> str:
    """How a block is held, which is checked here; "" for one that is not."""
    if text.strip().startswith('"""') or page.startswith("README"):
        if any(text in (ROOT / path).read_text(encoding="utf-8") for path in EXAMPLES):
            return "file"
    if page in WHOLE or any(text.startswith(start) for start in TESTED):
        with suppress(UserError) if "\nerror: " in text else nullcontext():  # a mistake is what it shows
            for line in lines_of(text):
                if line.startswith("$ ") and (words := command_of(line[2:])):
                    check_command(words)
        return "tested"
    if text.startswith(UNTRIED):
        return "untried"
    lines = lines_of(text)
    if all(map(command_of, lines)):
        for line in lines:
            check_command(command_of(line))
        return "commands"
    with suppress(yaml.YAMLError):
        given = yaml.safe_load(text)
        if isinstance(given, dict) and all(hasattr(Config(), key) for key in given):
            if "my_package." not in text:  # a reader's own, whose keys are not known here
                check_settings(text)
            return "settings"
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_held(page: str) -> None:
    free = [text for text in blocks(page) if not kind_of(page, text)]
    assert not free, "\n---\n".join(free)


@pytest.mark.parametrize("page", ["README.md", "docs/expectations.md"])
def test_commands_in_tables_are_understood(page: str) -> None:
    rows = re.findall(r"^\|.*", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    commands = [words for row in rows for code in re.findall(r"`([^`]+)`", row) if (words := command_of(code))]
    assert len(commands) > 6
    for words in commands:
        with pytest.raises(UserError) if "mesh.tensor=3" in words else nullcontext():  # which shows the message
            check_command(words)


def test_all_expectations_are_answered() -> None:
    """25 and 10 rows, each with a key, a command or a page; the keys are there."""
    text = (ROOT / "docs" / "expectations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [*range(1, 26), *range(1, 11)]
    assert [number for number, answer in rows if "`" not in answer and "](" not in answer] == []
    sections = "|".join(vars(Config()))
    keys = re.findall(rf"`((?:{sections})\.[\w.]+)", "".join(answer for _, answer in rows))
    assert len(keys) > 8
    for key in keys:
        attrgetter(key)(Config())


def test_the_tests_that_hold_blocks_are_there() -> None:
    defined = {
        node.name
        for path in TESTS
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert {*TESTED.values(), *WHOLE.values()} <= defined, {*TESTED.values(), *WHOLE.values()} - defined
    every = [text for page in PAGES for text in blocks(page)]
    assert [start for start in (*TESTED, *UNTRIED) if not any(text.startswith(start) for text in every)] == []


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    wrong = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_headings_skip_no_level(page: str) -> None:
    """The site does not build from a page that has a heading of level 3 right below one of level 1."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1200


def test_readme_in_korean_says_the_same() -> None:
    """Blocks, links and the order of the headings' levels are those of README."""
    ours, theirs = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "README.ko.md"))
    assert blocks("README.md") == blocks("README.ko.md")
    outside = [re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL) for text in (ours, theirs)]
    links = [re.findall(r"\]\(([^)\s]+)\)", text) for text in outside]
    assert sorted(links[0][1:]) == sorted(links[1][1:]) and links[0][0] == "README.ko.md" and links[1][0] == "README.md"
    for pattern in (r"^#+ ", r"^\|", r"`[^`\n]+`"):
        found = [sorted(re.findall(pattern, text, re.MULTILINE)) for text in outside]
        assert found[0] == found[1], pattern
    assert len(re.findall(r"[가-힣]", theirs)) > 1000
