"""The page in a real browser: it draws, and it does not complain."""

import re
from pathlib import Path

import pytest
from browser import BROWSER, DARK, curves, opened
from report_fixtures import course, empty_run, logged_run

from tapeless.report.history import RunHistory
from tapeless.report.page import render

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome in the path")
# what a reader does: points at a curve and at a layer, changes the axis, changes the theme
READER = """
const point = (chart, x, y) => {
  const plot = document.querySelector(`[data-chart=${chart}] .plot`), at = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent("pointermove", { clientX: at.left + x * at.width, clientY: at.top + y }));
  return plot.querySelector(".tip").textContent;
};
const said = [point("loss", 0.4, 60), point("layer_update_ratio", 0.4, 32)];
document.querySelector("[data-axis=time]").click();
document.getElementById("theme").click();
said.push(point("loss", 0.4, 60), document.documentElement.dataset.theme);
document.title = JSON.stringify(said);
"""


def test_curves_are_drawn_and_nothing_is_complained_of(tmp_path: Path):
    page = tmp_path / "page.html"
    history = RunHistory.read(logged_run(tmp_path / "run", 600, floor=1.4))
    for step, changes in ((100, {"lr": [0.1, 0.2]}), (600, {"threads": [None, 1]})):
        history.add({**(history.start or {}), "event": "resume", "step": step, "changes": changes})
    page.write_text(render([history]))
    dom, complaints = opened(page)
    assert complaints == []
    assert len(curves(dom, "loss")) == 2
    for chart in ("grad_norm", "clip_rate", "lr", "tokens_per_second", "memory"):
        assert len(curves(dom, chart)) == 1
        assert "NaN" not in curves(dom, chart)[0]
    assert dom.count('class="cell"') == 2 * 11 * 13  # layers x looks
    for label in ("bigram 2.490", "unigram 3.170", "entropy 1.400", "clip 1"):
        assert f">{label}</text>" in dom
    assert "alert(1)" in dom  # the samples, as text
    # a resume is labelled at the side of its line where there is room
    assert re.findall(r'text-anchor="(start|end)">(resumed[^<]*)<', dom) == [
        ("start", "resumed, lr 0.1 -&gt; 0.2"),
        ("end", "resumed, threads none -&gt; 1"),
    ]


@pytest.mark.slow
def test_several_runs_share_the_charts(tmp_path: Path):
    histories = [RunHistory.read(logged_run(tmp_path / name, steps)) for name, steps in (("a", 300), ("b", 1500), ("c", 20))]
    page = tmp_path / "page.html"
    page.write_text(render(histories))
    dom, complaints = opened(page, DARK)
    assert complaints == []
    assert len(curves(dom, "loss")) == 5  # c was never evaluated
    assert len(curves(dom, "grad_norm")) == 3


@pytest.mark.slow
def test_a_run_of_no_steps_and_of_one(tmp_path: Path):
    empty, one = RunHistory(empty_run(tmp_path / "empty")), RunHistory(empty_run(tmp_path / "one"))
    for event in [event for event in course(1) if event["event"] != "end"]:
        one.add(event)
    for number, histories in enumerate(([empty], [one], [empty, one])):
        page = tmp_path / f"{number}.html"
        page.write_text(render(histories))
        dom, complaints = opened(page)
        assert complaints == []
        assert "NaN" not in dom
        assert len(curves(dom, "loss")) == len(histories) - (empty in histories)


def with_script(folder: Path) -> str:
    """A page into which somebody has got a script."""
    text = render([RunHistory.read(logged_run(folder / "run", 600))])
    return text.replace("</body>", f"<script>{READER}</script></body>")


def test_a_reader_points_and_clicks(tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(re.sub(r"<meta http-equiv[^>]+>", "", with_script(tmp_path)))
    dom, complaints = opened(page)
    assert complaints == []
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title
    assert re.search(r"step \d+ · .*tokens.*training\d\.\d+", title[1])
    assert re.search(r"blocks\.0\.attn\d\.\d+e-4", title[1])
    assert title[1].count("training") == 2
    assert title[1].endswith('"dark"]')


@pytest.mark.slow
def test_a_script_that_is_not_the_pages_own_is_refused(tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(with_script(tmp_path))
    dom, complaints = opened(page)
    assert "<title>run</title>" in dom
    assert len(complaints) == 1
    assert "Content Security Policy" in complaints[0]
    assert len(curves(dom, "loss")) == 2
