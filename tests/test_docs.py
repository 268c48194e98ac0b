"""README and docs say what is so: links lead somewhere, the map is the tree, examples run, commands parse, numbers agree."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mutants.table import MUTANTS
from tapeless.config import ROLES, load_config
from tapeless.interop import families
from tapeless.kernels import choose
from tapeless.verify import tolerances

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LAYOUT = ROOT / "docs" / "architecture.md"
PACKAGE = "src/tapeless/"


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.M | re.S)


def prose(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)


def region(path: Path, name: str) -> str:
    return path.read_text().split(f"<!-- begin: {name} -->")[1].split(f"<!-- end: {name} -->")[0]


def code_paths(text: str) -> list[str]:
    """Files that a page names in backticks, such as `tests/ops/test_rope.py`."""
    return re.findall(r"`((?:src|tests|docs|examples|acceptance|bench)/[\w./-]+)`", text)


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_links_lead_somewhere(path: Path):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose(path))
    relative = [link for link in links if "://" not in link]
    assert [link for link in relative if not (path.parent / link).exists()] == []
    assert [name for name in code_paths(prose(path)) if not (ROOT / name).exists()] == []


def test_every_page_is_reached_from_the_readme():
    linked = {(README.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", prose(README)) if "://" not in link}
    assert {page for page in PAGES if page != README} <= linked


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_pictures_are_there_and_small(path: Path):
    names = re.findall(r"(?:src|srcset)=\"([^\"]+)\"|!\[[^\]]*\]\(([^)]+)\)", prose(path))
    for name in [first or second for first, second in names]:
        assert (path.parent / name).stat().st_size < 150_000, name


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_addresses_outside_are_well_formed(path: Path):
    """That they answer cannot be checked without a network."""
    for address in re.findall(r"\]\((\w+://[^)]*)\)|<(\w+://[^>]*)>", prose(path)):
        parts = urlsplit("".join(address))
        assert parts.scheme == "https", address
        assert re.fullmatch(r"([\w-]+\.)+[a-z]{2,}", parts.hostname or ""), address
        assert not re.search(r"\s", "".join(address)), address


def test_extras_that_a_page_names_exist():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = {
        extra
        for path in PAGES
        for names in re.findall(r"pip install[^\n`]*'(?:tapeless|\.)\[([\w,-]+)\]'", path.read_text())
        for extra in names.split(",")
    }
    assert named <= extras
    table = README.read_text().split("| extra |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w[\w-]*)`", table)) == extras - {"dev", "docs"}


def test_files_that_point_to_a_page_or_a_test_find_it():
    """Docstrings name docs and tests too."""
    missing = []
    for source in (ROOT / "src").rglob("*.py"):
        for name in re.findall(r"\b((?:docs|tests)/[\w/]+\.(?:md|py))", source.read_text()):
            if not (ROOT / name).exists():
                missing.append((ids(source), name))
    assert missing == []


def mapped() -> set[str]:
    """The paths of the repository layout: a name, a folder ending in /, children indented below it."""
    (tree,) = [block for block in blocks(LAYOUT, "text") if PACKAGE in block]
    paths, parent = set(), ""
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            parent = name
        paths.add(name if not line.startswith(" ") else parent + name)
    return paths


def test_the_map_shows_nothing_that_is_not_there():
    for name in mapped():
        path = ROOT / name
        assert path.is_dir() if name.endswith("/") else path.is_file(), name


def tops(paths: list[str]) -> set[str]:
    return {path.split("/")[0] + ("/" if "/" in path else "") for path in paths}


def test_the_map_leaves_nothing_out():
    shown = mapped()
    package = ROOT / PACKAGE
    folders = {f"{PACKAGE}{path.name}/" for path in package.glob("[!_]*/") if any(path.glob("[!_]*.*"))}
    files = {f"{PACKAGE}{path.name}" for path in package.glob("*.py") if not path.name.startswith("__")}
    assert {name for name in shown if name.startswith(PACKAGE) and name != PACKAGE} == folders | files
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0 and tracked.stdout:  # a copy without its history has nothing to compare with
        assert tops(tracked.stdout.splitlines()) <= tops(sorted(shown))


@pytest.fixture
def _registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the examples register is gone after them."""
    monkeypatch.setattr("tapeless.kernels.choose._BACKENDS", dict(choose._BACKENDS))
    monkeypatch.setattr("tapeless.interop.families.FAMILIES", dict(families.FAMILIES))
    for known in ROLES.values():
        monkeypatch.setattr(known, "_entries", dict(known._entries))


