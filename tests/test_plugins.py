"""Sublayers from a file outside the package: loading it, recording it, and the example's gradients, decoding and errors."""

import hashlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tapeless.cli.main import main
from tapeless.config import OPTIMIZERS, REPORTERS, ROLES, Lora, ModelConfig, TrainConfig
from tapeless.errors import ConfigError
from tapeless.model import sublayer as registry
from tapeless.model.trained import plain
from tapeless.plugins import LOADED, changed_plugins, load_plugin, require_plugins, required_plugins
from tapeless.runner import resume, train
from tapeless.training.loading import load
from tapeless.verify.fixtures import ModelCase, build, shrunk
from tapeless.verify.model_judges import by_recompute, check_model

EXAMPLE = Path(__file__).parents[1] / "examples" / "gated_token_shift.py"
PATTERN = "shift(width=10)+ffn/attn+ffn"
SMALL = ModelConfig(
    blocks=PATTERN, vocab_size=256, hidden_dim=16, num_layers=2, num_heads=2, intermediate_dim=24, max_seq_len=8
)
RECORD = f"gated_token_shift.py sha256:{hashlib.sha256(EXAMPLE.read_bytes()).hexdigest()}"


@pytest.fixture(autouse=True)
def no_plugins_before_and_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts with the built-in kinds alone."""
    builtin = {kind: cls for kind, cls in registry._KINDS.items() if cls.__module__.startswith("tapeless.")}
    monkeypatch.setattr(registry, "_KINDS", builtin)
    for known in ROLES.values():
        monkeypatch.setattr(known, "_entries", dict(known._entries))
    unload()
    yield
    unload()


def unload() -> None:
    LOADED.clear()
    for name in [name for name in sys.modules if name.startswith("tapeless_plugin_")]:
        del sys.modules[name]


def forget() -> None:
    """As in a new process, which has not loaded the plugin."""
    del registry._KINDS["shift"]
    unload()


def case(**options: Any) -> ModelCase:
    changes = {name: options.pop(name) for name in list(options) if name in ModelConfig.__dataclass_fields__}
    return ModelCase("shift", shrunk(ModelConfig(num_layers=2, blocks=PATTERN, **changes)), **options)


def small_run(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("a plugin is a file that registers a kind of sublayer\n" * 20)
    settings = TrainConfig(batch_size=2, max_steps=3, eval_every=3, sample_every=0, ops="reference", verify=False)
    return train((SMALL, settings), text, out_dir=folder / "run", display=None).path


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"plugin .*none\.py: no such file"):
        load_plugin(tmp_path / "none.py")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_fails_is_named_and_can_be_repaired(tmp_path: Path, source: str, message: str):
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"plugin .*mine\.py: {message}"):
        load_plugin(file)
    shutil.copy(EXAMPLE, file)
    load_plugin(file)
    assert "shift" in registry._KINDS


def test_a_file_that_fails_leaves_no_kind_behind(tmp_path: Path):
    file, other = tmp_path / "mine.py", tmp_path / "other.py"
    file.write_text(EXAMPLE.read_text() + "1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_plugin(file)
    assert "shift" not in registry._KINDS
    other.write_text("")
    load_plugin(other)
    shutil.copy(EXAMPLE, file)
    load_plugin(file)
    assert list(required_plugins(SMALL, TrainConfig())) == ["shift"]


@pytest.mark.parametrize(("kind", "blocks"), [("attn2", "attn+attn+attn2"), ("attn_norm", "attn+attn_norm")])
def test_no_two_parameters_have_one_name(tmp_path: Path, kind: str, blocks: str):
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLE.read_text().replace('"shift"', f'"{kind}"').replace('"m"', '"w"'))
    load_plugin(file)
    with pytest.raises(ConfigError, match=rf"two parameters are named blocks\.0\.{kind}"):
        build(case()._replace(config=replace(SMALL, blocks=blocks)))


def test_not_python(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(ConfigError, match=r"not a Python file; expected a name that ends in \.py"):
        load_plugin(tmp_path / "mine.txt")


def test_a_file_is_run_once(tmp_path: Path):
    file = tmp_path / "counted.py"
    file.write_text(f"with open({str(tmp_path / 'count')!r}, 'a') as file: file.write('x')\n")
    load_plugin(file)
    load_plugin(tmp_path / "." / "counted.py")
    assert (tmp_path / "count").read_text() == "x"


def test_no_such_kind():
    with pytest.raises(ConfigError, match=r"unknown sublayer kind 'shift' in blocks.*--plugin FILE"):
        build(case())


def test_a_kind_is_registered_by_one_class(tmp_path: Path):
    load_plugin(EXAMPLE)
    other = tmp_path / "other.py"
    other.write_text(EXAMPLE.read_text().replace("class GatedTokenShift", "class Another"))
    with pytest.raises(ConfigError, match=r"sublayer kind 'shift' is already registered by tapeless_plugin_gated_token_shift"):
        load_plugin(other)
    other.write_text(EXAMPLE.read_text().replace("class GatedTokenShift", "class Another").replace('"shift"', '"attn"'))
    with pytest.raises(ConfigError, match=r"'attn' is already registered by tapeless\.model\.attention"):
        load_plugin(other)


def test_an_unknown_option():
    load_plugin(EXAMPLE)
    with pytest.raises(ConfigError, match="depth"):
        build(case()._replace(config=replace(SMALL, blocks="shift(depth=3)+ffn")))


def test_an_option_of_type_float_takes_an_integer(tmp_path: Path):
    class Scaled(registry.sublayer_class("ffn")):  # type: ignore[misc]
        kind, options = "scaled", {"scale": 1.0, "count": 1}

    scaled = Scaled(SMALL, "blocks.0.scaled", {"scale": 2})
    assert type(scaled.options["scale"]) is float
    with pytest.raises(ConfigError, match=r"scaled\(count=2.0\): expected int"):
        Scaled(SMALL, "blocks.0.scaled", {"count": 2.0})


def test_what_a_model_requires():
    load_plugin(EXAMPLE)
    assert required_plugins(SMALL, TrainConfig()) == {"shift": RECORD}
    assert required_plugins(replace(SMALL, blocks="attn+ffn"), TrainConfig()) == {}


def test_a_plugin_that_is_not_loaded():
    with pytest.raises(ConfigError) as found:
        require_plugins({"shift": RECORD}, Path("runs/mine"))
    assert str(found.value) == (
        "runs/mine needs the plugin gated_token_shift.py, which defines the sublayer 'shift' and is not loaded; "
        f"pass --plugin FILE, or import it before; its {RECORD.split()[1]}"
    )
    with pytest.raises(ConfigError, match=r"needs the plugin my own\.py, which"):
        require_plugins({"shift": "my own.py sha256:0"}, Path("runs/mine"))
    load_plugin(EXAMPLE)
    require_plugins({"shift": RECORD}, Path("runs/mine"))


def test_a_plugin_that_changed():
    load_plugin(EXAMPLE)
    now = required_plugins(SMALL, TrainConfig())
    assert changed_plugins({"shift": RECORD}, now) == []
    assert changed_plugins({"shift": "another name.py " + RECORD.split()[1]}, now) == []
    assert changed_plugins({"shift": "gated_token_shift.py sha256:0"}, now) == ["shift"]


TRAINING = """
from tapeless.config import OPTIMIZERS, REPORTERS
from tapeless.optim.sgd import SGD
from tapeless.report.reporters import Reporter

