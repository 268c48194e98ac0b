"""Medians, ratios within a group, the best peer, and losses that must agree."""

from bench_fixtures import task

from tapeless.bench.side_by_side import Comparison, Measured
from tapeless.bench.summary import summary


def measured(contender: str, dtype: str, seconds: float, *, group: int = 0, result=3.0, peak: int = 200) -> Measured:
    rounds = [[seconds, seconds * 1.1, seconds * 0.9], [seconds] * 3]
    return Measured(
        task(contender, dtype), group, result, 1.0, rounds, others=[0.1, 0.3], before=100, peak=peak, parts={"parameters": 60}
    )


def test_medians_spread_and_what_is_on_top_of_the_libraries():
    (row,) = summary(Comparison([measured("ours", "float32", 2.0)]))["contenders"]
    assert row["median_s"] == 2.0
    assert row["quartiles_s"] == [2.0, 2.0]
    assert row["tokens_per_s"] == 24 / 2.0
    assert row["round_medians_s"] == [2.0, 2.0]
    assert row["peak_bytes"] == 100
    assert row["others"] == 0.3
    assert row["parts_bytes"] == {"parameters": 60, "rest": 40}


def test_the_best_peer_is_the_hardest_to_beat():
    found = summary(
        Comparison(
            [
                measured("ours", "float32", 2.0),
                measured("ours", "bfloat16", 1.0),
                measured("eager", "float32", 3.0, peak=300),
                measured("compile", "bfloat16", 1.5),
                measured("floor", "float32", 0.1, result=None),
            ]
        )
    )
    verdicts = {(v["ours"], v["among"]): v for v in found["verdicts"]}
    assert verdicts["ours bfloat16", "all"]["ratio"] == 1.5
    assert verdicts["ours bfloat16", "all"]["peer"] == "compile bfloat16"
    assert verdicts["ours float32", "all"]["ratio"] == 0.75
    assert verdicts["ours float32", "its dtype"]["ratio"] == 1.5
    assert verdicts["ours float32", "its dtype"]["memory_ratio"] == 0.5
    assert found["disagreements"] == []


def test_ratios_are_within_a_group():
    """The second group ran while the machine was twice as slow."""
    found = summary(
        Comparison(
            [
                measured("ours", "float32", 1.0),
                measured("eager", "float32", 2.0),
                measured("ours", "float32", 2.0, group=1),
                measured("compile", "float32", 3.0, group=1),
            ]
        )
    )
    assert {pair["peer"]: pair["ratio"] for pair in found["ratios"]} == {"eager float32": 2.0, "compile float32": 1.5}
    assert found["verdicts"][0]["peer"] == "compile float32"


def test_losses_must_agree_within_a_dtype():
    rows = [measured("ours", "float32", 1, result=3.0), measured("eager", "float32", 1, result=3.001)]
    rows += [measured("ours", "bfloat16", 1, result=3.02), measured("eager", "bfloat16", 1, result=3.0)]
    (wrong,) = summary(Comparison(rows))["disagreements"]
    assert wrong == "ours float32 gives 3.0, eager float32 gives 3.001"


def test_tokens_must_be_equal_in_float32():
    rows = [measured("ours", "float32", 1, result=[1, 2]), measured("hf", "float32", 1, result=[1, 3])]
    rows += [measured("ours", "bfloat16", 1, result=[1, 2]), measured("hf", "bfloat16", 1, result=[1, 3])]
    assert len(summary(Comparison(rows))["disagreements"]) == 1
