"""docs/tutorial_chat.md, followed as it is written: within its time, a model that answers held-out instructions and stops, also
in transformers and, where LLAMA_CPP_PYTHON names a Python that has llama-cpp-python, in llama.cpp.

python acceptance/chat_tutorial.py [SEED]"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from claim import Claims
from training import command, environment, load_average, scratch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tutorial_chat.md"
SECONDS, RIGHT, MAX_TOKENS = 900, 18, 40
CPP = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
# stdin: {"model", "questions"}; stdout: for each question the answer and whether it stopped by itself
IN_LLAMA_CPP = """
import json, sys, llama_cpp
task = json.load(sys.stdin)
llama = llama_cpp.Llama(task["model"], n_ctx=128, verbose=False)
for question in task["questions"]:
    messages = [{"role": "user", "content": question}]
    said = llama.create_chat_completion(messages, temperature=0.0, max_tokens=task["max_tokens"])["choices"][0]
    print(json.dumps([said["message"]["content"], said["finish_reason"] == "stop"]))
"""

Answers = list[tuple[str, bool]]  # of each question: the answer, and whether it stopped by itself


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def follow(folder: Path, seed: int) -> None:
    (folder / "examples").symlink_to(PAGE.parents[1] / "examples")
    (folder / "mine.toml").write_text(blocks("toml")[0])
    for line in "".join(blocks("sh")).splitlines():
        words = shlex.split(line)
        trains = words[:3] == ["tapeless", "train", "new"]
        run = command(*words[1:], *(["--seed", seed] if trains else [])) if words[0] == "tapeless" else line
        done = subprocess.run(run, shell=words[0] != "tapeless", cwd=folder, env=environment(None), check=False)
        if done.returncode:
            sys.exit(f"{line}\nexit status {done.returncode}")


def in_chat(folder: Path, questions: list[str]) -> Answers:
    words = command("chat", "runs/qa", "--temperature", 0, "--max-tokens", MAX_TOKENS, "--once")
    answers = []
    for question in questions:
        done = subprocess.run([*words, question], cwd=folder, capture_output=True, text=True, check=True)
        answers.append((done.stdout.removesuffix("\n"), "cut off" not in done.stderr))
    return answers


def in_transformers(folder: Path, questions: list[str]) -> Answers:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = (kind.from_pretrained(folder / "my-model") for kind in (AutoTokenizer, AutoModelForCausalLM))
    answers = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=MAX_TOKENS)[0, prompt["input_ids"].shape[1] :]
        ended = tokenizer.decode(ids[-1:]) in ("<|im_end|>", "<|endoftext|>")
        answers.append((tokenizer.decode(ids, skip_special_tokens=True), ended))
    return answers


def in_llama_cpp(folder: Path, questions: list[str]) -> Answers | None:
    if subprocess.run([CPP, "-c", "import llama_cpp"], capture_output=True, check=False).returncode:
        return None
    task = {"model": str(folder / "my-model.gguf"), "questions": questions, "max_tokens": MAX_TOKENS}
    done = subprocess.run([CPP, "-c", IN_LLAMA_CPP], input=json.dumps(task), capture_output=True, text=True, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def main(seed: int) -> None:
    claims = Claims("chat_tutorial")
    with scratch() as folder:
        start = time.monotonic()
        follow(folder, seed)
        seconds, load = time.monotonic() - start, load_average()
        claims.check(
            "docs/tutorial_chat.md, every command",
            bound=f"{SECONDS} s",
            measured=f"{seconds:.0f} s at load {load}",
            ok=seconds <= SECONDS,
        )
        tests = [json.loads(line)["messages"] for line in (folder / "test.jsonl").read_text().splitlines()]
        questions, right = ([message[i]["content"] for message in tests] for i in (0, 1))
        table = {}
        for name, ask in {"tapeless chat": in_chat, "transformers": in_transformers, "llama.cpp": in_llama_cpp}.items():
            answers = ask(folder, questions)
            if answers is None:
                print(f"left out: no package for {name} here", flush=True)
                continue
            correct = [said == expected for (said, _), expected in zip(answers, right, strict=True)]
            table[name] = answers
            claims.check(
                f"{name}: right answers to {len(right)} held-out instructions",
                bound=f"at least {RIGHT}",
                measured=sum(correct),
                ok=sum(correct) >= RIGHT,
            )
            stopped = sum(ended for _, ended in answers)
            claims.check(
                f"{name}: answers that stop by themselves", bound=len(right), measured=stopped, ok=stopped == len(right)
            )
    claims.finish(seconds=round(seconds, 1), load_average=load, seed=seed, answers=table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
