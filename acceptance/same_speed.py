"""A refactoring costs no time: an older checkout and this one by turns, in one session.

    python acceptance/same_speed.py --old PATH                  PATH: a checkout of the code before; or in $TAPELESS_OLD
    python acceptance/same_speed.py --old PATH --device cuda    with torch, triton, numpy and safetensors alone: PYTHONPATH=src
    python acceptance/same_speed.py --old PATH --new PATH       the old code against itself: whether the method is any good
    … --presets llama-tiny --dtypes float32 --rounds 6 --turn 0.5 --threads 1 --cold

Of each model three workers are alive: old, new, and old once more. Each has its turn in every round, in all orders alike, and
sleeps on its pipe until then. Old against old says how far two of the same differ here, and nothing below that is a finding.
A load far above the cores in use says that others were at work, and how little the numbers mean."""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice, permutations
from math import sqrt
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OLD, NEW, TWIN = WHO = ("old", "new", "old again")
BOUND = 0.01  # of slower
UNNOTICED = 0.005  # seconds that nobody minds when a command starts
MOST = 500  # steps in a turn
TEXT = 300_000  # characters: a trainer wants data, though the steps that are timed have their own batches


class Case(NamedTuple):
    preset: str
    batch_size: int
    seq_len: int
    rounds: int  # a multiple of 6 has every order equally often


CASES = {
    "cpu": [Case("llama-tiny", 16, 64, 12), Case("llama-small", 4, 512, 6), Case("llama-base", 1, 1024, 6)],
    "cuda": [Case("llama-124m", 32, 1024, 6), Case("llama-1b", 8, 2048, 6)],
}
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "fp8")}
TURN = {"cpu": 1.0, "cuda": 0.5}  # seconds
STARTS = {"cpu": 6, "cuda": 2}  # first steps of each
COMMANDS = {"import tapeless": ["-c", "import tapeless"], "tapeless --help": ["-m", "tapeless", "--help"]}
LAUNCHES = 18  # of each command


class Worker:
    """In a process of its own: a model, AdamW and the trainer, by the names that everybody imports."""

    def __init__(self, task: dict[str, Any]):
        import torch

        import tapeless

        self.torch, self.cuda, self.replays = torch, task["device"] == "cuda", 0
        if self.cuda:
            self._count_replays()
        model_config = tapeless.load_preset(task["preset"])
        wanted = {"dtype": task["dtype"], "device": task["device"]}
        train = tapeless.TrainConfig(
            dataset_path=task["text"],
            batch_size=task["batch_size"],
            seq_len=task["seq_len"],
            max_steps=10**6,
            lr=1e-4,
            lr_schedule="constant",
            **wanted,
        )
        data = tapeless.prepare(train, model_config.vocab_size, Path(task["folder"]))
        model = tapeless.Transformer(model_config, **wanted)
        self.trainer = tapeless.Trainer(model, train, data)
        shape = (4, 2, task["batch_size"], task["seq_len"])
        drawn = torch.randint(0, model_config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        self.batches = cycle(drawn.to(task["device"]))

    def _count_replays(self) -> None:
        graph, worker = self.torch.cuda.CUDAGraph, self
        replay = graph.replay

        def counted(self: Any) -> None:
            worker.replays += 1
            replay(self)

        graph.replay = counted

    def timed(self) -> tuple[float, float]:  # seconds, loss
        tokens, targets = next(self.batches)
        self.wait()
        start = time.perf_counter()
        loss = self.trainer.step(tokens, targets).loss
        self.wait()
        return time.perf_counter() - start, loss

    def wait(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def answer(self, steps: int) -> dict[str, Any]:
        before = self.replays
        seconds, losses = zip(*(self.timed() for _ in range(steps)), strict=True)
        return {"seconds": seconds, "losses": losses, "replayed": self.replays - before}


def work(task: dict[str, Any]) -> None:
    """A line of stdin is a number of steps, a line of stdout what came of them; the end of stdin is the end."""
    gc.set_threshold(10_000)  # as the command does
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    worker = Worker(task)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(int(line))), file=answers, flush=True)


class WorkerError(Exception):
    pass


