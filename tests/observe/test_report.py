"""report.html: one well-formed, self-contained and safe page, whatever the run recorded. No devices are needed."""

import math
import re
from html.parser import HTMLParser

import pytest
from reports import DEFAULTS, ENVIRONMENT, LAYOUT, MESH, SETTINGS, record, records, with_experts

from jaxdist.observe.report import RunRecord, Sent, read_run, write_comparison, write_report
from jaxdist.observe.report.account import account_of, over_time
from jaxdist.observe.report.charts import Axis
from jaxdist.observe.report.sections.mesh import draws_devices
from jaxdist.observe.report.style import AXIS_COLOURS

VOID = {"meta", "br"}
FIGURES = 11  # of a run with everything


class Page(HTMLParser):
    """Checks nesting, unique ids, and that nothing is loaded; collects tags, text alternatives and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.timings: list[str] = []
        self.text, self._timing = "", False
        self.feed(text)
        self.close()
        assert self.open == [], self.open
        assert len(self.ids) == len(set(self.ids))
        assert {*self.links} <= {"#" + name for name in self.ids}, self.links

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        assert not any(name.startswith("on") for name in values)
        self.tags.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("src", "href", "xlink:href", "data") if name in values]
        self.labels += [values["aria-label"]] if values.get("role") == "img" else []
        if values.get("class") == "timing":
            self.timings.append("")
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
        if self.timings and not self.timings[-1].endswith("(simulated)"):
            self.timings[-1] += data


def report(path, **changes) -> tuple[str, Page]:
    write_report(path / "report.html", record(**changes))
    text = (path / "report.html").read_text()
    return text, Page(text)


def test_report_is_one_safe_self_contained_page(tmp_path):
    text, page = report(tmp_path)
    assert "http" not in text and "@import" not in text and "url(" not in text and len(text) < 300_000
    assert not {"script", "link", "iframe", "object", "friends", "img"} & set(page.tags)
    assert "<script>alert(1)</script>\ufffd[0m\ufffd </pre>" in page.text and "gpt & <friends>" in page.text
    assert "hunter2" not in text and "train.py <b>" in page.text and "loss <b>jumped</b>" in page.text
    for row in LAYOUT:
        assert row.path in page.text
    assert page.tags.count("figure") == len(page.labels) == FIGURES and all(page.labels)
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_report_says_what_was_trained(tmp_path):
    _, page = report(tmp_path)
    best = (5.5 * math.exp(-5) + 1.1) / math.log(2)
    assert (
        f"A GPT of 294,913 parameters learned 10.9 MB of text to {best:.3f} bits per byte (gzip $x^$: 2.500) in "
        "44.6 s on 8 simulated CPU devices, zero3 over data=2 fsdp=2 tensor=2." in page.text
    )
    last = (5.5 * math.exp(-5) + 1) / math.log(2)
    assert f"Final training loss{last:.4f}bits per byte, step 200" in page.text
    assert f"Best evaluation{best:.4f}bits per byte, step 200" in page.text
    assert f"Tokens seen{200 * 4096:,}" in page.text and "Throughput25,030 (simulated)" in page.text
    assert f"uniform8.0000{8 - best:.4f} lower: better" in page.text
    assert "Baselines beaten2 of 2by the best evaluation" in page.text
    assert "1 step slower than half the median" in page.text
    assert "data 2 × fsdp 2 × tensor 2. Devices: 8 × simulated CPU." in page.text
    assert "One device holds 288 KiB of the 1.125 MiB" in page.text
    _, page = report(tmp_path, metrics=records(1), environment=ENVIRONMENT | {"baselines": {"gzip": 2.5}})
    assert "Baselines beaten0 of 1by the final training loss" in page.text and "higher: not beaten" in page.text


def test_report_of_experts(tmp_path):
    """The last load, cell by cell; no curve of what was never dropped; as readable with many experts."""
    text, page = report(tmp_path, metrics=with_experts(records(200), 2, 4), settings={"model": {"moe": {"dense": 1}}})
    assert page.tags.count("figure") == len(page.labels) == FIGURES + 4
    assert (
        "Load of 2 blocks of 4 experts at step 199, tokens over the mean: at most 3; experts without a token: 1."
        in (page.labels)
    )
    [empty] = re.findall(r'<path class="cell fill-under" fill-opacity="1" d="([^"]*)"/>', text)
    [full] = re.findall(r'<path class="cell fill-over" fill-opacity="1" d="([^"]*)"/>', text)
    assert empty.startswith("M0.0 0.0h250.0v200.0") and full.startswith("M250.0 0.0h250.0v200.0")  # row 1 is on top
    assert "2" + "3 (expert 1)" + "0 (expert 0)" + "0.00 3.00 1.00 1.00" in page.text  # the first block has an MLP
    assert "Dropped, share" not in page.text and "Largest load, tokens" in page.text
    text, page = report(tmp_path, metrics=with_experts(records(200), 48, 128, dropped=0.1))
    assert "Dropped, share" in page.text and len(text) < 350_000
    assert "Experts" not in report(tmp_path)[1].text


@pytest.mark.parametrize("load", [[], [1.0], [[]], [[[1.0]]], [[math.nan, 1e308]], [[-1.0]]])
def test_report_of_experts_of_odd_records(tmp_path, load):
    lines = [{"step": 1, "loss": 2.0, "arrays": {"experts/load": load}}, {"step": 2, "experts/max_load": math.inf}]
    _, page = report(tmp_path, metrics=lines)
    assert "Environment" in page.text.partition("with their defaults")[2]  # the page goes on to its last section


def test_report_units_of_tokens(tmp_path):
    metrics = [{"step": step, "loss": 2.0} for step in range(1, 5)]
    _, page = report(tmp_path, metrics=metrics, environment=ENVIRONMENT | {"data": {"unit": "tokens"}})
    assert "Final training loss2.0000nats per token" in page.text
    assert f"uniform{8 * math.log(2):.4f}" in page.text  # baselines are in bits per token


def test_times_of_simulated_devices_say_so(tmp_path):
    _, page = report(tmp_path)
    assert len(page.timings) > 10
    assert all(words.endswith("(simulated)") for words in page.timings), page.timings
    _, page = report(tmp_path, environment=ENVIRONMENT | {"devices": {"NVIDIA H200": 8}})
    assert "imulated" not in page.text and "8 NVIDIA H200 devices" in page.text


def test_shares_of_time_sum_to_all(tmp_path):
    """Three sessions: a start, steps, a kill, lost lines, and a rollback that cut lines."""
    first = records(60, 20)
    later = records(80, 20, begun=first[-1]["time"] + 100, first=61)
    cut = later[:30] + later[40:]
    found = account_of(first + cut)
    assert found is not None
    assert sum(found.seconds.values()) == pytest.approx(found.total, rel=1e-9)
    assert found.seconds["stopped"] == pytest.approx(100)
    assert found.seconds["start"] == pytest.approx(18) and found.seconds["rest"] > 0
    assert [(each.first_step, each.last_step) for each in found.sessions] == [(1, 60), (61, 140)]
    for column in over_time(found, 50):
        assert sum(column.values()) == pytest.approx(1, abs=1e-6)
    _, page = report(tmp_path, metrics=first + cut)
    [table] = re.findall(r"purposesharetimewhat it is(.*?)Memory", page.text, re.DOTALL)
    shares = [float(share) for share in re.findall(r"(\d+\.\d\d)%", table)]
    assert abs(sum(shares[:-1]) - 100) < 0.1 and shares[-1] == pytest.approx(100, abs=0.01) and len(shares) == 9
    assert "1 restart" in page.text


def test_times_that_cannot_be_are_passed_over():
    assert account_of(records(5, begun=None)) is None
    odd = [
        {"step": 1, "time": 10.0, "time/start": 4.0},
        {"step": 2, "time": 12.0, "time/device": 50.0},  # more than there was
        {"step": 3, "time": 5.0, "time/device": math.nan, "time/data": -1.0},  # the clock was set back
        {"step": 4, "time": math.inf},
    ]
    found = account_of(odd)
    assert found is not None and found.total == pytest.approx(6)
    assert found.seconds == {"device": pytest.approx(2), "start": pytest.approx(4)}


def test_memory_and_communication_stand_beside_what_was_measured(tmp_path):
    metrics = [line | {"peak_memory_bytes": 10 << 20, "mfu": 0.4321} for line in records(40)]
    _, page = report(tmp_path, metrics=metrics)
    assert "parameters288 KiB288 KiB" in page.text and "optimizer state576 KiB-" in page.text
    assert "need 8.855 MiB at the most; the devices report 10 MiB, 1.13 times that" in page.text
    assert "43.2% (simulated) of the devices' peak" in page.text
    assert "tensoractivationspsumforward123.815 MiBinside a host" in page.text
    assert "remat fullin use" in page.text and "3 MiB1.50 × bytes sent" in page.text
    _, page = report(tmp_path, prediction="The model cannot be imported.", remedies=())
    for said in ("not predicted", "What is sent is not known", "layout of the parameters is not known"):
        assert said in page.text
    assert page.text.count("The model cannot be imported.") == 3


def test_settings_that_differ_come_first(tmp_path):
    _, page = report(tmp_path)
    assert "6 of 8 settings differ" in page.text and "parallel.strategyzero3ddp" in page.text
    assert page.text.index("model.layers412") < page.text.index("2 settings with their defaults")
    assert DEFAULTS["parallel"]["stages"] == SETTINGS["parallel"]["stages"]


NAN = [{"step": 1, "loss": math.nan, "tokens_per_s": math.nan}, {"step": 2, "loss": math.inf, "eval/loss": math.nan}]


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": []},
        {"metrics": records(1)},
        {"metrics": records(2, every=1)},
        {"metrics": NAN},
        {"metrics": [*records(3), *NAN]},
        {"metrics": [{"step": 0, "loss": 0.0, "tokens_per_s": 0.0, "step_s": 0.0}]},
        {"metrics": [{"step": 5, "eval/loss": 2.0}]},
        {"metrics": [{"step": 2**62, "loss": 1e308}, {"step": 2**62 + 9, "loss": -1e308, "grad_norm": 1e308}]},
        {"metrics": [line | {"skipped": 3, "loss_scale": 2.0**15} for line in records(4)]},
        {"prediction": "no", "remedies": (), "samples": "", "settings": {}, "environment": {}, "title": ""},
        {
            "environment": {
                "baselines": {"a" * 60: 3.0, "b": math.nan, "c": []},
                "data": [],
                "mesh": 5,
                "devices": {"x": "y"},
            }
        },
        {"environment": ENVIRONMENT | {"mesh": {"data": 1}, "devices": {"cuda": 1}}},
        {"settings": {"model": [], "data": {"seq_len": "x"}, "train": None}},
        {"incidents": [{}, {"step": "x", "what": ["<b>"]}, {"step": 10**6}]},
        {"title": "\u5b66\u7fd2", "samples": "\u5b66"},
    ],
    ids=range(15),
)
def test_report_of_little_or_odd_data(tmp_path, changes, recwarn):
    text, page = report(tmp_path, **changes)
    assert all(page.labels) and "http" not in text and "Summary" in page.text
    assert not list(recwarn)


@pytest.mark.parametrize(
    ("sizes", "drawn"), [((8,), True), ((64,), True), ((16, 4), True), ((2, 2, 2, 2, 4), True), ((4, 16, 8, 8), False)]
)
def test_mesh_pictures(tmp_path, sizes, drawn):
    axes = dict(zip(("pipe", "data", "fsdp", "context", "tensor"), sizes, strict=False))
    count = math.prod(sizes)
    assert draws_devices(axes) is drawn
    environment = ENVIRONMENT | {"mesh": axes, "devices": {"gpu": count}}
    text, page = report(tmp_path, environment=environment, metrics=[])
    assert ("Each row is one axis" in page.text) is not drawn
    assert text.count('class="device"') == (count if drawn else 0)
    assert f"{count:,} devices: {' × '.join(f'{a} {n}' for a, n in axes.items())}. Devices:" in page.text


@pytest.mark.slow
def test_report_of_a_long_run_is_small(tmp_path):
    metrics = records(20_000, every=1000)
    metrics[9000]["loss"] = 60.0
    prediction = record().prediction._replace(
        layout=[LAYOUT[0]._replace(path=f"unit{i}/w{j}") for i in range(40) for j in range(4)],
        sent=[Sent(("data",), f"w{i}", "psum", (), 1, 1.0, "inside") for i in range(70)],
    )
    text, page = report(tmp_path, metrics=metrics, prediction=prediction)
    assert len(text) < 600_000 and "160 rows" in page.text and "70 rows" in page.text
    assert "Steps above the axis: 1." in page.text


def test_comparison_shows_what_differs(tmp_path):
    other = {name: dict(section) for name, section in SETTINGS.items()}
    other["parallel"]["strategy"] = "<ddp>"
    faster = [line | {"loss": line["loss"] * 0.9} for line in records(150)]
    runs = [record(title="a"), record(title="b", settings=other, metrics=faster), RunRecord("c", metrics=[])]
    write_comparison(tmp_path / "both.html", runs)
    page = Page((tmp_path / "both.html").read_text())
    assert "3 runs compared." in page.text  # one has another unit
    write_comparison(tmp_path / "both.html", runs[:2])
    page = Page((tmp_path / "both.html").read_text())
    assert "2 runs compared: the lowest evaluation is 1.6404 bits per byte, of a." in page.text
    blind = [{key: line[key] for key in line if not key.startswith("eval/")} for line in records(150)]
    write_comparison(tmp_path / "unlike.html", [runs[0], record(title="b", metrics=blind)])
    page_of_unlike = Page((tmp_path / "unlike.html").read_text()).text
    assert "2 runs compared." in page_of_unlike and "final training loss" in page_of_unlike  # no winner
    assert "parallel.strategyzero3<ddp>" in page.text and "model.layers" not in page.text
    assert page.text.count("steps200150") == 1 and len(page.labels) == 2
    assert all(words.endswith("(simulated)") for words in page.timings)


def test_run_directory_is_read_as_far_as_it_can_be(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n<b>\n{"step": 9223372036854775808}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo'
    )
    (tmp_path / "config.yaml").write_text("model: {name: 'gpt'")
    (tmp_path / "env.json").write_text("[1")
    (tmp_path / "incidents.jsonl").write_text('{"step": 1, "what": "x"}\nnonsense\n')
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    found = read_run(tmp_path)
    assert found.last_step == 2 and found.checkpoints == [2] and len(found.incidents) == 1
    assert len(found.notes) == 4 and "line 2" in found.notes[0]
    write_report(tmp_path / "report.html", found)
    assert "env.json cannot be read" in Page((tmp_path / "report.html").read_text()).text


def test_colours_can_be_read():
    def light(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for axis, (ground, ink, dark_ground, dark_ink) in AXIS_COLOURS.items():
        for a, b in ((ground, ink), (dark_ground, dark_ink)):
            low, high = sorted((light(a), light(b)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, axis
    assert {*AXIS_COLOURS} == {*MESH, "none"}


def test_ticks_are_round_and_inside():
    assert Axis(0, 159).ticks(5) == [0, 50, 100, 150]
    assert Axis(0, 200, times=True).ticks(6) == [0, 60, 120, 180] and Axis(0, 9, times=True).words(125) == "2:05"
    assert Axis(5, 5).ticks() == [5] and Axis(0, math.inf).ticks() == [0]
