"""What a run learned: the headline, the cards, the loss with its yardsticks, and the optimizer's own figures."""

import math
from typing import Any

import numpy as np

from jaxdist.mesh import sizes_text
from jaxdist.observe.metrics import curve, smooth
from jaxdist.observe.report.account import Account
from jaxdist.observe.report.charts import Axis, Chart, Figure, Line, range_of
from jaxdist.observe.report.elements import (
    Markup,
    cards,
    folded,
    number_text,
    page_section,
    rows_table,
    seconds_text,
    sentence,
    short_bytes,
    text,
    timing,
)
from jaxdist.observe.report.record import Losses, RunRecord, mapping, median

_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def wall_seconds(record: RunRecord, account: Account | None) -> float:
    """Seconds that the run took: by its account, without stops, or else the sum of its steps."""
    if account is not None:
        return account.total - account.seconds.get("stopped", 0.0)
    rates = record.rates.values
    rates = rates[np.isfinite(rates) & (rates > 0)]
    return float((record.work / rates).sum()) if rates.size else math.nan


def amount(record: RunRecord) -> str:
    """How much there was to learn from: "10.9 MB of text", "1,437 samples"."""
    size, unit = record.data.get("train"), record.data.get("unit", "")
    if type(size) is not int:
        return "data of its own"
    if unit != "bytes":
        return f"{size:,} {unit}"
    scale, name = next(((scale, name) for scale, name in _DECIMAL if size >= scale), (1.0, ""))
    return f"{size / scale:.3g} {name}B of text"


def devices_of(record: RunRecord) -> str:
    """The devices in words: "8 simulated CPU devices"."""
    named = [f"{n:,} {'simulated CPU' if kind == 'cpu' else kind}" for kind, n in record.devices.items()]
    count = sum(record.devices.values())
    return (
        f"{' and '.join(named)} {'device' if count == 1 else 'devices'}" if named else "devices that are not recorded"
    )


def headline(record: RunRecord, losses: Losses, account: Account | None) -> str:
    """What was trained, on what, how well, how fast."""
    settings = {name: mapping(section) for name, section in record.settings.items()}
    name = str(settings.get("model", {}).get("name") or "model")
    name = name.upper() if len(name) <= 4 else name
    size = record.prediction.parameters if not isinstance(record.prediction, str) else None
    article = "An" if name[:1].lower() in "aeiou" else "A"
    said = f"{article} {name}" + (f" of {size:,} parameters" if size else "")
    _, own, _ = losses.own
    if math.isfinite(own):
        hardest = min(losses.baselines.items(), key=lambda item: item[1], default=None)
        beside = f" ({hardest[0]}: {number_text(hardest[1], 3)})" if hardest else ""
        said += f" learned {amount(record)} to {number_text(own, 3)} {losses.unit}{beside}"
    else:
        said += f" was trained on {amount(record)}"
    seconds = wall_seconds(record, account)
    said += f" in {seconds_text(seconds)}" if math.isfinite(seconds) else ""
    strategy = settings.get("parallel", {}).get("strategy")
    axes = sizes_text(record.mesh, none="")
    layout = " over ".join(str(part) for part in (strategy, axes) if part)
    return f"{said} on {devices_of(record)}" + (f", {layout}." if layout else ".")


