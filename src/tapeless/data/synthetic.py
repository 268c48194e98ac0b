"""Sources whose entropy rate is known: a validation loss can be compared with the lowest that any model could reach.

Both are unifilar: a state emits symbol c with probability p(c | state), and state and symbol determine the next state. Hence
    entropy rate = sum_s pi(s) H(p(. | s))      with pi the stationary distribution, pi = pi P
and the source's own loss on a window is an exact filter: start from pi, since a window begins anywhere; every symbol seen rules
states out, soon all but one. No model that sees only the window can do better.
Bytes are drawn with integers only (rng.py), so they are the same on every machine; floats only measure them.
Tested by: tests/data/test_synthetic.py."""

import math
import string
from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np

from tapeless.data.rng import draws, key, permutation


class Source(ABC):
    """A unifilar source over the bytes of `alphabet`; subclasses draw its symbols."""

    name: str
    num_symbols: int  # how many a corpus holds
    alphabet: bytes  # K symbols
    probability: np.ndarray  # (S, K) float64
    successor: np.ndarray  # (S, K) int64, the state after each symbol

    @abstractmethod
    def generate(self, count: int) -> bytes:
        """The first `count` symbols, the same at every call."""

    @cached_property
    def stationary(self) -> np.ndarray:  # (S,)
        """pi by iterating the lazy chain (stay with 1/2), which converges even where the chain itself is periodic."""
        state, symbol = np.nonzero(self.probability)
        p, to = self.probability[state, symbol], self.successor[state, symbol]
        pi, change = np.full(len(self.probability), 1 / len(self.probability)), 1.0
        while change > 1e-14:
            moved = (pi + np.bincount(to, pi[state] * p, len(pi))) / 2
            change = float(np.abs(moved - pi).sum())
            pi = moved
        return pi

    @cached_property
    def entropy_rate(self) -> float:  # nats per symbol
        p = self.probability
        return float(-(self.stationary @ np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0)).sum())

    def loss(self, first: np.ndarray, targets: np.ndarray) -> float:  # first (N,), targets (N, T): bytes, -100 is no target
        """The source's own mean -ln p of the targets, each window seen from its first symbol on. Infinite for
        unknown symbols."""
        index = np.full(256, -1)
        index[list(self.alphabet)] = np.arange(len(self.alphabet))
        total, states = 0.0, np.empty(len(first), np.int64)
        known_from = np.zeros(len(first), np.int64)
        for n, (symbol, row) in enumerate(zip(first, targets, strict=True)):
            loss, known_from[n], states[n] = self._find_state(index[symbol], index[row[row >= 0]])
            total += loss
        for t in range(targets.shape[1]):
            (known,) = np.nonzero((known_from <= t) & (targets[:, t] >= 0))
            symbols = index[targets[known, t]]
            if (symbols < 0).any():
                return math.inf
            with np.errstate(divide="ignore"):
                total -= float(np.log(self.probability[states[known], symbols]).sum())
            states[known] = self.successor[states[known], symbols]
        return total / int((targets >= 0).sum())

    def _find_state(self, first: int, targets: np.ndarray) -> tuple[float, int, int]:
        """Filter until one state is left: the loss up to there, how many targets that took, and the state."""
        states, belief, loss = np.arange(len(self.probability)), self.stationary, 0.0
        for t, symbol in enumerate([first, *targets]):
            joint = belief * self.probability[states, symbol] if symbol >= 0 else np.zeros(1)
            seen = joint.sum()
            if seen == 0:
                return math.inf, len(targets), 0
            loss -= math.log(seen) if t > 0 else 0.0  # the first symbol is given, not predicted
            following = self.successor[states, symbol]
            states, slot = np.unique(following[joint > 0], return_inverse=True)
            belief = np.bincount(slot, joint[joint > 0]) / seen
            if len(states) == 1:
                return loss, t, int(states[0])
        return loss, len(targets), 0


