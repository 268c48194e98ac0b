"""One page for one run or several: text and tables are written here, curves are drawn by page.js from the numbers in the page.

It is a single file without dependencies: its content security policy allows its own style sheet and script, by their hashes,
and no request at all. Everything that comes from data is escaped, also in the script's numbers: a sample may hold </script>.
Tested by: tests/report/test_page.py, tests/report/test_browser.py."""

import base64
import hashlib
import html
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tapeless.data.files import atomic_write
from tapeless.report.figures import Figure, figures
from tapeless.report.history import RunHistory, plain
from tapeless.report.metrics import METRICS, Metric
from tapeless.text import readable
from tapeless.training.run_time import activity_rows, startup_rows, verdict
from tapeless.training.summary import count, model_text, optimizer_text

HOME = Path(__file__).parent
COLORS = 6  # of page.css
ENDINGS = {
    "done": "done",
    "early": "ended early, without a new best",
    "stopped": "stopped by the user",
    "diverged": "diverged",
    None: "running when this page was written",
}
Chart = tuple[str, str, str]  # key in page.js, title, subtitle


def _chart(metric: Metric) -> Chart:
    key = f"layer_{metric.key}" if metric.per_layer else metric.key
    return key, metric.label[0].upper() + metric.label[1:], metric.unit


OWN = {metric.key: _chart(metric) for metric in METRICS if metric.curve}  # charts of a single metric
SINGLE = [("loss", "Loss", "nats per token; the band spans the minimum and maximum of the steps of each point")]
COMPARED = [("loss", "Loss", "nats per token; thick: validation, thin: training"), OWN["bits_per_byte"]]
STEPS = [
    OWN["grad_norm"],
    ("clip_rate", "Clipped steps", "percent of the steps"),
    OWN["lr"],
    OWN["tokens_per_second"],
    ("memory", "Memory", ""),
]
LAYERS = [_chart(metric) for metric in METRICS if metric.per_layer]


def render(histories: Sequence[RunHistory], names: Sequence[str] | None = None) -> str:
    """The page. names: the runs' names on it; default: those of their directories."""
    names = list(names or [history.name for history in histories])
    style, script = ((HOME / file).read_text(encoding="utf-8") for file in ("page.css", "page.js"))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    data = {"runs": [{"name": name, **history.data()} for name, history in zip(names, histories, strict=True)]}
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{_e(' · '.join(names))}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"{_main(histories, names)}\n</main>\n"
        f'<script type="application/json" id="data">{_json(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _main(histories: Sequence[RunHistory], names: Sequence[str]) -> str:
    many = len(histories) > 1
    titles = names if many else [""]

    def of_each(part: Callable[[RunHistory, str], str]) -> str:
        return "".join(part(history, title) for history, title in zip(histories, titles, strict=True))

    first = [_overview(histories, names), _differences(histories, names)] if many else [_tiles(histories[0])]
    parts = [
        _header(histories, names),
        *first,
        *(_figure(*chart, wide=True) for chart in (COMPARED if many else SINGLE)),
        _section("Steps", _grid([_figure(*chart) for chart in STEPS[:2]]) + _grid([_figure(*chart) for chart in STEPS[2:]])),
        _section("Layers", "".join(_layers(i, title) for i, title in enumerate(titles))),
        _section("Time", of_each(_time)),
        _section("Samples", of_each(_samples)),
        _notes(histories, names),
        _section("Configuration", of_each(_configuration)),
        _section("Environment", of_each(_environment)),
        f"<footer>Written by tapeless at {_now()}. This page is self-contained.</footer>",
    ]
    return "\n".join(part for part in parts if part)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _e(value: Any) -> str:
    return html.escape(readable(str(value)))


