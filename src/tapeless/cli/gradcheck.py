"""Check the gradients of a model or of one op.

    tapeless gradcheck                        the default model
    tapeless gradcheck --preset gpt2          a preset; --config FILE takes a TOML file, flags override both
    tapeless gradcheck runs/tiny              the model of a run
    tapeless gradcheck --op attention         one op, every variant
    tapeless gradcheck --ops cpu              another set of ops, and a model with it; also with --op

Exit status: 0 all within bounds, 3 a check failed, 2 wrong arguments."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeless.cli.options import add_model_arguments, chosen, say
from tapeless.errors import UsageError
from tapeless.progress import LOADING, busy

if TYPE_CHECKING:
    from tapeless.verify.finding import Finding

HELP = "check the gradients of a model against independent oracles"
FAILED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", nargs="?", type=Path, help="a run's directory: check the model it trains")
    parser.add_argument("--op", metavar="NAME", help="check one op instead of a model")
    parser.add_argument("--ops", metavar="TEXT", default="reference", help="the set of ops to check (default reference)")
    parser.add_argument("--device", metavar="TEXT", default="cpu", help="the device to run on (default cpu)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the check at full size (default 0)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed must be between 0 and 2^63 - 1, got {args.seed}")
    selector = "RUN" if args.op is None else "--op"
    ignored = ["RUN"] if args.run_dir and args.op is not None else []
    ignored += [f"--{name}" for name in ("preset", "config", "set") if getattr(args, name)]
    ignored += [f"--{name.removeprefix('model.').replace('_', '-')}" for name in vars(args) if name.startswith("model.")]
    if (args.run_dir or args.op is not None) and ignored:
        raise UsageError(f"{selector} selects what is checked, so {ignored[0]} would be ignored; leave it out")

    with busy(LOADING):
        from tapeless.training.process import usable_device
        from tapeless.verify.fixtures import Setting
        from tapeless.verify.kernel_levels import op_set

    on = Setting(args.ops, usable_device(args.device))
    args.on = on._replace(ops=op_set(on).name)  # with `auto` resolved
    return check_model(args) if args.op is None else check_op(args)


def as_json(value: dict[str, Any]) -> str:
    from tapeless.training.metrics_log import event_line  # writes NaN and infinity as text

    return event_line(value).decode().strip()


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows as columns of text; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def check_model(args: argparse.Namespace) -> int:
    from tapeless.training.run_dir import RunDir
    from tapeless.training.runs import usable_config
    from tapeless.verify.fixtures import ON_REFERENCE
    from tapeless.verify.gradcheck import gradcheck, gradcheck_ops

    if args.run_dir:
        name, config = str(args.run_dir), usable_config(RunDir.open(args.run_dir)).model
    else:
        name, config, _ = chosen(args)
    options = {"seed": args.seed, "progress": say}
    report = gradcheck(name, config, **options) if args.on == ON_REFERENCE else gradcheck_ops(name, config, args.on, **options)
    args.status = 0 if report.ok else FAILED  # known before printing, which may fail
    if args.json:
        print(as_json(report.as_json()))
        return args.status
    rows: list[tuple[str, ...]] = [("tensor", "shape", "checked as", *report.per_tensor, "worst at", "")]
    for row in report.tensors:
        found = [row.by(oracle) for oracle in report.per_tensor]
        where = next((f.where for f in found if f and f.where is not None), None)
        against = sorted({f.oracle for f in row.judged if not f.ok})
        shapes = ("x".join(map(str, shape)) for shape in (row.shape, row.checked_as))
        errors = (f"{f.error:.1e}" if f else "zero by identity" for f in found)
        result = "FAILED: " + ", ".join(against) if against else "ok"
        rows.append((row.tensor, *shapes, *errors, "" if where is None else str(list(where)), result))
    print(table(rows))
    sizes = f"{len(report.tensors)} tensors at fixture sizes, all of the model {report.scope}"
    print(f"\n{len(report.findings)} checks with {report.on}; {sizes}")
    if report.step is None:
        print(level_table(report.findings))
    if step := report.step:
        losses = f"loss {step.before:.6f} -> {step.after:.6f} (the gradient alone predicts {step.predicted:.6f})"
        print(f"one step downhill: {losses}")
    for finding in report.failures:
        print(finding)
    print("gradients agree with every oracle" if report.ok else f"{len(report.failures)} checks FAILED")
    return args.status


def level_table(findings: "list[Finding]") -> str:
    """For each level how much was checked, and the result closest to its bound."""
    from tapeless.verify.gradcheck import closeness

    rows: list[tuple[str, ...]] = [("level", "checks", "failed", "error/bound", "closest to its bound")]
    for level in sorted({finding.level for finding in findings}):
        here = [finding for finding in findings if finding.level == level]
        worst = max(here, key=closeness)
        failed = str(sum(not finding.ok for finding in here))
        rows.append((level, str(len(here)), failed, f"{closeness(worst):.0%}", f"{worst.check} {worst.tensor}, {worst.oracle}"))
    return table(rows)


def check_op(args: argparse.Namespace) -> int:
    from tapeless.verify.fixtures import ON_REFERENCE
    from tapeless.verify.kernel_levels import ops_findings
    from tapeless.verify.op_levels import level_1

    findings = list(level_1(args.op) if args.on == ON_REFERENCE else ops_findings(args.on, args.op))
    if not findings:
        raise UsageError(f"{args.op} is not part of a set of ops: it always uses the reference")
    failures = [finding for finding in findings if not finding.ok]
    if args.json:
        listed = [{**f._asdict(), "ok": f.ok} for f in findings]
        print(as_json({"op": args.op, **args.on._asdict(), "ok": not failures, "findings": listed}))
        return FAILED if failures else 0
    rows: list[tuple[str, ...]] = [("check", "gradient", "oracle", "error", "bound", "worst at", "")]
    for f in findings:
        where = "" if f.where is None else str(list(f.where))
        rows.append((f.check, f.tensor, f.oracle, f"{f.error:.1e}", f"{f.bound:.0e}", where, "ok" if f.ok else "FAILED"))
    print(table(rows))
    result = f"{len(failures)} FAILED" if failures else "all within bounds"
    print(f"\n{len(findings)} checks of {args.op} with {args.on}: {result}")
    return FAILED if failures else 0