class MarkovSource(Source):
    """Order 2 over 64 symbols: the next one depends on a class (of 4) of the symbol before last and one (of 4) of the last.

    4096 independent rows would have to be memorised one by one: most of a small run. With classes a model has to find two
    groupings of 64 symbols and 16 rows of 16 successors, while the two symbols still have to be read together: the rows of
    one class of the symbol before last have disjoint successors, all 64 together. Measured once, default
    preset, batches of 16 x 128, above the source's loss on 256 windows: 1.1 % at step 600 and 0.5 % at step 800, the last; with
    8 x 8 classes and 8 successors 2.5 % at step 600 of the same schedule.
    Probabilities are multiples of 1/256: a byte draws."""

    name, num_symbols = "markov", 3_000_000
    alphabet = (string.digits + string.ascii_letters + "+-").encode()

    def __init__(self, seed: int = 0):
        self.seed = seed
        before_last = permutation(key(seed, "markov", "before last"), 64) // 16  # (64,) class of each symbol
        last = permutation(key(seed, "markov", "last"), 64) // 16
        shuffled = [permutation(key(seed, "markov", "successors", i), 64) for i in range(4)]
        rows = np.stack(shuffled).reshape(16, 16)  # successors of each pair of classes
        share = 1 + (draws(key(seed, "markov", "weights"), 0, 256) % np.uint64(16)).astype(np.int64).reshape(16, 16)
        weights = share * 256 // share.sum(1, keepdims=True)  # at least 1: no row's shares add up to more than 256
        weights[:, 0] += 256 - weights.sum(1)
        self._row = (4 * before_last[:, None] + last).reshape(-1)  # (4096,) of each state, 64 (symbol before last) + last
        self._table = [np.repeat(rows[r], weights[r]).tolist() for r in range(16)]  # row -> byte -> symbol
        by_row = np.zeros((16, 64))
        np.put_along_axis(by_row, rows, weights / 256, axis=1)
        self.probability = by_row[self._row]
        self.successor = 64 * (np.arange(4096)[:, None] % 64) + np.arange(64)

    def generate(self, count: int) -> bytes:
        random = draws(key(self.seed, "markov", "bytes"), 0, -(-count // 8)).astype("<u8").tobytes()[:count]
        tables = [self._table[row] for row in self._row]
        state, symbols = 0, bytearray()
        for byte in random:
            symbol = tables[state][byte]
            symbols.append(symbol)
            state = (state << 6 | symbol) & 4095
        return bytes(symbols.translate(self.alphabet + bytes(192)))


class ArithmeticSource(Source):
    """Lines such as `37+58=95`: two operands uniform in 0 … 99, the sum determined by them.

    A line holds ln 10000 nats, so the rate is that over the mean length of a line. States are what a reader has to remember:
    before the equals sign the line so far, after it only the rest of the line."""

    name, num_symbols = "arithmetic", 2_000_000
    alphabet = b"0123456789+=\n"

    def __init__(self, seed: int = 0):
        self.seed = seed
        self._lines = [f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100)]
        states: dict[str, int] = {"": 0}
        edges: dict[tuple[int, int], tuple[int, int]] = {}  # (state, symbol) -> (number of pairs, next state)
        for line in self._lines:
            state = ""
            for i, symbol in enumerate(line):
                following = line[: i + 1] if "=" not in line[: i + 1] else "=" + line[i + 1 :]
                following = "" if symbol == "\n" else following
                edge = (states[state], self.alphabet.index(symbol.encode()))
                to = states.setdefault(following, len(states))
                edges[edge] = (edges.get(edge, (0, to))[0] + 1, to)
                state = following
        count = np.zeros((len(states), len(self.alphabet)))
        self.successor = np.zeros(count.shape, np.int64)
        for edge, (times, to) in edges.items():
            count[edge], self.successor[edge] = times, to
        self.probability = count / count.sum(1, keepdims=True)

    def generate(self, count: int) -> bytes:
        """Pairs by rejection: of 65536 values the lowest 60000 are each of the 10000 pairs exactly six times."""
        lines, length, first = [], 0, 0
        while length < count:
            values = draws(key(self.seed, "arithmetic"), first, 4096).astype("<u8").view("<u2")
            first += 4096
            fresh = [self._lines[pair] for pair in (values[values < 60000] % 10000).tolist()]
            lines += fresh
            length += sum(map(len, fresh))
        return "".join(lines)[:count].encode()


SOURCES: dict[str, type[MarkovSource] | type[ArithmeticSource]] = {"markov": MarkovSource, "arithmetic": ArithmeticSource}
