"""The pictures of README.md and docs/report.md, from two real runs: the default one, and one with another learning rate.

python docs/pictures/make.py     two runs of about two minutes on two CPU cores; needs Chromium or Chrome, and Pillow

128 colors make a picture a third as large. tests/test_docs.py holds their size."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "acceptance"))
from browser import DARK, picture  # noqa: E402

COLORS = 128
RUNS = {"default": [], "wsd": ["--lr", "1e-3", "--lr-schedule", "wsd"]}
PICTURES = {  # of which page, width, height, flags of the browser
    "report-top-light": ("default", 1200, 732, []),
    "report-top-dark": ("default", 1200, 732, [DARK]),
    "report-light": ("default", 1200, 1750, []),
    "report-dark": ("default", 1200, 1750, [DARK]),
    "report-phone": ("default", 390, 1200, []),
    "report-comparison": ("comparison", 1200, 1180, []),
}


def main() -> None:
    with TemporaryDirectory(prefix="tapeless-pictures-") as folder:
        for name, flags in RUNS.items():
            tapeless(folder, "train", "new", "--out-dir", f"runs/{name}", *flags)
        tapeless(folder, "report", *(f"runs/{name}" for name in RUNS), "--out", "comparison.html")
        pages = {"default": Path(folder, "runs", "default", "report.html"), "comparison": Path(folder, "comparison.html")}
        for name, (page, width, height, flags) in PICTURES.items():
            out = HERE / f"{name}.png"
            picture(pages[page], out, width, height, *flags)
            Image.open(out).convert("RGB").quantize(COLORS).save(out, optimize=True)


def tapeless(folder: str, *command: str) -> None:
    subprocess.run([sys.executable, "-m", "tapeless", *command], cwd=folder, check=True)


if __name__ == "__main__":
    main()