def summary_cards(record: RunRecord, losses: Losses, account: Account | None) -> Markup:
    """The figures of the run at a glance."""
    planned = mapping(record.settings.get("train")).get("steps")
    ended = f"of {planned:,} planned" if type(planned) is int else "recorded"
    entries: list[tuple[object, object, object]] = [("Steps", f"{record.last_step:,}", ended)]
    if losses.train.steps.size:
        note = f"{losses.unit}, step {losses.train.steps[-1]:,}"
        entries.append(("Final training loss", number_text(losses.train.values[-1]), note))
    name, own, step = losses.own
    if name == "best evaluation":
        entries.append(("Best evaluation", number_text(own), f"{losses.unit}, step {step:,}"))
    if losses.baselines and math.isfinite(own):
        beaten = [value for value in losses.baselines.values() if value > own]
        entries.append(("Baselines beaten", f"{len(beaten)} of {len(losses.baselines)}", f"by the {name}"))
    if math.isfinite(record.work):
        seen = f"{record.work * record.last_step:,.0f}"
        entries.append((f"{record.unit.capitalize()} seen", seen, f"{record.work:,.0f} a step"))
    if math.isfinite(record.rate):
        entries.append(("Throughput", timing(record, f"{record.rate:,.0f}"), f"{record.unit} per second, median"))
    if math.isfinite(record.step_s):
        entries.append(("Time of a step", timing(record, seconds_text(record.step_s)), "median"))
    mfu = median(curve(record.metrics, "mfu").values)
    if math.isfinite(mfu):
        entries.append(("Model FLOPs utilisation", timing(record, f"{mfu:.1%}"), "of the devices' peak, median"))
    seconds = wall_seconds(record, account)
    if math.isfinite(seconds):
        note = "all sessions, stops left out" if account else "the sum of the steps"
        entries.append(("Wall time", timing(record, seconds_text(seconds)), note))
    if not isinstance(record.prediction, str):
        entries.append(("Memory of a device", short_bytes(record.prediction.peak), "predicted peak"))
        entries.append(("Sent by a device", short_bytes(record.prediction.wire_bytes), "each step, by the ledger"))
    return cards(entries)


def loss_figure(losses: Losses) -> Figure | None:
    """The loss over steps; None without a finite one."""
    train, evaluation = losses.train, losses.evaluation
    steps = np.concatenate([train.steps, evaluation.steps])
    values = np.concatenate([train.values, evaluation.values])
    if not np.isfinite(values).any():
        return None
    first = train.values[np.isfinite(train.values)][:1]
    low, high = range_of(values, *first, *losses.baselines.values())
    x, y = Axis(float(steps.min()), float(steps.max()), "step"), Axis(low, high, losses.unit)
    lines = [Line("each step", train.steps, train.values, "train", "thin")]
    key = {"train": "training"}
    if train.steps.size >= 30:
        lines.append(Line("smoothed", train.steps, smooth(train.values), "train"))
        key["train"] = "training (thin: each step; thick: smoothed)"
    if evaluation.steps.size:
        key["eval"] = "evaluation on held-out data"
        lines.append(Line("evaluation", evaluation.steps, evaluation.values, "eval"))
        lines.append(Line("evaluation", evaluation.steps, evaluation.values, "eval", "dots"))
    levels = [
        (f"{name} {number_text(value, 3)}", value) for name, value in losses.baselines.items() if math.isfinite(value)
    ]
    name, own, step = losses.own
    counts = f"{len(train.steps):,} training and {len(evaluation.steps):,} evaluation points"
    label = f"Loss over steps in {losses.unit}: {counts}; {name} {number_text(own, 3)} at step {step:,}."
    caption = f"Loss in {losses.unit} over steps" + (
        " (nats per byte divided by ln 2)." if "byte" in losses.unit else "."
    )
    bad = train.steps[~np.isfinite(train.values)]
    if bad.size:
        caption += f" {bad.size:,} of {train.steps.size:,} steps had a loss that is not finite, first step {bad[0]:,}."
    above = int((np.isfinite(train.values) & (train.values > high)).sum())
    caption += f" Steps above the axis: {above:,}." if above else ""
    return Figure("loss", Chart(lines, x, y, levels), label, caption, key)


