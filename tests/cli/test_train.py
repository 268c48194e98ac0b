"""`tapeless train` from outside: the literal command people bring along, what is printed and written, and how it ends."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tapeless.cli.main import main
from tapeless.training.metrics_log import read_metrics
from tapeless.training.signals import StopSignals

ZIG = (
    "train new --hidden-dim 64 --num-layers 2 --num-heads 2 --intermediate-dim 128 --vocab-size 256 --max-seq-len 32 "
    "--batch-size 2 --epochs 5 --dataset-path training_data.txt"
)
SMALL = shlex.split("--hidden-dim 16 --num-layers 1 --num-heads 2 --intermediate-dim 32 --max-seq-len 16")


def last_losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_metrics(run / "metrics.jsonl") if event["event"] == "step"]


def test_the_literal_command_of_the_zig_trainer(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    (tmp_path / "training_data.txt").write_text(text_file.read_text()[:6000])
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(ZIG)) == 0
    out = capsys.readouterr().out
    run = tmp_path / "runs" / "default"
    losses = last_losses(run)
    windows = (5400 - 32) // 32
    assert len(losses) == 5 * windows // 2
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < 3.0
    assert "ln 256 5.5452" in out
    assert (run / "checkpoints" / "latest").is_file()
    assert main(shlex.split(f"{ZIG} --max-steps 2 --no-verify")) == 0
    assert (tmp_path / "runs" / "default-2").is_dir()  # a run is never written over


def test_what_a_run_says(trained: tuple[Path, str]):
    run, out = trained
    said = " ".join(out.split())  # however lines are broken
    for words in (
        f"run {run}",
        "parameters: 1 layer of width 16, 2 heads, swiglu 32, RMSNorm before each sublayer, rotary positions",
        "training tokens",
        "tokenizer bytes, 256 ids, 1.00 bytes per token of the validation text",
        "ops cpu (",
        "float32 on cpu",
        "steps 40 of 4 x 32 = 128 tokens",
        "2 warm-up steps",
        "decay 0.1 on embed.w, attn.{wq wk wv wo}, ffn.{w_gate w_up w_down}, head.w; none on attn_norm.w, ffn_norm.w",
        "baselines ln 256 5.5452, unigram ",
        "gradients correct on the first batch",
        "plain lines, since the output is not a terminal",
        "done 40 steps",
        "bigram ",
        f"tapeless generate {run}",
        f"tapeless train resume {run} --max-steps 80",
    ):
        assert words in said
    assert out.count("sample\n") == 2
    assert out.count("new best") == 2


def test_what_a_run_leaves(trained: tuple[Path, str]):
    run, _ = trained
    names = {path.name for path in run.iterdir()}
    assert {"config.toml", "env.json", "metrics.jsonl", "tokenizer.json", "train.bin", "val.bin", "data.json"} <= names
    events = list(read_metrics(run / "metrics.jsonl"))
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 41))
    assert events[0]["event"] == "start"
    assert events[0]["total_steps"] == 40
    assert set(events[0]["baselines"]) == {"uniform", "unigram", "bigram"}
    assert events[-1]["event"] == "end"
    assert [path.name for path in sorted((run / "samples").iterdir())] == ["step-00000020.txt", "step-00000040.txt"]


def test_json_is_every_event_and_nothing_else(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    run = tmp_path / "run"
    words = ["--dataset-path", str(text_file), "--out-dir", str(run), "--max-steps", "3", "--json"]
    assert main(["train", "new", *SMALL, *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    events = [json.loads(line) for line in out.splitlines()]
    assert events == list(read_metrics(run / "metrics.jsonl"))
    steps = ["step", "layer_stats", "step", "layer_stats", "step"]
    assert sum(event["event"] == "checkpoint" for event in events) == 1  # when it is written
    others = [event["event"] for event in events if event["event"] != "checkpoint"]
    assert others == ["start", *steps, "eval", "time_spent", "sample", "time_spent", "end"]


def test_a_stop_is_75_and_a_resume_ends_where_the_unbroken_run_does(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    common = [*SMALL, "--dataset-path", str(text_file), "--max-steps", "8", "--no-verify", "--eval-every", "4"]
    assert main(["train", "new", *common, "--out-dir", str(tmp_path / "whole")]) == 0
    asked = iter([False] * 4)
    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "requested", lambda self: next(asked, True))
        assert main(["train", "new", *common, "--out-dir", str(tmp_path / "broken")]) == 75
    out = capsys.readouterr().out
    assert "as requested; a checkpoint is saved" in out
    assert f"tapeless train resume {tmp_path / 'broken'}  " in out
    assert main(["train", "resume", str(tmp_path / "broken")]) == 0
    assert "resumed at step" in " ".join(capsys.readouterr().out.split())  # wherever a long path wraps the line
    for name in ("model", "optim"):
        file = Path("checkpoints", "step-00000008", f"{name}.safetensors")
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "broken" / file).read_bytes()


def test_a_resume_may_go_further_when_it_is_told_to(trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture):
    run = tmp_path / "copy"
    subprocess.run(["cp", "-r", trained[0], run], check=True)
    assert main(["train", "resume", str(run), "--override", "max_steps=44", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    resume = next(event for event in events if event["event"] == "resume")
    assert resume["changes"] == {"max_steps": [40, 44]}
    assert [event["step"] for event in events if event["event"] == "step"] == [41, 42, 43, 44]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train"], "the following arguments are required: ACTION"),
        (["train", "newer"], "no such command; did you mean 'new'?"),
        (["train", "resume"], "the following arguments are required: RUN"),
        (["train", "resume", "nowhere"], "nowhere is not the directory of a run: expected config.toml in it"),
        (["train", "info", "nowhere"], "nowhere is not the directory of a run"),
        (["train", "new", "--dataset-path", "nowhere.txt"], "nowhere.txt: no such file or folder"),
        (["train", "new", "--tokenizer", "byte"], "byte: no such tokenizer; expected bytes, char, bpe"),
        (["train", "new", "--vocab-size", "100"], "vocab_size 100 is below the 256 ids of the tokenizer"),
        (["train", "new", "--ops", "fast"], "unknown set of ops 'fast'"),
        (["train", "new", "--device", "cpuu"], "device 'cpuu' cannot be used here"),
        (["train", "new", "--epochs", "1", "--batch-size", "1024", "--warmup-steps", "50"], "warmup_steps 50 is beyond the"),
        (["train", "resume", "RUN", "--override", "lrr=1"], "unknown key train.lrr; did you mean 'lr'?"),
        (["train", "resume", "RUN", "--override", "lr"], "expected TABLE.KEY=VALUE"),
        (["train", "resume", "RUN", "--overide", "lr=1"], "unknown flag --overide; did you mean '--override'?"),
        (["train", "new", "--out-dir", "RUN"], "is not empty, it holds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_and_status_2(
    words: list[str],
    says: str,
    trained: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.chdir(tmp_path)
    assert main([str(trained[0]) if word == "RUN" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert err.startswith("error[")
    assert err.count("\n") == 1
    assert out == ""
    assert not (tmp_path / "runs" / "default").exists()  # what could not begin leaves nothing behind


def test_wrong_gradients_end_with_3_before_any_step(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    from dataclasses import replace

    from tapeless.kernels import choose
    from tapeless.ops.op import Op

    healthy = choose._BACKENDS["cpu"]
    ops = healthy.build(torch.device("cpu"))
    attention = ops.attention

    def swollen(dy, *rest, **options):
        return attention.backward(dy * 1.01, *rest, **options)

    broken = replace(ops, attention=Op(attention.forward, swollen))
    monkeypatch.setitem(choose._BACKENDS, "cpu", healthy._replace(build=lambda device: broken))
    run = tmp_path / "run"
    assert main(["train", "new", *SMALL, "--ops", "cpu", "--dataset-path", str(text_file), "--out-dir", str(run)]) == 3
    out, err = capsys.readouterr()
    assert "FAILED on the first batch; nothing was trained" in out
    assert "by own float64" in err
    assert not last_losses(run)


def test_a_diverging_run_ends_with_4(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    run = tmp_path / "run"
    words = ["--dataset-path", str(text_file), "--out-dir", str(run), "--max-steps", "50", "--no-verify"]
    wild = ["--optimizer", "sgd", "--lr", "1e30", "--grad-clip", "0", "--warmup-steps", "0"]
    assert main(["train", "new", *SMALL, *words, *wild]) == 4
    err = capsys.readouterr().err
    assert err.startswith("error[NONFINITE]: ")
    assert main(["train", "info", str(run)]) == 0
    assert "diverged: " in capsys.readouterr().out


def test_info_as_text_and_as_json(trained: tuple[Path, str], capsys: pytest.CaptureFixture):
    run, _ = trained
    assert main(["train", "info", str(run)]) == 0
    assert "done; step 40 of 40" in capsys.readouterr().out
    assert main(["train", "info", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["state"], facts["latest"]) == (40, "done", 40)


def test_a_whole_process_in_a_pipe(text_file: Path, tmp_path: Path):
    """Nothing but events on stdout, whatever torch or Python may have to say."""
    words = ["--dataset-path", str(text_file), "--out-dir", str(tmp_path / "run"), "--max-steps", "2", "--no-verify", "--json"]
    done = subprocess.run([sys.executable, "-m", "tapeless", "train", "new", *SMALL, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()][:3] == ["start", "step", "layer_stats"]


def test_time_runs_out_and_more_is_given(tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture):
    run = tmp_path / "run"
    words = ["--dataset-path", str(text_file), "--out-dir", str(run), "--max-steps", "30", "--no-verify"]
    assert main(["train", "new", *SMALL, *words, "--max-time", "0.001s"]) == 75
    out = " ".join(capsys.readouterr().out.split())  # lines end anywhere
    assert "this process stops after 0.001s" in out
    assert "max_time 0.001s reached; a checkpoint is saved" in out
    assert f"tapeless train resume {run}" in out
    assert main(["train", "resume", str(run)]) == 75  # the run keeps its limit, and every process has all of it
    assert main(["train", "resume", str(run), "--max-time", "0"]) == 0
    assert 'max_time = "0"' in (run / "config.toml").read_text()


def test_muon_and_an_average_are_said(tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture):
    run = tmp_path / "run"
    words = ["--dataset-path", str(text_file), "--out-dir", str(run), "--max-steps", "4", "--no-verify", "--ema-decay", "0.9"]
    assert main(["train", "new", *SMALL, *words, "--optimizer", "muon"]) == 0
    out = capsys.readouterr().out
    assert "muon, beta1 0.9, beta2 0.95, eps 1e-08, momentum 0.9, nesterov, lr 0.002" in out
    assert "weights averaged with decay 0.9" in out
    assert re.search(r"bits per byte; averaged weights \d\.\d{4}", out)
    assert main(["train", "info", str(run)]) == 0
    assert ", averaged weights " in capsys.readouterr().out


def test_a_name_that_no_disk_takes_is_one_line(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["train", "new", "--dataset-path", str(text_file), "--out-dir", str(tmp_path / ("x" * 300))]) == 2
    assert "cannot be created: File name too long" in capsys.readouterr().err
