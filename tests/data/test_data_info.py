"""What is said of data and of tokenizers is so."""

import json
from pathlib import Path

import numpy as np
import tokenizers

from tapeless.config import TrainConfig
from tapeless.data.chunks import Chunk
from tapeless.data.info import data_info, sample_windows, text_info, tokenizer_info
from tapeless.data.prepare import prepare
from tapeless.data.tokenizer import ByteTokenizer, CharTokenizer, load_tokenizer


def test_a_tokenizer_on_a_text(tmp_path: Path):
    text = "naïve\n" * 10
    facts = text_info(ByteTokenizer(), [Chunk(text, True)])
    assert facts["characters"], facts["bytes"] == (60, 70)
    assert (facts["tokens"], facts["bytes_per_token"], facts["unknown"], facts["round_trip"]) == (70, 1.0, 0, True)
    assert facts["ids_used"] == 7
    facts = text_info(CharTokenizer("nave\n"), [Chunk(text, True)])
    assert (facts["tokens"], facts["unknown"], facts["round_trip"]) == (50, 10, False)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    facts = text_info(load_tokenizer(tmp_path / "tokenizer.json"), [Chunk("a b a c", True)])
    assert (facts["tokens"], facts["unknown"], facts["round_trip"]) == (4, 2, False)


def test_a_tokenizer():
    facts = tokenizer_info(CharTokenizer("ab漢"))
    assert (facts["kind"], facts["vocab_size"], facts["longest"], facts["special"]) == ("char", 3, "漢", [])
    assert facts["mean_bytes_of_an_id"] == 1.667


def test_data(tmp_path: Path):
    lines = [json.dumps({"text": f"<{i % 38}>" + "x" * i}) for i in range(40)] + ['{"text": " "}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    facts = data_info(path, "text")
    assert (facts["documents"], facts["without_text"], facts["copies"]) == (40, 1, 0)
    assert facts["characters_per_document"] == [3, 23, 42]
    data = prepare(TrainConfig(dataset_path=str(path), seq_len=8), 256, tmp_path / "data")
    facts = data_info(tmp_path / "data", "text")
    assert facts["training_tokens"] + facts["validation_tokens"] == len(data.train) + len(data.val)
    assert (facts["documents"], facts["vocab_size"], facts["bytes_of_an_id"]) == (40, 256, 2)
    np.arange(50, dtype="<u2").tofile(tmp_path / "theirs.bin")
    assert data_info(tmp_path / "theirs.bin", "text") == {"format": "nanogpt", "tokens": 50, "largest_id": 49}


def test_samples_show_where_documents_begin(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"<document {i}>"}) for i in range(40)))
    data = prepare(TrainConfig(dataset_path=str(tmp_path / "a.jsonl"), seq_len=8), 256, tmp_path / "data")
    windows = sample_windows(data, "train", 5, 60, seed=0)
    assert windows == sample_windows(data, "train", 5, 60, seed=0) != sample_windows(data, "train", 5, 60, seed=1)
    for window in windows:
        assert window.count("⟦document⟧") == window.count("<") > 1
        assert window.replace("⟦document⟧", "") in data.tokenizer.decode(data.train)
    (whole,) = sample_windows(data, "val", 1, 10**6, seed=0)
    assert whole.count("⟦document⟧") == len(data.val_starts)


def test_instructions(tmp_path: Path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "ab", "completion": "c"}\n{"prompt": "", "completion": "d"}\n')
    found = data_info(path, "text")
    assert (found["examples"], found["characters"]) == (2, 4)
    assert found["characters_per_example"] == [1, 2, 3]
