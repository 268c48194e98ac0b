"""Instructions: only completions count, in training and in validation, and no prompt token is ever a target."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapeless.config import ModelConfig, TrainConfig
from tapeless.data.baselines import token_blocks
from tapeless.data.chat import CHATML, read_template
from tapeless.data.instructions import COUNTS, holds_examples, read_examples, split_examples
from tapeless.data.loader import training_batches, validation_set
from tapeless.data.prepare import Dataset, open_prepared, prepare, with_text
from tapeless.errors import DataError
from tapeless.model.transformer import Transformer

PAIRS = [{"prompt": f"Q{i}:", "completion": f"a{i}b"} for i in range(20)]
CHAT = [
    {
        "messages": [
            {"role": "user", "content": f"say {i}"},
            {"role": "assistant", "content": f"<{i}>"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": f"[{i}]"},
        ]
    }
    for i in range(10)
]


def prepared(folder: Path, records: list[Any], *, tokenizer: str = "bytes", vocab_size: int = 256, **options: Any) -> Dataset:
    folder.mkdir(exist_ok=True)
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return prepare(TrainConfig(dataset_path=str(path), tokenizer=tokenizer), vocab_size, folder / "data", **options)


def validation_batch(data: Dataset, seq_len: int, limit: int = 0) -> tuple[torch.Tensor, ...]:  # tokens, targets (N, T)
    windows = validation_set(data, seq_len, limit)
    return next(windows.batches(len(windows)))


def read(row: torch.Tensor, targets: torch.Tensor) -> tuple[str, str]:
    """What a row shows and what it asks for."""
    return bytes(row.tolist()).decode().rstrip("\0"), bytes(t for t in targets.tolist() if t >= 0).decode()


def test_a_row_asks_for_the_completion_and_nothing_else(tmp_path: Path):
    data = prepared(tmp_path, PAIRS)
    rows = [*zip(*training_batches(data, 12, 18, seed=0).batch(0), strict=True), *zip(*validation_batch(data, 12), strict=True)]
    seen = sorted(read(*row) for row in rows)
    assert seen == sorted((f"{p['prompt']}{p['completion']}\n", f"{p['completion']}\n") for p in PAIRS)
    assert len(validation_batch(data, 12)[0]) == 2
    assert len(validation_batch(data, 12, limit=1)[0]) == 1


def test_only_the_assistant_is_asked_for(tmp_path: Path):
    data = prepared(tmp_path, CHAT)
    tokens, targets = validation_batch(data, 64)
    shown, asked = read(tokens[0], targets[0])
    i = asked[1]
    assert asked == f"<{i}>\n[{i}]\n"
    assert shown == f"user: say {i}\nassistant: <{i}>\nuser: again\nassistant: [{i}]\n"
    assert bytes(data.beginning().tolist()).decode() == f"user: say {i}\nassistant: "


def test_the_models_own_end_stands_behind_a_completion(tmp_path: Path):
    data = prepared(tmp_path, PAIRS, eos_ids=[7])
    _, targets = validation_batch(data, 12)
    assert [int(row[row >= 0][-1]) for row in targets] == [7, 7]


def test_the_formats_of_others(tmp_path: Path):
    """Alpaca and ShareGPT are the same conversations."""
    asked = "Add.\n\n{i} and 1"
    same: dict[str, list[dict[str, Any]]] = {
        "alpaca": [{"instruction": "Add.", "input": f"{i} and 1", "output": f"{i + 1}"} for i in range(10)],
        "sharegpt": [
            {"conversations": [{"from": "human", "value": asked.format(i=i)}, {"from": "gpt", "value": f"{i + 1}"}], "id": i}
            for i in range(10)
        ],
        "messages": [
            {"messages": [{"role": "user", "content": asked.format(i=i)}, {"role": "assistant", "content": f"{i + 1}"}]}
            for i in range(10)
        ],
    }
    data = {name: prepared(tmp_path / name, records) for name, records in same.items()}
    assert len({(d.fingerprint, d.source.split(": ")[1]) for d in data.values()}) == 1
    assert data["alpaca"].source.endswith("10 conversations")
    shown, asked = read(*(rows[0] for rows in validation_batch(data["alpaca"], 64)))
    assert shown == f"user: Add.\n\n{int(asked) - 1} and 1\nassistant: {asked}"
    (tmp_path / "alpaca.json").write_text(json.dumps(same["alpaca"], indent=1))  # as it is distributed
    listed = prepare(TrainConfig(dataset_path=str(tmp_path / "alpaca.json"), tokenizer="bytes"), 256, tmp_path / "list")
    assert listed.fingerprint == data["alpaca"].fingerprint
    short = prepared(tmp_path, [{"instruction": f"Say {i}", "input": None, "output": f"{i}"} for i in range(10)])
    assert bytes(short.beginning().tolist()).decode().count("\n") == 1


def test_a_tokenizer_with_special_tokens(tmp_path: Path):
    """Conversations in ChatML, whose template the data keep; a completion ends with the end of text."""
    data = prepared(tmp_path, [*CHAT, *PAIRS], tokenizer="bytes+chat", vocab_size=259)
    assert data.source.endswith("10 conversations and 20 prompts with completions")
    tokens, targets = validation_batch(data, 128)
    asked = [data.tokenizer.decode(row[row >= 0]) for row in targets]
    assert {text[text.index("<|") :][:10] for text in asked} <= {"<|im_end|>", "<|endoftex"}
    both = next(i for i, text in enumerate(asked) if "im_end" in text)
    assert data.tokenizer.decode(tokens[both]).startswith("<|im_start|>user\nsay ")
    assert asked[both].count("<|im_end|>") == 2
    assert "user" not in asked[both]
    assert read_template(tmp_path / "data") == CHATML
    again = prepare(TrainConfig(dataset_path=str(tmp_path / "data")), 259, tmp_path / "reused")
    assert again.fingerprint == data.fingerprint
    assert read_template(tmp_path / "reused") == CHATML


def test_an_epoch_has_every_example_once_and_a_resume_the_same_ones(tmp_path: Path):
    data = prepared(tmp_path, PAIRS)
    loader = training_batches(data, 12, 6, seed=1)
    epochs = [torch.cat([loader.batch(first)[0] for first in range(e * 18, e * 18 + 18, 6)]) for e in range(2)]
    assert loader.num_windows == 18
    assert len({tuple(row.tolist()) for row in epochs[0]}) == 18
    assert not epochs[0].equal(epochs[1])
    assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist())
    again = training_batches(open_prepared(tmp_path / "data"), 12, 6, seed=1)
    assert again.batch(12)[0].equal(epochs[0][12:])
    assert (loader.epoch_of(17), loader.epoch_of(18)) == (0, 1)


def test_a_prompt_has_no_influence_through_targets(tmp_path: Path):
    """The gradient is that of the completions alone, as one has it by writing dlogits at their places and nowhere else."""
    data = prepared(tmp_path, PAIRS)
    tokens, targets = training_batches(data, 12, 4, seed=0).batch(0)
    config = ModelConfig(vocab_size=256, hidden_dim=8, num_layers=1, num_heads=2, intermediate_dim=8, max_seq_len=12)
    model = Transformer(config, ops="reference", dtype="float64")
    model.forward(tokens, targets)
    model.backward()
    masked = {name: g.clone() for name, g in model.grads.items()}
    model.zero_grads()
    logits = model.logits(tokens, keep=True)
    asked = targets >= 0
    dlogits = torch.zeros_like(logits)
    dlogits[asked] = (logits.softmax(-1) - torch.nn.functional.one_hot(targets.clamp_min(0), 256))[asked] / asked.sum()
    model.backward(dlogits)
    assert all(torch.allclose(g, model.grads[name], rtol=1e-10, atol=1e-14) for name, g in masked.items())
    assert 0 < asked.sum() < tokens.numel()


def test_what_is_counted_is_what_baselines_see(tmp_path: Path):
    data = prepared(tmp_path, PAIRS)
    assert data.roles is not None
    train, val = (next(token_blocks(x, r, COUNTS)()) for x, r in zip((data.train, data.val), data.roles, strict=True))
    text = bytes(np.concatenate([train, val]).tolist()).decode()
    assert sorted(text.split()) == sorted(p["completion"] for p in PAIRS)
    assert data.bytes_per_token == pytest.approx(sum(len(line) for line in bytes(val.tolist()).split()) / len(val))


def test_long_examples_are_cut_and_those_without_a_completion_in_sight_left_out(tmp_path: Path):
    long = [{"prompt": "p" * 30, "completion": f"x{i}"} for i in range(4)]
    data = prepared(tmp_path, [*PAIRS, *long])
    loader = training_batches(data, 8, 4, seed=0)
    assert loader.num_windows == loader.examples.num_examples - loader.examples.left_out
    assert loader.examples.left_out >= 1
    assert all((row >= 0).any() for row in loader.batch(0)[1])
    with pytest.raises(DataError, match="no example of the training part has a completion that begins within seq_len = 2"):
        training_batches(data, 2, 4, seed=0)


def test_copies_stay_on_one_side_and_order_does_not_matter(tmp_path: Path):
    for name, records in (("one", PAIRS), ("two", [*reversed(PAIRS), PAIRS[3]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    one, two = (split_examples(read_examples(str(tmp_path / f"{name}.jsonl"))) for name in ("one", "two"))
    assert one[1] == two[1]
    assert not [example for example in two[0] if example in two[1]]


def test_roles_are_part_of_the_fingerprint(tmp_path: Path):
    data = prepared(tmp_path, PAIRS)
    roles = tmp_path / "data" / "val.roles.bin"
    other = prepared(tmp_path, [{**p, "prompt": p["prompt"][:-1], "completion": ":" + p["completion"]} for p in PAIRS])
    assert other.fingerprint != data.fingerprint
    roles.write_bytes(roles.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(DataError, match="the data changed since the run began"):
        open_prepared(tmp_path / "data")


@pytest.mark.parametrize("part", ["train", "val"])
def test_missing_roles_are_an_error(tmp_path: Path, part: str):
    prepared(tmp_path, PAIRS)
    (tmp_path / "data" / f"{part}.roles.bin").unlink()
    with pytest.raises(DataError, match="the data changed since the run began"):
        open_prepared(tmp_path / "data")


def test_a_list_of_examples_that_was_cut_off_is_an_error(tmp_path: Path):
    path = tmp_path / "cut.json"
    path.write_text('[{"prompt": "2 + 2 =", "completion": " 4"},\n {"prompt": "3 + 3')
    assert holds_examples(str(path), "text")
    with pytest.raises(DataError, match=r"cut\.json:2: not JSON"):
        read_examples(str(path))


def test_a_text_is_not_taken_for_instructions(tmp_path: Path):
    for name, line in (
        ("a.jsonl", '{"text": "x", "prompt": "y"}'),
        ("b.jsonl", "[1]"),
        ("c.txt", '{"prompt": "x"}'),
        ("d.jsonl", "{"),
        ("e.json", '{"prompt": "x"}'),
        ("f.json", '["prompt"]'),
        ("g.json", '[{"prompt": "x'),
    ):
        (tmp_path / name).write_text(line + "\n")
        assert not holds_examples(str(tmp_path / name), "text")


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([{"prompt": "a"}], "data.jsonl:1: expected an object with `prompt` and `completion`"),
        ([PAIRS[0], {"prompt": 1, "completion": "b"}], "data.jsonl:2: `prompt` must be a string, got int"),
        ([PAIRS[0], {"text": "a"}], "data.jsonl:2: expected an object with `prompt`"),
        ([{"messages": []}], "or with a list of `messages`"),
        ([{"messages": [{"role": "user"}]}], "message 1: expected an object with `role` and `content`, or `from`"),
        ([{"messages": [{"role": "user", "content": "x"}]}], "no message has the role 'assistant'"),
        ([PAIRS[0], {"prompt": "\ud800", "completion": "b"}], "half of a surrogate pair"),
        ([{"messages": [{"role": "a b", "content": "x"}]}], "data.jsonl:1: message 1: `role` 'a b' is not a role"),
        ([{"conversations": [{"from": "gpt", "value": 1}]}], "data.jsonl:1: message 1: `value` must be a string, got int"),
        ([{"instruction": "a", "output": None}], "data.jsonl:1: `output` must be a string, got NoneType"),
        ([PAIRS[0], {"instruction": "a"}], "data.jsonl:2: expected an object .* with `instruction` and `output`"),
        ([PAIRS[0], PAIRS[0]], "two different examples at least"),
    ],
)
def test_mistakes(tmp_path: Path, records: list[Any], says: str):
    with pytest.raises(DataError, match=says):
        prepared(tmp_path, records)


def test_a_text_is_evaluated_as_a_whole(tmp_path: Path):
    data = prepared(tmp_path, PAIRS)
    with pytest.raises(DataError, match="holds instructions"):
        with_text(data, str(tmp_path / "data.jsonl"))
