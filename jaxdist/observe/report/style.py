"""The style sheet of a page: light and dark, narrow and wide, screen and paper."""

# Ground and text of a mesh axis, in light and in dark.
AXIS_COLOURS = {
    "pipe": ("#fde8d7", "#7a3304", "#4a230a", "#fbd0ac"),
    "data": ("#dbeafe", "#1e3f8a", "#1b315f", "#c4dafd"),
    "fsdp": ("#d6f2e1", "#0f5132", "#123b29", "#bfeed3"),
    "expert": ("#f8e0f4", "#77206b", "#4a1a44", "#f5cfef"),
    "context": ("#fcf0c2", "#5f4600", "#443508", "#fbe6a4"),
    "tensor": ("#e6e1fc", "#442a9c", "#322470", "#d8d0fc"),
    "none": ("#e6eaf0", "#39465a", "#2a3442", "#d3dbe6"),
}
# Fills of bars and lines, in light and in dark. What they mean always stands in words, too.
FILLS = {
    "device": ("#2563b8", "#6aa5f5"), "data": ("#d97706", "#f0a347"), "host": ("#7c3aed", "#b196f8"),
    "eval": ("#0d8577", "#43c7b5"), "save": ("#a8326e", "#ec86b8"), "start": ("#64748b", "#94a3b8"),
    "lost": ("#8a5a13", "#c99a52"),
    "stopped": ("#c3ccd8", "#3b4757"), "rest": ("#a8a29e", "#6b6660"), "bad": ("#b91c1c", "#f87171"),
    "train": ("#2563b8", "#6aa5f5"), "whole": ("#cfdbec", "#33445c"), "params": ("#2563b8", "#6aa5f5"),
    "optim": ("#7c3aed", "#b196f8"), "batch": ("#0d8577", "#43c7b5"), "temp": ("#d97706", "#f0a347"),
    "other": ("#64748b", "#94a3b8"), "axis-pipe": ("#c2621b", "#f0a56d"), "axis-data": ("#3b74d8", "#86b3fa"),
    "axis-fsdp": ("#1e8a57", "#63cf9b"), "axis-expert": ("#b13aa0", "#e793da"), "axis-context": ("#a17c0b", "#e5c35c"),
    "axis-tensor": ("#6d4fd6", "#ac99f6"), "run0": ("#2563b8", "#6aa5f5"), "run1": ("#c2410c", "#fb9d6b"),
    "run2": ("#0d8577", "#43c7b5"), "run3": ("#7c3aed", "#b196f8"), "run4": ("#a8326e", "#ec86b8"),
    "run5": ("#64748b", "#94a3b8"), "under": ("#2563b8", "#6aa5f5"), "over": ("#d9480f", "#ff8a4c"),
}  # fmt: skip
_PAGE = {
    "ground": ("#ffffff", "#11161d"), "ink": ("#17212e", "#e6ebf2"), "panel": ("#f5f7fa", "#1a212b"),
    "line": ("#d8dee7", "#34404f"), "muted": ("#52606f", "#a2b1c4"), "link": ("#1d4f9c", "#8ab6f7"),
    "grid": ("#e6eaf0", "#28323f"),
}  # fmt: skip


def _variables(dark: bool) -> str:
    found = {name: pair[dark] for name, pair in _PAGE.items()} | {
        f"f-{name}": pair[dark] for name, pair in FILLS.items()
    }
    for axis, (ground, ink, dark_ground, dark_ink) in AXIS_COLOURS.items():
        found |= {f"{axis}-ground": dark_ground if dark else ground, f"{axis}-ink": dark_ink if dark else ink}
    return "".join(f"--{name}:{colour};" for name, colour in found.items())


_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1, h2, p, td, th, dd, dt, summary, figcaption, .lane-name, .key { overflow-wrap: anywhere; }
.run { color: var(--muted); font-size: .95rem; margin: 0; }
h1 { font-size: clamp(1.25rem, 1rem + 1.6vw, 1.8rem); line-height: 1.3; margin: .35rem 0 1rem; font-weight: 650; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .6rem; padding-bottom: .35rem; border-bottom: 1px solid var(--line); }
nav { display: flex; flex-wrap: wrap; gap: .15rem 1rem; margin: 0 0 1.1rem; font-size: .92rem; }
a, summary { color: var(--link); cursor: pointer; }
p { margin: .4rem 0 .9rem; } b { font-weight: 650; }
.note { border-left: 4px solid var(--f-data); padding: .1rem .8rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(13.5rem, 46%), 1fr)); gap: .7rem;
  margin: 0; }
.cards div, pre { background: var(--panel); border: 1px solid var(--line); border-radius: .55rem;
  padding: .65rem .85rem; }
.cards dd { margin: 0; font-size: 1.3rem; font-weight: 650; line-height: 1.35; }
small { display: block; font-size: .8rem; font-weight: 400; } .timing em { font-style: normal; font-weight: 400;
  font-size: .85em; }
dd .timing em { font-size: .8rem; white-space: nowrap; }
small, dt, figcaption, thead th, .values th, .ys, .xs, .x-name { color: var(--muted); }
  dt, figcaption { font-size: .87rem; }
figure { margin: .6rem 0 1.4rem; min-width: 0; } figcaption { margin-top: .4rem; }
.two { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: .4rem 1.6rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin-bottom: .45rem; font-size: .85rem; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: .18em; margin-right: .4em; }
.plot { display: grid; grid-template-columns: 0 minmax(0, 1fr); grid-template-rows: 17rem auto auto;
  margin-right: .6rem; }
