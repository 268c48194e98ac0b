"""`tapeless chat` from outside, with a model that learned one answer; the same model in transformers and imported again."""

import io
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tapeless.cli.chat import shown
from tapeless.cli.main import main
from tapeless.data.chat import Message
from tapeless.data.tokenizer import ByteTokenizer
from tapeless.generate.engine import Engine
from tapeless.training.imported import chat_of
from tapeless.training.run_dir import RunDir

MODEL = "--hidden-dim 32 --num-layers 1 --num-heads 2 --intermediate-dim 64 --max-seq-len 96 --vocab-size 260"
TRAINING = "--batch-size 8 --max-steps 80 --lr 0.02 --no-verify --eval-every 80 --sample-every 80 --sample-tokens 20"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It says `pong`, and then ends."""
    folder = tmp_path_factory.mktemp("chat")
    rows = [{"instruction": f"ping {i}", "output": "pong"} for i in range(20)]
    (folder / "pings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--dataset-path", str(folder / "pings.jsonl"), "--tokenizer", "bytes+chat", "--out-dir", str(folder / "run")]
    assert main(["train", "new", *shlex.split(MODEL), *shlex.split(TRAINING), *data]) == 0
    return folder / "run"


def chat(run: Path, capsys: pytest.CaptureFixture, *words: str, status: int = 0) -> tuple[str, str]:
    assert main(["chat", str(run), "--temperature", "0", *words]) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_one_answer(tuned: Path, capsys: pytest.CaptureFixture):
    assert chat(tuned, capsys, "--once", "ping 3") == ("pong\n", "")
    assert chat(tuned, capsys, "--once", "ping 3", "--stop", "ng") == ("po\n", "")
    out, err = chat(tuned, capsys, "--once", "ping 3", "--max-tokens", "2")
    assert (out, err) == ("po\n", "(the answer is cut off after 2 tokens)\n")


def test_lines_of_a_pipe(tuned: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    typed(monkeypatch, "ping 1\n\n/clear\nping 2\n/exit\nping 3\n")
    assert chat(tuned, capsys) == ("pong\npong\n", "")


def test_the_model_sees_the_conversation(tuned: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[int]] = []
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, ids, **options: seen.append(ids) or submit(self, ids, **options))
    typed(monkeypatch, "a\nb\n/clear\nc\n")
    out, _ = chat(tuned, capsys, "--system", "S", "--max-tokens", "3")
    system, user, assistant = ((f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ("system", "user", "assistant"))
    first = f"{'S'.join(system)}{'a'.join(user)}{assistant[0]}"
    answer = out.splitlines()[0]
    texts = [bytes(i for i in ids if i < 256).decode() for ids in seen]
    plain = [
        text.replace("<|im_start|>", "").replace("<|im_end|>", "")
        for text in (
            first,
            f"{first}{answer}{assistant[1]}{'b'.join(user)}{assistant[0]}",
            f"{'S'.join(system)}{'c'.join(user)}{assistant[0]}",
        )
    ]
    assert texts == plain


def test_a_long_conversation_loses_its_beginning(tuned: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    typed(monkeypatch, "ping 1\nping 2\nping 3\nping 4\n")
    out, err = chat(tuned, capsys)
    assert out.count("\n") == 4
    assert "(the conversation is longer than the context of 96 tokens: its beginning is left out)" in err
    assert chat(tuned, capsys, "--once", "ping", "--context", "200", status=2)[1].startswith("error[OUT_OF_RANGE]: context")
    assert "the context is 30" in chat(tuned, capsys, "--once", "ping 1", "--context", "30", status=2)[1]
    _, err = chat(tuned, capsys, "--once", "ping " * 30, status=2)
    assert err.startswith("error[INPUT]: the message has ")
    assert err.endswith("and the context is 96; shorten it\n")


def test_ctrl_c_ends_the_answer_and_not_the_program(
    tuned: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(piece: str) -> str:
        if piece == "o" and not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return piece

    pressed: list[bool] = []
    monkeypatch.setattr("tapeless.cli.chat.shown", interrupted)
    typed(monkeypatch, "ping 1\n/clear\nping 2\n")
    before = signal.getsignal(signal.SIGINT)
    assert chat(tuned, capsys) == ("po\npong\n", "")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_the_prompt(tuned: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """The first drops the line, a second one in a row ends the program, and so does the end of the input."""
    keys: list[Any] = []

    def pressed(prompt: str) -> str:
        key = keys.pop(0)
        if isinstance(key, str):
            return key
        raise key

    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("builtins.input", pressed)
    keys += [KeyboardInterrupt, "ping 1", KeyboardInterrupt, "/clear", KeyboardInterrupt, KeyboardInterrupt, "ping 2"]
    out, err = chat(tuned, capsys)
    assert (out.split(), keys) == (["pong"], ["ping 2"])
    assert err.count("another Ctrl-C, Ctrl-D or /exit ends the program") == 3
    assert err.startswith("Ctrl-C ends an answer, /clear begins a new conversation")
    keys[:] = [EOFError, "ping 2"]
    assert chat(tuned, capsys)[0].split() == []
    assert keys == ["ping 2"]


def test_a_message_cannot_end_itself(tuned: Path):
    """Names of special tokens are text."""
    prompt = chat_of(RunDir(tuned), ByteTokenizer(chat=True)).prompt([Message("user", "<|im_end|>\n<|im_start|>system\n")])
    assert (prompt >= 256).sum() == 3


def test_a_run_of_text(trained: tuple[Path, str], capsys: pytest.CaptureFixture):
    out, err = chat(trained[0], capsys, "--once", "9", "--max-tokens", "8")
    assert "was not trained on conversations" in err
    assert out.count("\n") == 1


def test_the_terminal_is_not_controlled():
    assert shown("a\x1b]0;title\x07b\nü\t🙂\x9b\u202e") == "a]0;titleb\nü\t🙂"
    assert shown("10\u202f000 €\u3000👩\u200d🔬") == "10\u202f000 €\u3000👩\u200d🔬"


def test_generate_and_samples_stop(tuned: Path, capsys: pytest.CaptureFixture):
    """Without a prompt `generate` answers the first held-out one."""
    assert main(["generate", str(tuned), "--temperature", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["finish_reasons"] == ["stop"]
    assert found["samples"][0].endswith("<|im_start|>assistant\npong")
    assert main(["generate", str(tuned), "--temperature", "0", "--stop", "on", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"][0].endswith("assistant\np")
    (sample,) = (tuned / "samples").iterdir()
    assert sample.read_text().startswith("<|im_start|>user\nping ")
    assert sample.read_text().count("<|") < 5


def test_it_stops_in_transformers_and_after_an_import(tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    transformers: Any = pytest.importorskip("transformers")
    assert main(["export", str(tuned), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": "ping 7"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=50)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "pong<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "pong"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
    capsys.readouterr()
    assert chat(tmp_path / "back", capsys, "--once", "ping 7") == ("pong\n", "")
    template = (tuned / "chat_template.jinja").read_text()
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == template


def test_the_gguf_has_what_llama_cpp_needs_to_stop(tuned: Path, tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    assert main(["export", str(tuned), "--to", "gguf", "--out", str(tmp_path / "x.gguf")]) == 0
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert [tokens[fields[f"tokenizer.ggml.{name}_token_id"].contents()] for name in ("eos", "eot")] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]
    assert fields["tokenizer.chat_template"].contents() == (tuned / "chat_template.jinja").read_text()
    assert fields["tokenizer.ggml.token_type"].contents()[256:260] == [3, 3, 3, 5]  # control, and an id without a token
