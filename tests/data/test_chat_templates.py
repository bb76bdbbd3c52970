"""Chat templates: three that are in use, as text and as the assistant's turns; limits; those of hostile folders."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import on_page

from jaxdist.cli.data import main
from jaxdist.config.schema import DataConfig
from jaxdist.data import Samples, load_source
from jaxdist.data.text import template as limits
from jaxdist.data.text.show import show_examples
from jaxdist.data.text.template import Conversation, Renderer
from jaxdist.data.text.tokenizer import load_tokenizer
from jaxdist.errors import UserError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="jaxdist[hf] is not installed")

TALK = [
    {"role": "user", "content": "Héllo?"},
    {"role": "assistant", "content": "Yes: 1 < 2."},
    {"role": "user", "content": " And\nthen? "},
    {"role": "assistant", "content": "No."},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' +"
    " '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' +"
    " message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MARKED = (  # with blocks that say what the assistant's is, and every helper
    "{%- for message in messages %}\n  {% if loop.index > 9 %}{% break %}{% endif %}\n"
    "{{ message.role }} {{ strftime_now('%Y') }}:{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message | tojson }}{% endif %};{% endfor %}"
)
# What each gives, with ⟨ and ⟩ around the assistant's turns.
GOLDEN = {
    CHATML: "<|im_start|>user\nHéllo?<|im_end|>\n<|im_start|>assistant\n⟨Yes: 1 < 2.<|im_end|>\n⟩"
    "<|im_start|>user\n And\nthen? <|im_end|>\n<|im_start|>assistant\n⟨No.<|im_end|>\n⟩",
    LLAMA3: "<s><|start_header_id|>user<|end_header_id|>\n\nHéllo?<|eot_id|><|start_header_id|>assistant"
    "<|end_header_id|>\n\n⟨Yes: 1 < 2.<|eot_id|>⟩<|start_header_id|>user<|end_header_id|>\n\nAnd\nthen?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟨No.<|eot_id|>⟩",
    MISTRAL: "<s>[INST] Héllo? [/INST]⟨Yes: 1 < 2.</s>⟩[INST]  And\nthen?  [/INST]⟨No.</s>⟩",
    MARKED: 'user 2024:{"role": "user", "content": "Héllo?"};assistant 2024:⟨Yes: 1 < 2.⟩;'
    'user 2024:{"role": "user", "content": " And\\nthen? "};assistant 2024:⟨No.⟩;',
}
NAMES = ["chatml", "llama3", "mistral", "marked"]


def render(template: str, messages: Any = TALK, **keys: Any) -> tuple[str, list[tuple[int, int]]]:
    given = {"key": "data.chat_template", "special": SPECIAL, "day": "2024-07-26", "spans": True}
    with Renderer(template, **given | keys) as renderer:
        return renderer.render([Conversation("a.jsonl, line 7", messages)])[0]


@pytest.mark.parametrize("template", GOLDEN, ids=NAMES)
def test_text_and_turns(template: str) -> None:
    text, spans = render(template)
    assert text == GOLDEN[template].replace("⟨", "").replace("⟩", "")
    shown = text
    for begin, end in reversed(spans):
        shown = f"{shown[:begin]}⟨{shown[begin:end]}⟩{shown[end:]}"
    assert shown == GOLDEN[template]
    assert render(template, spans=False) == (text, [(0, len(text))])


@pytest.mark.parametrize("template", GOLDEN, ids=NAMES)
def test_as_transformers_does(template: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(byte_level(tmp_path)), **SPECIAL)
    keys = {"chat_template": template.replace("strftime_now('%Y')", "'2024'")}
    assert theirs.apply_chat_template(TALK, tokenize=False, **keys) == render(template)[0]
    ids = theirs.apply_chat_template(TALK, return_dict=False, **keys)
    ours = load_tokenizer(tmp_path, key="data.tokenizer")
    assert ours.encode(render(template)[0]) == ids and len(set(ids)) > 20
    if "endgeneration" in template:
        found = theirs.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True, **keys)
        (encoded,) = ours.encode_batch([render(template)[0]])
        spans = render(template)[1]
        mask = [int(any(begin <= at < end for begin, end in spans)) for at in encoded.begins]
        assert found["assistant_masks"] == mask and 0 < sum(mask) < len(mask)


def byte_level(folder: Path, template: str | None = None) -> Path:
    """A folder with a byte-level tokenizer, as GPT-2's, with special tokens and few merges."""
    package = pytest.importorskip("tokenizers", reason="jaxdist[hf] is not installed")
    blank = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = package.Tokenizer(package.models.BPE())
    model.pre_tokenizer, model.decoder = blank, package.decoders.ByteLevel()
    model.post_processor = package.processors.ByteLevel(trim_offsets=True)
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    trainer = package.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=blank.alphabet(), show_progress=False
    )
    model.train_from_iterator(["user assistant then Yes No is Paris "] * 20, trainer)
    model.save(str(folder / "tokenizer.json"))
    settings = SPECIAL | {"chat_template": template} if template else SPECIAL
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 10**30}))
    return folder / "tokenizer.json"


