"""`tapeless gradcheck` from outside: what it lists, what it says of a wrong gradient, and how it ends."""

import json
from dataclasses import replace

import pytest
import torch

from tapeless.cli.main import main
from tapeless.config import load_preset
from tapeless.kernels import choose
from tapeless.model.transformer import transformer_specs
from tapeless.ops.op import Op
from tapeless.ops.reference import REFERENCE
from tapeless.verify import kernel_levels


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
    ops = healthy.build(torch.device("cpu"))
    linear = ops.linear

    def swollen(dy, saved, w, b, dw, db):
        if dw is not None and dw.shape == (24, 24) and b is None:
            dy = dy * 1.01
        return linear.backward(dy, saved, w, b, dw, db)

    broken = replace(ops, linear=Op(linear.forward, swollen))
    monkeypatch.setitem(choose._BACKENDS, "reference", healthy._replace(build=lambda device: broken))
    assert main(["gradcheck", "--preset", "tiny"]) == 3
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.startswith("blocks.1.attn.wo ")]
    assert "FAILED: " in row
    assert "autograd reference" in row
    assert "complex step" in row
    assert "checks FAILED" in out


@pytest.fixture
def sets(monkeypatch) -> None:
    """Two sets of kernels: one is the reference under another name, the other has a gradient that is wrong in bfloat16."""
    monkeypatch.setattr(choose, "_BACKENDS", dict(choose._BACKENDS))
    for cases in ("TRANSFORMER_CASES", "PARTLY_TRAINED_CASES"):  # tests/verify/test_kernel_levels.py runs them all
        monkeypatch.setattr(kernel_levels, cases, getattr(kernel_levels, cases)[:1])
    attention = REFERENCE.attention

    def swollen(do, saved):
        return tuple(1.1 * g if g.dtype == torch.bfloat16 else g for g in attention.backward(do, saved))

    narrow = {"devices": ["cpu"], "dtypes": ["float32", "bfloat16"]}
    choose.register_ops("copied", REFERENCE, **narrow)
    choose.register_ops("swollen", replace(REFERENCE, attention=Op(attention.forward, swollen)), **narrow)


def test_a_set_of_ops_passes_and_is_named(capsys, sets):
    assert main(["gradcheck", "--preset", "tiny", "--ops", "copied"]) == 0
    out = capsys.readouterr().out
    assert "checks with ops copied on cpu; 26 tensors" in out
    assert "reference in float32  reference in bfloat16" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("L")] == ["L0", "L1", "L2", "L5", "L6"]


def test_a_wrong_set_of_ops_ends_with_3(capsys, sets):
    assert main(["gradcheck", "--preset", "tiny", "--ops", "swollen", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert (report["ops"], report["device"], report["ok"], report["sgd"]) == ("swollen", "cpu", False, None)
    failed = [finding for finding in report["findings"] if not finding["ok"]]
    assert {"L1", "L2"} <= {finding["level"] for finding in failed}
    assert not any("float32" in finding["check"] + finding["oracle"] for finding in failed)
    assert not next(row for row in report["tensors"] if row["tensor"] == "blocks.1.attn.wq")["ok"]
    assert any(finding["check"] == "full size, bfloat16" for finding in failed)


def test_one_op_of_a_set(capsys, sets):
    assert main(["gradcheck", "--op", "attention", "--ops", "copied"]) == 0
    assert "checks of attention with ops copied on cpu: all within bounds" in capsys.readouterr().out
    assert main(["gradcheck", "--op", "gqa", "--ops", "swollen", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert {finding["oracle"] for finding in report["findings"] if not finding["ok"]} >= {"bfloat16 of the reference"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ops", "coppied"], "unknown set of ops 'coppied'; did you mean 'copied'"),
        (["--preset", "simplelm", "--ops", "copied"], "which always runs on the reference ops"),
        (["--op", "softcap", "--ops", "copied"], "softcap is not part of a set of ops"),
        (["--device", "nowhere"], "device 'nowhere' cannot be used here"),
    ],
)
def test_questions_about_sets_that_have_no_answer(capsys, sets, words, says):
    assert main(["gradcheck", *words]) == 2
    assert says in capsys.readouterr().err


def test_infinities_of_a_set_are_a_failed_check(capsys, sets):
    def infinite(x, w, b):
        y, saved = REFERENCE.linear.forward(x, w, b)
        return y / 0, saved

    choose.register_ops("infinite", replace(REFERENCE, linear=Op(infinite, REFERENCE.linear.backward)))
    assert main(["gradcheck", "--preset", "tiny", "--ops", "infinite", "--json"]) == 3
    failed = [finding for finding in json.loads(capsys.readouterr().out)["findings"] if not finding["ok"]]
    found = {(finding["level"], finding["oracle"], finding["check"]): finding["error"] for finding in failed}
    assert found["L0", "adjoint float32", "linear"] == "NaN"
    assert found["L1", "float32", "linear"] == found["L1", "bfloat16", "linear"] == "Infinity"
    assert "own float64" in {oracle for level, oracle, _ in found if level == "L2"}


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
    assert {"complex step", "autograd reference", "central difference"} <= {finding["oracle"] for finding in report["findings"]}


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
        (["--op", "rope", "--preset", "tiny"], "--op selects what is checked, so --preset would be ignored"),
        (["runs/x", "--preset", "tiny"], "RUN selects what is checked, so --preset would be ignored"),
        (["runs/x", "--op", "rope"], "--op selects what is checked, so RUN would be ignored"),
        (["no/such/run"], "is not the directory of a run"),
    ],
)
def test_two_questions_at_once_are_refused(capsys, words, says):
    assert main(["gradcheck", *words]) == 2
    assert says in capsys.readouterr().err
