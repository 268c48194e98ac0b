"""The size of the vocabulary is that of the tokenizer wherever it is known, unless it is set."""

from pathlib import Path

import pytest

from tapeless.config import ModelConfig, Recipe, TrainConfig
from tapeless.data.prepare import prepare
from tapeless.data.tokenizer import CharTokenizer
from tapeless.training.vocabulary import infer_vocab_size


def inferred(model: dict, **train: object) -> tuple[int, str]:
    config, note = infer_vocab_size(Recipe("model", model, {}), ModelConfig(**model), TrainConfig(**train))
    return config.vocab_size, note


def test_a_new_bpe_has_4096():
    assert inferred({}, tokenizer="bpe") == (4096, "4,096 ids, the default of a new BPE; --vocab-size sets another")


def test_a_tokenizer_file_has_its_own(tmp_path: Path):
    CharTokenizer("abc").save(tmp_path / "abc.json")
    size, note = inferred({}, tokenizer=str(tmp_path / "abc.json"))
    assert (size, note) == (3, f"3 ids, that of {tmp_path / 'abc.json'}; --vocab-size sets another")


def test_so_have_prepared_data(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abcab" * 100)
    prepare(TrainConfig(dataset_path=str(tmp_path / "a.txt"), tokenizer="char"), None, tmp_path / "data")
    assert inferred({}, dataset_path=str(tmp_path / "data"))[0] == 3


@pytest.mark.parametrize(
    ("model", "train"),
    [({"vocab_size": 300}, {"tokenizer": "bpe"}), ({}, {"tokenizer": "char"}), ({}, {}), ({}, {"init_from": "runs/a"})],
    ids=["set", "characters", "bytes", "another model's"],
)
def test_otherwise_it_stays(model: dict, train: dict):
    assert inferred(model, **train) == (ModelConfig(**model).vocab_size, "")
