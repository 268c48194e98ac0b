"""Malicious and damaged directories: each attack by name, and hundreds of mutations."""

import json
import pickle
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from interop_fixtures import change_json, exported
from mutators import RAW, STRUCTURED, base_directories, judged, mutants
from safetensors.torch import load_file, save_file

from tapeless.cli.main import main
from tapeless.data.bpe import train_bpe
from tapeless.errors import DataError, InputError, TapelessError, UntrustedFileError
from tapeless.interop.hf_import import read_model
from tapeless.interop.tensor_file import Entry, TensorFile

MUTATIONS, LIMIT = 200, 5.0


def rewritten(folder: Path, **changes: torch.Tensor | None) -> None:
    """The weights with some tensors changed, added, or (None) left out."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: w for name, w in tensors.items() if w is not None}, path)


@pytest.mark.parametrize("home", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", 7, None])
def test_an_index_cannot_point_elsewhere(home: object, tmp_path: Path):
    folder, _ = exported(tmp_path, shard_bytes=6000)
    (tmp_path / "model.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = home
    change_json(folder / "model.safetensors.index.json", **index)
    with pytest.raises(UntrustedFileError, match="is not a plain file name; all files of a model are in one directory"):
        read_model(folder)


def test_a_shard_that_is_a_link_is_not_followed(tmp_path: Path):
    folder, _ = exported(tmp_path, shard_bytes=6000)
    shard = next(folder.glob("*.safetensors"))
    shard.rename(tmp_path / "outside.safetensors")
    shard.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(UntrustedFileError, match="is a symlink"):
        read_model(folder)


def test_an_index_that_disagrees_with_its_files(tmp_path: Path):
    folder, _ = exported(tmp_path, shard_bytes=6000)
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    change_json(path, weight_map={**weight_map, "model.x": weight_map["lm_head.weight"]})
    with pytest.raises(UntrustedFileError, match=r"disagree: 'model\.x' is in only one of them"):
        read_model(folder)
    change_json(path, weight_map={name: home for name, home in weight_map.items() if name != "lm_head.weight"})
    with pytest.raises(UntrustedFileError, match="is in only one of them"):
        read_model(folder)
    change_json(path, weight_map=[])
    with pytest.raises(UntrustedFileError, match="expected a weight_map"):
        read_model(folder)


def test_missing_extra_and_misshapen_tensors(tmp_path: Path):
    folder, _ = exported(tmp_path)
    wrong = {f"model.layers.{i}.mlp.up_proj.weight": None for i in range(2)}
    wrong |= {"model.norm.weight": torch.ones(25), "x": torch.ones(2, 2), "y": torch.ones(1), "z": torch.ones(1)}
    rewritten(folder, **wrong)
    with pytest.raises(InputError) as found:
        read_model(folder)
    for part in (
        "model.layers.0.mlp.up_proj.weight (13, 24) is missing",
        "model.norm.weight is (25,), expected (24,)",
        "'x' (2, 2) is unexpected",
        "; and 1 more",
    ):
        assert part in str(found.value)


def test_nothing_is_allocated_for_sizes_in_config_json(tmp_path: Path):
    folder, _ = exported(tmp_path)
    change_json(folder / "config.json", hidden_size=2**40, intermediate_size=2**50, vocab_size=2**60)
    tracemalloc.start()
    with pytest.raises(InputError, match="the tensors do not match"):
        read_model(folder)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_nan_is_reported(tmp_path: Path):
    folder, model = exported(tmp_path)
    bad = model.params["blocks.0.attn.wk"].clone()
    bad[3, 1] = float("nan")
    rewritten(folder, **{"model.layers.0.self_attn.k_proj.weight": bad})
    with pytest.raises(
        UntrustedFileError, match=r"k_proj\.weight \(12, 24\) has 1 values that are not finite, the first at \[3, 1\]"
    ):
        read_model(folder)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("pickle-was-run"),))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.PKL"])
def test_pickles_are_not_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = exported(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=r"is a pickle, which can execute code when it is loaded; give safetensors: if y"):
        read_model(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(DataError, match="is a pickle, which can execute code"):
        read_model(folder)
    assert not Path("pickle-was-run").exists()


def test_a_pickle_next_to_safetensors_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = exported(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    read_model(folder)
    assert not Path("pickle-was-run").exists()


def test_code_in_the_directory_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = exported(tmp_path)
    (folder / "modeling_evil.py").write_text("open('code-was-run', 'w')")
    read_model(folder)
    change_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    with pytest.raises(InputError, match="auto_map asks to run code from the model's directory"):
        read_model(folder)
    assert not Path("code-was-run").exists()


@pytest.mark.parametrize("where", ["vocab", "added_tokens"])
def test_a_tokenizer_larger_than_the_vocabulary(where: str, tmp_path: Path):
    folder, _ = exported(tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    if where == "vocab":
        spec["model"]["vocab"]["x"] = 2**32 - 1
    else:
        spec["added_tokens"] = [{"id": 2**32 - 1, "content": "x", "special": True}]
    change_json(folder / "tokenizer.json", **spec)
    tracemalloc.start()
    with pytest.raises(InputError, match="contains the id 4294967295, but the model's vocabulary is 23"):
        read_model(folder)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["file.zip", "gone"])
def test_not_a_directory(name: str, tmp_path: Path):
    (tmp_path / "file.zip").write_bytes(b"PK")
    with pytest.raises(UntrustedFileError, match=r"is not a directory; .* archives are not unpacked"):
        read_model(tmp_path / name)
    with pytest.raises(UntrustedFileError, match=r"no config\.json; is it a Hugging Face directory"):
        read_model(tmp_path)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    pytest.importorskip("tokenizers")
    return base_directories(tmp_path_factory.mktemp("bases"), train_bpe(["the quick brown fox " * 20], 290))


def test_valid_directories_are_read(bases: list[Path]):
    assert [judged(folder) for folder in bases] == ["read"] * 4


def test_mutations_give_a_model_or_a_tapeless_error(bases: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture):
    found: Counter[str] = Counter()
    for seed, done, folder in mutants(bases, tmp_path, range(MUTATIONS)):
        start = time.monotonic()
        try:
            found[judged(folder)] += 1
        except Exception as error:
            pytest.fail(f"seed {seed}, {done}: {type(error).__name__}: {error}")
        assert time.monotonic() - start < LIMIT, f"seed {seed}, {done}"
    assert found["read"] < MUTATIONS / 3  # most mutations do harm
    assert {"UNTRUSTED_FILE", "INPUT", "OUT_OF_RANGE", "WRONG_TYPE", "DATA"} <= found.keys()
    assert capfd.readouterr() == ("", "")


def test_every_mutation_is_made(bases: list[Path], tmp_path: Path):
    made = {word for _, done, _ in mutants(bases, tmp_path, range(200)) for word in done.replace(";", "").split()}
    assert {change.__name__ for change in [*RAW, *STRUCTURED]} <= made


def outcome(folder: Path) -> str:
    try:
        return judged(folder)
    except Exception as error:
        return type(error).__name__


def test_a_trusting_reader_would_fail(bases: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The test above can fail: a reader that does not check the headers does."""

    def trusting(self: TensorFile, name: str, value: Any, data: int) -> Entry:
        start, end = value["data_offsets"]
        return Entry(self, name, value["dtype"], tuple(value["shape"]), data + start, data + end)

    monkeypatch.setattr("tapeless.interop.family.Family.check_shapes", lambda *_: None)
    monkeypatch.setattr(TensorFile, "_check_tiling", lambda *_: None)
    monkeypatch.setattr(TensorFile, "_entry", trusting)
    found = {outcome(folder) for _, _, folder in mutants(bases, tmp_path, range(100))}
    assert {"TypeError", "RuntimeError"} <= found


def test_the_command_prints_one_line(bases: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture):
    for seed, done, folder in mutants(bases, tmp_path, range(60)):
        out = tmp_path / f"run-{seed}"
        status = main(["import", str(folder), "--out", str(out)])
        err = capfd.readouterr().err
        if status == 0:
            assert out.is_dir()
        else:
            assert (status, out.exists()) == (2, False), done
            assert err.startswith("error["), done
            assert err.count("\n") == 1, done


def test_errors_are_typed():
    assert issubclass(UntrustedFileError, TapelessError)
    assert (UntrustedFileError.code, UntrustedFileError.exit_status) == ("UNTRUSTED_FILE", 2)
