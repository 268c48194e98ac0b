"""Write the report of a run, or a comparison of several, as one self-contained HTML file.

    tapeless report runs/default                         writes runs/default/report.html
    tapeless report runs/a runs/b --out a-and-b.html     both in the same charts, with their differences

A run writes its own report during training; `--report-to` of `tapeless train new` selects other formats."""

import argparse
from pathlib import Path

from tapeless.errors import UsageError

HELP = "write the HTML report of a run, or compare runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", metavar="RUN", type=Path, nargs="+", help="a run directory")
    words = "output file (default report.html in the run, or here for several runs)"
    parser.add_argument("--out", metavar="FILE", type=Path, help=words)
    parser.set_defaults(run=run, waiting="writing the report")


def run(args: argparse.Namespace) -> int:
    from tapeless.report.history import RunHistory
    from tapeless.report.page import write_page
    from tapeless.training.metrics_log import as_written
    from tapeless.training.run_dir import RunDir

    runs = [RunDir.open(path) for path in args.run_dirs]
    out = args.out or (runs[0].report if len(runs) == 1 else Path("report.html"))
    if out.is_dir():
        raise UsageError(f"--out {out} is a directory; name the file, such as {out / 'report.html'}")
    histories = [RunHistory.read(run) for run in runs]
    with as_written(" or ".join(str(run.metrics) for run in runs)):
        write_page(out, histories, names(args.run_dirs))
    print(f"{out}   {out.stat().st_size / 1000:,.0f} kB")
    return 0


def names(paths: list[Path]) -> list[str]:
    """The directories' names, or if two are equal, the paths as given."""
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]
