"""`tapeless generate` from outside: the same text streamed or whole, alone or beside others; and its mistakes."""

import json
from pathlib import Path

import pytest

from tapeless.cli.main import main


@pytest.fixture
def generated(trained: tuple[Path, str], capsys: pytest.CaptureFixture):
    def run(*words: str) -> str:
        assert main(["generate", str(trained[0]), *words]) == 0
        return capsys.readouterr().out

    return run


def test_streamed_or_whole_is_the_same_text(generated):
    words = ["--prompt", "9 bottles", "--max-tokens", "60", "--seed", "3"]
    (whole,) = json.loads(generated(*words, "--json"))["samples"]
    assert generated(*words) == whole + "\n"
    assert whole.startswith("9 bottles")
    assert len(whole) >= len("9 bottles") + 15  # characters may take several bytes


def test_half_characters_stream_as_they_decode(generated):
    """A flat distribution over bytes draws broken UTF-8; replacement characters must not depend on streaming."""
    for count in (*range(1, 9), 40):  # some of them end within a character
        words = ["--prompt", "é", "--max-tokens", str(count), "--temperature", "50"]
        (whole,) = json.loads(generated(*words, "--json"))["samples"]
        assert generated(*words) == whole + "\n"
    assert "\ufffd" in whole


def test_several_samples_and_each_as_if_alone(generated):
    words = ["--prompt", "9", "--max-tokens", "24"]
    samples = json.loads(generated(*words, "--num-samples", "3", "--json"))["samples"]
    assert len(set(samples)) == 3
    assert json.loads(generated(*words, "--json"))["samples"] == samples[:1]
    text = generated(*words, "--num-samples", "3")
    assert all(f"--- sample {i + 1}\n{sample}" in text for i, sample in enumerate(samples))


def test_equal_seeds_equal_text_and_greedy_needs_none(generated):
    words = ["--prompt", "9", "--max-tokens", "24"]
    assert generated(*words, "--seed", "1") == generated(*words, "--seed", "1")
    assert generated(*words, "--seed", "1") != generated(*words, "--seed", "2")
    assert generated(*words, "--temperature", "0", "--seed", "1") == generated(*words, "--top-k", "1", "--seed", "2")


def test_without_a_prompt_it_begins_as_the_validation_text_does(generated, trained: tuple[Path, str]):
    from tapeless.data.prepare import open_prepared

    data = open_prepared(trained[0])
    assert generated("--max-tokens", "0") == data.tokenizer.decode(data.val[:1]) + "\n"


def test_past_the_window_it_slides_and_says_so_once(trained: tuple[Path, str], capsys: pytest.CaptureFixture):
    assert main(["generate", str(trained[0]), "--prompt", "9", "--max-tokens", "80"]) == 0
    assert capsys.readouterr().err.count("the window slides") == 1


def test_checkpoints_by_name_and_by_step(generated):
    words = ["--prompt", "9", "--max-tokens", "24", "--temperature", "0", "--checkpoint"]
    assert generated(*words, "latest") == generated(*words, "40")
    assert generated(*words, "best") in (generated(*words, "20"), generated(*words, "40"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--checkpoint", "30"], "has no checkpoint '30'; there are latest, best, 20, 40"),
        (["--temperature", "-1"], "temperature must be 0 or more, got -1.0"),
        (["--top-p", "0"], "top_p must be above 0, at most 1, got 0.0"),
        (["--num-samples", "0"], "num_samples must be at least 1, got 0"),
        (["--max-tokens=-1"], "max_tokens must be 0 or more, got -1"),
        (["--temprature", "1"], "unknown flag --temprature; did you mean '--temperature'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(words: list[str], says: str, trained: tuple[Path, str], capsys: pytest.CaptureFixture):
    assert main(["generate", str(trained[0]), *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.startswith("error[")
    assert err.count("\n") == 1


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["generate", str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
