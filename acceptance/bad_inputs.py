"""Every bad input is one line with a code and a hint, exit status 2, no traceback, and nothing is left behind or written over.

tests/cli/test_bad_inputs.py runs the same cases."""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from claim import Claims
from training import scratch

from tapeless.cli.main import main
from tapeless.data.files import file_sha256, readable_json
from tapeless.training.checkpoint import FORMAT_VERSION
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import Recorder

MODEL = ["--hidden-dim", "16", "--num-layers", "1", "--num-heads", "2", "--intermediate-dim", "24", "--max-seq-len", "16"]
MODEL += ["--batch-size", "2", "--max-steps", "2", "--no-verify", "--eval-windows", "2", "--sample-tokens", "4"]
TEXT = "what goes forward comes back, and what comes back is proven\n"


class Case(NamedTuple):
    what: str
    code: str
    words: list[str]
    says: str
    during: Callable[[], AbstractContextManager[object]] = nullcontext


def run_made(folder: Path) -> Path:
    """A small finished run."""
    run = folder / "run"
    (folder / "good.txt").write_text(TEXT * 40)
    with contextlib.redirect_stdout(io.StringIO()):
        if main(["train", "new", *MODEL, "--dataset-path", str(folder / "good.txt"), "--out-dir", str(run)]):
            raise SystemExit("the run that the cases begin with failed")
    return run


def copied(run: Path, name: str) -> Path:
    return shutil.copytree(run, run.with_name(name))


def unreadable(folder: Path) -> Path:
    """A file that may not be read; nothing stops root but a file that cannot be."""
    path = folder / "secret.txt"
    path.write_text(TEXT)
    path.chmod(0)
    return Path("/proc/self/mem") if os.access(path, os.R_OK) else path


def of_the_future(run: Path) -> Path:
    """A checkpoint whose format is one higher, and whose manifest agrees."""
    step = run / "checkpoints" / "step-00000002"
    state = json.loads((step / "state.json").read_text())
    (step / "state.json").write_text(json.dumps(state | {"format_version": FORMAT_VERSION + 1}))
    files = [{"name": p.name, "size": p.stat().st_size, "sha256": file_sha256(p)} for p in step.glob("*") if p.name[0] != "M"]
    (step / "MANIFEST.json").write_bytes(readable_json({"files": files}))
    return run


def with_last_token(run: Path, token: int) -> Path:
    tokens = (run / "train.bin").read_bytes()
    (run / "train.bin").write_bytes(tokens[:-2] + token.to_bytes(2, "little"))
    return run


@contextmanager
def locked(run: Path) -> Iterator[None]:
    with Recorder(RunDir(run)):
        yield


def data_cases(folder: Path) -> list[Case]:
    def given(name: str, content: bytes | str) -> list[str]:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return new(path)

    def new(path: Path) -> list[str]:
        return ["train", "new", *MODEL, "--dataset-path", str(path), "--out-dir", str(folder / "out")]

    record = json.dumps({"text": TEXT * 40})
    return [
        Case("missing path", "NO_SUCH_PATH", new(folder / "nowhere.txt"), "nowhere.txt: no such file or folder (looked in "),
        Case("empty file", "EMPTY_DATA", given("empty.txt", ""), "empty.txt is empty"),
        Case("whitespace only", "ONLY_WHITESPACE", given("blank.txt", " \n\t \n"), "blank.txt holds only whitespace"),
        Case("fewer tokens than one window", "TOO_FEW_TOKENS", given("few.txt", "abc"), "the training part has 2 tokens"),
        Case("validation too short", "TOO_FEW_TOKENS", given("short.txt", TEXT), "the validation part has 6 tokens"),
        Case("non-UTF-8 byte", "NOT_UTF8", given("latin.txt", b"caf\xe9 au lait"), "byte 0xe9 at offset 3 is not UTF-8"),
        Case("UTF-16", "OTHER_ENCODING", given("wide.txt", TEXT.encode("utf-16")), "wide.txt: is UTF-16, expected UTF-8"),
        Case(
            "binary file",
            "BINARY_FILE",
            given("image.txt", b"\x89PNG\r\n\x1a\n\0\0"),
            "so this is a binary file",
        ),
        Case("unreadable file", "UNREADABLE", new(unreadable(folder)), "cannot be read: "),
        Case("JSONL, bad line", "NOT_JSON", given("a.jsonl", f"{record}\n{{'text': 1}}"), "a.jsonl:2: not JSON: "),
        Case("JSONL, missing field", "NO_TEXT_FIELD", given("b.jsonl", '{"body": "x"}'), "b.jsonl:1: no field `text`, got "),
        Case("JSONL, wrong type", "BAD_RECORD", given("c.jsonl", '{"text": 3}'), "c.jsonl:1: expected an object with a string"),
        Case("pickle as text", "PICKLE", given("weights.pt", b"\x80\x04\x95\x00\x00"), "weights.pt: is a pickle"),
        Case("folder without text", "NO_FILES", new(folder_of(folder, "photos")), "photos: no text files in this folder"),
    ]


def folder_of(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "a.png").write_bytes(b"\x89PNG")
    return folder / name


