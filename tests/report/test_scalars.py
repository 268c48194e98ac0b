"""Numbers of events, by the names that are shown."""

import math

from report_fixtures import GROUPS, course, eval_event, step_event, watch_event

from tapeless.report.scalars import as_markdown, scalars


def test_a_step_and_an_evaluation():
    step = scalars(step_event(3, loss=2.5, lr=1e-3, grad_norm=0.5, tokens_per_second=100.0))
    assert step == {"loss/train": 2.5, "step/lr": 1e-3, "step/grad_norm": 0.5, "step/tokens_per_second": 100.0}
    assert scalars(eval_event(3, 2.0)) == {"loss/validation": 2.0, "loss/bits_per_byte": 2.0 / math.log(2)}


def test_a_look_has_a_number_for_each_layer_and_none_for_a_device_that_is_not_there():
    found = scalars(watch_event(50))
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
