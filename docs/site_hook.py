"""What the documentation site has beyond the files of docs/ (a hook of mkdocs, see mkdocs.yml).

    index.md           README.md; likewise the other pages of the root, such as CONTRIBUTING.md
    api/*.md           the API reference: every public name, by mkdocstrings, and the docstring of every op
    source/PATH.md     each file of the repository that a page links to, so that a link works here as it does in the repository
Links are rewritten from the repository's paths to the site's. Tested by: tests/test_site.py, acceptance/docs_site.py."""

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
API = {
    "training": (
        "Training",
        "What `tapeless train new`, `train resume` and `generate` do, from Python.",
        ("train", "resume", "TrainResult", "STOP", "Trainer", "prepare", "load", "Engine", "Sampling", "TapelessError"),
    ),
    "models": (
        "Models",
        "A model has `params`, `grads`, `forward` and `backward`; a `Chain` is one made of ops.",
        ("Transformer", "SimpleLM", "Chain", "layer", "residual", "Op", "OpSet", "REFERENCE", "register_ops", "saved_bytes"),
    ),
    "optim": (
        "Optimizers",
        "Each makes one pass over the flat buffers of parameters and gradients.",
        ("optim.SGD", "optim.Adam", "optim.AdamW", "optim.Muon", "optim.make_optimizer"),
    ),
    "config": (
        "Configuration",
        "Frozen dataclasses; every field with its default is in [Settings](../settings.md).",
        ("ModelConfig", "SimpleLMConfig", "TrainConfig", "load_preset"),
    ),
}
LINK = re.compile(r"(!?\[)([^\]]*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
# A picture in two themes: the hosting platforms' way, of which mkdocs-material's is made.
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" (width="\d+") src="([^"]+)">\s*</picture>'
)
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".yml": "yaml", ".json": "json", "Makefile": "makefile"}


def root_pages() -> dict[str, str]:
    """Page of the site -> file in the root."""
    pages = {"index.md" if path.name == "README.md" else path.name.lower(): path.name for path in ROOT.glob("*.md")}
    return dict(sorted(pages.items()))


def api_page(name: str) -> str:
    title, about, names = API[name]
    return "\n\n".join([f"# {title}", about, *(f"::: tapeless.{name}" for name in names)]) + "\n"


def ops_page() -> str:
    """Each op's own derivation: the docstring of its file."""
    blocks = ["# Ops", "One file each: forward, backward and derivation. Letters: [notation](../notation.md)."]
    for path in sorted((ROOT / "src/tapeless/ops").glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        blocks += [f"## {path.stem}", as_markdown(text), f"[Source](../{source_page(path)})"]
    return "\n\n".join(blocks) + "\n"


def as_markdown(docstring: str) -> str:
    """Indented lines, such as formulas, as code, which Markdown makes of them only between empty lines; the rest as it is."""
    lines: list[str] = []
    for line in docstring.splitlines():
        code = line.startswith("    ")
        if lines and lines[-1] and line and code != lines[-1].startswith("    "):
            lines.append("")
        spans = re.split(r"(`[^`]*`)", line)
        spans[::2] = [span.replace("*", "\\*").replace("<", "&lt;") for span in spans[::2]]
        lines.append(line if code else "".join(spans))
    return "\n".join(lines)


def source_page(path: Path) -> str:
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def source(path: Path) -> str:
    language = LANGUAGES.get(path.suffix or path.name, "text")
    if path.is_dir():
        text = "\n".join(sorted(entry.name + "/" * entry.is_dir() for entry in path.glob("[!_.]*")))
    else:
        text = path.read_text()
    title = path.relative_to(ROOT).as_posix()
    return f"---\ntitle: {title}\nsearch:\n  exclude: true\n---\n\n# `{title}`\n\n~~~~{language}\n{text}\n~~~~\n"


def target(page: str, link: str) -> Path:
    """The file that a link of a page means: in the repository, where the page is README.md or a file of docs/."""
    home = ROOT if page in root_pages() else (ROOT / "docs" / page).parent
    return (home / link).resolve()


def site_path(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path.is_relative_to(ROOT / "docs") and not path.is_dir():
        return path.relative_to(ROOT / "docs").as_posix()
    names = {file: page for page, file in root_pages().items()}
    return names.get(path.relative_to(ROOT).as_posix()) or source_page(path)


def rewritten(page: str, text: str) -> str:
    """The text with the site's paths in its links, those inside code blocks left alone."""

    def link(found: re.Match[str]) -> str:
        kind, words, name, anchor = found.groups()
        if "://" in name:
            return found[0]
        path = target(page, name)
        if words == path.name and path.suffix == ".md" and path.exists():
            words = path.read_text().split("\n", 1)[0].removeprefix("# ")  # the title says more than the name of the file
        return f"{kind}{words}]({posixpath.relpath(site_path(path), posixpath.dirname(page) or '.')}{anchor})"

    text = PICTURE.sub(r"![\2](\4#only-light){ \3 }\n![\2](\1#only-dark){ \3 }", text)
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def linked_sources(pages: dict[str, str]) -> set[Path]:
    found = {target(page, name) for page, text in pages.items() for _, _, name, _ in LINK.findall(text) if "://" not in name}
    return {path for path in found if path.exists() and site_path(path).startswith("source/")}


def on_config(config: Any) -> Any:
    """The pages of the root that are there join the last section."""
    sys.path.insert(0, str(ROOT / "docs"))  # for site_docstrings.py
    config.nav[-1]["Project"] += [page for page in root_pages() if page != "index.md"]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    made = {page: (ROOT / file).read_text() for page, file in root_pages().items()}
    made["index.md"] = "---\nhide: [navigation]\n---\n" + made["index.md"]
    written = {file.src_uri: file.content_string for file in files.documentation_pages()}
    sources = linked_sources(made | written) | set((ROOT / "src/tapeless/ops").glob("[!_]*.py"))
    made |= {f"api/{name}.md": api_page(name) for name in API} | {"api/ops.md": ops_page()}
    made |= {source_page(path): source(path) for path in sources}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    return text if uri.startswith(("api/", "source/")) else rewritten(uri, text)
