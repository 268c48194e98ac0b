"""`tapeless estimate` from outside, and what `train new` does with it."""

import json
from pathlib import Path

import pytest

from tapeless.cli.main import main
from tapeless.estimate import fit
from tapeless.training.metrics_log import read_metrics

SMALL = ["--hidden-dim", "16", "--num-layers", "1", "--num-heads", "2", "--intermediate-dim", "32", "--max-seq-len", "16"]


def test_as_text(capsys: pytest.CaptureFixture, tmp_path: Path):
    assert main(["estimate", *SMALL, "--no-calibrate", "--out-dir", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    said = " ".join(out.split())
    for words in (
        "parameters: 1 layer of width 16",
        "1,000 steps of 8 x 16 = 128 tokens; float32 on cpu",
        "optimizer state",
        "saved activations",
        "peak, training step",
        "peak, gradient check",
        "that are free: it fits",
        "a checkpoint, up to 4 at a time",
        "FLOP a step",
        "time not measured (--no-calibrate)",
    ):
        assert words in said
    assert not (tmp_path / "run").exists()


def test_as_json_with_the_time(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from tapeless.estimate import calibrate

    monkeypatch.setattr(calibrate, "BUDGET", 0.1)
    monkeypatch.setattr(calibrate, "WRITTEN", 1000)
    assert main(["estimate", *SMALL, "--grad-accum", "2", "--json", "--out-dir", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert found["parameters"] == 2 * 256 * 16 + 4 * 256 + 3 * 32 * 16 + 3 * 16
    assert found["flops"] == 1000 * found["flops_a_step"]
    assert found["tokens_a_step"] == 2 * 8 * 16
    assert found["memory"]["peak"] == max(found["memory"]["phases"].values())
    assert found["disk"]["most"] == 4 * found["disk"]["checkpoint"]
    assert found["time"]["total"] == pytest.approx(sum(found["time"]["parts"].values()))
    assert found["resource_errors"] == []


def test_epochs_are_counted_in_the_data(text_file: Path, capsys: pytest.CaptureFixture):
    assert main(["estimate", *SMALL, "--dataset-path", str(text_file), "--epochs", "2", "--no-calibrate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokens = int(len(text_file.read_bytes()) * 0.9)
    assert found["steps"] == pytest.approx(2 * tokens / (8 * 16), rel=0.02)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    name, size = request.param
    monkeypatch.setattr(fit, name, lambda *where: size)


@pytest.mark.parametrize(
    ("little", "code", "words"),
    [
        (("room_of", 1000), "TOO_LARGE", "choose a smaller model"),
        (("free_disk", 1000), "DISK_FULL", "not enough space on the disk"),
    ],
    indirect=["little"],
)
def test_train_new_refuses_what_cannot_fit(
    little: None, code: str, words: str, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    pytest.importorskip("numba")
    run = tmp_path / "run"
    asked = [*SMALL, "--dataset-path", str(text_file), "--out-dir", str(run), "--max-steps", "2", "--no-verify", "--ops", "cpu"]
    assert main(["train", "new", *asked]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error[{code}]: ")
    assert words in err
    assert err.count("\n") == 1
    assert out == ""
    assert not run.exists()
    assert main(["estimate", *asked, "--no-calibrate"]) == 2
    assert words in " ".join(capsys.readouterr().out.split())
    assert main(["train", "new", *asked, "--skip-resource-check"]) == 0
    assert words in capsys.readouterr().err
    assert [event["step"] for event in read_metrics(run / "metrics.jsonl") if event["event"] == "step"] == [1, 2]


def test_a_run_that_begins_with_another_has_its_model(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    other = tmp_path / "other"
    usual = ["--dataset-path", str(text_file), "--max-steps", "1", "--no-verify", "--sample-tokens", "1", "--report-to", "none"]
    assert main(["train", "new", *SMALL, *usual, "--out-dir", str(other)]) == 0
    capsys.readouterr()
    begin = ["--init-from", str(other), "--no-calibrate", "--json"]
    whole, adapted = (estimated(capsys, *begin, *words) for words in ([], ["--lora-rank", "2"]))
    assert whole["model"]["hidden_dim"] == 16
    assert adapted["disk"]["checkpoint"] < whole["disk"]["checkpoint"]
    assert adapted["memory"]["parts"]["gradients"] < whole["memory"]["parts"]["gradients"] / 5
    files = sum(path.stat().st_size for path in (other / "checkpoints" / "step-00000001").iterdir())
    assert 0 < whole["disk"]["checkpoint"] - files < 64 * 2**10
    assert main(["estimate", "--init-from", str(tmp_path / "nothing")]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err


def test_examples_are_counted_as_they_are_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture):
    data = tmp_path / "asked.jsonl"
    lines = [json.dumps({"prompt": f"{i}?", "completion": "yes"}) for i in range(200)]
    data.write_text("\n".join(lines) + "\n")
    found = estimated(capsys, *SMALL, "--dataset-path", str(data), "--epochs", "1", "--no-calibrate", "--json")
    assert found["steps"] == pytest.approx(200 * 0.9 / 8, abs=3)  # an example a row, however short


def estimated(capsys: pytest.CaptureFixture, *words: str) -> dict:
    assert main(["estimate", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture):
    assert main(["estimate", *SMALL, "--device", "h100", "--dtype", "bfloat16", "--ops", "triton"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    said = " ".join(out.split())
    for words in ("bfloat16 on h100, ops triton", "of the 78.6 GiB that are free: it fits", "the largest that fits: "):
        assert words in said
    assert "computed, not measured: FLOPs by the peak of h100" in said
    assert "are free for" not in said  # its disk is not known


def test_too_little_memory_elsewhere(capsys: pytest.CaptureFixture):
    assert main(["estimate", *SMALL, "--memory", "70MB", "--ops", "triton"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "are free on a GPU with 70MB" in said
    assert "the largest that fits: 0 x 16" in said
    assert "time not known: the time depends on the GPU; name one" in said
    assert main(["estimate", *SMALL, "--memory", "much"]) == 2
    assert capsys.readouterr().err.startswith("error[CONFIG]: memory is 'much'")