@pytest.mark.usefixtures("_registries")
@pytest.mark.parametrize("path", [page for page in PAGES if blocks(page, "python")], ids=ids)
def test_python_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page, one after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    for number, block in enumerate(blocks(path, "python"), 1):
        exec(compile(block, f"{ids(path)}, python block {number}", "exec"), namespace)


def test_the_readme_example_learns(capsys: pytest.CaptureFixture):
    (example,) = [block for block in blocks(README, "python") if "tapeless.Transformer(" in block]
    exec(example, {})
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("path", [page for page in PAGES if blocks(page, "toml")], ids=ids)
def test_toml_examples_load(path: Path, tmp_path: Path):
    for block in blocks(path, "toml"):
        (tmp_path / "example.toml").write_text(block)
        load_config(tmp_path / "example.toml")


def commands(path: Path, program: str) -> list[str]:
    """What a page tells the reader to type: lines of its shell blocks, and code within its sentences."""
    lines = [line.strip() for block in blocks(path, "sh") for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", prose(path))
    return [text for text in [*lines, *spans] if re.match(rf"{program}\b", text) and text != program]


@pytest.mark.parametrize("path", [page for page in PAGES if commands(page, "tapeless ")], ids=ids)
def test_tapeless_commands_parse(path: Path):
    from tapeless.cli.main import build_parser

    for command in commands(path, "tapeless "):
        words = shlex.split(command, comments=True)[1:]
        if words[-1] in ("--help", "--help-all"):
            with pytest.raises(SystemExit):
                build_parser().parse_args(words)
        else:
            build_parser().parse_args(words)


FEW_STEPS = ["--max-steps", "6", "--warmup-steps", "1", "--eval-windows", "2", "--sample-tokens", "8"]
# tests/cli/test_gradcheck.py, tests/cli/test_bench.py, test_make_targets_exist, test_extras_that_a_page_names_exist and
# acceptance/fresh_clone.py; the tutorial's gradcheck runs here
ELSEWHERE = ("tapeless gradcheck", "tapeless bench", "make ", "pip install", "python3 -m venv")


def shortened(command: list[str]) -> list[str]:
    """The same command, done in a second: few steps, of a shallow model."""
    if command[:2] == ["train", "new"]:
        existing = "--init-from" in command and "--config" not in command  # its layers are those of the other run
        return [*command, *FEW_STEPS, *([] if existing else ["--num-layers", "1"])]
    if command[0] == "estimate":  # tests/estimate/test_calibrate.py measures
        elsewhere = ["--ops", "triton"] if {"--device", "--memory"} & {*command} else []
        return [*command, "--num-layers", "1", "--no-calibrate", *elsewhere]
    if command[:2] == ["train", "resume"] and "--max-steps" in command:
        return [*command, "--max-steps", "9"]
    return command


def stop_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """What Ctrl-C does, at a moment that a test can name."""
    from tapeless.training.signals import StopSignals

    asked = iter(range(steps))
    patch.setattr(StopSignals, "requested", lambda self: next(asked, None) is None)


def lacks_a_package(command: list[str]) -> bool:
    """Whether it names a reporter of a package that is not installed here."""
    named = {name for word in command for name in word.split(",")} & {"wandb", "trackio", "tensorboard"}
    return any(find_spec(name) is None for name in named)


def follow(path: Path, monkeypatch: pytest.MonkeyPatch, *, stopped: str = "") -> list[str]:
    """Type what a page says, line by line, but for the number of steps. stopped: the command to press Ctrl-C in."""
    from tapeless.cli.main import main

    done = []
    for line in [line for block in blocks(path, "sh") for line in block.splitlines()]:
        words = shlex.split(line, comments=True)
        if words[0] == "python3" and not line.startswith(ELSEWHERE):
            subprocess.run(line, shell=True, check=True)
        elif words[1:] == ["presets"]:  # with the ops of a user: the dry runs of the reference ops take half a minute
            subprocess.run([sys.executable, "-m", *words], check=True)
        elif not (line.startswith(ELSEWHERE) and not stopped):
            with monkeypatch.context() as patch:
                if stopped and line.startswith(stopped):
                    stop_after(3, patch)
                expected = 75 if stopped and line.startswith(stopped) else 2 if lacks_a_package(words) else 0
                assert main(shortened(words[1:])) == expected, line
        done.append(line)
    return done


def test_the_tutorial_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Text, train, Ctrl-C, info, resume, further, generate, eval, a model of one's own: everything as the page says it."""
    page = ROOT / "docs" / "tutorial.md"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(blocks(page, "toml")[0])
    typed = follow(page, monkeypatch, stopped="tapeless train new --dataset-path")
    assert [line.split()[1] for line in typed if line.startswith("tapeless")].count("train") >= 5
    said = capsys.readouterr().out
    assert "stopped as requested; step" in said  # info, between the stop and the resume
    assert "resumed at step" in said
    assert "gradients agree with every oracle" in said
    assert (tmp_path / "runs" / "first" / "checkpoints" / "step-00000009").is_dir()  # --max-steps
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "latest").is_file()


