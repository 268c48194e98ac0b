"""Checkpoints: equal weights are equal bytes, what is read is what was written, and damage is named and never loaded."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_fixtures import EARLIEST_STATE, assert_is, flip, rewrite_state, save_at, silent, state_at, tensors_at
from torch import Tensor

from tapeless.config import ModelConfig
from tapeless.data.files import file_sha256, readable_json, write_json
from tapeless.errors import CheckpointError, DamagedError
from tapeless.model.transformer import Transformer
from tapeless.optim import AdamW
from tapeless.training import checkpoint
from tapeless.training.checkpoint import (
    ADDED,
    FORMAT_VERSION,
    STATE_FIELDS,
    Checkpoint,
    load_checkpoint,
    read_checkpoint,
    restore,
    save_checkpoint,
    verify,
)

FILES = ["model.safetensors", "optim.safetensors", "state.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three good checkpoints, of steps 10, 20 and 30."""
    for step in (10, 20, 30):
        save_at(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def test_what_is_read_is_what_was_written(folder: Path):
    checkpoint = load_checkpoint(folder, on_warning=silent)
    assert_is(checkpoint, 30)
    assert checkpoint.path == folder / "step-00000030"
    assert checkpoint.optim.keys() == {"exp_avg", "exp_avg_sq"}
    assert checkpoint.state["torch_version"] == torch.__version__
    assert checkpoint.state["threads"] == torch.get_num_threads()
    assert checkpoint.state["format_version"] == FORMAT_VERSION


def test_the_files_are_those_of_the_format(folder: Path):
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000010", "step-00000020", "step-00000030"]
    assert (folder / "latest").read_text() == "step-00000030\n"
    path = folder / "step-00000030"
    assert sorted(file.name for file in path.iterdir()) == sorted([*FILES, "MANIFEST.json"])
    manifest = json.loads((path / "MANIFEST.json").read_text())
    listed = [{"name": n, "size": (path / n).stat().st_size, "sha256": file_sha256(path / n)} for n in FILES]
    assert manifest == {"files": listed}


def test_equal_weights_are_equal_bytes(tmp_path: Path):
    params, optim = tensors_at(5)
    first = save_checkpoint(tmp_path / "a", params, optim, state_at(5))
    backwards = dict(reversed(params.items()))
    apart = {name: x.clone() for name, x in backwards.items()}  # another order, other memory
    columns = {name: x.t().contiguous().t() for name, x in apart.items()}  # another layout
    for n, same in enumerate([backwards, apart, columns]):
        again = save_checkpoint(tmp_path / f"b{n}", same, dict(reversed(optim.items())), state_at(5))
        for name in [*FILES, "MANIFEST.json"]:
            assert (first / name).read_bytes() == (again / name).read_bytes()


def test_one_bit_of_one_weight_is_other_bytes(tmp_path: Path):
    params, optim = tensors_at(5)
    first = save_checkpoint(tmp_path / "a", params, optim, state_at(5))
    params["embed.w"].view(torch.int32)[1, 1] ^= 1
    again = save_checkpoint(tmp_path / "b", params, optim, state_at(5))
    assert (first / FILES[0]).read_bytes() != (again / FILES[0]).read_bytes()
    assert (first / FILES[1]).read_bytes() == (again / FILES[1]).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_model_and_its_optimizer_come_back_bit_for_bit(tmp_path: Path, dtype: str):
    config = ModelConfig(vocab_size=17, hidden_dim=12, num_layers=2, num_heads=2, intermediate_dim=20, max_seq_len=8)

    def make(seed: int) -> tuple[Transformer, AdamW]:
        model = Transformer(config, seed=seed, dtype=dtype)
        return model, AdamW(model.params, model.grads)

    def moments(model: Transformer, optimizer: AdamW) -> dict[str, dict[str, Tensor]]:
        return {key: model.store.layout.views(flat) for key, flat in optimizer.state.items()}

    model, optimizer = make(0)
    tokens = torch.arange(16).view(2, 8) % 17
    model.forward(tokens, tokens)
    model.backward()
    optimizer.step()
    path = save_checkpoint(tmp_path, model.params, moments(model, optimizer), state_at(1))
    other, its_optimizer = make(1)
    saved = read_checkpoint(path)
    restore(other.params, saved.params, path)
    for key, views in moments(other, its_optimizer).items():
        restore(views, saved.optim[key], path)
    assert other.store.flat.equal(model.store.flat)
    assert all(its_optimizer.state[key].equal(optimizer.state[key]) for key in optimizer.state)
    assert other.loss(tokens, tokens).equal(model.loss(tokens, tokens))


def test_tensors_that_do_not_fit_are_named_and_nothing_is_copied():
    views = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}
    saved = {"a": torch.ones(2), "b": torch.ones(4), "d": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"step-1 does not fit: b is \(4,\), expected \(3,\); c is missing; d is"):
        restore(views, saved, Path("step-1"))
    assert all(x.eq(0).all() for x in views.values())