class Mine(SGD):
    pass

class Counts(Reporter):
    def __init__(self, run):
        self.path, self.count = run.path / "count", 0

    def event(self, event):
        event.clear()  # its own copy
        self.count += 1
        self.path.write_text(str(self.count))

OPTIMIZERS.register("mine", Mine)
REPORTERS.register("counts", Counts)
"""


def test_an_optimizer_and_a_reporter_are_needed_to_resume_and_not_to_load(tmp_path: Path, capsys: pytest.CaptureFixture):
    plugin, text, builtin = tmp_path / "training.py", tmp_path / "text.txt", {k: dict(v._entries) for k, v in ROLES.items()}
    plugin.write_text(TRAINING)
    text.write_text("a plugin is a file that registers something\n" * 20)
    load_plugin(plugin)
    settings: dict[str, Any] = {"batch_size": 2, "max_steps": 2, "sample_every": 0, "ops": "reference", "verify": False}
    settings |= {"optimizer": "mine", "report_to": "counts,csv"}
    model = replace(SMALL, blocks="attn+ffn")
    result = train((model, TrainConfig(**settings)), text, out_dir=tmp_path / "run", display=None)
    assert (result.path / "count").read_text() == str(len(result.events()))
    assert len((result.path / "metrics.csv").read_text().splitlines()) == 3  # the reporter before it cleared its events
    for role, known in ROLES.items():
        known._entries = builtin[role]
    unload()
    assert torch.equal(load(result.path).store.flat, result.model.store.flat)
    assert main(["eval", str(result.path)]) == 0
    with pytest.raises(ConfigError, match=r"needs the plugin training\.py, which defines the optimizer 'mine'"):
        resume(result.path, max_steps=3, display=None)
    with pytest.raises(ConfigError, match=r"needs the plugin training\.py, which defines the reporter 'counts'"):
        resume(result.path, max_steps=3, display=None, optimizer="sgd")
    capsys.readouterr()
    assert main(["train", "info", str(result.path)]) == 0
    info = capsys.readouterr().out
    assert "optimizer  mine, lr " in info
    assert f"tapeless train resume {result.path} --max-steps 4 --plugin training.py " in info
    assert "generate" in info
    assert info.count("--plugin") == 1  # the model needs none
    load_plugin(plugin)
    assert resume(result.path, max_steps=3, display=None, report_to="csv").step == 3
    plugin.write_text(TRAINING + "# another version\n")
    unload()
    load_plugin(plugin)
    with pytest.raises(ConfigError, match=r"plugins\.optimizer-mine"):
        resume(result.path, max_steps=4, display=None)


def test_a_file_that_fails_leaves_no_optimizer_behind(tmp_path: Path):
    (tmp_path / "mine.py").write_text(TRAINING + "1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_plugin(tmp_path / "mine.py")
    assert "mine" not in OPTIMIZERS
    assert "counts" not in REPORTERS


def test_a_name_that_is_no_word_is_refused():
    with pytest.raises(ConfigError, match="the name 'a,b' cannot be registered"):
        REPORTERS.register("a,b", object)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_placement": "post", "norm": "layer", "norm_bias": True, "position": "none", "recompute": "cheap"},
        {"documents": True, "recompute": "full", "dropout": 0.2},
        {"lora": Lora(3, 5.0, "wr,wo,wq"), "documents": True},
        {"lora": Lora(2, 3.0, "all-linear"), "recompute": "full"},
        {"freeze": "embed*,blocks.0.shift.m,blocks.0.shift.wo,*_norm.w"},
    ],
    ids=["plain", "post-norm", "documents", "lora", "lora-all", "frozen"],
)
def test_gradients_of_the_example(options: dict[str, Any]):
    load_plugin(EXAMPLE)
    findings = list(check_model(case(**options)))
    assert findings
    assert [str(finding) for finding in findings if not finding.ok] == []


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_recomputation_changes_no_bit(dtype: str):
    load_plugin(EXAMPLE)
    assert [str(finding) for finding in by_recompute(case(documents=True), dtype) if not finding.ok] == []


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_decoding_equals_the_forward(placement: str):
    load_plugin(EXAMPLE)
    model = build(case(norm_placement=placement))
    tokens = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(0))
    cache, parts, at = model.kv_cache(2, 9), [], 0
    for size in (3, 1, 2, 1, 1, 1):
        parts.append(model.logits(tokens[:, at : at + size], kv_cache=cache))
        at += size
    torch.testing.assert_close(torch.cat(parts, 1), model.logits(tokens), rtol=0, atol=1e-12)


def test_a_run_needs_its_plugin(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    load_plugin(EXAMPLE)
    run = small_run(tmp_path)
    assert f'[plugins]\nshift = "{RECORD}"' in (run / "config.toml").read_text()
    expected = dict(load(run, ops="reference").params)
    forget()
    shutil.copy(EXAMPLE, run / EXAMPLE.name)  # nothing in a run directory is executed
    for words in (
        ["train", "resume", str(run)],
        ["train", "new", "--init-from", str(run), "--out-dir", str(tmp_path / "other")],
        ["generate", str(run)],
        ["eval", str(run)],
        ["gradcheck", str(run)],
        ["export", str(run), "--to", "hf", "--out", str(tmp_path / "hf")],
    ):
        assert main(words) == 2, words
        error = capsys.readouterr().err
        assert f"error[CONFIG]: {run} needs the plugin gated_token_shift.py, which defines the sublayer 'shift'" in error
    with pytest.raises(ConfigError, match=r"needs the plugin gated_token_shift\.py"):
        load(run)
    assert main(["train", "info", str(run)]) == 0  # what runs no model needs no plugin
    assert main(["generate", str(run), "--plugin", str(EXAMPLE), "--ops", "reference", "--max-tokens", "2"]) == 0
    assert all(torch.equal(w, expected[name]) for name, w in load(run, ops="reference").params.items())


def test_resume_refuses_another_version(tmp_path: Path):
    load_plugin(EXAMPLE)
    run = small_run(tmp_path)
    forget()
    other = tmp_path / "gated_token_shift.py"
    other.write_text(EXAMPLE.read_text() + "# another version\n")
    load_plugin(other)
    with pytest.raises(ConfigError, match=r"plugins\.shift: 'gated_token_shift\.py sha256:.*fixed for the run"):
        resume(run, display=None, max_steps=5)
    with pytest.warns(UserWarning, match="another version of its plugin"):
        load(run, ops="reference")


def test_merged_adapters_still_name_the_plugin(tmp_path: Path):
    load_plugin(EXAMPLE)
    base = small_run(tmp_path)
    options: dict[str, Any] = {"init_from": str(base), "lora_rank": 2, "lora_targets": "wr,wo", "max_steps": 2, "verify": False}
    tuned = train("default", tmp_path / "text.txt", out_dir=tmp_path / "tuned", display=None, ops="reference", **options)
    assert {name.rsplit(".", 2)[-2] for name in tuned.model.params.keys() - plain(tuned.model.params).keys()} >= {"wr", "wo"}
    assert main(["merge", str(tuned.path), "--out", str(tmp_path / "merged")]) == 0
    assert f'shift = "{RECORD}"' in (tmp_path / "merged" / "config.toml").read_text()
