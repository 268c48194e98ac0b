"""Write the report of a run, or of several side by side, as one page that loads nothing.

    tapeless report runs/default                         writes runs/default/report.html
    tapeless report runs/a runs/b --out a-and-b.html     both in the same charts, and in what they differ

A run writes its own page while it trains, and other forms of it: `--report-to` of `tapeless train new`."""

import argparse
from pathlib import Path

from tapeless.errors import UsageError

HELP = "write a run's report.html, or compare runs in one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", metavar="RUN", type=Path, nargs="+", help="a run's directory")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the page (default report.html in the run, or here for several)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tapeless.report.history import RunHistory
    from tapeless.report.page import write_page
    from tapeless.train.run_dir import RunDir

    runs = [RunDir.open(path) for path in args.run_dirs]
    out = args.out or (runs[0].report if len(runs) == 1 else Path("report.html"))
    if out.is_dir():
        raise UsageError(f"--out {out} is a directory; name the file, such as {out / 'report.html'}")
    write_page(out, [RunHistory.read(run) for run in runs], names(args.run_dirs))
    print(f"{out}   {out.stat().st_size / 1000:,.0f} kB")
    return 0


def names(paths: list[Path]) -> list[str]:
    """What the runs are called: by their folders, or where two share one, as they were given."""
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]