def test_what_marks_no_end_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_level(tmp_path, CHATML)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "{i} is", "completion": "{i}"}}\n' for i in range(40)))
    keys: dict[str, Any] = {"source": "jsonl", "path": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path)}

    def show() -> str:
        show_examples([keys["path"]], 1, tokenizer=keys["tokenizer"])
        return capsys.readouterr().out

    told = "warning: nothing marks the end of examples with prompt: tokenizer.json has no end token, which eos_token in"
    assert told not in show() and not any(told in line for line in load_source(DataConfig(**keys)).info["lines"])
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert told in show() and load_source(DataConfig(**keys)).info["lines"][-1].startswith(told)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    for read in (show, lambda: load_source(DataConfig(**keys))):
        with pytest.raises(UserError, match="eos_token is '<end>' in .* has no such token; name one that it has"):
            read()


def test_an_end_token_that_is_not_there_is_missed_where_it_is_used(tmp_path: Path) -> None:
    """A chat template writes all ends: with one that does not use the token, nothing needs it."""
    byte_level(tmp_path, CHATML)
    talks = ({"messages": [*TALK, {"role": "user", "content": str(i)}]} for i in range(9))
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in talks))
    keys = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), seq_len=128, tokenizer=str(tmp_path))
    before = load_source(keys)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": CHATML}))
    after = load_source(keys)
    assert after.info == before.info and not any("nothing marks" in line for line in after.info["lines"])
    show_examples([str(keys.path)], 1, tokenizer=str(tmp_path))
    settings = {"bos_token": "", "eos_token": "<end>", "chat_template": MISTRAL}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="eos_token is '<end>' in .* has no such token"):
        load_source(keys)


def test_a_run_learns_the_assistants_turns(tmp_path: Path) -> None:
    byte_level(tmp_path, CHATML)
    talk = tmp_path / "a.jsonl"
    talk.write_text(
        "".join(json.dumps({"messages": [*TALK, {"role": "user", "content": str(i)}]}) + "\n" for i in (1, 2))
    )
    keys: dict[str, Any] = {"source": "jsonl", "path": str(talk), "seq_len": 128, "tokenizer": str(tmp_path)}
    source = load_source(DataConfig(**keys))
    tokenizer = load_tokenizer(tmp_path, key="")
    assert isinstance(source.train, Samples) and source.vocab == tokenizer.vocab == 289
    row = {name: leaf[0] for name, leaf in source.train.read(np.arange(1)).items()}
    assert tokenizer.decode(row["targets"][row["weights"] > 0].tolist()) == "Yes: 1 < 2.<|im_end|>\nNo.<|im_end|>\n"
    every = load_source(DataConfig(**keys, completion_only=False))
    assert (
        isinstance(every.train, Samples) and every.train.read(np.arange(1))["weights"].sum() > 2 * row["weights"].sum()
    )
    (tmp_path / "own.jinja").write_text(MARKED)
    other = load_source(DataConfig(**keys, chat_template=str(tmp_path / "own.jinja")))
    row = {name: leaf[0] for name, leaf in other.train.read(np.arange(1)).items()}
    assert tokenizer.decode(row["targets"][row["weights"] > 0].tolist()) == "Yes: 1 < 2.No."
    (tmp_path / "same.jinja").write_text(CHATML + "{# #}")
    renamed = load_source(DataConfig(**keys, chat_template=str(tmp_path / "same.jinja")))
    with (tmp_path / "tokenizer.json").open("a") as file:
        file.write("\n")
    touched = load_source(DataConfig(**keys))
    assert len({each.info["sha256"] for each in (source, every, other, renamed, touched)}) == 5


def test_a_prompt_that_ends_in_a_blank(tmp_path: Path) -> None:
    """`: ` and `Paris` are encoded apart, as they are when a model continues the prompt: not as `:` and ` Paris`."""
    byte_level(tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} is: ", "completion": "Paris"}) + "\n" for i in (1, 2)))
    source = load_source(DataConfig(source="jsonl", path=str(path), seq_len=16, tokenizer=str(tmp_path)))
    tokenizer = load_tokenizer(tmp_path, key="")
    assert tokenizer.encode(": Paris") != tokenizer.encode(": ") + tokenizer.encode("Paris")
    row = {name: leaf[0] for name, leaf in source.train.read(np.arange(1)).items()}
    learned = row["targets"][row["weights"] > 0].tolist()
    assert learned == [*tokenizer.encode("Paris"), tokenizer.eos] and tokenizer.decode(learned) == "Paris</s>"


