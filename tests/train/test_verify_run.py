"""`tapeless train verify`: everything in a run against its record, one line a check; steps again, bit for bit."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_fixtures import flip, rewrite_state
from run_fixtures import text_of

import tapeless
from tapeless.cli.main import main
from tapeless.config import ModelConfig
from tapeless.data.chat import FILE as CHAT_TEMPLATE
from tapeless.training import replay
from tapeless.training.checkpoint import checkpoints
from tapeless.training.run_dir import RunDir, RunLock
from tapeless.training.trainer import Trainer

SHAPE = ModelConfig(vocab_size=256, hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=24, max_seq_len=8)
USUAL = {"batch_size": 2, "save_every": 3, "eval_every": 3, "sample_every": 0, "sample_tokens": 2, "keep_last": 9}
USUAL |= {"verify": False, "ops": "reference", "display": None}
FILES = ["config.toml", "tokenizer.json", "train.bin", "val.bin", "train.starts.npy", "data.json", "checkpoints/best"]
FILES += ["checkpoints/latest", "metrics.jsonl"]
FILES += [
    f"checkpoints/step-00000006/{name}" for name in ("model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json")
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(text_of(900))
    return tapeless.train(SHAPE, folder / "text.txt", out_dir=folder / "run", max_steps=7, ema_decay=0.9, **USUAL).path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(trained, tmp_path / "run"))


def verified(run: RunDir, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, tuple[bool, str]]]:
    capsys.readouterr()
    status = main(["train", "verify", str(run.path), "--json", *words])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (status == 0)
    return status, {check["name"]: (check["ok"], check["text"]) for check in found["checks"]}


def failed(run: RunDir, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    status, checks = verified(run, capsys, *words)
    wrong = {name: text for name, (ok, text) in checks.items() if not ok}
    assert status == (3 if wrong else 0)
    return wrong


def test_an_intact_run_passes_with_a_line_for_each_check(run: RunDir, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "verify", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok      ") for line in lines)
    names = ["config.toml", "tokenizer.json", "data", "checkpoints/latest", "checkpoints/best", "metrics.jsonl"]
    assert [line.split()[1].rstrip(":") for line in lines] == [f"checkpoints/step-{n:08d}" for n in (3, 6, 7)] + names


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found(run: RunDir, name: str, capsys: pytest.CaptureFixture[str]):
    size = (run.path / name).stat().st_size
    if name == "metrics.jsonl":
        size = 2 * run.metrics.read_bytes().index(b'"loss": ') + 2 * len('"loss": 5.')
    flip(size // 2)(run.path / name)
    assert failed(run, capsys)


def test_what_is_missing_is_found(run: RunDir, capsys: pytest.CaptureFixture[str]):
    lines = run.metrics.read_bytes().splitlines(True)
    kept = [line for line in lines if b'"step": 5,' not in line or b'"event": "step"' not in line]
    run.metrics.write_bytes(b"".join(kept))
    assert failed(run, capsys) == {"metrics.jsonl": "step 5 is missing"}
    (step,) = [line for line in lines if line.startswith(b'{"event": "step", "step": 3,')]
    run.metrics.write_bytes(b"".join([*lines, step]))
    assert failed(run, capsys) == {"metrics.jsonl": "step 3 comes after step 7"}
    run.metrics.write_bytes(b"".join(lines))
    shutil.rmtree(checkpoints(run.checkpoints)[7])
    assert "names step 7, of which there is no intact checkpoint" in failed(run, capsys)["checkpoints/latest"]
    (run.checkpoints / "latest").unlink()
    assert failed(run, capsys)["checkpoints/latest"] == "missing"


def test_a_run_that_is_in_use_is_not_verified(run: RunDir, capsys: pytest.CaptureFixture[str]):
    with RunLock(run.lock):
        assert main(["train", "verify", str(run.path)]) == 2
    assert "is in use by process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replay", "3"], "replay of steps 4 to 6: 3 losses and gradient norms, 48 tensors of step 6: the same bits"),
        (["--replay", "10", "--checkpoint", "6"], "replay of steps 7 to 7: 1 losses and gradient norms, 48 tensors of step 7"),
        (["--replay", "2", "--checkpoint", "0"], "replay of steps 1 to 2: 2 losses and gradient norms: the same bits"),
    ],
)
def test_steps_repeat(run: RunDir, words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    before = {
        path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name not in ("data.json", "lock")
    }
    assert main(["train", "verify", str(run.path), *words]) == 0
    assert said in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in before}


def test_a_replay_keeps_to_the_settings_of_its_steps(run: RunDir, capsys: pytest.CaptureFixture[str]):
    tapeless.resume(run.path, max_steps=9, lr=1e-3, display=None)
    tapeless.resume(run.path, max_steps=11, batch_size=3, display=None)
    for first, last in ((0, 7), (6, 7), (7, 9), (9, 11)):
        status, checks = verified(run, capsys, "--replay", "20", "--checkpoint", str(first))
        assert f"replay of steps {first + 1} to {last}" in checks
        assert status == 0


def test_another_record_or_other_software_is_told_from_a_fault(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    whole = run.metrics.read_bytes()
    changed = re.sub(rb'("step": 7, .*"grad_norm": )[0-9.]+', rb"\g<1>1.25", whole)
    run.metrics.write_bytes(changed)
    text = failed(run, capsys, "--replay", "1", "--checkpoint", "6")["replay of steps 7 to 7"]
    assert text.startswith("step 7: grad_norm is ")
    assert "1.25 in metrics.jsonl; two replays agree, and software and settings are those of the run" in text
    path = checkpoints(run.checkpoints)[6]
    state = json.loads((path / "state.json").read_text())
    rewrite_state(path, state | {"seal": state["seal"] | {"ops": "cpu"}})
    text = failed(run, capsys, "--replay", "1", "--checkpoint", "6")["replay of steps 7 to 7"]
    assert "two replays agree: software or settings differ from those of the run: ops was cpu, is reference" in text
    run.metrics.write_bytes(whole)
    original, count = Trainer.step, iter(range(100))

    def faulty(self: Trainer, *batch: torch.Tensor) -> object:
        self.model.params["embed.w"][0, 0] += next(count)
        return original(self, *batch)

    monkeypatch.setattr(replay.Trainer, "step", faulty)
    (text,) = failed(run, capsys, "--replay", "3").values()
    assert "two replays do not agree: a hardware fault, or ops that are not deterministic" in text


def test_steps_before_the_first_checkpoint_are_compared_with_its_seal(run: RunDir, capsys: pytest.CaptureFixture[str]):
    run.metrics.write_bytes(re.sub(rb'("step": 2, .*"grad_norm": )[0-9.]+', rb"\g<1>1.25", run.metrics.read_bytes()))
    words = "--replay", "2", "--checkpoint", "0"
    assert "software and settings are those of the run" in failed(run, capsys, *words)["replay of steps 1 to 2"]
    path = checkpoints(run.checkpoints)[3]
    state = json.loads((path / "state.json").read_text())
    rewrite_state(path, state | {"seal": state["seal"] | {"ops": "cpu"}})
    assert "settings differ from those of the run: ops was cpu, is ref" in failed(run, capsys, *words)["replay of steps 1 to 2"]
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    text = failed(run, capsys, *words)["replay of steps 1 to 2"]
    assert "no checkpoint tells the software and settings of the run" in text


def test_damaged_files_are_not_replayed(run: RunDir, capsys: pytest.CaptureFixture[str]):
    flip(-1)(run.path / "train.bin")
    assert main(["train", "verify", str(run.path), "--replay", "1"]) == 3
    out = capsys.readouterr().out
    assert "not replayed" in out
    assert "FAILED  data: " in out


def test_generation_settings_of_an_imported_run_are_known(tmp_path: Path, run: RunDir, capsys: pytest.CaptureFixture[str]):
    assert main(["export", str(run.path), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    (tmp_path / "hf" / CHAT_TEMPLATE).write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    imported = RunDir(tmp_path / "imported")
    assert main(["import", str(tmp_path / "hf"), "--out", str(imported.path)]) == 0
    assert not failed(imported, capsys)
    (imported.path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert "it was edited, or damaged" in failed(imported, capsys)["generation_config.json"]
    with pytest.warns(UserWarning, match="generation_config.json was edited since the run began"):
        tapeless.load(imported.path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replay", "0"], "expected a whole number, 1 or more"),
        (["--checkpoint", "6"], "add --replay N"),
        (["--replay", "2", "--checkpoint", "5"], "has no checkpoint '5'; there are 0 (the beginning), 3, 6, 7"),
        (["--replay", "2", "--checkpoint", "7"], "has no line of step 8"),
    ],
)
def test_mistakes(run: RunDir, words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "verify", str(run.path), *words]) == 2
    assert said in capsys.readouterr().err
