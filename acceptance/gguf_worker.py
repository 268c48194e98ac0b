"""What llama.cpp makes of a GGUF file: run by acceptance/gguf_files.py with a Python that has the package llama-cpp-python.

stdin: {"model", "texts", "prompt", "new_tokens", "logits"}   stdout: {"tokens", "greedy"}; the logits go into that file."""

import json
import sys

import llama_cpp
import numpy as np

task = json.load(sys.stdin)
llama = llama_cpp.Llama(
    task["model"],
    n_ctx=task["context"],
    n_batch=task["context"],
    n_threads=1,
    n_threads_batch=1,
    logits_all=True,
    type_k=0,  # float32 keys and values: by default they are float16 whatever the file is
    type_v=0,
    verbose=False,
)
tokens = [llama.tokenize(text.encode(), add_bos=False, special=False) for text in task["texts"]]
text = list(task["prompt"])
llama.eval(text)
scores = np.array(llama.scores[: len(text)])  # (n, V)
np.save(task["logits"], scores)
while len(text) < len(task["prompt"]) + task["new_tokens"]:
    text.append(int(np.argmax(llama.scores[len(text) - 1])))
    llama.eval(text[-1:])
ends = [i for i in range(llama.n_vocab()) if llama_cpp.llama_vocab_is_eog(llama_cpp.llama_model_get_vocab(llama.model), i)]
print(json.dumps({"tokens": tokens, "greedy": text[len(task["prompt"]) :], "ends": ends, "llama_cpp": llama_cpp.__version__}))
