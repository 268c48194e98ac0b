"""Log-likelihoods: sums of log p(token | previous tokens), in windows of at most the model's context length.

    context      c1 … ck            a question, or a single bos token
    continuation t1 … tn            each of its tokens is scored once
If the two do not fit into one window, the context is truncated on the left. If the continuation alone does not, it is split
into several windows, and the last one extends to the left, so that its tokens are predicted from a full window:
    length 4:  [c t1 t2 t3] -> t1 t2 t3 t4    [t4 t5 t6 t7] -> t5 t6 t7 t8    [t6 t7 t8 t9] -> t9 t10
Windows of different lengths share a batch: shorter ones are padded on the right, which causal attention does not see.
Tested by: tests/tasks/test_scoring.py, and tests/tasks/test_lm.py against lm-eval's own model for transformers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tapeless.generate.decoder import LanguageModel
from tapeless.ops.numerics import accumulation_dtype

Batches = list[list[int]]


class Window(NamedTuple):
    inputs: list[int]
    targets: list[int]  # the tokens that follow the last len(targets) inputs


class Score(NamedTuple):
    logprob: float
    greedy: bool  # each token is the most likely one


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
    """The score of each continuation after its context. track: wraps the list of batches, for instance tqdm."""
    owners, split = [], []
    for owner, (context, continuation) in enumerate(pairs):
        for window in windows(context, continuation, length):
            owners.append(owner)
            split.append(window)
    longest_first = sorted(range(len(split)), key=lambda i: -len(split[i].inputs))  # least padding
    batches = [longest_first[i : i + batch_size] for i in range(0, len(split), batch_size)]
    scores = [Score(0.0, True)] * len(pairs)  # of an empty continuation
    for batch in track(batches):
        for i, found in zip(batch, _score_batch(model, [split[i] for i in batch]), strict=True):
            before = scores[owners[i]]
            scores[owners[i]] = Score(before.logprob + found.logprob, before.greedy and found.greedy)
    return scores


def _score_batch(model: LanguageModel, batch: list[Window]) -> list[Score]:
    tokens = torch.zeros(len(batch), max(len(window.inputs) for window in batch), dtype=torch.int64)  # (B, T)
    for row, window in enumerate(batch):
        tokens[row, : len(window.inputs)] = torch.tensor(window.inputs)
    logits = model.logits(tokens.to(model.device))  # (B, T, V)
    return [_score_row(logits[row, : len(window.inputs)], window.targets) for row, window in enumerate(batch)]


def _score_row(logits: Tensor, targets: list[int]) -> Score:  # (T, V)
    predicting = logits[-len(targets) :]  # (n, V)
    ids = torch.tensor(targets, device=logits.device)  # (n,)
    logprobs = predicting.to(accumulation_dtype(logits)).log_softmax(-1).gather(1, ids[:, None])  # (n, 1)
    return Score(float(logprobs.cpu().double().sum()), bool((predicting.argmax(-1) == ids).all()))
