"""metrics.csv: what a spreadsheet reads is what was told."""

import csv
from pathlib import Path

from report_fixtures import course, empty_run, loss_at

from tapeless.report.csv_table import CsvTable


def test_a_row_a_step(tmp_path: Path):
    run = empty_run(tmp_path / "run")
    table = CsvTable(run)
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


def test_a_resume_begins_the_table_anew(tmp_path: Path):
    run = empty_run(tmp_path / "run")
    for steps in (200, 100):  # cut back to a checkpoint, as metrics.jsonl is
        table = CsvTable(run)
        table.begin(course(steps))
        table.close()
    assert len((run.path / "metrics.csv").read_text().splitlines()) == 101