.plot.with-y { grid-template-columns: 3.4rem minmax(0, 1fr); } .plot.small { grid-template-rows: 8.5rem auto; }
.plot.shares { grid-template-rows: 5.5rem auto auto; }
.area { position: relative; grid-column: 2; grid-row: 1; border-bottom: 1px solid var(--muted); overflow: hidden; }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; display: block; }
.ys { position: relative; grid-column: 1; grid-row: 1; } .xs { position: relative; height: 1.35rem; }
.plot .xs { grid-column: 2; grid-row: 2; } .x-name { grid-column: 2; grid-row: 3; font-size: .78rem;
  text-align: right; }
.ys span, .xs span { position: absolute; font-size: .76rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
.ys span { right: .5rem; transform: translateY(-50%); } .xs span { top: .15rem; transform: translateX(-50%); }
span.level { position: absolute; left: .4rem; transform: translateY(-100%); font-size: .76rem; color: var(--muted); }
path { fill: none; vector-effect: non-scaling-stroke; stroke-width: 2.2; stroke-linejoin: round; }
path.cell { stroke: none; shape-rendering: crispEdges; }
.plot.heat .area { background: var(--panel); border-top: 1px solid var(--muted); }
.thin { stroke-width: 1; opacity: .5; } .grid { stroke: var(--grid); stroke-width: 1; }
path.level { stroke: var(--muted); stroke-width: 1.2; stroke-dasharray: 6 4; }
.dots { stroke-width: 7; stroke-linecap: round; }
rect { shape-rendering: crispEdges; }
.bar { display: flex; height: 1.7rem; border-radius: .35rem; overflow: hidden; background: var(--grid); }
.bar i { display: block; min-width: 1px; }
.lanes { display: grid; grid-template-columns: minmax(5.5rem, auto) minmax(0, 1fr); gap: .3rem .8rem;
  align-items: center;
  font-size: .85rem; } .lanes.three { grid-template-columns: minmax(4rem, auto) minmax(0, 1fr) auto; }
.lane { position: relative; height: 1.1rem; background: var(--panel); border-radius: .2rem; overflow: hidden; }
.lane > i { position: absolute; top: 0; bottom: 0; } .lanes .lane > i.mark { width: 3px; margin-left: -1.5px; }
.lanes.three .lane { background: none; } .lane > i.fill-whole { left: 0; overflow: hidden; border-radius: .2rem; }
.lane i i { display: block; height: 100%; } .lane-value { font-variant-numeric: tabular-nums; }
.mesh, .inside { display: flex; flex-wrap: wrap; gap: .45rem; }
.box { padding: .3rem .5rem .5rem; border-radius: .45rem; } .box b { font-size: .8rem; display: block;
  margin-bottom: .2rem; }
.device { background: var(--ground); color: var(--ink); border-radius: .3rem; padding: .15rem .65rem;
  font-size: .85rem; }
.chip { display: inline-block; border-radius: .35rem; padding: 0 .45rem; font-size: .84em; white-space: nowrap; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .87rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .34rem .8rem .34rem 0; border-bottom: 1px solid var(--line); }
.values th { font-weight: 400; width: 11rem; } th { font-weight: 600; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td:first-child { min-width: 6.5rem; }
th:last-child, td:last-child { padding-right: 0; }
pre { font: .85rem/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 46rem) {
  main { padding: 1.2rem .9rem 3rem; } .plot { grid-template-rows: 13rem auto auto; }
  table:not(.values) thead { display: none; }
  table:not(.values) tr { display: block; border-bottom: 1px solid var(--line); padding: .45rem 0; }
  table:not(.values) td { display: block; position: relative; min-height: 1.6em; border: 0; padding: .1rem 0 .1rem 9rem;
    text-align: left; white-space: normal; }
  table:not(.values) td::before { content: attr(data-head); color: var(--muted); position: absolute; left: 0;
    width: 8.5rem; }
  table:not(.values) td[data-head=""] { padding-left: 0; font-weight: 600; } td[data-head=""]::before { display: none; }
  .values tr, .values th, .values td { display: block; width: auto; border: 0; padding: 0; }
  .values tr { border-bottom: 1px solid var(--line); padding: .35rem 0; }
  .lanes.three { grid-template-columns: minmax(3.5rem, auto) minmax(0, 1fr); }
    .lanes.three .lane-value { grid-column: 2; }
}
@media print {
  main { max-width: none; padding: 0; } nav { display: none; } body { font-size: 11pt; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  figure, .cards div, tr { break-inside: avoid; } h2 { break-after: avoid; }
  details::details-content { content-visibility: visible; display: block; }
}
"""


def style_sheet() -> str:
    """The whole style sheet."""
    marks = [f".fill-{name}{{background:var(--f-{name});fill:var(--f-{name})}}" for name in FILLS]
    marks += [f".stroke-{name}{{stroke:var(--f-{name})}}" for name in FILLS]
    marks += [f".axis-{axis}{{background:var(--{axis}-ground);color:var(--{axis}-ink)}}" for axis in AXIS_COLOURS]
    light = f":root{{color-scheme:light dark;{_variables(False)}}}"
    # Paper is white, whatever the screen is.
    dark = f"@media screen and (prefers-color-scheme: dark){{:root{{{_variables(True)}}}}}"
    return "\n".join([light, dark, *marks, _RULES])
