"""The text of a measurement."""

from bench_fixtures import SMALL, task

from tapeless.bench.measure import How, described, scaled
from tapeless.bench.report import table, text
from tapeless.bench.side_by_side import Comparison, Measured
from tapeless.bench.summary import summary
from tapeless.config import ModelConfig

FLOOR = {"flops": 2_000_000_000, "products_s": 1.0, "optimizer_bytes": 4_000_000_000, "optimizer_s": 0.5}


def measured(contender: str, seconds: float, *, group: int = 0, **more) -> Measured:
    found = Measured(task(contender), group, 3.0, 1.25, [[seconds] * 3], others=[0.01], before=0, peak=3 * 2**20)
    for name, value in more.items():
        setattr(found, name, value)
    return found


def training(*found: Measured, **more) -> dict:
    return {"kind": "training", **described("mine", task(), How(threads=2)), **summary(Comparison([*found])), **more}


def test_a_training_step():
    ours = measured("ours", 0.5, parts={"parameters": 2**20, "saved activations": 2**19})
    said = text(training(ours, measured("eager", 1.0, peak=6 * 2**20), measured("floor", 0.25, result=None, facts=FLOOR)))
    assert "mine (" in said
    assert "3x8, one training step" in said
    assert "ours float32: 2.00x the speed of the best peer (eager float32; by rounds 2.00 to 2.00), 0.50 of its memory" in said
    assert said.count("the best") == 1  # of all, and of its dtype, is the same one
    floor = ["float32", "250", "1000", "2", "500", "8.0", "2.00", "times", "as", "long"]
    assert any(line.split() == floor for line in said.splitlines())
    assert any(line.split() == ["ours", "float32", "1.0", "0.5", "1.5", "3.0"] for line in said.splitlines())  # by part
    assert "group" not in said
    assert "cold" not in said


def test_what_is_reserved_on_a_gpu_has_a_column():
    gpu = training(measured("ours", 0.5, reserved=4 * 2**20), measured("compile", 1.0, reserved=5 * 2**20))
    assert "0.80 of what it reserves" in text(gpu)
    head, ours, compiled = (line.split() for line in text(gpu).splitlines()[3:6])
    assert head[-4:] == ["reserved", "first", "step", "s"]
    assert (ours[-2], compiled[-2]) == ("4", "5")
    assert "reserve" not in text(training(measured("ours", 0.5), measured("compile", 1.0)))


def test_groups_first_steps_and_what_went_wrong():
    result = training(
        measured("ours", 0.5),
        measured("eager", 1.0, result=4.0),
        measured("ours", 0.6, group=1),
        measured("compile", 0.9, group=1),
        first_steps={"ours float32": {"cold": 2.5, "warm": 1.5}},
        left_out={"hf float32": "hf float32: not installed"},
    )
    said = text(result)
    assert "group" in said.splitlines()[3]
    assert said.splitlines()[4].split()[-2:] == ["2.5", "1.5"]
    assert "left out: hf float32: not installed" in said
    assert "NOT THE SAME: ours float32 gives 3.0, eager float32 gives 4.0" in said


def test_a_busy_machine_is_said():
    result = training(measured("ours", 0.5))
    assert "BUSY" not in text(result)
    assert "THE MACHINE WAS BUSY: others had up to 50% of it" in text({**result, "busy": 0.5})


def test_generation():
    result = {**training(measured("ours", 0.5), measured("hf", 1.0)), "kind": "generation", "tokens": 128}
    assert "128 tokens, one sequence, greedy" in text(result)
    assert "2.00x the speed of the best peer (hf float32" in text(result)


def test_scaling():
    both = training(measured("ours", 0.5), measured("floor", 0.25))
    points = [{**both, "vary": "T", "value": 128, "parameters": 1000}]
    said = text({**training(), "kind": "scaling", "points": points})
    assert said.splitlines()[-1].split() == ["T", "=", "128", "1,000", "float32", "48", "96", "50%"]


def test_every_point_of_the_scaling_has_as_many_tokens():
    model = ModelConfig(num_heads=4, num_kv_heads=2)
    points = list(scaled(task(model=model), (128, 4096), (64, 96, 1024)))
    assert [(vary, value) for vary, value, _ in points] == [("T", 128), ("T", 4096), ("C", 64), ("C", 96), ("C", 1024)]
    assert {each.tokens for _, _, each in points} == {4096}
    assert {each.model.head_dim for _, _, each in points} == {model.head_dim}
    assert points[-1][2].model.intermediate_dim == 8 * model.intermediate_dim


def test_a_table_has_its_names_left_and_its_numbers_right():
    assert table([("name", "ms"), ("a", "1.5")]) == "name   ms\na     1.5"


def test_the_model_is_in_the_record():
    found = described("mine", task(), How())
    assert found["model"]["hidden_dim"] == SMALL.hidden_dim
    assert {"cpu", "cores", "torch"} <= found["machine"].keys()
    assert {"threads", "device"} <= found["conditions"].keys()