def learning_section(record: RunRecord, losses: Losses) -> tuple[str, Markup]:
    """The loss over steps, what simple models reach, and each evaluation."""
    name, own, step = losses.own
    parts: list[Markup] = []
    if math.isfinite(own):
        parts.append(sentence(f"The {name} is {number_text(own)} {losses.unit}, at step {step:,}."))
    steps = losses.train.steps.size + losses.evaluation.steps.size
    none = sentence("No finite loss was recorded." if steps else "No step was recorded.")
    parts.append(shown.html() if (shown := loss_figure(losses)) else none)
    if losses.baselines:
        rows: list[tuple[object, ...]] = [
            (key, number_text(value), _beside(value, own))
            for key, value in sorted(losses.baselines.items(), key=lambda item: -item[1])
        ]
        parts.append(rows_table(["baseline", losses.unit, "the run"], rows, right=[1]))
    else:
        known = "baselines" in record.environment
        parts.append(sentence("There are no baselines for these data." if known else "Baselines were not recorded."))
    evaluations = [each for each in record.metrics if any(key.startswith("eval/") for key in each)]
    keys = list(dict.fromkeys(key for each in evaluations for key in each if key.startswith("eval/")))[:8]
    if evaluations:
        rows = [(f"{each['step']:,}", *(_cell(each.get(key)) for key in keys)) for each in evaluations]
        made = rows_table(["step", *(key.removeprefix("eval/") for key in keys)], rows, right=range(len(keys) + 1))
        parts.append(folded(f"Evaluations ({len(evaluations):,}; loss in nats, as in metrics.jsonl)", made))
    return page_section("Learning", *parts)


def _beside(value: float, own: float) -> str:
    if not (math.isfinite(own) and math.isfinite(value)):
        return "-"
    return f"{abs(value - own):.4f} {'lower: better' if own < value else 'higher: not beaten'}"


def _cell(value: Any) -> str:
    return "-" if value is None else number_text(float(value))


# Key of metrics.jsonl: (title, what it is).
_CURVES = {
    "grad_norm": ("Gradient norm", "before clipping"),
    "lr": ("Learning rate", "of the optimizer's schedule"),
    "loss_scale": ("Loss scale", "of half-precision gradients"),
}


def steps_section(record: RunRecord) -> tuple[str, Markup]:
    """Gradient norm, learning rate, loss scale, speed, and the steps that were skipped."""
    parts = []
    skipped = [each["step"] for each in record.metrics if each.get("skipped")]
    if skipped:
        named = ", ".join(f"{step:,}" for step in skipped[:8]) + (" ..." if len(skipped) > 8 else "")
        parts.append(sentence(f"{len(skipped):,} steps were skipped, because a gradient was not finite: step {named}."))
    elif record.metrics:
        parts.append(sentence("No step was skipped."))
    made = "".join(each.html() for each in step_figures(record))
    parts.append(Markup(f'<div class="two">{made}</div>') if made else sentence("Nothing was recorded."))
    return page_section("Steps", *parts)


def step_figures(record: RunRecord) -> list[Figure]:
    """Gradient norm, learning rate, loss scale and speed over steps, as far as they are recorded."""
    made = []
    for key, (title, what) in _CURVES.items():
        found = curve(record.metrics, key)
        fine = found.values[np.isfinite(found.values)]
        if fine.size:
            said = f"{fine[-1]:.4g} at the end"
            made.append(small_figure(key, title, what, found.steps, found.values, "train", said))
    rates, usual = record.rates, record.rate
    if math.isfinite(usual):
        low = rates.values < usual / 2
        what = f"{record.unit} per second, all devices together" + (", simulated" if record.simulated else "")
        if left := int(low.sum()):
            steps = "step" if left == 1 else "steps"
            what += f"; {left:,} {steps} slower than half the median left out (compilation)"
        shown = np.where(low, np.nan, rates.values)
        made.append(small_figure("throughput", "Throughput", what, rates.steps, shown, "eval", f"median {usual:,.0f}"))
    return made


def small_figure(
    name: str, title: str, what: str, steps: np.ndarray, values: np.ndarray, kind: str, said: str
) -> Figure:
    """One metric over steps. Some value is finite."""
    low, high = range_of(values)
    if values[np.isfinite(values)].min() >= 0:
        low = max(0.0, low)
    x, y = Axis(float(steps.min()), float(steps.max())), Axis(low, high)
    lines = [Line(title, steps, values, kind, "thin")]
    if steps.size >= 30:
        lines.append(Line(title, steps, smooth(values), kind))
    caption = Markup(f"<b>{text(title)}</b>, {text(what)}: {text(said)}.")
    return Figure(name, Chart(lines, x, y, small=True), f"{title} over steps, {what}: {said}.", caption)
