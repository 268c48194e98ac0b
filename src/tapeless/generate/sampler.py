"""Sampling one token from logits.

The filters, in this order, each on the renormalised result of the previous one:
    1. repetition penalty r   a logit z of a previous token becomes z / r if z > 0, else z r
    2. temperature t          z / t; 0 puts all probability on the largest logit
    3. top-k                  keep the k largest
    4. top-p                  keep the largest until their probabilities sum to p, including the one that reaches p
    5. min-p                  keep those at least p times as probable as the most probable
Of equal logits the lower id ranks first, in every filter and in argmax: top_k = 1 is temperature 0.
All of it is computed in float64 on the CPU, so that a sample depends on the logits and not on the device; the cost is small
compared with the forward.

A sample is a pure function of (seed, sample index, position): a hash gives a number in [0, 1), which the inverse of the
cumulative distribution maps to a token. There is no generator, hence no state to save or restore.
Tested by: tests/generate/test_sampler.py."""

import hashlib

import torch
from torch import Tensor

from tapeless.config import Sampling
from tapeless.errors import NonFiniteError


def probabilities(
    logits: Tensor,  # (B, V); read only
    history: Tensor,  # (B, n) int64: the tokens so far, for the repetition penalty
    sampling: Sampling,
) -> Tensor:  # (B, V) float64, on the CPU
    """The distribution of each row after all filters."""
    z = _penalized(logits, history, sampling)
    z, ids = z.sort(dim=-1, descending=True, stable=True)  # (B, V) both; stable: equal logits keep the order of their ids
    z = z - z[:, :1]  # before the division: at any temperature the largest stays 0, so exp cannot overflow
    rank = torch.arange(z.shape[-1]).expand_as(z)
    if sampling.temperature == 0:
        p = _softmax(z, rank < 1)
    else:
        z = z / sampling.temperature
        keep = rank < (sampling.top_k or z.shape[-1])
        p = _softmax(z, keep)
        if sampling.top_p < 1:
            keep[:, 1:] &= p.cumsum(-1)[:, :-1] < sampling.top_p  # kept while those before it sum to less than top_p
        if sampling.top_p < 1 or sampling.min_p:  # a ratio, which renormalising does not change
            p = _softmax(z, keep & (p >= sampling.min_p * p[:, :1]))
    return torch.zeros_like(z).scatter(1, ids, p)


def sample(
    logits: Tensor,  # (B, V); read only
    history: Tensor,  # (B, n) int64
    sampling: Sampling,
    *,
    position: int,  # of the new token, counted from the start of the text
    first_sample: int = 0,  # the index of row 0 among all samples
) -> Tensor:  # (B,) int64, on the CPU
    if sampling.temperature == 0:  # no sort is needed; numpy's argmax is the first of equals
        return torch.from_numpy(_penalized(logits, history, sampling).numpy().argmax(-1))
    cumulative = probabilities(logits, history, sampling).cumsum(-1)  # (B, V)
    u = [uniform(sampling.seed, first_sample + row, position) for row in range(len(logits))]
    # (B, 1); u is at most 1 - 2^-53, so even after rounding x is below the last of the row
    x = torch.tensor(u, dtype=torch.float64)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, x, right=True)[:, 0]  # right: skips tokens of probability 0


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the precision of float64."""
    digest = hashlib.sha256(f"sample/{seed}/{sample_index}/{position}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def _penalized(logits: Tensor, history: Tensor, sampling: Sampling) -> Tensor:  # (B, V) float64, on the CPU
    z = logits.to("cpu", torch.float64)
    _check(z)
    if sampling.repetition_penalty == 1:
        return z
    r = sampling.repetition_penalty
    seen = torch.zeros(z.shape, dtype=torch.bool).scatter(1, history.to("cpu"), True)
    return torch.where(seen, torch.where(z > 0, z / r, z * r), z)


def _softmax(z: Tensor, keep: Tensor) -> Tensor:  # (B, V) each; the largest z of a row is 0
    e = torch.where(keep, z.exp(), 0.0)
    return e / e.sum(-1, keepdim=True)


def _check(z: Tensor) -> None:  # (B, V)
    """-inf excludes a token; any other value that is not finite is an error."""
    if torch.isfinite(z.sum()):
        return
    bad = (z.isnan() | z.isposinf()).nonzero()
    if len(bad):
        row, token = bad[0].tolist()
        raise NonFiniteError(f"logit of token {token} in row {row} is {z[row, token].item()}; cannot sample")
    if z.isneginf().all(-1).any():
        raise NonFiniteError("every logit of a row is -inf; cannot sample")