def config_cases(folder: Path) -> list[Case]:
    def new(*words: str) -> list[str]:
        return ["train", "new", *MODEL, "--dataset-path", str(folder / "good.txt"), "--out-dir", str(folder / "out"), *words]

    (folder / "mine.toml").write_text("[model]\nhiden_dim = 32\n")
    (folder / "typed.toml").write_text('[model]\n[train]\nlr = "fast"\n')
    room = ["--save-every", "1", "--keep-last", str(10**12), "--max-steps", str(10**12)]
    return [
        Case("unknown flag", "UNKNOWN_FLAG", new("--learning-rat", "1"), "unknown flag --learning-rat; "),
        Case(
            "unknown key",
            "UNKNOWN_KEY",
            new("--config", str(folder / "mine.toml")),
            "model.hiden_dim; did you mean ",
        ),
        Case("wrong type in a file", "WRONG_TYPE", new("--config", str(folder / "typed.toml")), "lr must be float, got 'fast'"),
        Case("wrong type of a flag", "WRONG_TYPE", new("--batch-size", "many"), "--batch-size must be int, got 'many'"),
        Case("lr NaN", "OUT_OF_RANGE", new("--lr", "nan"), "lr must be a number above 0, got nan"),
        Case("lr negative", "OUT_OF_RANGE", new("--lr", "-0.1"), "lr must be a number above 0, got -0.1"),
        Case("lr 0", "OUT_OF_RANGE", new("--lr", "0"), "lr must be a number above 0, got 0.0"),
        Case("indivisible width", "INDIVISIBLE", new("--num-heads", "3"), "hidden_dim 16 is not divisible by num_heads 3"),
        Case("indivisible heads", "INDIVISIBLE", new("--num-heads", "4", "--num-kv-heads", "3"), "num_heads 4 is not "),
        Case("warm-up beyond the steps", "WARMUP_TOO_LONG", new("--warmup-steps", "3"), "warmup_steps 3 is beyond max_steps 2"),
        Case("memory beyond what is free", "TOO_LARGE", new("--batch-size", str(10**10)), "the training step needs "),
        Case("disk full at start", "DISK_FULL", new(*room), "not enough space on the disk: "),
        Case("pickle as tokenizer", "PICKLE", new("--tokenizer", str(folder / "weights.pt")), "give a tokenizer.json"),
    ]


def run_cases(folder: Path, run: Path) -> list[Case]:
    def resume(path: Path, *words: str) -> list[str]:
        return ["train", "resume", str(path), *words]

    def changed(*names: str) -> list[str]:
        return [f"--override={name}" for name in names]

    (folder / "other.txt").write_text(TEXT * 41)
    other = copied(run, "other-tokenizer")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"!": 33', '"!": 34', 1))
    held, new = copied(run, "held"), ["train", "new", *MODEL, "--out-dir"]
    return [
        Case("run directory not empty", "RUN_NOT_EMPTY", [*new, str(run)], "run is not empty, it holds "),
        Case("run locked", "RUN_LOCKED", resume(held), f"held is in use by process {os.getpid()}", lambda: locked(held)),
        Case("resume with nothing there", "NOT_A_RUN", resume(folder / "nothing"), "nothing is not the directory of a run"),
        Case("pickle as a run", "PICKLE", resume(folder / "weights.pt"), "weights.pt: is a pickle"),
        Case(
            "changed architecture",
            "CHANGED",
            resume(run, *changed("intermediate_dim=32", "num_layers=2")),
            "model.num_layers: 1 in the run, 2 now (fixed for the run); model.intermediate_dim: 24 in the run, 32 now (fixed",
        ),
        Case("changed schedule", "UNKNOWN_KEY", resume(run, *changed("lrr=1")), "train.lrr; did you mean 'lr'?"),
        Case(
            "changed tokenizer",
            "CHANGED",
            resume(run, *changed("tokenizer=char")),
            "train.tokenizer: 'bytes' in the run",
        ),
        Case("another tokenizer.json", "CHANGED", resume(other), "data.tokenizer_hash: '"),
        Case("another text", "CHANGED", resume(run, *changed(f"dataset_path={folder}/other.txt")), "data.source_sha256: '"),
        Case("changed data", "CHANGED", resume(with_last_token(copied(run, "altered"), 7)), "data.dataset_fingerprint: '"),
        Case(
            "token id beyond the vocabulary",
            "BEYOND_VOCABULARY",
            ["eval", str(with_last_token(copied(run, "beyond"), 700))],
            "is 700, outside of the vocabulary of 256",
        ),
        Case("newer format", "NEWER_FORMAT", resume(of_the_future(copied(run, "newer"))), f"version {FORMAT_VERSION + 1}, "),
    ]


def cases(folder: Path) -> list[Case]:
    run = run_made(folder)
    return [*data_cases(folder), *config_cases(folder), *run_cases(folder, run)]


def problem(case: Case, folder: Path) -> str | None:
    """What is wrong with the answer to a bad input; None where nothing is."""
    out, err = io.StringIO(), io.StringIO()
    with case.during(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(case.words)
    said = err.getvalue()
    checks = {
        f"exit status {status}": status == 2,
        "not one line": said.count("\n") == 1,
        "another code": said.startswith(f"error[{case.code}]: "),
        "other words": case.says in said,
        "no hint": "; " in said,
        "something on stdout": not out.getvalue(),
        "something left behind": not (folder / "out").exists(),
    }
    wrong = [name for name, ok in checks.items() if not ok]
    return f"{', '.join(wrong)}: {said}" if wrong else None


if __name__ == "__main__":
    claims = Claims("bad_inputs")
    with scratch() as folder:
        for case in cases(folder):
            found = problem(case, folder)
            bound = f"one line, exit 2, error[{case.code}], a hint"
            claims.check(case.what, bound=bound, measured=found or "as it should be", ok=found is None)
    claims.finish()
