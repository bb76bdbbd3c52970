"""report.html in a real browser, Debian's Chromium: at three widths, in light and dark.

`tests/browser/install.sh` installs it where it can. Slow, and skipped loudly where there is none.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from reports import record, records, with_experts

from jaxdist.observe.report import write_comparison, write_report

pytestmark = pytest.mark.slow
WIDTHS = (360, 800, 1400)
# Each page is in a frame of that width: a window of Chromium's is never narrower than 500 px. A text's ground is the
# first of its ancestors that has one.
PROBE = """
const luminance = colour => { const c = colour.match(/[\\d.]+/g).slice(0, 3).map(v => { v /= 255;
  return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 }); return 0.2126*c[0] + 0.7152*c[1] + 0.0722*c[2] };
const ground = (view, e) => { for (; e; e = e.parentElement) {
  const c = view.getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c) && c != 'transparent') return c }
  return 'rgb(255, 255, 255)' };
window.onload = () => { const found = [];
  for (const frame of document.querySelectorAll('iframe')) {
    const view = frame.contentWindow, root = frame.contentDocument, wide = view.innerWidth, worst = [99, ''];
    for (const e of root.querySelectorAll('body *')) {
      if (![...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim())) continue;
      const a = luminance(view.getComputedStyle(e).color), b = luminance(ground(view, e));
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < worst[0]) { worst[0] = ratio; worst[1] = e.outerHTML.slice(0, 90) } }
    const beyond = [...root.querySelectorAll('main *')].filter(
      e => e.getBoundingClientRect().right > wide + 1 && !e.closest('.area')).map(e => e.outerHTML.slice(0, 90));
    found.push({wide, scroll: root.documentElement.scrollWidth, beyond: beyond.slice(0, 3), worst,
      scrolling: [...root.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length,
      dark: view.matchMedia('(prefers-color-scheme: dark)').matches,
      figures: root.querySelectorAll('figure').length,
      named: root.querySelectorAll('figure [role=img][aria-label]:not([aria-label=""])').length,
      pictures: [...root.querySelectorAll('svg')].every(e => e.closest('[role=img]'))}) }
  document.body.innerHTML = '<pre id=found></pre>';
  document.getElementById('found').textContent = JSON.stringify(found) };
"""


def chromium() -> str:
    """The path of Chromium; the test is skipped where there is none."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("SKIPPED: there is no chromium; tests/browser/install.sh installs it")
    return found


def looked_at(page: Path, *, dark: bool) -> tuple[list[dict], list[str]]:
    """(what the browser measured at each width, the lines of its console)."""
    content = html.escape(page.read_text())
    frames = "".join(f'<iframe style="width:{w}px;height:900px;border:0" srcdoc="{content}"></iframe>' for w in WIDTHS)
    harness = page.with_name("harness.html")
    harness.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{frames}<script>{PROBE}</script></body>")
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--window-size=1600,1000", "--enable-logging=stderr", f"--user-data-dir={page.with_name('profile')}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=5000", "--dump-dom",
        harness.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["run", "runs"])
def test_page_fits_every_width(tmp_path, kind, dark):
    page = tmp_path / "page.html"
    lines = records(60) + records(40, begun=1_000_500.0, first=61)
    long = record(title="a" * 90, metrics=with_experts(lines, 48, 128, dropped=0.1))
    if kind == "run":
        write_report(page, long)
    else:
        write_comparison(page, [long, record(title="b"), record(title="c"), record(title="d" * 40)])
    found, console = looked_at(page, dark=dark)
    assert console == []
    assert [each["wide"] for each in found] == list(WIDTHS)
    for each in found:
        assert each["dark"] is dark
        assert each["scroll"] <= each["wide"] and each["beyond"] == [], each
        assert each["scrolling"] == 0, each
        assert each["figures"] == each["named"] > 0 and each["pictures"], each
        assert each["worst"][0] >= 4.5, each


def test_the_look_finds_what_is_wrong(tmp_path):
    page = tmp_path / "page.html"
    wrong = '<main><p style="width:900px;color:#999">wide</p><figure><svg></svg></figure></main>'
    page.write_text(f"<!DOCTYPE html><body style='background:#fff'>{wrong}<script>console.error('oh')</script></body>")
    found, console = looked_at(page, dark=False)
    assert console and found[0]["scroll"] > found[0]["wide"] and found[0]["beyond"]
    assert found[0]["worst"][0] < 4.5 and found[0]["named"] < found[0]["figures"] and not found[0]["pictures"]
