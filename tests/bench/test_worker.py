"""A worker builds any contender, times it, and says how much memory it took; all agree on the first loss."""

import io
import json

import pytest
from bench_fixtures import task

from tapeless.bench.task import Task
from tapeless.bench.worker import serve
from tapeless.config import ModelConfig, SimpleLMConfig
from tapeless.errors import ConfigError

GPT2 = ModelConfig(
    vocab_size=23,
    hidden_dim=16,
    num_layers=1,
    num_heads=2,
    intermediate_dim=24,
    max_seq_len=8,
    norm="layer",
    norm_bias=True,
    position="learned",
    ffn="gelu",
    attn_bias=True,
    ffn_bias=True,
    tie_embeddings=True,
)


def told(work: Task, *requests: dict) -> list[dict]:
    lines = [json.dumps(request) for request in ({"do": "build", "task": work.as_json()}, *requests)]
    answers = io.StringIO()
    serve(lines, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("contender", ["ours", "eager", "hf", "floor"])
def test_all_requests_are_answered(contender: str, dtype: str):
    if contender == "hf":
        pytest.importorskip("transformers")
    requests = [{"do": "first"}, {"do": "reset"}, {"do": "steps", "count": 2}, {"do": "finish"}]
    built, first, reset, steps, end = told(task(contender, dtype), *requests)
    assert built["before"] > 0
    assert reset == {}
    assert len(steps["seconds"]) == 2
    assert min(steps["seconds"]) > 0
    assert end["peak"] > 0
    assert end["reserved"] is None  # which is a GPU's
    if contender == "floor":
        assert first["result"] is None
        assert end["facts"]["flops"] > 0
    else:
        assert first["result"] == pytest.approx(3.14, rel=2e-2)  # ln 23
        assert end["parts"]["moments"] == 2 * end["parts"]["gradients"]


@pytest.mark.parametrize("model", [task().model, GPT2], ids=["llama", "gpt2"])
def test_ours_eager_and_transformers_begin_with_the_same_loss(model: ModelConfig):
    pytest.importorskip("transformers")
    losses = [told(task(each, model=model), {"do": "first"})[1]["result"] for each in ("ours", "eager", "hf")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_a_model_without_attention():
    simple = task(model=SimpleLMConfig(vocab_size=23, hidden_dim=16, intermediate_dim=20))
    losses = [told(simple.by(each, "float32"), {"do": "first"})[1]["result"] for each in ("ours", "eager")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "error" in told(simple.by("hf", "float32"))[0]


def test_both_generate_the_same_tokens():
    pytest.importorskip("transformers")
    from dataclasses import replace

    longer = replace(task(), model=replace(task().model, max_seq_len=40), new_tokens=20)
    ours, theirs = (told(longer.by(each, "float32"), {"do": "first"})[1]["result"] for each in ("ours", "hf"))
    assert len(ours) == 20
    assert ours == theirs
    assert "does not generate" in told(longer.by("eager", "float32"))[0]["error"]


def test_a_failure_is_an_answer():
    wrong = task(model=ModelConfig(vocab_size=23, max_seq_len=8, norm_placement="post"))
    assert "transformers has no class" in told(wrong.by("hf", "float32"))[0]["error"]
    assert told(task(), {"do": "dance"})[1] == {"error": "ValueError: no such request: dance"}


def test_a_task_travels_as_json():
    for work in (task("eager", "bfloat16"), task(model=SimpleLMConfig()), task(new_tokens=7)):
        assert Task.from_json(json.loads(json.dumps(work.as_json()))) == work


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"contender": "egaer"}, "did you mean 'eager'"),
        ({"dtype": "float64"}, "not measured"),
        ({"model": ModelConfig(dropout=0.1)}, "--dropout 0"),
        ({"model": ModelConfig(max_seq_len=4)}, "at most max_seq_len = 4"),
    ],
)
def test_a_wrong_task_is_refused(choices: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        task(**choices)