class Tree(NamedTuple):
    source: Path  # its src/
    threads: int | None

    def environment(self, caches: str | None = None) -> dict[str, str]:
        """Of the `tapeless` command. caches: a folder for whatever is compiled, instead of the usual ones."""
        behind = [text for text in (os.environ.get("PYTHONPATH"),) if text]
        found = os.environ | {"PYTHONPATH": os.pathsep.join([str(self.source), *behind]), "PYTHONSAFEPATH": "1"}
        if "OMP_WAIT_POLICY" not in found:
            found.setdefault("GOMP_SPINCOUNT", "10000")
        if self.threads:
            found |= {"OMP_NUM_THREADS": str(self.threads), "NUMBA_NUM_THREADS": str(self.threads)}
        if caches:
            found |= {name: os.path.join(caches, name) for name in ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")}
        return found

    def holds_the_package(self) -> bool:
        """Whether it is found here, whatever is installed."""
        command = [sys.executable, "-c", "import tapeless; print(tapeless.__file__)"]
        found = subprocess.run(command, env=self.environment(), stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
        return Path(found) == self.source / "tapeless" / "__init__.py"


class Process:
    """The parent's end of a worker, which builds its model meanwhile."""

    def __init__(self, who: str, tree: Tree, task: dict[str, Any], caches: str | None = None):
        self.who, self.started = who, time.perf_counter()
        self.folder = tempfile.TemporaryDirectory(prefix="tapeless-")
        self.noise = tempfile.TemporaryFile("w+")  # noqa: SIM115  open for the life of the worker
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(task | {"folder": self.folder.name})],
            env=tree.environment(caches),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.noise,
            text=True,
        )

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.noise.seek(0)
            words = self.noise.read().strip().splitlines() or ["without a word"]
            raise WorkerError(f"{self.who} ended, status {self.process.wait()}: {words[-1]}")
        return json.loads(line)

    def steps(self, count: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{count}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # receive says why
        return self.receive()

    def first_step(self) -> float:
        """Seconds from the start of the process to the end of its first step."""
        self.receive()
        self.loss: float = self.steps(1)["losses"][0]
        return time.perf_counter() - self.started

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            self.process.kill()  # it may be in the middle of a long answer
        self.process.communicate()  # closes its stdin, which ends it
        self.noise.close()
        self.folder.cleanup()


class Finding(NamedTuple):
    """From the seconds of each round. Rounds are compared within themselves, since a machine is not always as fast."""

    seconds: dict[str, list[float]]
    facts: Mapping[str, Any] = MappingProxyType({})

    @property
    def slower(self) -> float:
        """New than old, as a share: the median of the rounds."""
        by_round = zip(*(self.seconds[who] for who in WHO), strict=True)
        return median(new / ((old + twin) / 2) for old, new, twin in by_round) - 1

    @property
    def twins(self) -> list[float]:
        return [twin / old for old, twin in zip(self.seconds[OLD], self.seconds[TWIN], strict=True)]

    @property
    def spread(self) -> float:
        """Of old against old: how far they are apart, or what the scatter of the rounds leaves open, where that is more."""
        low, _, high = quantiles(self.twins, n=4, method="inclusive") if len(self.twins) > 1 else [0.0] * 3
        return max(abs(median(self.twins) - 1), (high - low) / sqrt(len(self.twins)))

    def allowed(self, unnoticed: float = 0.0) -> float:
        return max(BOUND, self.spread, unnoticed / median(self.seconds[OLD]))

    def disagreement(self) -> str:
        """Whatever makes the times of two workers times of different things."""
        losses = self.facts.get("first_losses", {})
        if any(abs(loss - losses[OLD]) > 1e-3 * abs(losses[OLD]) for loss in losses.values()):
            return f"other first losses: {losses}; "
        without = [who for who, good in self.facts.get("replayed", {}).items() if not good]
        return f"steps without a CUDA graph: {', '.join(without)}; " if without else ""

    def words(self) -> str:
        times = ", ".join(f"{who} {1e3 * median(self.seconds[who]):.2f} ms" for who in WHO)
        return f"{self.slower:+.2%}: {times}; old against old {median(self.twins) - 1:+.2%}, spread {self.spread:.2%}"

    def record(self) -> dict[str, Any]:
        return (
            {"slower": self.slower, "old_against_old": median(self.twins) - 1, "spread": self.spread}
            | self.seconds
            | dict(self.facts)
        )


def orders(rounds: int) -> Iterator[tuple[str, ...]]:
    return islice(cycle(permutations(WHO)), rounds)


def by_turns(rounds: int, measure: Callable[[str], float]) -> Finding:
    seconds: dict[str, list[float]] = {who: [] for who in WHO}
    for order in orders(rounds):
        for who in order:
            seconds[who].append(measure(who))
    return Finding(seconds)


class Session(NamedTuple):
    trees: dict[str, Tree]  # by who
    device: str
    text: str  # a file
    turn: float

    def task(self, case: Case, dtype: str) -> dict[str, Any]:
        return case._asdict() | {"dtype": dtype, "device": self.device, "text": self.text}

    def steps(self, case: Case, dtype: str) -> Finding:
        """Training steps, and beside them the first losses and whether a graph was replayed."""
        with ExitStack() as stack:
            task = self.task(case, dtype)
            workers = {who: stack.enter_context(Process(who, tree, task)) for who, tree in self.trees.items()}
            fastest = self.turn
            for worker in workers.values():
                worker.first_step()
                fastest = min(fastest, *worker.steps(2)["seconds"])  # on a GPU the first of them captures the graph
            count = min(MOST, round(self.turn / fastest))
            skipped = int(count > 1)  # the first of a turn: the caches were another's until then
            replayed = dict.fromkeys(WHO, True)

            def turn(who: str) -> float:
                answer = workers[who].steps(count + skipped)
                replayed[who] &= answer["replayed"] >= count + skipped
                return median(answer["seconds"][skipped:])

            for who in WHO:
                turn(who)  # not counted
            facts = {"first_losses": {who: workers[who].loss for who in WHO}, "steps_in_a_turn": count}
            found = by_turns(case.rounds, turn)
            return Finding(found.seconds, facts | ({"replayed": replayed} if self.device == "cuda" else {}))

    def first_steps(self, case: Case, dtype: str, rounds: int, cold: bool) -> Finding:
        def once(who: str) -> float:
            with tempfile.TemporaryDirectory(prefix="tapeless-") as caches, ExitStack() as stack:
                process = Process(who, self.trees[who], self.task(case, dtype), caches if cold else None)
                return stack.enter_context(process).first_step()

        return by_turns(rounds, once)

    def launches(self, words: list[str], rounds: int) -> Finding:
        def once(who: str) -> float:
            start = time.perf_counter()
            environment = self.trees[who].environment()
            code = subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, check=False).returncode
            if code:
                raise WorkerError(f"{who}: {' '.join(words)} ended with status {code}")
            return time.perf_counter() - start

        for who in WHO:
            once(who)  # which writes the bytecode where there is none
        return by_turns(rounds, once)


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", default=os.environ.get("TAPELESS_OLD"), metavar="PATH", help="a checkout of the old code")
    parser.add_argument("--new", default=str(ROOT), metavar="PATH", help="what to compare with (default: this tree)")
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--presets", metavar="NAMES", help="some of them, by commas; none: the starts alone")
    parser.add_argument("--dtypes", metavar="NAMES", help="by commas (default float32,bfloat16; on a GPU bfloat16,fp8)")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each worker, first steps and launches")
    parser.add_argument("--turn", type=float, metavar="S", help="about how long a turn lasts (default 1, on a GPU 0.5)")
    parser.add_argument("--threads", type=int, metavar="N", help="of each worker; default as many as torch takes")
    parser.add_argument("--cold", action="store_true", help="also the first step with nothing compiled before, once each")
    return parser.parse_args()


