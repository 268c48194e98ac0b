"""lm-eval runs models trained here, on tasks that are JSONL files: what it reports is what it reports of the exported models
under its own `hf`, and what sums of log p in float64 give.

python acceptance/lm_eval_task.py [STEPS]        of training; 300 by default
Needs a Python with lm_eval, transformers and accelerate: this one, or the one that TAPELESS_LM_EVAL_PYTHON names. It needs no
network."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from claim import HOME, Claims, skip
from training import library_text, scratch, tapeless, train

from tapeless.data.tokenizer import load_tokenizer
from tapeless.model.transformer import Transformer
from tapeless.training.run_dir import RunDir
from tapeless.training.runs import load

PYTHON = os.environ.get("TAPELESS_LM_EVAL_PYTHON", sys.executable)
QUESTIONS, CONTEXT, NEW_TOKENS = 40, 96, 24
ANSWER = 1e-4  # largest difference of a log p
TEXT = 1e-6  # of a whole text, by its size: hf adds hundreds of nats up in float32, whose step is then 6e-5
SMALL = ["--num-layers", 2, "--hidden-dim", 64, "--num-heads", 4, "--max-seq-len", CONTEXT, "--batch-size", 8, "--no-verify"]
BPE = ["--tokenizer", "bpe", "--vocab-size", 600]
GPT2 = ["--norm", "layer", "--norm-bias", "--position", "learned", "--ffn", "gelu", "--attn-bias", "--ffn-bias"]
FAMILIES = {
    "llama": ["--num-kv-heads", 2, "--intermediate-dim", 160, *BPE],
    "qwen3": ["--qk-norm", "--num-kv-heads", 2, "--head-dim", 32, "--intermediate-dim", 96, *BPE],
    "gpt2": [*GPT2, "--tie-embeddings", "--intermediate-dim", 128, "--vocab-size", 256],
}
END = "\x00"  # lm-eval's hf cannot do without a token that ends a text; this one is in no text here
TASKS = {
    "answers": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "perplexity": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "texts": f"""output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: text
generation_kwargs: {{until: ["\\n\\n", ")"], max_gen_toks: {NEW_TOKENS}}}
metric_list: [{{metric: exact_match}}]
""",
}


def write_tasks(folder: Path, text: str) -> list[dict[str, Any]]:
    """Questions are the beginning of a piece of text, answers its true end and the ends of others. Some are longer than the
    models see, and no two are of one length."""
    draw, pieces = random.Random(0), []
    for _ in range(QUESTIONS):
        start = draw.randrange(len(text) - 1000)
        cut = draw.randrange(5, 600)
        pieces.append((text[start : start + cut], text[start + cut : start + cut + draw.randrange(2, 25)]))
    documents = []
    for i, (question, end) in enumerate(pieces):
        choices = [draw.choice(pieces)[1] for _ in range(3)]
        choices[i % 3] = end
        documents.append({"question": question, "choices": choices, "answer": i % 3, "text": question + end})
    folder.mkdir()
    (folder / "tasks.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, body in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        data = f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(folder / 'tasks.jsonl'))}}}}}\n"
        (folder / f"{name}.yaml").write_text(head + data + body)
    return documents


def asked(out: Path, tasks: Path, words: list[object]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The metrics of each task, and what the model answered to each document."""
    flags = ["--tasks", ",".join(TASKS), "--include_path", tasks, "--output_path", out, "--log_samples"]
    flags += ["--batch_size", 8, "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "cache")}
    here = {"PYTHONPATH": str(HOME.parent / "src")}  # that Python has its own packages, but this tapeless
    command = [PYTHON, "-m", *map(str, [*words, *flags])]
    done = subprocess.run(command, env=os.environ | offline | here, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr[-3000:]}\n{' '.join(command)} failed")
    (found,) = out.rglob("results_*.json")
    answers = {}
    for name in TASKS:
        (file,) = out.rglob(f"samples_{name}_*.jsonl")
        lines = sorted(map(json.loads, file.read_text().splitlines()), key=lambda line: line["doc_id"])
        answers[name] = [line["resps"] for line in lines]
    return json.loads(found.read_text())["results"], answers


def numbers(answers: list[Any]) -> list[float]:
    """The log-probabilities in what was answered, which lm-eval writes as text."""
    flat = [one for document in answers for response in document for one in response]
    return [float(one[0] if isinstance(one, list) else one) for one in flat]


def in_float64(run: RunDir, documents: list[dict[str, Any]]) -> list[float]:
    """The log p of every answer, by the plain sum over one forward each, the question cut to what the model sees."""
    trained, tokenizer = load(run.path, on_warning=print).model, load_tokenizer(run.tokenizer)
    model = Transformer(trained.config, dtype="float64")
    for name, w in model.params.items():
        w.copy_(trained.params[name])
    found = []
    for document in documents:
        question = tokenizer.encode(document["question"].rstrip()).tolist()  # spaces before an answer count to it
        for choice in document["choices"]:
            # lm-eval's tokens: the question's own, then those of both together from there on, also where a merge crosses over
            answer = tokenizer.encode(document["question"] + choice).tolist()[len(question) :]
            whole = torch.tensor((question + answer)[-(CONTEXT + 1) :])  # (n + 1,)
            logprobs = model.logits(whole[None, :-1])[0].log_softmax(-1)  # (n, V)
            found.append(float(logprobs.gather(1, whole[1:, None])[-len(answer) :].sum()))
    return found


def largest(one: list[float], other: list[float], *, by_size: bool = False) -> float:
    return max(abs(a - b) / (abs(b) if by_size else 1) for a, b in zip(one, other, strict=True))


def there() -> bool:
    code = "import lm_eval, transformers, accelerate, torch"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, check=False).returncode == 0


