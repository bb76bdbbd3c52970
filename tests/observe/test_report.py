"""report.html: one well-formed, self-contained and safe page, whatever the run recorded. No devices are needed."""

import base64
import math
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxdist.observe.figures import draws_devices
from jaxdist.observe.report import LayoutRow, write_report

AXES = {"pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
LAYOUT = [
    LayoutRow("embed/tokens", (256, 128), "float32", "P('tensor', 'fsdp')", 4, 32768, 131072),
    LayoutRow("blocks/mlp/up/kernel", (4, 128, 512), "float32", "P('pipe', 'fsdp', 'tensor')", 4, 262144, 1048576),
    LayoutRow("blocks/<i>&amp/scale", (), "bfloat16", "P()", 1, 2, 2),
]
VOID = {"meta", "br", "img"}
IMAGE = "data:image/svg+xml;base64,"


class Page(HTMLParser):
    """Checks nesting, unique ids, that images are well formed and that nothing is loaded; collects tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], self.open
        assert len(self.ids) == len(set(self.ids))
        assert {link for link in self.links if link.startswith("#")} <= {"#" + name for name in self.ids}
        assert all(link.startswith(("#", IMAGE)) for link in self.links), self.links
        for link in self.links:
            for element in (
                ElementTree.fromstring(base64.b64decode(link.removeprefix(IMAGE))).iter() if IMAGE in link else ()
            ):
                assert not element.tag.endswith(("}script", "}foreignObject"))
                loaded = [value for name, value in element.items() if name.endswith(("href", "src"))]
                assert all(value.startswith(("#", "data:image/png;base64,")) for value in loaded), loaded

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("src", "href", "xlink:href", "data") if name in values]
        self.labels += [values["alt"]] if tag == "img" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def records(count: int, every: int = 50) -> list[dict]:
    result: list[dict] = []
    for step in range(1, count + 1):
        rate = 800.0 if step == 1 else 25000.0 + 10 * (step % 7)
        result.append({"step": step, "loss": 5.5 * math.exp(-step / 40) + 1, "grad_norm": 1.0, "tokens_per_s": rate})
        if step % every == 0:
            result.append({"step": step, "eval/loss": 5.5 * math.exp(-step / 40) + 1.1})
    return result


def report(path: Path, **changes) -> tuple[str, Page]:
    arguments = {
        "title": "gpt & <friends>",
        "config_yaml": "model: {name: gpt}\ndata: {path: 's3://u:hunter2@b/x'}\n",
        "environment": {"command": ["train.py", "<b>"], "versions": {"jax": "0.12"}, "git": None},
        "metrics": records(200),
        "layout": LAYOUT,
        "mesh_axes": AXES,
        "devices": ["cpu"] * 8,
        "baselines": {"uniform": 8.0, "gzip $x^$": 2.5},
        "samples": "import os\n<script>alert(1)</script>\x1b[0m\x00 </pre>",
        "data_info": {"unit": "bytes", "files": [f"{i}.py" for i in range(40)], "tokens_per_step": 4096},
    }
    write_report(path / "report.html", **(arguments | changes))
    text = (path / "report.html").read_text()
    return text, Page(text)


def test_report_is_one_safe_self_contained_page(tmp_path):
    text, page = report(tmp_path)
    assert "http" not in text and "@import" not in text and len(text) < 1_000_000
    assert not {"script", "link", "iframe", "object", "b", "friends"} & set(page.tags)
    assert "<script>alert(1)</script>\ufffd[0m\ufffd </pre>" in page.text and "gpt & <friends>" in page.text
    assert "hunter2" not in text and "train.py <b>" in page.text
    for row in LAYOUT:
        assert row.path in page.text and row.spec in page.text
    assert len(page.labels) == 4 and all(page.labels)
    assert "prefers-color-scheme: dark" in text


def test_report_summary_is_right(tmp_path):
    _, page = report(tmp_path)
    last, best = (5.5 * math.exp(-5) + 1) / math.log(2), (5.5 * math.exp(-5) + 1.1) / math.log(2)
    assert f"Final training loss{last:.4f}bits per byte, step 200" in page.text
    assert f"Best evaluation{best:.4f}bits per byte, step 200" in page.text
    assert f"Tokens seen{200 * 4096:,}" in page.text and "Median throughput25,030tokens/s" in page.text
    assert "Wall time0:00:38in training" in page.text  # 4096 / 800 s + 199 * 4096 / 25030 s
    assert f"uniform8.0000{8 - best:+.4f}" in page.text and f"gzip $x^$2.5000{2.5 - best:+.4f}" in page.text
    assert "Baselines beaten2 of 2hardest: gzip $x^$, 2.5000" in page.text
    assert "1 of 200 steps, slower than half the median (step 1)" in page.text
    assert "data 2 × fsdp 2 × tensor 2. Devices: 8 × cpu." in page.text
    assert "one device holds 288 KiB of 1.125 MiB" in page.text
    _, page = report(tmp_path, metrics=records(1), baselines={"gzip": 2.5})
    assert "Baselines beaten0 of 1by the final training loss" in page.text


def test_report_units_of_tokens(tmp_path):
    metrics = [{"step": step, "loss": 2.0} for step in range(1, 5)]
    _, page = report(tmp_path, metrics=metrics, data_info={"unit": "tokens", "tokens_per_step": 10})
    assert "Final training loss2.0000nats per token" in page.text and "Tokens seen40" in page.text
    assert f"uniform{8 * math.log(2):.4f}" in page.text  # baselines are in bits per token


def test_median_throughput_leaves_out_compilation(tmp_path):
    _, page = report(tmp_path, metrics=records(3))  # 800, 25020, 25030 tokens/s
    assert "Median throughput25,025tokens/s" in page.text


NAN = [{"step": 1, "loss": math.nan, "tokens_per_s": math.nan}, {"step": 2, "loss": math.inf, "eval/loss": math.nan}]


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": []},
        {"metrics": records(1)},
        {"metrics": records(2, every=1)},
        {"metrics": NAN},
        {"metrics": [*records(3), *NAN]},
        {"metrics": [{"step": 0, "loss": 0.0, "tokens_per_s": 0.0}], "baselines": {}},
        {"metrics": [{"step": 5, "eval/loss": 2.0}]},
        {"samples": ""},
        {"layout": [], "devices": [], "data_info": {}},
        {"environment": {}, "config_yaml": "", "baselines": {"a" * 60: 3.0, "b": 3.0, "c": math.nan}},
        {"mesh_axes": {"data": 1}, "devices": ["cuda:0"]},
        {"mesh_axes": {}, "devices": []},
        {"title": "\u5b66\u7fd2", "baselines": {"\u5b66\u7fd2": 2.0}, "layout": [LAYOUT[0]._replace(path="\u5b66/$^")]},
    ],
    ids=range(13),
)
def test_report_of_little_or_odd_data(tmp_path, changes, recwarn):
    text, page = report(tmp_path, **changes)
    assert len(page.labels) == 4 and "http" not in text
    assert not list(recwarn)


@pytest.mark.parametrize(
    ("sizes", "drawn"),
    [((8,), True), ((64,), True), ((2, 32), False), ((16, 4), True), ((2, 2, 2, 2, 4), True), ((4, 16, 8, 8), False)],
)
def test_mesh_pictures(tmp_path, sizes, drawn):
    axes = dict(zip(("pipe", "data", "fsdp", "context", "tensor"), sizes, strict=False))
    count = math.prod(sizes)
    assert draws_devices(axes) is drawn
    _, page = report(tmp_path, mesh_axes=axes, devices=[f"gpu{i}" for i in range(count)], metrics=[])
    assert ("Each strip is one axis" in page.text) is not drawn
    assert (
        f"{count:,} devices: {' × '.join(f'{a} {n}' for a, n in axes.items())}. Devices: gpu0 ... gpu{count - 1}."
        in page.text
    )


def test_report_of_a_long_run_is_small(tmp_path):
    metrics = records(20_000, every=1000)
    metrics[9000]["loss"] = 60.0
    layout = [LAYOUT[0]._replace(path=f"unit{i}/w{j}") for i in range(40) for j in range(4)]
    text, page = report(tmp_path, metrics=metrics, layout=layout)
    assert len(text) < 1_000_000 and "160 rows" in page.text
    assert "Steps above the axis: 1." in page.text
