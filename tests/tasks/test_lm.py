"""lm-eval with the model of a run gives the results of its own model for transformers with the exported run."""

import contextlib
import io
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the package lm_eval is not installed; see acceptance/lm_eval_task.py")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.utils import get_rolling_token_windows

from tapeless.cli.main import main
from tapeless.errors import CheckpointError, ConfigError, InputError
from tapeless.generate.engine import generate
from tapeless.tasks.lm import TapelessLM
from tapeless.tasks.scoring import windows

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that are not ours
SENTENCE = "every forward has its backward and one judge reads both of them line by line"
WORDS = SENTENCE.split()
SMALL = "--hidden-dim 32 --num-layers 2 --num-heads 4 --num-kv-heads 2 --intermediate-dim 48 --max-seq-len 24 --no-verify"
TRAINED = f"{SMALL} --max-steps 60 --batch-size 4 --lr 0.01 --ema-decay 0.9 --tokenizer bpe --vocab-size 290 --save-every 30"


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def command(*arguments: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm")
    (folder / "text.txt").write_text("".join(f"{' '.join(WORDS[seed % 7 :])}.\n" for seed in range(200)))
    flags = [*shlex.split(TRAINED), "--keep-last", "5"]
    command("train", "new", "--dataset-path", folder / "text.txt", "--out-dir", folder / "run", *flags)
    return folder / "run"


@pytest.fixture(scope="module")
def theirs(run: Path) -> Any:
    """The exported run under lm-eval's own model. It requires an eos token, so it gets one that the
    text does not contain."""
    pytest.importorskip("accelerate", reason="lm-eval's model of transformers needs the package accelerate")
    command("export", run, "--to", "hf", "--out", run.parent / "hf")
    described = run.parent / "hf" / "tokenizer_config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "eos_token": "~"}))
    prefix = TapelessLM(run).prefix_token_id
    return get_model("hf")(pretrained=str(run.parent / "hf"), device="cpu", prefix_token_id=prefix, batch_size=3)


def asked(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


PAIRS = [
    ("every forward", " has its backward"),
    ("", "every line"),
    ("one judge ", "reads"),  # the space is the continuation's
    (words(40, 1), " line by line"),  # longer than the model sees
    ("x", "~ unlikely ~"),
]
TEXTS = ["line", words(3, 2), words(30, 3), words(100, 4)]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_continuations_score_as_under_transformers(run: Path, theirs: Any, batch_size: int):
    requests = asked("loglikelihood", *PAIRS)
    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    found = TapelessLM(run, batch_size=batch_size).loglikelihood(requests, disable_tqdm=True)
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_whole_texts_score_as_under_transformers(run: Path, theirs: Any, batch_size: int):
    requests = asked("loglikelihood_rolling", *((text,) for text in TEXTS))
    expected = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    found = TapelessLM(run, batch_size=batch_size).loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_a_context_of_spaces_is_empty(run: Path):
    lm = TapelessLM(run)
    spaces, none = lm.loglikelihood(asked("loglikelihood", ("  ", "every line"), ("", "  every line")), disable_tqdm=True)
    assert spaces == none


def test_an_answer_that_merges_into_its_question_is_refused(run: Path):
    """It would score as certain: lm-eval takes the tokens after as many as the question has alone."""
    lm = TapelessLM(run)
    assert len(lm.tok_encode("one judg" + "e")) <= len(lm.tok_encode("one judg"))
    with pytest.raises(InputError, match="'e' has no token of its own after 'one judg'"):
        lm.loglikelihood(asked("loglikelihood", ("one judg", "e")), disable_tqdm=True)
    assert lm.loglikelihood(asked("loglikelihood", ("one judge", "")), disable_tqdm=True) == [(0.0, True)]


GREEDY = {"until": [".", "\n"], "max_gen_toks": 12}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_texts_are_those_of_transformers(run: Path, theirs: Any, batch_size: int):
    prompts = ["every forward", "one judge reads", "one judge has", "line", words(40, 5)]
    requests = asked("generate_until", *((prompt, dict(GREEDY)) for prompt in prompts))
    found = TapelessLM(run, batch_size=batch_size).generate_until(requests, disable_tqdm=True)
    assert found == theirs.generate_until(requests, disable_tqdm=True)
    assert len(set(found)) > 1


@pytest.mark.parametrize("length", [1, 2, 5])
def test_windows_are_those_of_the_harness(length: int):
    for count in range(1, 14):
        text = list(range(1, count + 1))
        expected = list(get_rolling_token_windows(text, prefix_token=0, max_seq_len=length, context_len=1))
        assert [tuple(window) for window in windows([0], text, length)] == expected


def test_a_sampled_text_depends_on_its_index_only(run: Path):
    drawn = {"do_sample": True, "temperature": 0.9, "top_k": 40, "max_gen_toks": 10, "until": []}
    requests = asked("generate_until", *(("every forward", drawn) for _ in range(4)))
    one, many = (TapelessLM(run, batch_size=size).generate_until(requests, disable_tqdm=True) for size in (1, 4))
    assert one == many
    assert len(set(one)) > 1
    lm = TapelessLM(run)
    (ids,) = generate(
        lm.model,
        lm.tok_encode("every forward"),
        max_tokens=10,
        first_sample=2,
        vocab_size=lm.data.tokenizer.vocab_size,
        sampling=lm._parse("every forward", drawn).sampling,
    )
    assert one[2] == lm.data.tokenizer.decode(ids)


def test_more_new_tokens_than_the_window_slide_it(run: Path):
    requests = asked("generate_until", (words(30, 6), {"max_gen_toks": 60, "until": []}))
    (text,) = TapelessLM(run).generate_until(requests, disable_tqdm=True)
    assert len(TapelessLM(run).data.tokenizer.encode(text)) > 24


def test_checkpoint_and_weights(run: Path):
    request = asked("loglikelihood", PAIRS[0])
    chosen = [{}, {"checkpoint": 30}, {"weights": "ema"}, {"max_length": 3}]
    assert len({TapelessLM(run, **each).loglikelihood(request, disable_tqdm=True)[0] for each in chosen}) == 4


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"checkpoint": 3}, CheckpointError, "has no checkpoint '3'"),
        ({"weights": "mean"}, ConfigError, "weights is 'mean'"),
        ({"batch_size": "auto"}, ConfigError, "batch_size 'auto': expected a positive integer"),
        ({"batch_size": 0}, ConfigError, "batch_size 0: expected a positive integer"),
        ({"max_length": 25}, ConfigError, "max_length must be 1 to 24, got 25"),
        ({"prefix_token_id": 290}, ConfigError, "prefix_token_id must be 0 to 289, got 290"),
        ({"device": "nowhere"}, ConfigError, "device 'nowhere' cannot be used here"),
    ],
)
def test_invalid_arguments_are_refused(run: Path, arguments: dict[str, Any], error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        TapelessLM(run, **arguments)


def test_an_unknown_setting_of_generation_is_refused(run: Path):
    with pytest.raises(ConfigError, match="unknown key num_beams"):
        TapelessLM(run).generate_until(asked("generate_until", ("a", {"num_beams": 4})))


def test_characters_without_a_line_end_need_a_prefix(run: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("abcabdab" * 100)
    flags = [*shlex.split(SMALL), "--tokenizer", "char", "--vocab-size", "4", "--max-steps", "1"]
    command("train", "new", "--dataset-path", tmp_path / "text.txt", "--out-dir", tmp_path / "run", *flags)
    with pytest.raises(InputError, match="pass prefix_token_id=N"):
        TapelessLM(tmp_path / "run")
    (found,) = TapelessLM(tmp_path / "run", prefix_token_id=0).loglikelihood_rolling(asked("x", ("abc",)), disable_tqdm=True)
    assert -15 < found < 0


def files_of_the_page(folder: Path) -> str:
    """The task that docs/lm_eval.md describes, written out, and the command that it says to type."""
    page = (Path(__file__).parents[2] / "docs" / "lm_eval.md").read_text()
    blocks = [block.split("```")[0].partition("\n")[::2] for block in page.split("\n```")[1::2]]
    (yaml,), (jsonl,) = ([text for language, text in blocks if language == kind] for kind in ("yaml", "json"))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "sums.yaml").write_text(yaml)
    (folder / "tasks" / "sums.jsonl").write_text(jsonl)
    return next(
        line for language, text in blocks if language == "sh" for line in text.splitlines() if line.startswith("tapeless")
    )


@pytest.mark.slow  # lm-eval reads all of its own tasks first
def test_the_page_can_be_followed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    typed = shlex.split(files_of_the_page(tmp_path))[1:]
    typed[typed.index("lm-eval") + 1] = str(run)
    assert main(typed) == 0
    assert "|acc" in capsys.readouterr().out.replace(" ", "")
    assert main(["lm-eval", str(run), "--checkpoint", "3", *typed[2:]]) == 2
    assert "error[CHECKPOINT]" in capsys.readouterr().err
    assert main(["lm-eval", str(run), "--model", "hf"]) == 2
    assert "the model is the run's" in capsys.readouterr().err
