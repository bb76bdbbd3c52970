"""Console, metrics.jsonl and env.json. No devices are needed."""

import io
import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.files.regular import replace_file
from jaxdist.observe import (
    Console,
    MetricsWriter,
    environment,
    read_metrics,
    redact,
    redact_command,
    redact_settings,
    write_environment,
)
from jaxdist.observe.console import format_duration
from jaxdist.observe.metrics import smooth

# ---------------------------------------------------------------- metrics


def strict(line: str) -> dict:
    """A line as a JSON reader in another language sees it: NaN and Infinity are errors."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_metrics_round_trip_every_float(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    with MetricsWriter(path, resume_step=None) as writer:
        for step, value in enumerate(values, start=1):
            writer.write(step, {"loss": value, "grad_norm": 1})
    for line in path.read_text().splitlines():
        strict(line)
    records = read_metrics(path)
    assert [r["step"] for r in records] == list(range(1, len(values) + 1))
    assert [np.float64(r["loss"]).tobytes() for r in records if not math.isnan(r["loss"])] == [
        np.float64(v).tobytes() for v in values if not math.isnan(v)
    ]
    assert [math.isnan(r["loss"]) for r in records] == [math.isnan(v) for v in values]
    assert all(set(r) == {"step", "loss", "grad_norm"} and type(r["grad_norm"]) is int for r in records)


def test_arrays_round_trip_to_four_digits(tmp_path):
    path, values = tmp_path / "metrics.jsonl", np.array([[1 / 3, 0.0], [np.nan, -123456.0]], np.float32)
    with MetricsWriter(path, resume_step=None) as writer:
        writer.write(1, {"loss": 0.5, "experts/load": values, "mine": np.arange(2)})
        writer.write(2, {"loss": np.array(0.25)})
    arrays = {"experts/load": [[0.3333, 0.0], [None, -123500.0]], "mine": [0.0, 1.0]}
    assert strict(path.read_text().splitlines()[0]) == {"step": 1, "loss": 0.5, "arrays": arrays}
    first, second = read_metrics(path)
    np.testing.assert_array_equal(first["arrays"]["experts/load"], [[0.3333, 0.0], [np.nan, -123500.0]])
    assert second == {"step": 2, "loss": 0.25}
    with MetricsWriter(path, resume_step=1) as writer, pytest.raises(ValueError, match="'arrays': the name is taken"):
        writer.write(2, {"arrays": 1.0})
    assert len(read_metrics(path)) == 1


@pytest.mark.parametrize(
    "arrays",
    ["[1]", '{"a": 1}', '{"a": ["1"]}', '{"a": [[1], [1, 2]]}', '{"a": [1, [1]]}', '{"a": [true]}', '{"a": {}}'],
)
def test_arrays_that_are_none_are_a_bad_line(tmp_path, arrays):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "arrays": {arrays}}}\n')
    with pytest.raises(UserError, match=r"line 1: not a line of metrics \('arrays' is of type"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_metrics_line_is_as_documented_and_flushed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, resume_step=None)
    writer.write(10, {"loss": 0.1 + 0.2, "grad_norm": np.float32(0.1), "tokens_per_s": math.nan, "up": -math.inf})
    assert strict(path.read_text()) == {
        "step": 10,
        "loss": 0.30000000000000004,
        "grad_norm": float(np.float32(0.1)),
        "tokens_per_s": None,
        "tokens_per_s/nonfinite": "nan",
        "up": None,
        "up/nonfinite": "-inf",
    }
    for taken in ("step", "loss/nonfinite"):
        with pytest.raises(ValueError, match=taken):
            writer.write(11, {taken: 1.0})
    writer.close()
    writer.close()


LINES = [
    b'{"step": 1, "loss": 3.50}\n',
    b'{"step":2,"loss":3.25}\n',
    b'{"step": 2, "eval/loss": 3.5}\n',
    b'{"step": 3, "loss": 3}\n',
]


@pytest.mark.parametrize("tail", [b"", b'{"step": 4, "lo', b'{"step": 4, "loss": 2}', b"\x00\x00\x00", b"{", b"\xff"])
@pytest.mark.parametrize("resume", [0, 1, 2, 3, 9])
def test_resume_keeps_lines_byte_for_byte(tmp_path, tail, resume):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(LINES) + tail)
    MetricsWriter(path, resume_step=resume).close()
    whole = [*LINES, tail + b"\n"] if tail.endswith(b"}") else LINES
    expected = [line for line in whole if strict(line.decode())["step"] <= resume]
    assert path.read_bytes() == b"".join(expected)
    with MetricsWriter(path, resume_step=resume) as writer:
        writer.write(resume + 1, {"loss": 1.0})
    assert path.read_bytes() == b"".join(expected) + b'{"step": %d, "loss": 1.0}\n' % (resume + 1)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]  # no temporary file is left


def test_resume_without_file_and_new_run_over_an_old_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path, resume_step=7).close()
    assert path.read_bytes() == b""
    path.write_bytes(LINES[0])
    MetricsWriter(path, resume_step=None).close()
    assert path.read_bytes() == b"" and (tmp_path / "metrics.jsonl.old").read_bytes() == LINES[0]


@pytest.mark.parametrize(
    "bad",
    [
        b"{\n",
        b"\n",
        b"[1]\n",
        b'{"loss": 1}\n',
        b'{"step": 1.5}\n',
        b'{"step": 2, "loss": NaN}\n',
        b"\xff\n",
        pytest.param(b"[" * 9999 + b"\n", id="deep"),
        b'{"step": 2, "a/nonfinite": []}\n',
        b'{"step": 2, "a/nonfinite": "1.5"}\n',
        pytest.param(b'{"step": 2, "a/nonfinite": "' + b"[" * 3000 + b'"}\n', id="long"),
    ],
)
@pytest.mark.parametrize("rest", [b"", LINES[2], b'{"torn'])
def test_a_bad_line_is_told_by_its_number_and_set_aside_on_resuming(tmp_path, bad, rest):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINES[0] + bad + rest)
    with pytest.raises(UserError, match="metrics.jsonl, line 2:") as found:
        read_metrics(path)
    assert len(str(found.value)) < 500
    said = []
    for aside in ("metrics.jsonl.damaged", "metrics.jsonl.damaged-2"):
        path.write_bytes(LINES[0] + bad + rest)
        MetricsWriter(path, resume_step=5, say=said.append).close()
        assert path.read_bytes() == LINES[0] + (rest if rest.endswith(b"\n") else b"")
        assert (tmp_path / aside).read_bytes() == LINES[0] + bad + rest
        line = said.pop()
        assert (
            re.fullmatch(rf"metrics.jsonl is damaged, line 2: .*; moved to {aside}, its good lines are kept", line)
            and not said
        )


def test_read_metrics_leaves_out_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINES[0] + b'{"step": 2, "loss": 3.')
    assert read_metrics(path) == [{"step": 1, "loss": 3.5}]
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "none.jsonl")


def test_replace_file_leaves_the_old_content_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def fail(self, target):
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_smoothing():
    line = np.linspace(8, 2, 400)
    inner = smooth(line)[:-12]
    assert np.allclose(inner, line[:-12])  # a centred mean does not lag behind a slope
    assert np.isnan(smooth(np.array([1.0, np.nan, 3.0]))).tolist() == [False, True, False]
    assert smooth(np.array([])).size == 0


# ---------------------------------------------------------------- console


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_console_lines():
    stream, clock = io.StringIO(), Clock()
    with Console(25, mode="auto", log_every=10, enabled=True, stream=stream, clock=clock) as console:
        console.header({"model": "gpt 4 x 128", "mesh axes": "data 2"})
        for step in range(1, 26):
            clock.now += 90.0 if step in (1, 7) else 2.0  # compilation, a long evaluation
            console.step(step, {"loss": 3.21409, "grad_norm": 1.234, "tokens_per_s": 12345.4})
            if step == 20:
                console.evaluation(step, {"eval/loss": 3.0, "eval/bits_per_byte": 4.32809})
        console.line("done")
    assert stream.getvalue().splitlines() == [
        "model      gpt 4 x 128",
        "mesh axes  data 2",
        "step   1/25  loss 3.2141  grad 1.23  tokens/s 12,345  eta -:--:--",
        "step  10/25  loss 3.2141  grad 1.23  tokens/s 12,345  eta 0:00:30",
        "step  20/25  loss 3.2141  grad 1.23  tokens/s 12,345  eta 0:00:10",
        "eval  20/25  loss 3.0000  bits_per_byte 4.3281",
        "step  25/25  loss 3.2141  grad 1.23  tokens/s 12,345  eta 0:00:00",
        "done",
    ]


@pytest.mark.parametrize("name", ["tokens_per_s", "samples_per_s", "mfu"])
def test_rates_are_means_since_the_last_line(name: str) -> None:
    """By time: two steps at 0.1 and one at 0.4 take 22.5 units, as three at 0.1333 do. Not those of the line before."""
    stream = io.StringIO()
    with Console(6, mode="plain", log_every=3, stream=stream, clock=Clock()) as console:
        for step, rate in enumerate([100.0, 0.1, 0.4, 0.1, 0.1, 0.4], 1):
            console.step(step, {"loss": 1.0, name: rate})
    shown = {"mfu": ("MFU", "10000.0%", "16.0%", "13.3%")}.get(
        name, (name.replace("_per_", "/"), "100", "0.16", "0.133")
    )
    found = [line.split("  eta")[0].partition("1.0000  ")[2] for line in stream.getvalue().splitlines()]
    assert found == [f"{shown[0]} {each}" for each in shown[1:]]


def test_plain_console_of_a_resumed_run_flushes_and_takes_odd_values():
    class Stream(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed = len(self.getvalue())

    stream, clock = Stream(), Clock()
    console = Console(200, mode="plain", log_every=10, enabled=True, stream=stream, clock=clock)
    console.step(93, {"loss": math.nan, "tokens_per_s": math.inf})
    clock.now += 7
    console.step(100, {"loss": 1e-9})  # seven steps in seven seconds
    assert stream.flushed == len(stream.getvalue())
    assert stream.getvalue().splitlines() == [
        "step   93/200  loss nan  tokens/s inf  eta -:--:--",
        "step  100/200  loss 1e-09  eta 0:01:40",
    ]


def test_console_is_silent_when_disabled_and_refuses_bad_arguments():
    stream = io.StringIO()
    for mode in ("auto", "plain", "rich"):
        console = Console(3, mode=mode, log_every=1, enabled=False, stream=stream)
        console.header({"a": "b"})
        console.line("x")
        console.step(1, {"loss": 1.0})
        console.evaluation(1, {"eval/loss": 1.0})
        console.close()
    assert stream.getvalue() == ""
    with pytest.raises(ValueError, match="fancy"):
        Console(3, mode="fancy", stream=stream)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="log_every"):
        Console(3, log_every=0, stream=stream)


def test_rich_console_draws_a_bar_and_gives_the_terminal_back(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    console = Console(3, mode="rich", log_every=1, stream=stream)
    console.header({"model": "[bold]gpt[/bold]"})
    for step in (1, 2, 3):
        console.step(step, {"loss": 4.0 - step, "tokens_per_s": 10.0})
    console.evaluation(3, {"eval/loss": 0.5})
    console.close()
    console.close()
    console.line("after")
    text = stream.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "3/3" in plain and "loss 1.0000" in plain and "eta 0:00:00" in plain and "eval  3/3  loss 0.5000" in plain
    assert "[bold]gpt[/bold]" in plain  # values are not markup
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l") and plain.endswith("after\n")  # the cursor is back


def test_console_line_disarms_terminal_escapes_and_narrow_encodings():
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    Console(1, mode="plain", stream=stream).line("a\x1b[31m\tb\nc \u00e9")
    assert buffer.getvalue() == b"a\\ufffd[31m\tb\nc \\xe9\n"


def test_format_duration():
    assert [format_duration(s) for s in (0, 59.6, 3661, 90061, math.inf)] == [
        "0:00:00",
        "0:01:00",
        "1:01:01",
        "1d 1:01:01",
        "-:--:--",
    ]


# ---------------------------------------------------------------- environment

SECRET = "hunter2swordfish"
PLANTED = {
    "HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "HOME": f"/home/{SECRET}",
    "JAXDIST_TOKEN": SECRET, "NCCL_PASSWORD": SECRET, "JAX_my_credentials": SECRET, "JAXDIST_API_KEY": SECRET,
    "JAX_COMPILATION_CACHE_DIR": f"gs://me:{SECRET}@bucket/cache", "JAX_PROXY": f"https://{SECRET}@host:1/x",
    "XLA_FLAGS": f"--xla_dump_to=/tmp/d --xla_auth_token={SECRET}", "NCCL_NET": f"http://u:p@{SECRET}@h/x",
}  # fmt: skip


def test_environment_holds_no_planted_secret(tmp_path):
    allowed = {
        "SLURM_PROCID": "3",
        "RANK": "3",
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JWT": SECRET,
    }
    values = environment(
        process_count=2,
        devices=["NVIDIA H200"] * 2,
        mesh={"data": 2},
        command=[
            "train.py",
            "--api-key",
            SECRET,
            f"data.token={SECRET}",
            f"data.path=s3://a:{SECRET}@b/c",
            "train.steps=2",
        ],
        environ={**PLANTED, **allowed},
    )
    write_environment(tmp_path / "env.json", values)
    text = (tmp_path / "env.json").read_text()
    assert SECRET not in text
    assert json.loads(text) == values
    assert values["command"] == [
        "train.py",
        "--api-key",
        "[redacted]",
        "data.token=[redacted]",
        "data.path=s3://[redacted]@b/c",
        "train.steps=2",
    ]
    variables = values["variables"]
    assert {name: variables[name] for name in allowed if name != "SLURM_JWT"} == {
        name: value for name, value in allowed.items() if name != "SLURM_JWT"
    }
    assert variables["JAXDIST_TOKEN"] == "[redacted]" and not {"HF_TOKEN", "HOME", "SLURM_JWT"} & set(variables)
    assert variables["XLA_FLAGS"] == "--xla_dump_to=/tmp/d --xla_auth_token=[redacted]"
    assert variables["JAX_COMPILATION_CACHE_DIR"] == "gs://[redacted]@bucket/cache"
    assert values["devices"] == {"NVIDIA H200": 2} and values["versions"]["numpy"] == np.__version__


@pytest.mark.parametrize(
    "argument",
    [
        "--token={}",
        "wandb.API_KEY={}",
        "my-secret-name={}",
        "Password = {}",
        "--opt=HF_TOKEN={}",
        'x={{"token": "{} b"}}',
        "observe={{api_key: {}}}",
        "https://u:{}@h/p",
        "https://{}@h",
        "url=ssh://u:a/{}@h",
        "https://h/?access_token={}&a=1",
        "a=http://x:1@h,http://u:{}@i",
        "--db_passwd='a {} b'",
        "https://b.s3.amazonaws.com/k?X-Amz-Credential=A&X-Amz-Signature={}&X-Amz-Expires=9",
        "data.path=https://storage.googleapis.com/b/o?X-Goog-Signature={}",
        "https://d.cloudfront.net/o?Expires=1&Signature={}&Key-Pair-Id=K",
        "https://a.blob.core.windows.net/c?sv=2024-01-01&sr=b&sig={}%3D",
        "sig={}",
        "db.pwd={}",
        "--mysql-pwd={}",
        "Authorization=Bearer {}",
        "--header=Authorization: Basic {}",
        "curl -H 'authorization: bearer {}'",
        "say Bearer {} to nobody",
        "x=hf_{}",
        "data.path=/mnt/ghp_{}/a",
        "github_pat_{}",
        "sk-{}",
        "model.name=sk-proj-{}",
        "prompt 'xoxb-{}'",
        "a.b=glpat-{}",
    ],
)
def test_secrets_in_arguments_are_redacted(argument):
    for shown in (redact_command([argument.format(SECRET)])[0], redact(argument.format(SECRET))):
        assert SECRET not in shown and "[redacted]" in shown


def test_access_keys_are_redacted():
    assert redact("aws AKIAIOSFODNN7EXAMPLE, ASIAIOSFODNN7EXAMPLE") == "aws [redacted], [redacted]"


def test_no_key_of_the_configuration_looks_like_a_secret():
    """Its record could not be run again."""
    sections = {name: dict.fromkeys(keys, "text") for name, keys in asdict(Config()).items()}
    assert redact_settings(sections) == sections


@given(
    name=st.from_regex(r"[a-z_.]{0,6}(token|KEY|Secret|password|CREDENTIAL)[a-z_.]{0,6}", fullmatch=True).filter(
        lambda name: not re.search("tokeni[sz]", name)  # data.tokenizer is none
    ),
    secret=st.from_regex(r"[A-Za-z0-9+/_-]{12,30}", fullmatch=True),
)
@settings(max_examples=100, deadline=None)
def test_any_secret_assignment_is_redacted(name, secret):
    secret = "Z" + secret  # a name cannot hold it by chance, and it is no option
    for command in ([f"{name}={secret}"], [f"--{name}={secret}"], [f"--{name}", secret]):
        assert secret not in " ".join(redact_command(command))


@pytest.mark.parametrize(
    "argument",
    [
        "train.sample_tokens=200",
        "data.token_dtype=uint16",
        "data.mask_token_rate=0.15",
        "tokens: 2,503,730",
        "data.source=tokens",
        "--config",
        "data.path=/a/b@c",
        "--coordinator",
        "host:8080",
        "http://host:8080/x@y",
        "model.kv_heads=2",
        "design=2",
        "signal=SIGTERM",
        "my.sigma=0.1",
        "train.author=me",
        "--tokenizer=a.json",
        "task-1234567890abcdef",
        "svd=full",
        "checkpoint.keep_every=5",
        "the bearer of this",
    ],
)
def test_harmless_arguments_stay(argument):
    assert redact_command([argument]) == [argument]


def test_environment_without_git_and_package_imports_no_jax(tmp_path, monkeypatch):
    code = "import sys, jaxdist.observe; assert not {'jax', 'matplotlib'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    monkeypatch.setenv("PATH", str(tmp_path))
    values = environment(process_count=1, devices=[], mesh={}, command=[], environ={})
    assert values["git"] is None and values["variables"] == {}
