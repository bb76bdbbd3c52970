"""Files of others at random: each is read, or refused with one line. 50 or 100 a kind every day, 2,000 in slow runs."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from data_files import config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxdist import registry
from jaxdist.checkpoint.checksums import CHECKSUMS, _text, check_files, newer_format, seal
from jaxdist.checkpoint.huggingface.convert import config_differences, config_json
from jaxdist.checkpoint.huggingface.safetensors import SINGLE, TensorEntry, TensorFiles, read_json, write
from jaxdist.config.json_reader import parse_json
from jaxdist.config.load import load_config, to_yaml
from jaxdist.config.rules.fields import Key, all_keys, is_list
from jaxdist.config.schema import Config, ModelConfig
from jaxdist.data.manifest import MANIFEST
from jaxdist.data.prepare import prepare
from jaxdist.data.sources.tokens import tokens
from jaxdist.errors import UserError
from jaxdist.observe import read_metrics
from jaxdist.plan.budget import KEY_FIELDS, SENT, read_budget

EVERYDAY = (50, 100)
FEW, COUNTS = ([each, pytest.param(2000, marks=pytest.mark.slow)] for each in EVERYDAY)


def search(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], count: int) -> None:
    """Check that many examples: every day the same ones."""
    limits = settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=count in EVERYDAY,
        suppress_health_check=list(HealthCheck),
    )
    limits(given(strategy)(check))()


def answer(function: Callable[[], Any], refused: type[Exception] = UserError) -> Any:
    """What the function returns, or None if it refuses, in one line that can be shown."""
    try:
        return function()
    except refused as error:
        text = str(error)
        assert text.isprintable() and 0 < len(text) < 2000, text
        return None


# Values of any type: at the ends of ranges, of other types, not to be shown, not to be written.
ODD = st.sampled_from(
    [
        *(
            None,
            True,
            False,
            0,
            1,
            -1,
            2,
            7,
            255,
            2**31,
            2**63,
            2**64,
            -(2**70),
            10**400,
            0.0,
            -0.0,
            0.5,
            -1e-300,
            1e308,
        ),
        *(
            math.inf,
            -math.inf,
            math.nan,
            "",
            " ",
            "x",
            "null",
            "1",
            "true",
            "gpt2",
            "a.b",
            "..",
            "/",
            "\0",
            "\x1b]0;t\x07",
        ),
        *(
            "\n",
            "ä",
            "\u2028",
            "\ud800",
            "x" * 300,
            "DEEP",
            [],
            {},
            [[]],
            [None],
            ["x", 1],
            {"a": 1},
            {"": {}},
            {"a": {"b": [{}]}},
        ),
    ]
).map(copy.deepcopy)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of everything inside a JSON value."""
    for key, inside in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inside, dict | list):
            yield from places(inside)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one to three places changed."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        if not isinstance(value, dict | list) or not (found := list(places(value))) or draw(st.integers(0, 20)) == 0:
            return draw(ODD)
        inside, key = draw(st.sampled_from(found))
        what = draw(st.sampled_from(["value", "value", "value", "number", "gone", "more", "other"]))
        if what == "gone":
            del inside[key]
        elif what == "more" and isinstance(inside, dict):
            inside[draw(st.text(max_size=3) | st.sampled_from(["../x", "a\0b", "\ud800", "b\\c"]))] = draw(ODD)
        elif what == "number":
            inside[key] = draw(st.integers() | st.floats())
        elif what == "other":
            inside[key] = copy.deepcopy(
                inside[draw(st.sampled_from(list(range(len(inside)))))]
                if isinstance(inside, list)
                else draw(st.sampled_from(list(inside.values())))
            )
        else:
            inside[key] = draw(ODD)
    return value