class Question(NamedTuple):
    what: str
    measure: Callable[[], Finding]
    unnoticed: float = 0.0  # seconds


def questions(args: argparse.Namespace, here: Session) -> Iterator[Question]:
    cases = [case for case in CASES[args.device] if args.presets is None or case.preset in args.presets.split(",")]
    dtypes = args.dtypes.split(",") if args.dtypes else DTYPES[args.device]
    for case in cases:
        for dtype in dtypes:
            what = f"{case.preset} {case.batch_size}x{case.seq_len} {dtype}, a step"
            yield Question(what, partial(here.steps, case._replace(rounds=args.rounds or case.rounds), dtype))
    first, dtype = (cases or CASES[args.device])[0], dtypes[0]
    what = f"{first.preset} {dtype}, from the start to the end of the first step"
    yield Question(what, partial(here.first_steps, first, dtype, args.rounds or STARTS[args.device], False))
    if args.cold:
        yield Question(f"{what}, with nothing compiled before", partial(here.first_steps, first, dtype, 1, True))
    for what, words in COMMANDS.items():
        yield Question(what, partial(here.launches, words, args.rounds or LAUNCHES), UNNOTICED)


def main() -> None:
    from claim import Claims, skip  # not in a worker, whose tree may be older than what they import

    args = asked()
    if not args.old:
        skip("needs an older checkout to compare with: --old PATH, or TAPELESS_OLD in the environment")
    old, new = (Tree(Path(path).resolve() / "src", args.threads) for path in (args.old, args.new))
    for tree in (old, new):
        if not tree.holds_the_package():
            sys.exit(f"{tree.source} holds no package tapeless")
    claims, table = Claims("same_speed" if args.device == "cpu" else f"same_speed_{args.device}"), {}
    with tempfile.TemporaryDirectory(prefix="tapeless-") as folder:
        text = Path(folder) / "text.txt"
        text.write_text("".join(random.Random(0).choices("etaoin shrdlu\n", k=TEXT)))
        here = Session({OLD: old, NEW: new, TWIN: old}, args.device, str(text), args.turn or TURN[args.device])
        for what, measure, unnoticed in questions(args, here):
            claim = f"{what}: as fast as before"
            try:
                found = measure()
            except WorkerError as error:
                claims.check(claim, bound="measured", measured=str(error), ok=False)
                continue
            allowed, wrong, load = found.allowed(unnoticed), found.disagreement(), round(os.getloadavg()[0], 1)
            table[what] = found.record() | {"allowed": allowed, "load_average": load}
            measured, good = f"{wrong}{found.words()}; load {load}", found.slower <= allowed and not wrong
            claims.check(claim, bound=f"at most {allowed:+.2%}", measured=measured, ok=good)
    if new.source != ROOT / "src" or args.presets or args.dtypes or args.rounds:
        sys.exit(0 if claims.ok else 1)  # a try of the method, or a part of it: nothing is stored
    claims.finish(device=args.device, threads=args.threads, measured=table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
