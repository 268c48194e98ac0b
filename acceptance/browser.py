"""A page in a headless browser: the document it makes of it, what it complains of, how it looks. Tests use it too."""

import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
COMPLAINT = re.compile(r"CONSOLE|Uncaught|Refused to")  # of the page itself; browsers also complain of the machine
DARK = "--blink-settings=preferredColorScheme=0"


def run_browser(page: Path, *flags: str, query: str = "") -> tuple[str, list[str]]:
    """What it prints, and its complaints. query: of the address."""
    assert BROWSER, "needs Chromium or Chrome in the path"
    with TemporaryDirectory(prefix="tapeless-browser-", ignore_cleanup_errors=True) as profile:
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command += ["--enable-logging=stderr", *flags, page.resolve().as_uri() + f"?{query}" * bool(query)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if COMPLAINT.search(line)]


def opened(page: Path, *flags: str) -> tuple[str, list[str]]:
    """The document as the browser has it in the end, and its complaints."""
    return run_browser(page, "--window-size=1200,900", *flags, "--dump-dom")


def picture(page: Path, out: Path, width: int, height: int, *flags: str) -> list[str]:
    """A picture of the page's upper part. No window is narrower than 500 pixels, so that a telephone is a frame in one."""
    shown = page
    if width < 500:
        shown = page.with_name("frame.html")
        frame = f'<iframe src="{page.name}" width="{width}" height="{height}" style="border:0"></iframe>'
        shown.write_text(f'<!doctype html><body style="margin:0">{frame}')
    return run_browser(shown, f"--window-size={width},{height}", f"--screenshot={out}", *flags)[1]


def curves(dom: str, chart: str) -> list[str]:
    """The paths of a chart's curves."""
    (figure,) = re.findall(rf'<figure[^>]*data-chart="{chart}".*?</figure>', dom, re.S)
    return re.findall(r'<path class="curve[^"]*" d="(M[^"]+)"', figure)