@st.composite
def spoiled(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with some of them changed, taken out, or put in a second time."""
    for _ in range(draw(st.integers(1, 3))):
        a, b = sorted((draw(st.integers(0, len(content))), draw(st.integers(0, len(content)))))
        short = draw(st.binary(max_size=4) | st.sampled_from([b"{", b"[" * 3000, b'"', b",", b"1e999", b"NaN", b"\n"]))
        content = content[:a] + draw(st.sampled_from([short, b"", content[a:b] * 2])) + content[b:]
    return content


def json_files(value: Any) -> st.SearchStrategy[bytes]:
    """Contents of a JSON file: changed as a value, or as bytes; or anything."""
    whole = json.dumps(value).encode()
    values = changed(value).map(encoded)
    return values | values | spoiled(whole) | st.binary(max_size=40)


def encoded(value: Any) -> bytes:
    """JSON, with real depth where `ODD` has only its name."""
    return json.dumps(value).encode().replace(b'"DEEP"', b'[{"a":' * 3000 + b"1" + b"}]" * 3000)


def right(key: Key) -> st.SearchStrategy[Any]:
    """Values that a key allows, by itself, most of them small."""
    rule = key.rule
    if rule.folder or rule.choices:
        found = st.sampled_from(rule.choices or [*registry.names(rule.folder), "os.system"])
    elif key.kind is bool:
        found = st.booleans()
    elif key.kind in (int, float):
        numbers = [
            key.kind(each)
            for each in (-1, 0, 1, 1, 1, 2, 2, 4, 8, 16, 3, 0.5, 0.25, 1e-6)
            if int(each) == each or key.kind is float
        ]
        found = st.sampled_from([each for each in numbers if rule.holds(each)])
    elif is_list(key.kind):
        found = st.lists(
            st.integers(1, 4) if key.kind == tuple[int, ...] else st.sampled_from(["embed.*", "x"]), max_size=4
        )
    else:
        found = st.sampled_from(["stdlib", "x", "import "])
    found = found | st.lists(st.sampled_from(rule.listed), max_size=2) if rule.listed else found
    return found | st.none() if key.optional else found


KEYS = {**dict(all_keys(Config)), **{f"model.{name}": key for name, key in all_keys(type(ModelConfig()))}}
LEAVES = {name: key for name, key in KEYS.items() if not key.nested}
# The keys that many rules are about come often.
OFTEN = [name for name in LEAVES if name.startswith(("mesh.", "parallel.", "precision", "memory.", "model."))]


@st.composite
def configurations(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """A YAML file, and overrides. In two of three each value is right by itself, so that rules of several are met."""
    tree: dict[str, Any] = {"devices": {"platform": draw(st.sampled_from(["cpu", "cpu", "auto"]))}}
    overrides, wild = [], draw(st.integers(0, 2)) == 0
    for _ in range(draw(st.integers(0, 10))):
        name = draw(st.sampled_from(OFTEN) | st.sampled_from(list(LEAVES)))
        value = draw(ODD if wild and draw(st.booleans()) else right(LEAVES[name]))
        if wild and draw(st.integers(0, 9)) == 0:
            name = draw(st.sampled_from([name[:-1], name + "s", name + ".x", "x." + name, name.partition(".")[0], ""]))
        if draw(st.booleans()):
            text = value if isinstance(value, str) else draw(st.text(max_size=8)) if wild else json.dumps(value)
            overrides.append(draw(st.sampled_from([f"{name}={text}"] * 9 + [f"{name}:{text}"] * wild)))
            continue
        inside = tree
        *sections, last = name.split(".")
        for section in sections:
            if not isinstance(inside.get(section), dict):
                inside[section] = {}
            inside = inside[section]
        inside[last] = value
    content = yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")
    return draw(spoiled(content)) if wild and draw(st.integers(0, 4)) == 0 else content, overrides


@pytest.mark.parametrize("count", FEW)
def test_configurations(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path, taken = tmp_path / "config.yaml", []

    def check(given: tuple[bytes, list[str]]) -> None:
        content, overrides = given
        path.write_bytes(content)
        found = answer(lambda: load_config(path, overrides))
        if found is not None:
            assert isinstance(found, Config)
            path.write_text(to_yaml(found), encoding="utf-8")
            assert load_config(path) == found
            taken.append(found)

    search(configurations(), check, count)
    assert count / 10 < len(taken) < count * 0.9


@pytest.mark.parametrize("count", COUNTS)
def test_json(count: int) -> None:
    value = {"a": [1, 2.5, "ä", None, {"b": [[], {}]}], "c": True}

    def check(content: bytes) -> None:
        answer(lambda: parse_json(content), ValueError)

    search(json_files(value), check, count)


@pytest.mark.parametrize("count", COUNTS)
def test_manifests(count: int, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some text\n" * 20)
    manifest = prepare([tmp_path / "text"], tmp_path / "out", held_out=0.2)

    def check(content: bytes) -> None:
        (tmp_path / "out" / MANIFEST).write_bytes(content)
        source = answer(lambda: tokens(config(tmp_path / "out", packing="documents")))
        assert source is None or np.asarray(source.train).max() < source.vocab

    search(json_files(manifest), check, count)


@pytest.mark.parametrize("count", COUNTS)
def test_checksums(count: int, tmp_path: Path) -> None:
    folder = tmp_path / "7"
    for name in ("a", "state/b", "meta/metadata"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    seal(folder, 7)
    listed = json.loads((folder / CHECKSUMS).read_text())

    def resealed(files: Any) -> bytes:
        return answer(lambda: _text(7, files).encode(), (TypeError, ValueError)) or b""  # type: ignore[arg-type]

    def check(content: bytes) -> None:
        (folder / CHECKSUMS).write_bytes(content)
        found = answer(lambda: check_files(folder, 7))  # a later version's is refused
        problem = found.problem if found else ""
        assert found or newer_format(folder)
        assert "\n" not in problem and len(problem) < 3000
        assert not problem.startswith(CHECKSUMS) or problem.isprintable()

    search(json_files(listed) | changed(listed["files"]).map(resealed), check, count)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_config_json(style: str, count: int, tmp_path: Path) -> None:
    model = ModelConfig(style=style, layers=1, width=8, heads=2, vocab=32).resolved()
    whole = config_json(model, positions=16, dtype="float32")
    path = tmp_path / "config.json"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        differences = answer(lambda: config_differences(read_json(path), model, positions=16))
        assert all(each.isprintable() for each in differences or ())

    search(json_files(whole), check, count)


@st.composite
def tensor_files(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file of safetensors with another header, whose size is right; or spoiled as bytes."""
    size = int.from_bytes(whole[:8], "little")
    header, rest = whole[8 : 8 + size], whole[8 + size :]
    header = draw(changed(json.loads(header)).map(encoded) | spoiled(header))
    made = len(header).to_bytes(8, "little") + header + rest
    return draw(st.sampled_from([made, made]) | spoiled(whole) | st.binary(max_size=60))


@pytest.mark.parametrize("count", COUNTS)
def test_safetensors(count: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors (extra hf) is not installed")
    entries = [TensorEntry("a", "float32", (2, 3)), TensorEntry("b.c", "bfloat16", (4,))]
    arrays = [np.ones(each.shape, np.float32) for each in entries]
    arrays[1] = arrays[1].astype("bfloat16")
    write(tmp_path, entries, arrays)
    whole = (tmp_path / SINGLE).read_bytes()

    def read() -> None:
        with TensorFiles(tmp_path) as files:
            for name in files.names:
                assert files.read(name).shape == files.shape(name) and files.dtype(name)

    def check(content: bytes) -> None:
        (tmp_path / SINGLE).write_bytes(content)
        answer(read)

    search(tensor_files(whole), check, count)


@pytest.mark.parametrize("count", COUNTS)
def test_metrics_and_budgets(count: int, tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 2.5, "samples": ["a"]}, {"step": 2, "loss": None, "loss/nonfinite": "nan"}]
    budget = {"collectives": [dict.fromkeys(KEY_FIELDS, "x") | {SENT: 8}]}

    def check(content: bytes) -> None:
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + content + b"\n")
        for record in answer(lambda: read_metrics(tmp_path / "metrics.jsonl")) or ():
            assert all(isinstance(record[key], list if key == "samples" else int | float) for key in record)
        (tmp_path / "budget.json").write_bytes(content)
        answer(lambda: read_budget(tmp_path / "budget.json"))

    search(json_files(lines[0]) | json_files(lines[1]) | json_files(budget), check, count)
