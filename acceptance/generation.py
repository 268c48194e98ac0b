"""Generation: one sequence is no slower than before, and several together are faster than one after the other.

    python acceptance/generation.py --old PATH      PATH: a checkout of the code before; or in $TAPELESS_OLD
    … --presets llama-tiny --dtypes float32 --rounds 2    a part of it; nothing is stored

Greedy tokens through generate_each, which both checkouts have. Old, new and old again are three processes that take turns, as
in same_speed.py: old against old says how far two of the same differ here. Both sides must run the decode kernel once for
every token after the first, or the comparison is refused: at 810b800 `logits` no longer ran it and generate_each did not yet,
so that every token went through the whole model op by op."""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))  # a worker's environment leaves it out
from same_speed import ROOT, WHO, Finding, Tree, by_turns

PROMPT, NEW_TOKENS = 16, 128
PRESETS, DTYPES, ROUNDS = ("llama-tiny", "llama-small", "llama-base"), ("bfloat16", "float32"), 12
RAGGED, TOGETHER, TIMES = "llama-small", 8, 4.0  # sequences of different lengths, and how many times one sequence's tokens/s


def work(task: dict[str, Any]) -> None:
    """A line of stdin is a list of lengths of prompts, a line of stdout what it took to continue them together: seconds, new
    tokens of each, and calls of the decode kernel."""
    import torch

    import tapeless
    from tapeless.config import Sampling
    from tapeless.generate.engine import generate_each

    model = tapeless.Transformer(tapeless.load_preset(task["preset"]), dtype=task["dtype"])
    decode, calls = model._decode, 0

    def counted(*inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return decode(*inputs)

    model._decode = counted
    V, room = model.config.vocab_size, model.config.max_seq_len
    ids = torch.randint(V, (room,), generator=torch.Generator().manual_seed(0)).tolist()
    for line in sys.stdin:
        prompts = [ids[:length] for length in json.loads(line)]
        count, calls = min(NEW_TOKENS, room - max(map(len, prompts))), 0
        start = time.perf_counter()
        generate_each(model, prompts, max_tokens=count, sampling=Sampling(temperature=0.0))
        print(json.dumps([time.perf_counter() - start, count, calls]), flush=True)


class Worker:
    def __init__(self, stack: ExitStack, tree: Tree, preset: str, dtype: str):
        self.source = tree.source
        command = [sys.executable, __file__, "--worker", json.dumps({"preset": preset, "dtype": dtype})]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=tree.environment(), stdin=pipe, stdout=pipe, text=True)
        self.process = stack.enter_context(process)
        stack.callback(process.kill)

    def seconds_per_token(self, lengths: list[int]) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(lengths), file=self.process.stdin, flush=True)
        seconds, count, calls = json.loads(self.process.stdout.readline())
        if calls != count - 1:
            sys.exit(f"{self.source}: {count} tokens are {calls} calls of the decode kernel; compare with another checkout")
        return seconds / (count * len(lengths))


def one_sequence(trees: dict[str, Tree], preset: str, dtype: str, rounds: int) -> Finding:
    with ExitStack() as stack:
        workers = {who: Worker(stack, tree, preset, dtype) for who, tree in trees.items()}

        def turn(who: str) -> float:
            return min(workers[who].seconds_per_token([PROMPT]) for _ in range(3))  # another process's work only adds

        for who in WHO:
            turn(who)  # not counted
        return by_turns(rounds, turn)


def together(tree: Tree, rounds: int) -> list[float]:
    """Tokens per second of several ragged sequences over those of one, of each round."""
    lengths = [PROMPT + 13 * i for i in range(TOGETHER)]
    with ExitStack() as stack:
        worker = Worker(stack, tree, RAGGED, "bfloat16")
        found = [worker.seconds_per_token(which) for _ in range(rounds + 1) for which in ([PROMPT], lengths)]
    return [one / several for one, several in list(pairwise(found))[2::2]]  # the first round is not counted


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", default=os.environ.get("TAPELESS_OLD"), metavar="PATH", help="a checkout of the old code")
    parser.add_argument("--presets", metavar="NAMES", help="some of them, by commas")
    parser.add_argument("--dtypes", metavar="NAMES", help="by commas (default bfloat16,float32)")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"turns of each (default {ROUNDS})")
    return parser.parse_args()


def main() -> None:
    from claim import Claims, skip  # not in a worker, whose tree may be older than what they import

    args = asked()
    if not args.old:
        skip("needs an older checkout to compare with: --old PATH, or TAPELESS_OLD in the environment")
    old, new = (Tree(Path(path).resolve() / "src", None) for path in (args.old, ROOT))
    trees, rounds = dict(zip(WHO, (old, new, old), strict=True)), args.rounds or ROUNDS
    claims, table = Claims("generation"), {}
    for preset in args.presets.split(",") if args.presets else PRESETS:
        for dtype in args.dtypes.split(",") if args.dtypes else DTYPES:
            what = f"{preset} {dtype}, one sequence"
            found = one_sequence(trees, preset, dtype, rounds)
            table[what] = found.record() | {"allowed": found.allowed()}
            ok = found.slower <= found.allowed()
            claims.check(f"{what}: as fast as before", bound=f"at most {found.allowed():+.2%}", measured=found.words(), ok=ok)
    ratios = together(new, rounds)
    claims.check(
        f"{RAGGED} bfloat16: tokens/s of {TOGETHER} sequences of different lengths over one's",
        bound=f"at least {TIMES}",
        measured=f"{median(ratios):.2f}",
        ok=median(ratios) >= TIMES,
    )
    if args.presets or args.dtypes or args.rounds:
        sys.exit(0 if claims.ok else 1)  # a part of it: nothing is stored
    claims.finish(device="cpu", measured=table, together=ratios)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
