"""How likely a model finds a text: sums of log p(token | the tokens before it), in windows that the model can see.

    context      c1 … ck            a question, or the one token that a text begins behind
    continuation t1 … tn            what is scored: each of its tokens once
Where the two do not fit into one window, the context loses its beginning; where the continuation alone does not, several
windows follow each other, and the last one is full, so that its tokens are predicted from as many as can be seen:
    length 4:  [c t1 t2 t3] -> t1 t2 t3 t4    [t4 t5 t6 t7] -> t5 t6 t7 t8    [t6 t7 t8 t9] -> t9 t10
Windows of different lengths share a batch, the shorter ones filled up behind their end, where causal attention does not look.
Tested by: tests/tasks/test_scoring.py, and tests/tasks/test_lm.py against lm-eval's own model of transformers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.generate.engine import LanguageModel
from tapeless.ops.numerics import accumulation_dtype

Batches = list[list[int]]


class Window(NamedTuple):
    inputs: list[int]
    targets: list[int]  # the tokens behind the last len(targets) inputs


class Score(NamedTuple):
    logprob: float
    greedy: bool  # each token is the likeliest at its place


def windows(context: list[int], continuation: list[int], length: int) -> Iterator[Window]:
    """context: at least one token."""
    whole, done = context + continuation, len(context)
    while done < len(whole):
        end = min(done + length, len(whole))
        yield Window(whole[max(0, end - 1 - length) : end - 1], whole[done:end])
        done = end


def score(
    model: LanguageModel,
    pairs: Sequence[tuple[list[int], list[int]]],
    *,
    length: int,
    batch_size: int,
    track: Callable[[Batches], Iterable[list[int]]] = iter,
) -> list[Score]:
    """The score of each continuation behind its context. track: sees the batches go by, such as tqdm."""
    owners, seen = [], []
    for owner, (context, continuation) in enumerate(pairs):
        for window in windows(context, continuation, length):
            owners.append(owner)
            seen.append(window)
    longest_first = sorted(range(len(seen)), key=lambda i: -len(seen[i].inputs))  # neighbours need the least filling
    batches = [longest_first[i : i + batch_size] for i in range(0, len(seen), batch_size)]
    scores = [Score(0.0, True)] * len(pairs)  # of nothing
    for batch in track(batches):
        for i, found in zip(batch, _score_batch(model, [seen[i] for i in batch]), strict=True):
            before = scores[owners[i]]
            scores[owners[i]] = Score(before.logprob + found.logprob, before.greedy and found.greedy)
    return scores


def _score_batch(model: LanguageModel, batch: list[Window]) -> list[Score]:
    tokens = torch.zeros(len(batch), max(len(window.inputs) for window in batch), dtype=torch.int64)  # (B, T)
    for row, window in enumerate(batch):
        tokens[row, : len(window.inputs)] = torch.tensor(window.inputs)
    logits = model.logits(tokens.to(model.device))  # (B, T, V)
    return [_score_row(logits[row, : len(window.inputs)], window.targets) for row, window in enumerate(batch)]


def _score_row(logits: Tensor, wanted: list[int]) -> Score:  # (T, V)
    predicting = logits[-len(wanted) :]  # (n, V)
    targets = torch.tensor(wanted, device=logits.device)  # (n,)
    logprobs = predicting.to(accumulation_dtype(logits)).log_softmax(-1).gather(1, targets[:, None])  # (n, 1)
    return Score(float(logprobs.cpu().double().sum()), bool((predicting.argmax(-1) == targets).all()))
