"""What determines the result of a run is in its checkpoints, and a resume or a load that differs is refused or announced."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest
import torch
from checkpoint_fixtures import rewrite_state
from run_fixtures import begin_run, config, play

import tapeless
from tapeless.cli.main import main
from tapeless.config import ModelConfig, TrainConfig
from tapeless.errors import ConfigError
from tapeless.model.build import build_model
from tapeless.ops.reference import REFERENCE
from tapeless.training import seal
from tapeless.training.checkpoint import checkpoints
from tapeless.training.run_config import FREE, PATHS, is_edited, read_run_config, write_run_config
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import resume_config

OTHER = {"rope_theta": "20000.0", "norm_eps": "1e-06", "ffn": '"geglu"', "seed": "5", "lr": "0.5", "batch_size": "4"}
OTHER |= {"spike_z": "0.0", "lora_alpha": "3.0", "dataset_fingerprint": '"ab"', "tokenizer_hash": '"cd"', "min_lr": "0.001"}
SCHEDULE = {"seed", "lr", "batch_size", "spike_z", "min_lr"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("every backward has its judges\n" * 40)
    settings = {"batch_size": 2, "max_steps": 4, "save_every": 2, "eval_every": 2, "sample_every": 0, "verify": False}
    model = ModelConfig(vocab_size=256, hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=24, max_seq_len=8)
    options = {"ops": "reference", "display": None, "sample_tokens": 2, **settings}
    return RunDir(tapeless.train(model, folder / "text.txt", out_dir=folder / "run", **options).path)


@pytest.fixture
def run(trained: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(trained.path, tmp_path / "run"))


def edit(run: RunDir, name: str, value: str) -> None:
    text = run.config.read_text()
    found = re.sub(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
    run.config.write_text(found if found != text else text.replace("[train]\n", f"[train]\n{name} = {value}\n"))


def state_of(run: RunDir) -> dict:
    return json.loads((checkpoints(run.checkpoints)[4] / "state.json").read_text())


def test_every_field_that_is_not_free_is_in_the_checkpoint(run: RunDir):
    sealed, config = state_of(run)["seal"], read_run_config(run.config)
    expected = {f"{table}.{name}": x for table, values in config.tables().items() for name, x in values.items()}
    left_out = {f"train.{name}" for name in FREE} | {".".join(path) for path in PATHS} | {"train.ops"}
    assert {name: x for name, x in sealed.items() if name in expected} == {
        n: x for n, x in expected.items() if n not in left_out
    }
    assert {"ops", "code", "cpu", "deterministic"} <= sealed.keys()
    assert {f.name for f in fields(TrainConfig)} > {path[1] for path in PATHS if path[0] == "train"}


@pytest.mark.parametrize("name", OTHER)
def test_a_field_edited_by_hand_is_refused(run: RunDir, name: str, capsys: pytest.CaptureFixture[str]):
    edit(run, name, OTHER[name])
    assert is_edited(run.config)
    before = run.config.read_bytes()
    assert main(["train", "resume", str(run.path)]) == 2
    err = capsys.readouterr().err
    assert f".{name}: " in err
    assert ("--override" in err) == (name in SCHEDULE) or "restore what cannot change" in err
    assert run.config.read_bytes() == before
    if name not in SCHEDULE:
        with pytest.raises(ConfigError, match=rf"{name} is .*, expected .*; restore the expected values"):
            tapeless.load(run.path)


def test_an_edit_that_is_repeated_as_an_override_counts(run: RunDir, caplog: pytest.LogCaptureFixture):
    edit(run, "lr", "0.5")
    tapeless.resume(run.path, lr=0.5, max_steps=5, display=None)
    assert "lr was 0.002, is 0.5" in caplog.text
    assert not is_edited(run.config)


@pytest.mark.parametrize(
    "change", [lambda text: text + "# mine\n", lambda text: text.replace("save_every = 2", "save_every = 3")]
)
def test_an_edit_without_effect_is_announced_once(run: RunDir, change: Callable, caplog: pytest.LogCaptureFixture):
    run.config.write_text(change(run.config.read_text()))
    with pytest.warns(
        UserWarning, match="was edited after it was written: its fields that determine the model are as they were"
    ):
        tapeless.load(run.path)
    for expected in (True, False):
        caplog.clear()
        tapeless.resume(run.path, display=None)
        assert ("was edited after it was written: no field that its checkpoints record differs" in caplog.text) == expected


def test_overrides_that_no_checkpoint_knows_yet_stay(run: RunDir, caplog: pytest.LogCaptureFixture):
    """A resume that was killed before its first checkpoint has recorded what it was told in config.toml."""
    known = read_run_config(run.config)
    write_run_config(run.config, replace(known, train=replace(known.train, lr=0.25, max_steps=5)))
    resume_config(run, {})
    tapeless.resume(run.path, display=None)
    assert (
        "the steps from here on differ from those of an unchanged run: max_steps was 4, is 5; lr was 0.002, is 0.25"
        in caplog.text
    )


def test_runs_of_before_there_were_seals_go_on(run: RunDir, caplog: pytest.LogCaptureFixture):
    for path in checkpoints(run.checkpoints).values():
        state = json.loads((path / "state.json").read_text())
        del state["seal"]
        rewrite_state(path, state)
    run.config.write_text("".join(line for line in run.config.read_text().splitlines(True) if not line.startswith("#")))
    tapeless.load(run.path)
    tapeless.resume(run.path, display=None)
    assert caplog.messages == ["all 4 steps are done already; --max-steps 8 trains for longer"]
    assert is_edited(run.config) is False


@pytest.mark.parametrize(
    ("name", "old", "words"),
    [
        ("ops", "cpu", "ops was cpu, is reference"),
        ("numba.OPT", "0", None),  # `ops` says that Numba is not there any more
        ("code", "sha256:00", "code was sha256:00, is sha256:"),
        ("env.MKL_CBWR", "AVX2", "env.MKL_CBWR was AVX2, is not set"),
        ("cpu", "i386", "cpu was i386, is "),
    ],
)
def test_other_software_is_announced(run: RunDir, name: str, old: str, words: str | None, caplog: pytest.LogCaptureFixture):
    path = checkpoints(run.checkpoints)[4]
    state = state_of(run)
    rewrite_state(path, state | {"seal": state["seal"] | {name: old}})
    tapeless.resume(run.path, display=None)
    found = [text for text in caplog.messages if text.startswith("the last bits may differ from an uninterrupted run: ")]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_numbas_settings_are_part_of_the_seal(monkeypatch: pytest.MonkeyPatch):
    jit = pytest.importorskip("tapeless.kernels.cpu.jit")
    before, folder = jit.settings(), jit.cache_folder()
    monkeypatch.setattr(numba.config, "LOOP_VECTORIZE", 0)
    assert {name for name, value in jit.settings().items() if before[name] != value} == {"LOOP_VECTORIZE"}
    assert jit.cache_folder() != folder  # or code that was compiled with the other setting would be used


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda patch: patch.setenv("DNNL_MAX_CPU_ISA", "AVX2"), "env.DNNL_MAX_CPU_ISA"),
        (lambda patch: patch.setenv("MKL_NUM_STRIPES", "2"), "env.MKL_NUM_STRIPES"),
        (lambda patch: patch.setattr(torch.backends.mkldnn, "enabled", False), "onednn"),
        (
            lambda patch: patch.setattr(torch.backends.mkldnn, "matmul", SimpleNamespace(fp32_precision="bf16")),
            "fp32_precision",
        ),
    ],
)
def test_what_selects_code_in_torchs_libraries_is_part_of_the_seal(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], name: str
):
    shape = ModelConfig(vocab_size=8, hidden_dim=4, num_layers=1, num_heads=1, intermediate_dim=4, max_seq_len=4)
    model = build_model(shape, ops="reference")
    before = seal.software_seal(model)
    change(monkeypatch)
    after = seal.software_seal(model)
    assert {key for key in after if before.get(key) != after[key]} == {name}


def test_ops_that_are_not_ours_are_known_by_their_file():
    shape = ModelConfig(vocab_size=8, hidden_dim=4, num_layers=1, num_heads=1, intermediate_dim=4, max_seq_len=4)
    model = build_model(shape, ops="reference")

    def forward(*args: object, **options: object) -> object:
        return REFERENCE.linear.forward(*args, **options)

    model.ops = replace(REFERENCE, name="mine", linear=REFERENCE.linear._replace(forward=forward))
    assert re.fullmatch(r"sha256:[0-9a-f]{16}", seal.software_seal(model)[f"ops.{__name__}"])


def test_a_trainer_without_a_seal_compares_what_it_knows(tmp_path: Path):
    run = begin_run(tmp_path / "run", config(max_steps=4))
    play(run)
    path = checkpoints(run.checkpoints)[4]
    state = json.loads((path / "state.json").read_text())
    assert state["seal"] is None
    found = seal.differences(state | {"threads": 77}, None)
    assert [d.name for d in found] == ["threads"]
    assert str(found[0]) == f"threads was 77, is {torch.get_num_threads()}"
