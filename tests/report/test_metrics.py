"""The table of metrics, and the numbers of events by their tags."""

import math

from report_fixtures import GROUPS, course, eval_event, layer_stats_event, step_event

from tapeless.report.metrics import METRICS, as_markdown, scalars


def test_a_step_and_an_evaluation():
    step = scalars(step_event(3, loss=2.5, lr=1e-3, grad_norm=0.5, tokens_per_second=100.0))
    assert step == {"loss/train": 2.5, "step/lr": 1e-3, "step/grad_norm": 0.5, "step/tokens_per_second": 100.0}
    assert scalars(eval_event(3, 2.0)) == {"loss/validation": 2.0, "loss/bits_per_byte": 2.0 / math.log(2)}
    assert scalars(eval_event(3, 2.0) | {"ema_val_loss": 1.5})["loss/validation_ema"] == 1.5


def test_the_table_has_every_number_of_the_events_and_no_key_or_tag_twice():
    events = [step_event(1), eval_event(1, 2.0) | {"ema_val_loss": 1.5}, layer_stats_event(1)]
    known = {(metric.event, metric.key) for metric in METRICS}
    notes = {"event", "step", "time", "floor", "best"}  # every event has them, or they are not measured
    found = {(event["event"], key) for event in events for key in event if key not in notes}
    assert found | {("step", "step"), ("step", "time")} == known
    assert len(known) == len(METRICS)
    tags = [metric.tag for metric in METRICS if metric.tag]
    assert len(set(tags)) == len(tags)


def test_layer_stats_have_a_number_for_each_layer_and_none_for_a_missing_device():
    found = scalars(layer_stats_event(50))
    layers = {f"{table}/{group}" for table in ("grad_norm", "update_ratio") for group in GROUPS}
    assert set(found) == {"memory/process", *layers}
    assert found["grad_norm/embed"] == 0.1


def test_what_is_not_finite_is_a_number_also_where_the_log_has_text():
    assert math.isnan(scalars(step_event(1, loss="NaN"))["loss/train"])
    assert scalars(step_event(1, loss="-Infinity"))["loss/train"] == -math.inf


def test_other_events_have_none():
    others = [event for event in course(100) if event["event"] not in ("step", "eval", "layer_stats")]
    assert {event["event"] for event in others} == {"start", "checkpoint", "sample", "end"}
    assert [event for event in others if scalars(event)] == []


def test_a_sample_is_no_markup():
    assert as_markdown("# no title\n*no*") == "    # no title\n    *no*\n"
