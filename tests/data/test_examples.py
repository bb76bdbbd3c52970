"""The source `jsonl`: lines of JSON, what counts in the loss, packing, what is cut and left out."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from data_files import folder_of, sharding
from layouts import SEQ, Case, initial, model_config, parts_of

from jaxdist.config.load import load_config
from jaxdist.config.schema import DataConfig
from jaxdist.data import Samples, Source, load_source, make_eval_loader, make_loader
from jaxdist.data.text import packing
from jaxdist.data.text.packing import first_fit
from jaxdist.errors import UserError
from jaxdist.state import place_params

ADD = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}\n"} for i in range(40)]


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def jsonl(path: Path, **keys: Any) -> Source:
    return load_source(DataConfig(**{"source": "jsonl", "path": str(path), "seq_len": 16, **keys}))


def rows_of(source: Source, side: int = 0) -> list[tuple[str, str]]:
    """(text of the inputs, text of the targets with . where they do not count) of every row."""
    samples = source[side]
    assert isinstance(samples, Samples)
    rows = samples.read(np.arange(samples.size))
    shown = np.where(rows["weights"] > 0, rows["targets"], ord("."))
    return [
        (bytes(inputs).decode("latin-1").rstrip("\0"), bytes(targets).decode("latin-1").rstrip("."))
        for inputs, targets in zip(rows["inputs"].tolist(), shown.tolist(), strict=True)
    ]


def test_completions_count_and_prompts_do_not(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [*ADD, {"text": "wörds", "other": [1]}])
    held = lines(tmp_path / "b.jsonl", [{"text": "ab"}])
    source = jsonl(path, val_path=str(held))
    assert rows_of(source)[11:13] == [("11+11=22\n", ".....22\n"), ("12+12=24\n", ".....24\n")]
    assert rows_of(source)[40] == ("wörds".encode().decode("latin-1"), "örds".encode().decode("latin-1"))
    assert rows_of(source, 1) == [("ab", "b")] and source.vocab == 256
    every = jsonl(path, val_path=str(held), completion_only=False)
    assert rows_of(every)[11] == ("11+11=22\n", "1+11=22\n") and every.info["sha256"] != source.info["sha256"]
    assert source.info["examples"]["train_learned"] == sum(2 + (i > 4) for i in range(40)) + 5
    assert source.info["lines"][0] == "40 of prompt, 2 of text: 343 tokens (bytes)"


def test_packed_examples_are_apart(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ADD)
    source, alone = jsonl(path, packing="documents", seq_len=20), jsonl(path, seq_len=20)
    packed, single = rows_of(source), rows_of(alone)
    learned = [sorted(re.findall(r"\d+", "".join(targets for _, targets in rows))) for rows in (packed, single)]
    assert learned[0] == learned[1]  # none is cut
    assert len(packed) < len(single) / 1.5 and source.info["sha256"] == alone.info["sha256"]
    assert packed[0] == ("0+0=0\n1+1=2\n2+2=4\n", "...0\n....2\n....4\n")
    assert packed[4][1].count("\n") >= 2 and all(re.fullmatch(r"(\.+\d+\n)+", targets) for _, targets in packed)
    every = jsonl(path, packing="documents", seq_len=20, completion_only=False)
    assert rows_of(every)[0][1] == "+0=0\n.+1=2\n.+2=4\n"  # no first token
    assert f"make {source.info['train']} rows of {alone.info['train']}" in alone.info["lines"][1]
    assert "which do not see each other" in source.info["lines"][1]
    train = source.train
    assert isinstance(train, Samples)
    again, one = train.read(np.array([3, 0, 3])), train.read(np.array([3]))
    assert all(np.array_equal(again[leaf][i], one[leaf][0]) for leaf in again for i in (0, 2))


def test_first_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_fit(np.array([5, 5, 4, 3, 5, 2, 2]), 9).tolist() == [0, 1, 0, 1, 2, 2, 2]
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 65, 3000)
    rows = first_fit(lengths, 64)
    used = np.bincount(rows, lengths)
    assert used.max() <= 64 and (used > 0).all() and used.sum() / (64 * used.size) > 0.95
    # As it is said, by hand: the first row with room.
    free: list[int] = []
    for length, row in zip(lengths[:300].tolist(), rows[:300].tolist(), strict=True):
        want = next((i for i, left in enumerate(free) if left >= length), len(free))
        free += [64] if want == len(free) else []
        free[want] -= length
        assert row == want
    monkeypatch.setattr(packing, "OPEN_ROWS", 4)
    few = first_fit(lengths, 64)
    assert np.bincount(few, lengths).max() <= 64 and few.max() > rows.max()


def test_what_is_too_long_is_cut_or_left_out(tmp_path: Path) -> None:
    records = [
        {"prompt": "abcdefghijklmnopqrs", "completion": "XY"},
        {"prompt": "0123456789", "completion": "ABCDEFGHIJKLM"},
        {"text": "x"},
    ]
    path, held = lines(tmp_path / "a.jsonl", records), lines(tmp_path / "b.jsonl", [{"text": "ab"}])
    right = jsonl(path, val_path=str(held))
    assert rows_of(right) == [("0123456789ABCDEF", ".........ABCDEFG")]
    assert right.info["lines"][0].endswith("; 1 cut at the right by 6 tokens; 2 without a token to learn left out")
    left = jsonl(path, val_path=str(held), truncation="left")
    assert rows_of(left) == [("efghijklmnopqrsX", "..............XY"), ("6789ABCDEFGHIJKL", "...ABCDEFGHIJKLM")]
    with pytest.raises(
        UserError, match=r"no examples to train on \(2 longer than data.seq_len \+ 1 left out, 1 without"
    ):
        jsonl(path, val_path=str(held), truncation="drop")


def test_held_out_by_content(tmp_path: Path) -> None:
    first = jsonl(lines(tmp_path / "a.jsonl", ADD), held_out=0.2)
    held = rows_of(first, 1)
    assert 2 <= len(held) <= 16 and not set(held) & set(rows_of(first))
    more = [{"text": f"more {i}"} for i in range(20)] + ADD[::-1] + ADD
    second = jsonl(lines(tmp_path / "b.jsonl", more), held_out=0.2)
    assert set(held) <= set(rows_of(second, 1)) and not set(rows_of(second, 1)) & set(rows_of(second))
    pair = jsonl(lines(tmp_path / "c.jsonl", ADD[:2]), held_out=1e-9)
    assert (pair.info["train"], pair.info["held_out"]) == (1, 1)
    with pytest.raises(UserError, match="no examples held out"):
        jsonl(lines(tmp_path / "d.jsonl", ADD[:1]))


DEEP = b'{"text": ' + b"[" * 10**6 + b"]" * 10**6 + b"}"
HOSTILE = [
    (b"{", "is no line of JSON"),
    (b'{"text": "a"}{"text": "b"}', "is no line of JSON"),
    (b'{"text": "\x00"}', "is no line of JSON"),
    (b"\x00\xff\xfe", "is no line of JSON"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b'{"messages": [{"role": "user", "\\udfff": ""}]}', "half of a surrogate pair"),
    (b'{"text": "a", "text": "b"}', "the key 'text' comes twice"),
    (DEEP, "nested more than 32 deep"),
    (b"[1]", "holds list; allowed: an object with messages, or"),
    (b"{}", "holds nothing; allowed: one of messages, or"),
    (b'{"text": null, "n": 1}', r"holds 'text' \(null\), 'n'; allowed: one of messages, or"),
    (b'{"input": "a", "output": "b"}', "holds 'input', 'output'; allowed: one of messages"),
    (b'{"text": "a", "messages": []}', "holds messages and text"),
    (b'{"text": "a", "prompt": "b", "completion": "c"}', "holds prompt and text"),
    (b'{"prompt": "a"}', "completion is NoneType; allowed: .*as text"),
    (b'{"prompt": "a", "completion": 3}', "completion is int"),
    (b'{"text": ["a"]}', "text is list"),
    (b'{"messages": []}', "messages is empty"),
    (b'{"messages": {"role": "user"}}', "messages is dict"),
    (b'{"messages": ["a"]}', "message 1 has no role"),
    (b'{"messages": [{"role": "user"}]}', "message 1 has no content"),
    (b'{"messages": [{"role": "user", "content": 1}]}', "message 1 has no content"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "the messages are of user; allowed: some of assistant"),
    (b'{"messages": [{"role": "assistant", "content": "a"}]}', "data.chat_template: null, but there are conv"),
]


@pytest.mark.parametrize(("line", "said"), HOSTILE, ids=[said for _, said in HOSTILE])
def test_a_line_that_is_no_example_is_one_line(tmp_path: Path, line: bytes, said: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "good \\u0000"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=said) as caught:
        jsonl(tmp_path / "a.jsonl")
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert "a.jsonl, line 3: " in message or message.startswith("data.chat_template: null")


def test_a_huge_line_and_files_without_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdist.data.text.examples.LINE_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"a" * 88 + b'"}\n')
    with pytest.raises(UserError, match=r"line 1: is longer than 100 bytes; allowed: one example a line"):
        jsonl(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"a" * 87 + b'"}\n\n{"text": "b c"}')  # 100 with its end
    assert jsonl(tmp_path / "a.jsonl").info["train"] == 1
    (tmp_path / "b.jsonl").write_bytes(b"\n \n")
    with pytest.raises(UserError, match=r"no examples to train on \(none was left out\)"):
        jsonl(tmp_path / "b.jsonl")
    with pytest.raises(UserError, match=r"holds no \.jsonl files"):
        jsonl(folder_of(tmp_path / "c", {"a.json": b"{}"}))
    with pytest.raises(UserError, match="data.chat_date: 'soon' is no day"):
        load_config("configs/quickstart.yaml", ["data.source=jsonl", f"data.path={tmp_path}", "data.chat_date=soon"])


def test_the_tokenizer_of_the_folder_that_a_run_starts_from(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", ADD)
    (tmp_path / "tokenizer.json").write_text("{}")
    given = ["data.source=jsonl", f"data.path={tmp_path}/a.jsonl", f"init.from={tmp_path}"]
    assert load_config("configs/quickstart.yaml", given).data.tokenizer == str(tmp_path)
    assert load_config("configs/quickstart.yaml", [*given, "data.tokenizer=bytes"]).data.tokenizer == "bytes"
    assert load_config("configs/quickstart.yaml", given[:2]).data.tokenizer is None
    assert jsonl(tmp_path / "a.jsonl", tokenizer="bytes").vocab == 256


def test_a_mixture_of_examples(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", ADD)
    lines(tmp_path / "b.jsonl", [{"text": f"text {i}"} for i in range(30)])
    parts = (f"sums 0.5 jsonl {tmp_path}/a.jsonl", f"texts 0.5 jsonl {tmp_path}/b.jsonl")
    source = load_source(DataConfig(mixture=parts, seq_len=16))
    batch = make_loader(source, seq_len=16, global_batch=8, sharding=sharding(), seed=0).host_rows(0, slice(0, 8))
    assert sum(b"text" in bytes(row) for row in batch["inputs"].tolist()) == 4
    assert [line.partition(":")[0] for line in source.info["lines"]] == ["sums", "sums", "texts", "texts"]
    (tmp_path / "t.txt").write_text("some text " * 100)
    with pytest.raises(UserError, match="must be of one kind"):
        load_source(DataConfig(mixture=(parts[0], f"plain 0.5 text {tmp_path}/t.txt"), seq_len=16))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_tokens_count_alike_however_uneven_the_rows_are(tmp_path: Path, strategy: str) -> None:
    """Rows with one counted token and with all: the mean is over the tokens of the global batch, not over rows,
    microbatches or devices."""
    marks = [chr(code) for code in range(33, 47)]
    records = [
        {"prompt": "#" * (7 - i % 7), "completion": marks[i % 14] * (1 + i % 7 * (i % 3 > 0))} for i in range(80)
    ]
    source = jsonl(lines(tmp_path / "a.jsonl", records), seq_len=SEQ)
    case = Case("gpt2", True, strategy, 4, (2, 2, 1))
    with jax.enable_x64(True):
        tx, target, step = parts_of(case, "fp64")
        layout = jax.sharding.NamedSharding(target.step.sharding.mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
        loader = make_loader(source, seq_len=SEQ, global_batch=32, sharding=layout, seed=0)
        params = initial(model_config(case), "fp64")
        host = loader.host_rows(0, slice(0, 32))
        sums = host["weights"].sum(axis=1)
        assert sums.min() == 1 and sums.max() == 7
        with jax.numpy_dtype_promotion("standard"):
            loss, grads = jax.value_and_grad(oracle.loss)(params, host, model_config(case))
        _, metrics = step(place_params(params, tx, target), loader.batch(0))
        assert abs(float(metrics["loss"]) / float(loss) - 1) < 1e-10
        assert oracle.error(metrics["grads"], grads) < 1e-10
        by_rows = np.mean(
            [
                float(oracle.loss(params, {k: v[i : i + 8] for k, v in host.items()}, model_config(case)))
                for i in range(0, 32, 8)
            ]
        )
        assert abs(by_rows / float(loss) - 1) > 1e-6  # a mean of means is another number
    held = make_eval_loader(source, seq_len=SEQ, global_batch=8, sharding=sharding(), batches=None)
    total = sum(float(held.host_rows(i, slice(0, 8))["weights"].sum()) for i in range(held.batches or 0))
    assert total == sum((w > 0).sum() for w in source.held_out.read(np.arange(source.held_out.size))["weights"])