GUIDES = [
    README,
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("training", "interop", "data", "report", "fine_tuning", "extending", "tutorial_chat")
    ),
]


@pytest.mark.parametrize("path", GUIDES, ids=ids)
def test_the_commands_of_a_guide_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Beside a text, instructions, conversations and the directory of somebody's model, in a folder where nothing else is."""
    from tapeless.cli.main import main

    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("The forward has its backward, and the backward has its judges.\n" * 200)
    Path("my.jsonl").write_text("".join(f'{{"prompt": "{n} + {n} =", "completion": " {2 * n}"}}\n' for n in range(200)))
    said = '{{"messages": [{{"role": "user", "content": "{n}?"}}, {{"role": "assistant", "content": "{n}!"}}]}}\n'
    Path("chat.jsonl").write_text("".join(said.format(n=n) for n in range(200)))
    if "tapeless import my-model" in path.read_text() and "--out my-model " not in path.read_text():
        assert main(shortened(["train", "new", "--dataset-path", "my.txt", "--out-dir", "theirs"])) == 0
        assert main(["export", "theirs", "--to", "hf", "--out", "my-model"]) == 0
    Path("examples").symlink_to(ROOT / "examples")
    if blocks(path, "toml"):
        Path("mine.toml").write_text(blocks(path, "toml")[0])
    assert any("tapeless train new" in line for line in follow(path, monkeypatch))


@pytest.mark.parametrize("path", [page for page in PAGES if commands(page, "make ")], ids=ids)
def test_make_targets_exist(path: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for command in commands(path, "make "):
        assert set(shlex.split(command, comments=True)[1:]) <= targets, command


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_generated_regions_are_closed(path: Path):
    text = path.read_text()
    marks = re.findall(r"<!-- (begin|end): ([\w-]+) -->", text)
    assert [mark for mark, _ in marks] == ["begin", "end"] * (len(marks) // 2)
    assert [name for _, name in marks[::2]] == [name for _, name in marks[1::2]]
    assert text.count("<!--") == len(marks)


def test_the_regions_that_are_filled_from_measurements_are_there():
    for name in ("mutants", "presets", "memory"):
        region(ROOT / "docs" / "verification.md", name)
    region(README, "number")
    region(README, "compared")


def entries(name: str, value: object) -> dict[str, float]:
    """One row each: `AUTOGRAD`, `ADJOINT["float64"]`, `SLOPE[0]`."""
    if isinstance(value, dict):
        return {f'{name}["{key}"]': number for key, number in value.items()}
    if isinstance(value, tuple):
        return {f"{name}[{i}]": number for i, number in enumerate(value)}
    return {name: value}


def test_the_table_of_tolerances_is_the_file():
    expected = {}
    for name, value in vars(tolerances).items():
        if name.isupper():
            expected |= entries(name, value)
    rows = re.findall(r"^\| `([^`]+)` \| ([^ |]+) \|", region(ROOT / "docs" / "verification.md", "tolerances"), re.M)
    assert {name: float(value) for name, value in rows} == expected


def test_the_list_of_mutants_is_the_table():
    """Every number is either planted or named as later work."""
    text = prose(ROOT / "docs" / "verification.md")
    (listing,) = [paragraph for paragraph in text.split("\n\n") if paragraph.startswith("1 ")]
    listed = re.split(r"\s·\s", listing)
    numbers = [int(entry.split()[0]) for entry in listed]
    assert numbers == list(range(1, 55))
    planted = {int(re.match(r"\d+", mutant.number)[0]) for mutant in MUTANTS if mutant.number[0].isdigit()}
    later = re.search(r"Numbers (\d+) to (\d+)\s+are bugs of reductions over ranks", text)
    assert set(numbers) - planted == {*range(int(later[1]), int(later[2]) + 1)}


def test_line_length():
    for path in PAGES:
        for line in path.read_text().splitlines():
            assert len(line) <= 128 or line.startswith("|"), f"{ids(path)}: {line}"
