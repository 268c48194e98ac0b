"""`tapeless gradcheck` from outside: what it lists, what it says of a wrong gradient, and how it ends."""

import json
from dataclasses import replace

import pytest

from tapeless.cli.main import main
from tapeless.config import load_preset
from tapeless.kernels import choose
from tapeless.model.params import transformer_specs
from tapeless.ops.op import Op


@pytest.mark.parametrize("preset", ["tiny", "qwen3-tiny", "simplelm"])
def test_a_healthy_preset_passes_and_lists_every_tensor(capsys, preset):
    assert main(["gradcheck", "--preset", preset, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert all(finding["ok"] for finding in report["findings"])
    assert report["sgd"]["after"] < report["sgd"]["before"]
    if preset != "simplelm":
        assert [row["tensor"] for row in report["tensors"]] == [spec.name for spec in transformer_specs(load_preset(preset))]
    assert all(row["checks"] >= 2 for row in report["tensors"])


def test_a_wrong_gradient_is_named_and_ends_with_3(capsys, monkeypatch):
    """The output projection's gradient 1 % too large: the tensor, the oracle and the place must be said."""
    healthy = choose._BACKENDS["reference"]
    linear = healthy.ops.linear

    def swollen(dy, saved, w, b, dw, db):
        if dw is not None and dw.shape == (24, 24) and b is None:
            dy = dy * 1.01
        return linear.backward(dy, saved, w, b, dw, db)

    broken = replace(healthy.ops, linear=Op(linear.forward, swollen))
    monkeypatch.setitem(choose._BACKENDS, "reference", healthy._replace(ops=broken))
    assert main(["gradcheck", "--preset", "tiny"]) == 3
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.startswith("blocks.1.attn.wo ")]
    assert "FAILED: " in row
    assert "autograd twin" in row
    assert "complex step" in row
    assert "checks FAILED" in out


def test_a_configuration_file_and_flags_over_it(capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[model]\nhidden_dim = 32\nnum_layers = 3\nnum_heads = 2\nqk_norm = true\n")
    assert main(["gradcheck", "--config", str(file), "--num-layers", "1", "--ffn", "relu2", "--num-heads", "4"]) == 0
    out = capsys.readouterr().out
    assert "blocks.0.attn.q_norm.w" in out
    assert "blocks.1." not in out
    assert "ffn.w_gate" not in out


def test_one_op(capsys):
    assert main(["gradcheck", "--op", "rms_norm", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"complex step", "autograd twin", "central difference"} <= {finding["oracle"] for finding in report["findings"]}


def test_one_mutant_is_found(capsys):
    assert main(["gradcheck", "--mutant", "28"]) == 0
    out = capsys.readouterr().out
    assert "FAILED" in out


def test_the_model_of_a_run(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("every forward has its backward\n" * 40)
    run = str(tmp_path / "run")
    sizes = ["--hidden-dim", "16", "--num-layers", "1", "--num-heads", "2", "--intermediate-dim", "24", "--max-seq-len", "8"]
    assert main(["train", "new", *sizes, "--qk-norm", "--max-steps", "1", "--dataset-path", str(text), "--out-dir", run]) == 0
    capsys.readouterr()
    assert main(["gradcheck", run]) == 0
    assert "blocks.0.attn.q_norm.w" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--op", "rope", "--preset", "tiny"], "--op says what is checked, so that --preset has no meaning"),
        (["--mutants", "--num-layers", "2"], "--mutants says what is checked, so that --num-layers has no meaning"),
        (["runs/x", "--preset", "tiny"], "RUN says what is checked, so that --preset has no meaning"),
        (["runs/x", "--op", "rope"], "--op says what is checked, so that RUN has no meaning"),
        (["no/such/run"], "is not the directory of a run"),
    ],
)
def test_two_questions_at_once_are_refused(capsys, words, says):
    assert main(["gradcheck", *words]) == 2
    assert says in capsys.readouterr().err
