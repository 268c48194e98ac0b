"""Which tokens are in which batch: pure functions of the seed, so that a resumed run needs nothing but a number.

An epoch cuts the tokens into W windows of stride T, from an offset in [0, T) that is a function of (seed, epoch), and visits
each once, in an order that is a permutation by (seed, epoch). Sample k of the run is
    epoch = k // W      window = order(epoch)[k % W]      start = offset(epoch) + T window      tokens[start : start + T + 1]
whatever the batch size or the number of ranks; a batch may lie across the border of two epochs. W is the same for every
offset, so up to T - 1 tokens at either end are left out in an epoch; the next has another offset.

Given where documents begin, a batch also says which document each token belongs to, and the first token of a document is no
target: then a document that is packed beside others teaches exactly what it would alone.
Tested by: tests/data/test_loader.py."""

import math

import numpy as np
import torch
from torch import Tensor

from tapeless.data.joined import Tokens, as_plain
from tapeless.data.rng import draws, key, permutation
from tapeless.data.shards import require_window

IGNORED = -100  # the target that no loss counts


class Loader:
    def __init__(
        self,
        tokens: Tokens,  # (n,) any integer type; a memory map is read only where it is needed
        seq_len: int,
        batch_size: int,
        seed: int,
        starts: np.ndarray | None = None,  # (d,) int64: the first token of each document, to keep them apart
    ):
        require_window(len(tokens), seq_len, "training")
        self.tokens, self.seq_len, self.batch_size, self.seed = as_plain(tokens), seq_len, batch_size, seed
        self.num_windows = max(1, (len(tokens) - seq_len) // seq_len)  # in an epoch [W]
        self.starts = starts
        self._orders: dict[int, np.ndarray] = {}

    def epoch_of(self, sample: int) -> int:
        return sample // self.num_windows

    def offset(self, epoch: int) -> int:
        room = min(
            self.seq_len, len(self.tokens) - self.num_windows * self.seq_len
        )  # less than T where there are not 2 T tokens
        return int(draws(key(self.seed, "offset", epoch), 0, 1)[0] % np.uint64(room))

    def order(self, epoch: int) -> np.ndarray:  # (W,)
        if epoch not in self._orders:
            kept = {e: order for e, order in self._orders.items() if e == epoch - 1}  # a batch needs two epochs at most
            self._orders = kept | {epoch: permutation(key(self.seed, "order", epoch), self.num_windows)}
        return self._orders[epoch]

    def start(self, sample: int) -> int:
        """Where sample k of the run begins."""
        epoch, place = divmod(sample, self.num_windows)
        return self.offset(epoch) + self.seq_len * int(self.order(epoch)[place])

    def batch(self, first_sample: int) -> tuple[Tensor, ...]:  # tokens, targets, and documents if kept apart (B, T) int64
        begins = np.array([self.start(first_sample + b) for b in range(self.batch_size)])
        places = begins[:, None] + np.arange(self.seq_len + 1)  # (B, T + 1)
        windows = torch.from_numpy(self.tokens[places].astype(np.int64))
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return (tokens, targets) if self.starts is None else (tokens, *kept_apart(targets, places, self.starts))


def kept_apart(
    targets: Tensor,  # (N, T) int64
    places: np.ndarray,  # (N, T + 1): where the tokens and the last target stand
    starts: np.ndarray,  # (d,) int64
) -> tuple[Tensor, Tensor]:  # targets, documents (N, T) int64
    """The number of each token's document, and the targets without those that are the next document's."""
    documents = torch.from_numpy(np.searchsorted(starts, places, side="right"))  # (N, T + 1)
    same = documents[:, 1:] == documents[:, :-1]
    return targets.masked_fill(~same, IGNORED), documents[:, :-1].contiguous()


def validation_windows(
    tokens: Tokens,  # (n,)
    seq_len: int,
    limit: int = 0,  # 0: all of them
    starts: np.ndarray | None = None,  # (d,) int64: as the loader's
) -> tuple[Tensor, ...]:  # tokens, targets, and documents if kept apart (N, T) int64
    """Always the same windows, of stride T from the first token: all, so that every token but the first is predicted once, or
    `limit` evenly spaced ones. The last of all is filled up with targets that no loss counts."""
    require_window(len(tokens), seq_len, "validation")
    count = math.ceil((len(tokens) - 1) / seq_len)
    chosen = np.arange(count) if limit in (0, count) or limit > count else np.arange(limit) * count // limit
    places = chosen[:, None] * seq_len + np.arange(seq_len + 1)  # (N, T + 1)
    rows = as_plain(tokens)[np.minimum(places, len(tokens) - 1)].astype(np.int64)
    targets = np.where(places[:, 1:] < len(tokens), rows[:, 1:], IGNORED)
    windows = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(targets)
    return windows if starts is None else (windows[0], *kept_apart(windows[1], places, starts))