def test_a_state_without_a_field_is_refused(tmp_path: Path):
    state = state_at(1)
    del state["guard"]
    with pytest.raises(CheckpointError, match="guard"):
        save_checkpoint(tmp_path, *tensors_at(1), state)
    assert list(tmp_path.iterdir()) == []


def swap(file: Path) -> None:
    """With the same file of another checkpoint."""
    other = file.parents[1] / "step-00000010" / file.name
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGE = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
    "empty": lambda file: file.write_bytes(b""),
    "first bit": flip(0),
    "bit in the middle": flip(60),
    "last bit": flip(-1),
    "missing": Path.unlink,
    "swapped": swap,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_used(folder: Path, name: str, damage: Callable[[Path], None]):
    path = folder / "step-00000030"
    damage(path / name)
    left = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(DamagedError, match=f"step-00000030 is damaged.*{name}: expected .*, got "):
        load_checkpoint(folder, fallback=False, on_warning=silent)
    warnings: list[str] = []
    assert_is(load_checkpoint(folder, on_warning=warnings.append), 20)
    assert len(warnings) == 2
    assert "step-00000030 is damaged" in warnings[0]
    assert name in warnings[0]
    assert "instead, " in warnings[1]
    assert "step-00000020" in warnings[1]
    assert {file.name: file.read_bytes() for file in path.iterdir()} == left


def test_two_files_of_a_checkpoint_swapped_are_both_named(folder: Path):
    a, b = (folder / "step-00000030" / name for name in FILES[:2])
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    with pytest.raises(DamagedError, match=r"model\.safetensors: expected .*optim\.safetensors: expected"):
        verify(folder / "step-00000030")


