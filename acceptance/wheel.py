"""The wheel: built from the source distribution in an environment of its own, with valid metadata and exactly the files of
src/tapeless; installed into a fresh environment outside of the tree it trains, evaluates and generates.

python acceptance/wheel.py [FOLDER]    FOLDER keeps both files, if every claim holds"""

import json
import os
import shutil
import subprocess
import sys
import time
import venv
from email.parser import BytesParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from claim import HOME, Claims
from packaging.metadata import Metadata
from training import scratch

ROOT = HOME.parent
STEPS = 60


def run(*command: object, cwd: Path) -> str:
    """The output of a command that must succeed, without what this interpreter's environment would add to it."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{command} failed with exit status {done.returncode}")
    return done.stdout


def expected_files() -> set[str]:
    files = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT / "src").as_posix() for path in files if not path.name.startswith(".")}


def check_files(claims: Claims, wheel: Path, sdist: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        raw = archive.read(info)
    metadata = Metadata.from_email(raw)  # raises for a field that an index would refuse
    about = f"{metadata.name} {metadata.version}, {metadata.license_expression}, Python {metadata.requires_python}"
    readme = BytesParser().parsebytes(raw).get_payload()
    complete = readme == (ROOT / "README.md").read_text(encoding="utf-8")
    claims.check("metadata are valid and hold the README", bound="yes", measured=about, ok=complete)
    folder = info.rpartition("/")[0]
    rest = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    wrong = sorted(names ^ (expected_files() | {f"{folder}/{name}" for name in rest}))
    claims.check(
        f"the wheel holds the {len(expected_files())} files of src/tapeless and nothing else",
        bound="no other, none missing",
        measured=wrong[:5] or "no other, none missing",
        ok=not wrong and {"tapeless/py.typed", "tapeless/presets/tiny.toml", "tapeless/report/page.js"} <= names,
    )
    sizes = f"wheel {wheel.stat().st_size / 1e6:.1f} MB, source distribution {sdist.stat().st_size / 1e6:.1f} MB"
    claims.check(
        "their sizes", bound="below 5 MB each", measured=sizes, ok=max(wheel.stat().st_size, sdist.stat().st_size) < 5e6
    )


def check_use(claims: Claims, tapeless: Path, folder: Path) -> None:
    """What a user does first, in a folder that holds nothing of the tree."""
    home = run(tapeless.parent / "python", "-c", "import tapeless; print(tapeless.__file__)", cwd=folder).strip()
    inside = Path(home).is_relative_to(folder / "fresh")
    claims.check("what is imported there", bound="the installed package", measured="it" if inside else home, ok=inside)
    run(tapeless, "train", "new", "--preset", "tiny", "--max-steps", STEPS, "--out-dir", "run", cwd=folder)
    found: dict[str, Any] = json.loads(run(tapeless, "eval", "run", "--json", cwd=folder).splitlines()[-1])
    claims.check(
        f"`tapeless train new`, {STEPS} steps, and `tapeless eval`: the validation loss",
        bound=f"below {found['unigram']:.3f}, unigrams of the data",
        measured=f"{found['val_loss']:.3f}",
        ok=found["val_loss"] < found["unigram"],
    )
    said = run(tapeless, "generate", "run", "--prompt", "def ", "--max-tokens", 20, "--seed", 1, cwd=folder)
    claims.check("`tapeless generate`", bound="the prompt and more", measured=repr(said), ok=len(said.strip()) > len("def "))


if __name__ == "__main__":
    claims, seconds = Claims("wheel"), {}
    with scratch() as folder:

        def timed(name: str, *command: object, cwd: Path = folder) -> None:
            start = time.monotonic()
            run(*command, cwd=cwd)
            seconds[name] = round(time.monotonic() - start, 1)

        timed("build", sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT)
        (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
        check_files(claims, wheel, sdist)
        venv.create(folder / "fresh", with_pip=True)
        bin = folder / "fresh" / ("Scripts" if os.name == "nt" else "bin")
        timed("install", bin / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
        start = time.monotonic()
        check_use(claims, bin / "tapeless", folder)
        seconds["use"] = round(time.monotonic() - start, 1)
        if claims.ok and len(sys.argv) > 1:
            shutil.copytree(folder / "dist", sys.argv[1], dirs_exist_ok=True)
    claims.finish(seconds=seconds)