def _json(value: Any) -> str:
    """JSON that cannot close the script element around it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _now() -> str:
    return datetime.now().astimezone().isoformat(" ", "minutes")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _grid(parts: list[str]) -> str:
    return f'<div class="grid of{len(parts)}">{"".join(parts)}</div>'


def _figure(key: str, title: str, what: str, *, wide: bool = False, run: int | None = None) -> str:
    of = "" if run is None else f' data-run="{run}"'
    about = f" <small>{_e(what)}</small>" if what else ""
    return (
        f'<figure class="{"wide " if wide else ""}card" data-chart="{key}"{of}>'
        f'<figcaption><b>{_e(title)}</b>{about}</figcaption><div class="plot"></div></figure>'
    )


def _header(histories: Sequence[RunHistory], names: Sequence[str]) -> str:
    if len(histories) > 1:
        about = f"{count(len(histories), 'run')} compared"
    else:
        (history,) = histories
        about = f"{ENDINGS[history.ending]}, {model_text(history.config.model, history.start.get('parameters'))}"
    choices = "".join(f'<button type="button" data-axis="{axis}">{axis}</button>' for axis in ("steps", "tokens", "time"))
    return (
        f"<header><div><h1>{_e(' · '.join(names))}</h1><p>{_e(about)}</p></div>"
        f'<div class="controls"><span class="switch" role="group" aria-label="horizontal axis">{choices}</span>'
        '<button type="button" id="theme" aria-label="light or dark">light / dark</button></div>'
        "<noscript><p>The curves are drawn by a script in this page, and scripts are disabled; "
        "the numbers are in metrics.jsonl.</p></noscript></header>"
    )


def _tiles(history: RunHistory) -> str:
    tiles = "".join(
        f"<li><span>{_e(f.label)}</span><b>{_e(f.value)}</b><small>{_e(f.below)}</small></li>" for f in figures(history)
    )
    return f'<ul class="tiles">{tiles}</ul>' if tiles else ""


def _overview(histories: Sequence[RunHistory], names: Sequence[str]) -> str:
    """One row per run, one column per figure."""
    known = [{figure.label: figure for figure in figures(history)} for history in histories]
    columns = list(dict.fromkeys(label for row in known for label in row))
    rows = ["<tr><th>run</th>" + "".join(f"<th>{_e(label)}</th>" for label in columns) + "</tr>"]
    for i, (history, name) in enumerate(zip(histories, names, strict=True)):
        found = [known[i].get(label, Figure(label, "", "")) for label in columns]
        cells = "".join(f"<td><b>{_e(f.value)}</b><small>{_e(f.below)}</small></td>" for f in found)
        rows.append(f"<tr><th>{_key(i)}{_e(name)}<small>{_e(ENDINGS[history.ending])}</small></th>{cells}</tr>")
    return f'<div class="scroll card"><table class="overview">{"".join(rows)}</table></div>'


def _key(run: int) -> str:
    return f'<i class="key k{run % COLORS}"></i>'


def _differences(histories: Sequence[RunHistory], names: Sequence[str]) -> str:
    """The fields in which the runs differ, in any of their steps."""
    tables = [
        {f"{table}.{name}": value for table, values in history.config.tables().items() for name, value in values.items()}
        | _changed(history)
        | {f"data.{name}": value[:12] for name, value in history.config.data.items()}  # the beginning of a hash is enough
        for history in histories
    ]
    keys = dict.fromkeys(key for table in tables for key in table if key not in ("train.out_dir", "train.report_to"))
    differing = [key for key in keys if len({repr(table.get(key)) for table in tables}) > 1]
    head = "<tr><th>differences</th>" + "".join(f"<th>{_key(i)}{_e(name)}</th>" for i, name in enumerate(names)) + "</tr>"
    return _fields([(key, *(table.get(key) for table in tables)) for key in differing], head) if differing else ""


def _changed(history: RunHistory) -> dict[str, str]:
    """The fields that resumes changed, each with all its values: config.toml has the last one only."""
    found: dict[str, str] = {}
    for step, name, old, new in history.changes:
        before = found.get(f"train.{name}", plain(old))
        found[f"train.{name}"] = f"{before}, from step {step + 1:,} on {plain(new)}"
    return found


def _fields(rows: Iterable[tuple[Any, ...]], head: str = "", highlighted: Collection[Any] = ()) -> str:
    """A table of names and values. highlighted: the names to emphasize."""
    lines = []
    for name, *values in rows:
        cells = "".join(f"<td>{_value(value)}</td>" for value in values)
        lines.append(f"<tr{' class=set' if name in highlighted else ''}><th>{_e(name)}</th>{cells}</tr>")
    return f'<div class="scroll card"><table class="fields">{head}{"".join(lines)}</table></div>'


def _value(value: Any) -> str:
    if value is None:
        return '<span class="none">none</span>'
    return _e(plain(value))


def _layers(run: int, name: str) -> str:
    return (f"<h3>{_e(name)}</h3>" if name else "") + _grid([_figure(*chart, run=run) for chart in LAYERS])


def _time(history: RunHistory, name: str) -> str:
    """Where the time of the run went; nothing for one without these events."""
    found = history.times.found()
    if found is None:
        return ""
    total = sum(found["seconds"].values())
    ends = [1000 * end / total for end in accumulate(found["seconds"].values(), initial=0.0)]
    parts = "".join(
        f'<rect class="{f"f{i}" if i < COLORS else "rest"}" x="{start:.1f}" width="{end - start:.1f}" height="10"/>'
        for i, (start, end) in enumerate(pairwise(ends))
    )
    bar = f'<svg class="share" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">{parts}</svg>'
    keys = [_key(i) if i < COLORS else '<i class="key rest"></i>' for i in range(len(found["seconds"]))]
    tables = _times(activity_rows(found), ["", *keys, ""]) + _times(startup_rows(found))
    title = f"<h4>{_e(name)}</h4>" if name else ""
    return f'<div class="card">{title}<p>{_e(verdict(found))}</p>{bar}<div class="columns">{tables}</div></div>'


def _times(rows: Sequence[Sequence[str]], keys: Sequence[str] = ()) -> str:
    """A table of names and numbers. keys: in front of the name of each row."""
    lines = [
        f"<tr><th>{key}{_e(name)}</th>" + "".join(f"<td>{_e(value)}</td>" for value in values) + "</tr>"
        for key, (name, *values) in zip(keys or [""] * len(rows), rows, strict=True)
    ]
    return f'<div class="scroll"><table class="times">{"".join(lines)}</table></div>'


def _samples(history: RunHistory, name: str) -> str:
    if not history.samples:
        return ""
    (step, text), *earlier = reversed(history.samples)
    older = "".join(f"<h4>step {s:,}</h4><pre>{_e(t)}</pre>" for s, t in earlier)
    title = f"{_e(name)}, step {step:,}" if name else f"step {step:,}"
    folded = f"<details><summary>earlier samples</summary>{older}</details>" if older else ""
    return f'<div class="card"><h4>{title}</h4><pre>{_e(text)}</pre>{folded}</div>'


def _notes(histories: Sequence[RunHistory], names: Sequence[str]) -> str:
    of = [f"{name}, " if len(histories) > 1 else "" for name in names]
    rows = [(f"{prefix}step {step:,}", text) for prefix, s in zip(of, histories, strict=True) for step, text in s.notes]
    return _section("Notes", _fields(rows) if rows else "")


def _configuration(history: RunHistory, run: str) -> str:
    """Every field; non-default values are highlighted."""
    tables, configs = [], (history.config.model, history.config.train)
    defaults = {f.name: f.default for config in configs for f in fields(config)}
    for table, values in history.config.tables().items():
        changed = {name for name, value in values.items() if name in defaults and defaults[name] != value}
        tables.append(_fields(values.items(), f"<caption>[{_e(table)}]</caption>", changed))
    words = f"<p>{_e(optimizer_text(history.config.train))}. Non-default values are highlighted.</p>"
    return _folded(run, words + f'<div class="columns">{"".join(tables)}</div>')


def _environment(history: RunHistory, run: str) -> str:
    flat: dict[str, Any] = {"started": history.started}
    for key, value in history.environment.items():
        if isinstance(value, dict):
            flat |= value
        else:
            flat[key] = " ".join(map(str, value)) if isinstance(value, list) else value
    return _folded(run, _fields((key, value) for key, value in flat.items() if value not in ("", None)))


def _folded(name: str, content: str) -> str:
    return f"<details><summary>{_e(name)}</summary>{content}</details>" if name else content


def write_page(path: Path, histories: Sequence[RunHistory], names: Sequence[str] | None = None) -> None:
    with atomic_write(path) as file:
        file.write(render(histories, names).encode(errors="replace"))