if not there():
    skip("no packages lm_eval, transformers and accelerate here; TAPELESS_LM_EVAL_PYTHON names a Python that has them")
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
claims, table = Claims("lm_eval_task"), {}
with scratch() as folder:
    (folder / "text.txt").write_text(library_text(300_000))
    documents = write_tasks(folder / "tasks", library_text(400_000)[310_000:])
    for name, flags in FAMILIES.items():
        run = RunDir(folder / name)
        few = ["--max-steps", steps, "--eval-windows", 4, "--sample-tokens", 4]
        train(run, *SMALL, *flags, "--dataset-path", folder / "text.txt", *few)
        exported = folder / f"{name}-hf"
        if (done := tapeless("export", run.path, "--to", "hf", "--out", exported)).code:
            sys.exit(done.output)
        described = exported / "tokenizer_config.json"
        end = load_tokenizer(run.tokenizer).encode(END)
        symbol = {i: text for text, i in json.loads(run.tokenizer.read_text())["model"]["vocab"].items()}[int(end[0])]
        described.write_text(json.dumps({**json.loads(described.read_text()), "eos_token": symbol}))
        tokenizer = load_tokenizer(run.tokenizer)
        prefix = int(tokenizer.encode("\n")[0]) if tokenizer.end_of_text is None else tokenizer.end_of_text
        ours, said = asked(folder / f"{name}-ours", folder / "tasks", ["tapeless", "lm-eval", run.path])
        hf = ["lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={exported},prefix_token_id={prefix}"]
        theirs, expected = asked(folder / f"{name}-theirs", folder / "tasks", hf)
        claims.check(
            f"{name}: log p of {3 * QUESTIONS} answers, largest difference from sums in float64",
            bound=ANSWER,
            measured=(off := largest(numbers(said["answers"]), in_float64(run, documents))),
            ok=off < ANSWER,
        )
        table[name] = {}
        for task, bound in (("answers", ANSWER), ("perplexity", TEXT)):
            off = largest(numbers(said[task]), numbers(expected[task]), by_size=task == "perplexity")
            table[name][task] = {"largest_difference": off, "tapeless": ours[task], "hf": theirs[task]}
            claims.check(
                f"{name}: log p of every request of task {task}, largest difference from lm-eval's hf on the export"
                + (", by its size" if task == "perplexity" else ""),
                bound=bound,
                measured=off,
                ok=off < bound,
            )
        same = sum(a == b for a, b in zip(said["texts"], expected["texts"], strict=True))
        claims.check(f"{name}: {QUESTIONS} greedy texts equal hf's", bound=QUESTIONS, measured=same, ok=same == QUESTIONS)
claims.finish(tasks=table)
