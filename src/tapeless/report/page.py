"""One page for one run or several: words and tables written here, curves drawn by page.js from the numbers in the page.

It is a single file that loads nothing: its policy allows its own style sheet and its own script, known by their hashes, and
no request at all. Everything that comes from data is escaped, also within the script's numbers: a sample may hold </script>.
Judged by: tests/report/test_page.py, tests/report/test_browser.py."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from tapeless.report.story import Story
from tapeless.train.info import number
from tapeless.train.summary import count, duration, model_words, optimizer_words

HOME = Path(__file__).parent
ENDINGS = {
    "done": "done",
    "early": "ended early, without a new best",
    "stopped": "stopped as asked",
    "diverged": "diverged",
    None: "under way when this was written",
}
# of a chart: its key in page.js, title, what it shows
LOSS = ("loss", "Loss", "nats per token; the band is the least and greatest of the steps behind each point")
CHARTS = [
    ("grad_norm", "Gradient norm", "before clipping, logarithmic"),
    ("clip_rate", "Clipped steps", "percent of the steps whose gradient was shortened"),
    ("lr", "Learning rate", ""),
    ("speed", "Throughput", "tokens per second, within steps"),
    ("memory", "Memory", "of the process, or what torch holds of a GPU"),
]
LAYERS = [
    ("layer_grad_norm", "Gradient norm by layer", "logarithmic; at the right the last one"),
    ("layer_update_ratio", "Update to weight by layer", "how far one step moves the weights, |Δw| / |w|; at the right the last one"),
]


def render(stories: Sequence[Story], names: Sequence[str] | None = None) -> str:
    """The page. names: what each run is called in it, where not by its folder."""
    names = list(names or [story.name for story in stories])
    style, script = ((HOME / file).read_text(encoding="utf-8") for file in ("page.css", "page.js"))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    data = {"runs": [{"name": name, **story.data()} for name, story in zip(names, stories, strict=True)]}
    title = " · ".join(names)
    many = len(stories) > 1
    body = [
        _header(stories, names),
        *([_overview(stories, names), _differences(stories, names)] if many else [_tiles(stories[0])]),
        _figure(*LOSS, wide=True),
        *([_figure("bits_per_byte", "Validation, bits per byte", "comparable whatever the tokenizer", wide=True)] if many else []),
        _section("Steps", _grid([_figure(*chart) for chart in CHARTS])),
        _section("Layers", "".join(_layers(i, names[i] if many else "") for i in range(len(stories)))),
        _section("Samples", "".join(_samples(story, name if many else "") for story, name in zip(stories, names, strict=True))),
        _notes(stories, names),
        _section("Configuration", "".join(_configuration(s, n if many else "") for s, n in zip(stories, names, strict=True))),
        _section("Environment", "".join(_environment(s, n if many else "") for s, n in zip(stories, names, strict=True))),
        f"<footer>Written by tapeless at {_now()}. This page holds everything it shows and loads nothing.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<title>{_e(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n'
        + "\n".join(part for part in body if part)
        + f'\n</main>\n<script type="application/json" id="data">{_json(data)}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _e(value: Any) -> str:
    return html.escape(str(value))


def _json(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _now() -> str:
    return datetime.now().astimezone().isoformat(" ", "minutes")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _grid(parts: list[str]) -> str:
    return f'<div class="grid">{"".join(parts)}</div>'


def _figure(key: str, title: str, what: str, *, wide: bool = False, run: int | None = None) -> str:
    of = "" if run is None else f' data-run="{run}"'
    about = f" <small>{_e(what)}</small>" if what else ""
    return (
        f'<figure class="{"wide " if wide else ""}card" data-chart="{key}"{of}>'
        f'<figcaption><b>{_e(title)}</b>{about}</figcaption><div class="plot"></div></figure>'
    )


def _header(stories: Sequence[Story], names: Sequence[str]) -> str:
    if len(stories) > 1:
        about = f"{count(len(stories), 'run')} side by side"
    else:
        (story,) = stories
        about = f"{ENDINGS[story.ending]}, {model_words(story.config.model, story.start.get('parameters'))}"
    choices = "".join(
        f'<button type="button" data-axis="{axis}">{axis}</button>' for axis in ("steps", "tokens", "time")
    )
    return (
        f"<header><div><h1>{_e(' · '.join(names))}</h1><p>{_e(about)}</p></div>"
        f'<div class="controls"><span class="switch" role="group" aria-label="horizontal axis">{choices}</span>'
        '<button type="button" id="theme" aria-label="light or dark">light / dark</button></div>'
        "<noscript><p>The curves are drawn by a script in this page, which is switched off here; "
        "the numbers are in metrics.jsonl.</p></noscript></header>"
    )


def figures(story: Story) -> list[tuple[str, str, str]]:
    """The numbers of a run in a row: label, number, what stands below it."""
    found, last, best = [], story.last, story.best_eval
    if best:
        below = f"best, at step {best['step']:,}"
        if story.last_eval["step"] != best["step"]:
            below += f"; last {number(story.last_eval['val_loss'])}"
        found.append(("validation loss", number(best["val_loss"]), below))
        found.append(("bits per byte", f"{float(best['bits_per_byte']):.3f}", f"perplexity {float(best['perplexity']):,.2f}"))
        mark, value = ("entropy", story.start["floor"]) if story.start.get("floor") else ("bigram", None)
        value = value if value is not None else (story.start.get("baselines") or {}).get("bigram")
        if value:
            percent = 100 * (best["val_loss"] / value - 1)
            found.append((f"to {mark}", f"{percent:+.1f} %", f"{mark} {value:.4f}"))
    if last:
        total = story.start.get("total_steps")
        found.append(("steps", f"{last['step']:,}", f"of {total:,}" if total else ""))
        found.append(("tokens", _short(last["tokens"]), f"epoch {last['epoch'] + 1}"))
        found.append(("tokens per second", f"{last['tokens'] / max(story.seconds, 1e-9):,.0f}", duration(story.seconds) + " in steps"))
    if story.start.get("parameters"):
        found.append(("parameters", _short(story.start["parameters"]), f"{story.config.train.dtype}, {story.config.train.device}"))
    if story.peak_memory:
        found.append(("peak memory", _bytes(story.peak_memory), "held of the GPU" if story.on_device else "of the process"))
    return found


def _short(n: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if n >= size:
            return f"{n / (1e3 if letter == 'k' else size):.3g} {letter}"
    return f"{n:,}"


def _bytes(n: float) -> str:
    return f"{n / 1e6:,.0f} MB" if n < 10e9 else f"{n / 1e9:,.1f} GB"


def _tiles(story: Story) -> str:
    tiles = (f"<li><span>{_e(label)}</span><b>{_e(value)}</b><small>{_e(below)}</small></li>" for label, value, below in figures(story))
    return f'<ul class="tiles">{"".join(tiles)}</ul>' if story.start else ""


def _overview(stories: Sequence[Story], names: Sequence[str]) -> str:
    columns = list(dict.fromkeys(label for story in stories for label, _, _ in figures(story)))
    head = "".join(f"<th>{_e(label)}</th>" for label in columns)
    rows = []
    for i, (story, name) in enumerate(zip(stories, names, strict=True)):
        known = {label: (value, below) for label, value, below in figures(story)}
        cells = "".join(
            f"<td><b>{_e(known[label][0])}</b><small>{_e(known[label][1])}</small></td>" if label in known else "<td></td>"
            for label in columns
        )
        rows.append(f'<tr><th><i class="key k{i % 6}"></i>{_e(name)}<small>{_e(ENDINGS[story.ending])}</small></th>{cells}</tr>')
    return f'<div class="scroll card"><table class="overview"><tr><th>run</th>{head}</tr>{"".join(rows)}</table></div>'


def _differences(stories: Sequence[Story], names: Sequence[str]) -> str:
    """The fields in which the runs are not the same."""
    tables = [{f"{t}.{k}": v for t, values in s.config.tables().items() for k, v in values.items()} for s in stories]
    keys = [key for key in dict.fromkeys(key for table in tables for key in table) if key != "train.out_dir"]
    differing = [key for key in keys if len({repr(table.get(key)) for table in tables}) > 1]
    if not differing:
        return ""
    head = "".join(f'<th><i class="key k{i % 6}"></i>{_e(name)}</th>' for i, name in enumerate(names))
    rows = "".join(
        f"<tr><th>{_e(key)}</th>{''.join(f'<td>{_value(table.get(key))}</td>' for table in tables)}</tr>" for key in differing
    )
    return f'<div class="scroll card"><table class="fields"><tr><th>what differs</th>{head}</tr>{rows}</table></div>'


def _value(value: Any) -> str:
    if value is None:
        return '<span class="none">none</span>'
    return _e(str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value)


def _layers(run: int, name: str) -> str:
    return (f"<h3>{_e(name)}</h3>" if name else "") + _grid([_figure(*chart, run=run) for chart in LAYERS])


def _samples(story: Story, name: str) -> str:
    if not story.samples:
        return ""
    (step, text), *earlier = reversed(story.samples)
    older = "".join(f"<h4>step {s:,}</h4><pre>{_e(t)}</pre>" for s, t in earlier)
    title = f"{_e(name)}, step {step:,}" if name else f"step {step:,}"
    folded = f"<details><summary>earlier ones</summary>{older}</details>" if older else ""
    return f'<div class="card"><h4>{title}</h4><pre>{_e(text)}</pre>{folded}</div>'


def _notes(stories: Sequence[Story], names: Sequence[str]) -> str:
    many = len(stories) > 1
    rows = [
        f"<tr><th>{f'{_e(name)}, ' if many else ''}step {step:,}</th><td>{_e(text)}</td></tr>"
        for story, name in zip(stories, names, strict=True)
        for step, text in story.notes
    ]
    return _section("Notes", f'<div class="scroll card"><table class="fields">{"".join(rows)}</table></div>' if rows else "")


def _configuration(story: Story, name: str) -> str:
    """Every field; those that are not the defaults stand out."""
    tables = []
    for table, values in story.config.tables().items():
        config = {"train": story.config.train, "data": None}.get(table, story.config.model)
        defaults = {} if config is None else {f.name: f.default for f in fields(config)}
        rows = "".join(
            f'<tr{"" if name in defaults and defaults[name] == value else " class=set"}><th>{_e(name)}</th><td>{_value(value)}</td></tr>'
            for name, value in values.items()
        )
        tables.append(f'<div class="scroll card"><table class="fields"><caption>[{_e(table)}]</caption>{rows}</table></div>')
    words = f"<p>{_e(optimizer_words(story.config.train))}. Fields that are not the defaults stand out.</p>"
    return _folded(name, words + f'<div class="columns">{"".join(tables)}</div>')


def _environment(story: Story, name: str) -> str:
    flat: dict[str, Any] = {"begun": story.begun}
    for key, value in story.environment.items():
        if isinstance(value, dict):
            flat |= value
        else:
            flat[key] = " ".join(map(str, value)) if isinstance(value, list) else value
    rows = "".join(f"<tr><th>{_e(key)}</th><td>{_value(value)}</td></tr>" for key, value in flat.items() if value not in ("", None))
    return _folded(name, f'<div class="scroll card"><table class="fields">{rows}</table></div>')


def _folded(name: str, content: str) -> str:
    return f"<details><summary>{_e(name)}</summary>{content}</details>" if name else content