def manifests(original: bytes) -> Iterator[bytes]:
    yield from (original[:n] for n in (0, 1, len(original) // 2, len(original) - 3))
    yield from (b"[]", b"{}", b"null", b'{"files": 3}', b'{"files": []}', b'{"files": [{"name": "state.json"}]}', b"\xff\xfe")
    yield original.replace(b"state.json", b"../state.json")


def test_a_damaged_manifest_is_never_taken_for_a_good_one(folder: Path):
    file = folder / "step-00000030" / "MANIFEST.json"
    for damaged in manifests(file.read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"MANIFEST\.json"):
            load_checkpoint(folder, fallback=False, on_warning=silent)
        assert_is(load_checkpoint(folder, on_warning=lambda _: None), 20)


def test_no_flipped_bit_of_a_manifest_loads_anything_but_the_truth(folder: Path):
    file = folder / "step-00000030" / "MANIFEST.json"
    original = file.read_bytes()
    for position in range(len(original)):
        file.write_bytes(original)
        flip(position)(file)
        checkpoint = load_checkpoint(folder, on_warning=lambda _: None)
        assert_is(checkpoint, checkpoint.state["step"])


def test_a_checkpoint_under_the_name_of_another_is_damaged(folder: Path):
    shutil.rmtree(folder / "step-00000030")
    (folder / "step-00000020").rename(folder / "step-00000030")
    with pytest.raises(DamagedError, match=r"expected step 30, got step 20 in state\.json"):
        load_checkpoint(folder, fallback=False, on_warning=silent)
    assert_is(load_checkpoint(folder, on_warning=lambda _: None), 10)


def test_when_all_are_damaged_nothing_is_loaded(folder: Path):
    for step in (10, 20, 30):
        flip(100)(folder / f"step-000000{step}" / FILES[0])
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match="all 3 checkpoints are damaged"):
        load_checkpoint(folder, on_warning=warnings.append)
    assert len(warnings) == 3


def test_a_checkpoint_that_is_gone_is_said_to_be(folder: Path):
    shutil.rmtree(folder / "step-00000030")
    warnings: list[str] = []
    assert_is(load_checkpoint(folder, on_warning=warnings.append), 20)
    assert warnings == [f"{folder / 'latest'} names step-00000030, which does not exist; there are 10, 20"]
    with pytest.raises(DamagedError, match="which does not exist"):
        load_checkpoint(folder, fallback=False, on_warning=silent)


def test_a_latest_that_is_gone_is_missed_where_there_is_a_choice(folder: Path):
    (folder / "latest").unlink()
    with pytest.raises(DamagedError, match="latest is missing: expected the name of one of step 10, 20, 30"):
        load_checkpoint(folder, fallback=False, on_warning=silent)
    warnings: list[str] = []
    assert_is(load_checkpoint(folder, on_warning=warnings.append), 30)
    assert len(warnings) == 1
    for step in (10, 20):
        shutil.rmtree(folder / f"step-000000{step}")
    assert_is(load_checkpoint(folder, fallback=False, on_warning=silent), 30)


@pytest.mark.parametrize("fallback", [True, False])
def test_a_reader_follows_a_run_that_moves_on(folder: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool):
    """Between looking at `latest` and reading its files another process saves 40 and deletes all the others."""

    def moves_on(path: Path) -> Checkpoint:
        monkeypatch.setattr(checkpoint, "read_checkpoint", read_checkpoint)
        save_at(folder, 40)
        for step in (10, 20, 30):
            shutil.rmtree(folder / f"step-000000{step}")
        return read_checkpoint(path)

    monkeypatch.setattr(checkpoint, "read_checkpoint", moves_on)
    assert_is(load_checkpoint(folder, fallback=fallback, on_warning=silent), 40)


def test_a_state_that_lost_a_field_is_damaged(folder: Path):
    path = folder / "step-00000030"
    state = json.loads((path / "state.json").read_text())
    del state["sample_index"]
    write_json(path / "state.json", state)
    listed = [{"name": n, "size": (path / n).stat().st_size, "sha256": file_sha256(path / n)} for n in FILES]
    write_json(path / "MANIFEST.json", {"files": listed})
    with pytest.raises(DamagedError, match="sample_index"):
        load_checkpoint(folder, fallback=False, on_warning=silent)


@pytest.mark.parametrize("content", [b"", b"step-", b"../../etc", b"step-00000030/../step-00000010", b"\xff\xfe"])
def test_a_damaged_latest_is_said_and_the_newest_used(folder: Path, content: bytes):
    (folder / "latest").write_bytes(content)
    with pytest.raises(DamagedError, match="latest is damaged: expected the name of a checkpoint"):
        load_checkpoint(folder, fallback=False, on_warning=silent)
    warnings: list[str] = []
    assert_is(load_checkpoint(folder, on_warning=warnings.append), 30)
    assert len(warnings) == 1


def test_latest_decides_and_not_the_number(folder: Path):
    (folder / "latest").write_text("step-00000010\n")
    warnings: list[str] = []
    assert_is(load_checkpoint(folder, on_warning=warnings.append), 10)
    assert warnings == [f"{folder / 'latest'} names step 10, although there are newer checkpoints: 20, 30; using 10"]
    flip(100)(folder / "step-00000010" / FILES[0])
    assert_is(load_checkpoint(folder, on_warning=lambda _: None), 30)


def test_no_checkpoint_is_an_error_that_says_where(tmp_path: Path):
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no checkpoint here"):
        load_checkpoint(tmp_path, on_warning=silent)


def test_a_newer_format_is_refused_and_not_taken_for_damage(folder: Path):
    path = folder / "step-00000030"
    rewrite_state(path, json.loads((path / "state.json").read_text()) | {"format_version": FORMAT_VERSION + 1})
    with pytest.raises(CheckpointError, match=f"format version {FORMAT_VERSION + 1}.*upgrade") as refused:
        load_checkpoint(folder, on_warning=silent)
    assert not isinstance(refused.value, DamagedError)
    assert refused.value.exit_status == 2


def test_a_state_from_before_a_field_came_is_whole(folder: Path):
    assert {*EARLIEST_STATE, *ADDED} >= STATE_FIELDS  # whoever adds a field says what it means where it is not
    path = folder / "step-00000030"
    rewrite_state(path, EARLIEST_STATE | {"step": 30})
    assert load_checkpoint(folder, on_warning=silent).state["base"] is None


def test_tensor_files_are_as_readable_as_the_others(folder: Path):
    modes = {(folder / "step-00000030" / name).stat().st_mode for name in FILES}
    assert len(modes) == 1


@pytest.mark.parametrize("kinds", [(), ("momentum",), ("exp_avg", "exp_avg_sq", "ema")], ids=len)
def test_large_files_are_written_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]):
    params, optim = {"w": torch.randn(30, 5), "b": torch.randn(7)}, {kind: {"w": torch.randn(30, 5)} for kind in kinds}
    expected = read_checkpoint(save_checkpoint(tmp_path / "a", params, optim, state_at(3)))
    monkeypatch.setattr(checkpoint, "AT_ONCE", 0)
    path = save_checkpoint(tmp_path / "b", params, optim, state_at(3))
    several = [f"optim-0000{i}-of-00003.safetensors" for i in range(3)]
    names = {"MANIFEST.json", "model.safetensors", "state.json", *(several if len(kinds) == 3 else ["optim.safetensors"])}
    assert {file.name for file in path.iterdir()} == names
    found = read_checkpoint(path)
    assert found.state == expected.state
    assert found.params["w"].equal(params["w"])
    assert {kind: views["w"].tolist() for kind, views in found.optim.items()} == {k: v["w"].tolist() for k, v in optim.items()}
    manifest = json.loads((path / "MANIFEST.json").read_text())
    for missing in ([several[1]], several, ["optim.safetensors"]):
        files = [file for file in manifest["files"] if file["name"] not in missing]
        if len(files) == len(manifest["files"]):
            continue
        (path / "MANIFEST.json").write_bytes(readable_json({"files": files}))
        with pytest.raises(DamagedError, match="is damaged: expected"):
            read_checkpoint(path)
