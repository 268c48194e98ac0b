"""metrics.csv: what a spreadsheet reads is what was logged."""

import csv
from pathlib import Path

from report_fixtures import course, empty_run, eval_event, loss_at, step_event

from tapeless.report.reporters.csv import CsvReporter


def test_a_row_a_step(tmp_path: Path):
    run = empty_run(tmp_path / "run")
    table = CsvReporter(run)
    events = list(course(200))
    table.begin(events[:120])
    for event in events[120:]:
        table.event(event)
    table.close()
    with open(run.path / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [*range(1, 201)]
    assert [float(row["loss"]) for row in rows] == [loss_at(step) for step in range(1, 201)]
    assert [int(row["step"]) for row in rows if row["val_loss"]] == [100, 200]
    assert [int(row["step"]) for row in rows if row["memory_bytes"]] == [1, 50, 100, 150, 200]
    assert rows[99]["val_loss"] == str(loss_at(100) + 0.05)
    assert rows[99]["ema_val_loss"] == ""


def test_the_loss_of_averaged_weights_has_its_column(tmp_path: Path):
    run = empty_run(tmp_path / "run")
    table = CsvReporter(run)
    table.begin([step_event(1), eval_event(1, 2.0) | {"ema_val_loss": 1.5}])
    table.close()
    with open(run.path / "metrics.csv", newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["val_loss"], row["ema_val_loss"]) == ("2.0", "1.5")


def test_a_resume_begins_the_table_anew(tmp_path: Path):
    run = empty_run(tmp_path / "run")
    for steps in (200, 100):  # cut back to a checkpoint, as metrics.jsonl is
        table = CsvReporter(run)
        table.begin(course(steps))
        table.close()
    assert len((run.path / "metrics.csv").read_text().splitlines()) == 101
