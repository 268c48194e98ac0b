"""The documentation site in a browser: every page on a desktop and on a phone, its pictures, its search, also from the disk.

python acceptance/docs_site.py [FOLDER]     FOLDER: also put pictures of some pages there, to look at

Needs Chromium or Chrome, and what `make docs` installs. Whether addresses outside of the site answer is not checked;
tests/test_docs.py checks their form."""

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from browser import BROWSER, COMPLAINT, DARK, picture, run_browser
from claim import Claims, skip

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
WIDTHS = {"phone": 390, "desktop": 1280}
SECONDS = 60
SHOWN = ("index.html", "tutorial.html", "settings.html", "performance.html", "api/training.html", "api/ops.html")

# Opens each page in a frame of each width, and sends what it finds: pictures that do not load, how far a page is too wide, and
# what it asked other hosts for within 200 ms of being loaded.
INSPECTOR = """<!doctype html><body><script>
(async () => {
  const found = []
  for (const [name, width] of Object.entries(WIDTHS)) for (const page of PAGES) {
    const frame = document.createElement("iframe")
    Object.assign(frame, { width, height: 800, src: page })
    const loaded = new Promise(resolve => { frame.onload = resolve })
    document.body.appendChild(frame)
    await loaded
    const { documentElement: root, images } = frame.contentDocument
    const visible = [...images].filter(image => image.offsetParent)
    visible.forEach(image => { image.loading = "eager" })
    await Promise.all(visible.map(image => image.decode().catch(() => 0)))
    const broken = visible.filter(image => !image.naturalWidth).map(image => image.src)
    await new Promise(resolve => setTimeout(resolve, 200))
    const asked = frame.contentWindow.performance.getEntriesByType("resource").map(entry => new URL(entry.name))
    const outside = asked.filter(url => url.protocol.startsWith("http") && url.host != location.host).map(String)
    found.push({ page, width: name, pictures: visible.length, broken, outside, too_wide: root.scrollWidth - root.clientWidth })
    frame.remove()
  }
  const search = document.createElement("iframe")
  Object.assign(search, { width: 1280, height: 800, src: "index.html?q=AdamW" })
  document.body.appendChild(search)
  let hits = []
  for (let i = 0; i < 100 && !hits.length; i++) {
    await new Promise(resolve => setTimeout(resolve, 100))
    hits = [...search.contentDocument.querySelectorAll(".md-search-result__link")].map(link => new URL(link.href).pathname)
  }
  await fetch("found", { method: "POST", body: JSON.stringify({ pages: found, hits }) })
})()
</script>"""


class Handler(SimpleHTTPRequestHandler):
    inspector, found = "", None

    def do_GET(self) -> None:
        if self.path != "/inspector.html":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(Handler.inspector.encode())

    def do_POST(self) -> None:
        Handler.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def inspect(pages: list[str]) -> tuple[dict, list[str]]:
    """What the inspector found on these pages, and the complaints of the browser."""
    Handler.inspector = INSPECTOR.replace("WIDTHS", json.dumps(WIDTHS)).replace("PAGES", json.dumps(pages))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(SITE))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/inspector.html"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1400,900"]
        browser = subprocess.Popen([BROWSER, *flags, address], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        end = time.monotonic() + SECONDS + len(pages)
        while Handler.found is None and time.monotonic() < end:
            time.sleep(0.1)
        browser.terminate()
        complaints = [line for line in browser.communicate()[1].splitlines() if COMPLAINT.search(line)]
        server.shutdown()
    return Handler.found or {"pages": [], "hits": []}, complaints


def loaded_from_outside(page: Path) -> list[str]:
    """What a page loads from another host: scripts, styles, pictures and frames, not links to follow."""
    tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"?([^\s\">]+)", page.read_text())
    return [address for address in tags if urlsplit(address).netloc]


def main() -> None:
    if BROWSER is None:
        skip("needs Chromium or Chrome in the path")
    start = time.monotonic()
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # advice of the theme about its successor
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build"], cwd=ROOT, env=quiet, capture_output=True, text=True)
    if "No module named mkdocs" in built.stderr:
        skip("needs the extra docs")
    seconds = time.monotonic() - start
    claims = Claims("docs_site")
    claims.check(
        f"the site is built strictly, every link, anchor and name leading somewhere, in {seconds:.0f} s",
        bound="exit 0, no warning",
        measured=f"exit {built.returncode}, {built.stderr.count('WARNING')} warnings",
        ok=built.returncode == 0 and "WARNING" not in built.stderr,
    )
    pages = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    read = [page for page in pages if not page.startswith("source/")]
    found, complaints = inspect(read)
    looked = found["pages"]
    wide = [f"{row['page']} by {row['too_wide']} pixels on a {row['width']}" for row in looked if row["too_wide"] > 0]
    claims.check(
        f"each of {len(read)} pages at {' and '.join(f'{width} pixels' for width in WIDTHS.values())}: none scrolls sideways",
        bound=f"{2 * len(read)} looked at, 0 too wide",
        measured=f"{len(looked)} looked at, {len(wide)} too wide{': ' * bool(wide)}{', '.join(wide[:3])}",
        ok=len(looked) == 2 * len(read) and not wide,
    )
    broken = [name for row in looked for name in row["broken"]]
    number = sum(row["pictures"] for row in looked)
    claims.check(
        "pictures on them that load",
        bound="all",
        measured=f"{number - len(broken)} of {number}",
        ok=number > 0 and not broken,
    )
    outside = [address for row in looked for address in row["outside"]]
    linked = [address for page in pages for address in loaded_from_outside(SITE / page)]
    claims.check(
        "complaints in the console; requests to other hosts; addresses of other hosts in tags that load something",
        bound="0, 0, 0",
        measured=", ".join(f"{len(rows)} {' '.join(rows[:3])}".strip() for rows in (complaints, outside, linked)),
        ok=bool(looked) and not (complaints or outside or linked),
    )
    named = sorted({hit.strip("/") for hit in found["hits"]})
    claims.check(
        "search for AdamW, from a server",
        bound="the reference of the optimizers among the results",
        measured=", ".join(named[:5]) or "nothing",
        ok="api/optim.html" in named,
    )
    page, said = run_browser(SITE / "index.html", "--virtual-time-budget=20000", "--dump-dom", query="q=AdamW")
    links = [tag for tag in re.findall(r"<a [^>]*>", page) if "md-search-result__link" in tag]
    claims.check(
        "the same in a page opened from the disk",
        bound="likewise, 0 complaints",
        measured=f"{len(links)} results, {len(said)} complaints",
        ok=any("api/optim.html" in link for link in links) and not said,
    )
    if len(sys.argv) > 1:
        take_pictures(Path(sys.argv[1]))
    claims.finish(pages=len(pages), seconds=round(seconds, 1))


def take_pictures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for page in SHOWN:
        for name, width in WIDTHS.items():
            for theme, flags in (("light", []), ("dark", [DARK])):
                out = folder / f"{page.replace('/', '-').removesuffix('.html')}-{name}-{theme}.png"
                picture(SITE / page, out, width, 1000, *flags)
    (SITE / "frame.html").unlink()


if __name__ == "__main__":
    main()