NOT_PREFIX = (
    "{% for message in messages %}{% if loop.last %}(last) {% endif %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
BAD = {
    "a text without end": ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 16777216 characters"),
    "too much memory": ("{{ 'a' * 10 ** 10 }}", "it needs more than 2048 MiB of memory"),
    "a way out": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
    "a way out by names": ("{% set x = namespace(__init__=1) %}", "begins with an underscore"),
    "changes what it is given": ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
    "raises": ("{{ raise_exception('line\nline') }}", "failed at a.jsonl, line 7: line line"),
    "what is not there": ("{{ messages[9].x.y }}", "no element 9"),
    "no template": ("{% if %}", "failed at compiling it: Expected an expression"),
    "too deep": ("{{" + "(" * 10**5 + "}}", "maximum recursion depth exceeded"),
    "turns that change": (NOT_PREFIX, "it changes what comes before message 2"),
    "alternation": (MISTRAL, "roles must alternate"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_template_is_one_line(what: str) -> None:
    template, said = BAD[what]
    messages = TALK[1:] if what == "alternation" else TALK
    with pytest.raises(UserError, match=r"^data.chat_template: the chat template failed at ") as caught:
        render(template, messages)
    assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_template_that_loops_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = limits.SECONDS
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError) as error:
        render(loop)
    shown = {"a.jsonl, line 7": "talks.jsonl, line 3", "0.2 s": f"{seconds} s"}
    on_page("docs/data.md", f"error: {error.value}", shown)
    with pytest.raises(UserError, match="failed at compiling it: it took more than 0.2 s"):
        render("{{ 'a' ~ " + " ~ ".join(["'a'"] * 200_000) + " }}")


@pytest.mark.parametrize("installed", [None, "3.1.2"])
def test_without_jinja(installed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("importlib.metadata.version", version)
    said = "which is not installed" if installed is None else "jinja2 3.1.2 is too old"
    with pytest.raises(UserError, match=f"{said}.*pip install 'jaxdist\\[hf\\]'"):
        render(CHATML)


def test_a_folder_that_is_damaged_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = byte_level(tmp_path, CHATML)
    good, config = file.read_bytes(), tmp_path / "tokenizer_config.json"

    def refused(said: str) -> None:
        with pytest.raises(UserError, match=said) as caught:
            load_tokenizer(tmp_path, key="data.tokenizer")
        assert str(caught.value).startswith("data.tokenizer: ") and "\n" not in str(caught.value)

    for bad in (good[:-9], b"{}", b"\xff", b"[" * 10**6, good.replace(b'"BPE"', b'"none"')):
        file.write_bytes(bad)
        refused("holds no tokenizer")
    file.write_bytes(good.replace(b'"id": 0,', b'"id": 99999999999,'))
    refused("holds no tokenizer|largest id")
    monkeypatch.setattr("jaxdist.data.text.tokenizer.TOKENIZER_BYTES", len(good) - 1)
    file.write_bytes(good)
    refused("is too large")
    monkeypatch.undo()
    for text, said in (("[1]", "holds list"), ("{", "cannot be read"), ('{"chat_template": 3}', "is no text")):
        config.write_text(text)
        refused(said)
    config.write_text(json.dumps({"chat_template": "a" * (1 << 20) + "b"}))
    refused("chat_template in .* is too large")
    config.write_text(
        json.dumps({"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}, "bos_token": "<none>"}')
    found = load_tokenizer(tmp_path, key="data.tokenizer")
    assert (found.chat_template, found.eos, found.bos) == ("d", 1, None)
    (tmp_path / "chat_template.jinja").write_text("own")
    assert load_tokenizer(tmp_path, key="data.tokenizer").chat_template == "own"
    file.unlink()
    refused("holds no tokenizer.json")
    with pytest.raises(UserError, match="nowhere' does not exist"):
        load_tokenizer(tmp_path / "nowhere", key="--tokenizer")


def test_the_page_shows_these_examples(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    lines, shown = (
        re.findall(rf"^```\n({start}.*?)^```", page, re.M | re.S)[0]
        for start in (r"\{\"messages\"", r"\$ jaxdist data")
    )
    monkeypatch.chdir(tmp_path)
    Path("examples.jsonl").write_text(lines)
    Path("chatml.jinja").write_text(CHATML)
    command, _, printed = shown.partition("\n")
    assert main(command.split()[3:]) == 0
    assert capsys.readouterr().out == printed


def test_examples_are_shown_with_what_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_level(tmp_path, CHATML)
    pair = {"prompt": "1+1=", "completion": "\x1b[2J2"}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in ({"messages": TALK}, pair, pair)))
    assert main([str(path), "--show", "2", "--tokenizer", str(tmp_path)]) == 0
    talk = GOLDEN[CHATML].replace("⟨", "⟦").replace("⟩", "⟧")
    size = len(load_tokenizer(tmp_path, key="").encode(render(CHATML)[0]))
    first, second = f"{path}, line 1: {size} tokens, 16 learned", f"{path}, line 2: 10 tokens, 6 learned"
    assert capsys.readouterr().out == f"{first}\n{talk}\n\n{second}\n1+1=⟦\\x1b[2J2</s>⟧\n\n"
    assert main([str(path)]) == 2 and "--show N without --out" in capsys.readouterr().err
