"""The page as text: whole, offline, small, and nothing in it that data could break."""

import base64
import hashlib
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_fixtures import NASTY, empty_run, history_of, logged_run

from tapeless.report.history import RunHistory
from tapeless.report.page import COLORS, HOME, render
from tapeless.training.run_dir import RunDir


class Tags(HTMLParser):
    """Every element with its attributes, and the text of pre and script."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return logged_run(tmp_path_factory.mktemp("runs") / "a <b> & 'c'", 300, sample_prompt=NASTY)


@pytest.fixture(scope="module")
def page(run: RunDir) -> str:
    return render([RunHistory.read(run)])


def test_every_element_is_closed(page: str, run: RunDir):
    assert Tags(page).open == []
    assert Tags(render([RunHistory.read(run)] * 2, ["a", "<b>"])).open == []


def test_data_is_text_and_nothing_else(page: str):
    """Samples, the name of the run, the prompt and the command line would all like to be elements."""
    tags = Tags(page)
    names = {tag for tag, _ in tags.found}
    assert "img" not in names
    assert [attributes for tag, attributes in tags.found if tag == "script"] == [{"type": "application/json", "id": "data"}, {}]
    assert any("</script><script>alert(1)</script><img src=x" in text for text in tags.texts["pre"])
    assert "\x1b" not in page
    data, script = tags.texts["script"]
    assert json.loads(data)["runs"][0]["name"] == "a <b> & 'c'"
    assert script == (HOME / "page.js").read_text()
    assert not any(name.startswith("on") or name == "style" for _, attributes in tags.found for name in attributes)


def test_nothing_is_loaded(page: str):
    for _, attributes in Tags(page).found:
        assert not {"src", "href", "srcset", "action", "background", "data"} & set(attributes)
    outside = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert outside <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    for call in ("@import", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "import("):
        assert call not in page.replace("url(#", "")  # the name of a shape in the page


def test_the_policy_allows_its_own_script_and_style_alone(page: str):
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    for element, directive in (("style", "style-src"), ("script", "script-src")):
        text = page.split(f"<{element}>")[1].split(f"</{element}>")[0]
        expected = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{expected}'" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]


def test_everything_is_there(page: str):
    for words in ("Gradient norm by layer", "Update / weight by layer", "Memory", "Throughput", "Learning rate", "Samples"):
        assert words in page
    for field in ("hidden_dim", "lr_schedule", "layer_stats_every", "tokenizer_hash", "torch", "argv"):
        assert f"<th>{field}</th>" in page
    assert "sample of step 300" in page
    assert "832,512 parameters" in page


def test_non_default_values_are_highlighted(tmp_path: Path):
    page = render([RunHistory(empty_run(tmp_path / "run", lr=0.5))])
    assert "<tr class=set><th>lr</th><td>0.5</td></tr>" in page
    assert "<tr><th>batch_size</th><td>8</td></tr>" in page


def test_several_runs_say_in_what_they_differ(tmp_path: Path):
    histories = [history_of(tmp_path / name, 200, lr=lr, out_dir=name) for name, lr in (("a", 0.1), ("b", 0.2))]
    page = render(histories)
    (table,) = re.findall(r"differences.*?</table>", page, re.S)
    assert "<tr><th>train.lr</th><td>0.1</td><td>0.2</td></tr>" in table
    assert table.count("<tr") == 1  # behind the head: not the folder
    assert [run["name"] for run in json.loads(Tags(page).texts["script"][0])["runs"]] == ["a", "b"]
    assert 'data-chart="bits_per_byte"' in page


def test_of_a_run_that_never_began(tmp_path: Path):
    page = render([RunHistory.read(empty_run(tmp_path / "run"))])
    assert "running when this page was written" in page
    assert Tags(page).open == []


def test_a_hundred_thousand_steps_fit(tmp_path: Path):
    history = history_of(tmp_path / "run", 100_000)
    begun = time.perf_counter()
    size = len(render([history]).encode())
    assert size < 300_000
    assert time.perf_counter() - begun < 2


def test_the_colors_are_the_style_sheets():
    assert len(set(re.findall(r"^\.?.*?\.k(\d) \{", (HOME / "page.css").read_text(), re.M))) <= COLORS
    assert set(re.findall(r"\.k(\d) ", (HOME / "page.css").read_text())) == {str(i) for i in range(COLORS)}


def test_the_time_of_a_run_is_a_bar_and_two_tables(run: RunDir):
    history = RunHistory.read(run)
    assert "<h2>Time</h2>" not in render([history])  # its events do not say
    history.add({"event": "time_spent", "step": history.last["step"], "seconds": {"step": 9.0, "evaluation": 3.0}})
    page = render([history])
    assert page.count("<rect ") == 2
    assert "<th>evaluation</th>" in page.replace('<i class="key k1"></i>', "")
    assert "of the median step" in page
    assert render([history, history], ["a", "b"]).count('class="times"') == 4


def test_a_comparison_has_every_value_of_a_changed_setting(tmp_path: Path):
    plain, changed = (history_of(tmp_path / name, 200, lr=0.2, out_dir=name) for name in ("a", "b"))
    changed.add({**changed.start, "event": "resume", "step": 20, "changes": {"lr": [0.1, 0.2]}})
    (table,) = re.findall(r"differences.*?</table>", render([plain, changed]), re.S)
    assert "<tr><th>train.lr</th><td>0.2</td><td>0.1, from step 21 on 0.2</td></tr>" in table


def test_the_charts_know_of_resumes(tmp_path: Path):
    history = history_of(tmp_path / "run", 30)
    history.add({**history.start, "event": "resume", "step": 30, "changes": {"lr": [0.1, 0.2]}})
    (run,) = json.loads(Tags(render([history])).texts["script"][0])["runs"]
    assert run["resumes"] == [{"step": 30, "text": "resumed, lr 0.1 -> 0.2", "tokens": 15360, "seconds": pytest.approx(1.5)}]
