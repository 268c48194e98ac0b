"""Sampling one token from the logits of one sequence.

The filters, in this order, each on the renormalised result of the previous one:
    1. repetition penalty r   a logit z of a previous token becomes z / r if z > 0, else z r
    2. temperature t          z / t; 0 puts all probability on the largest logit
    3. top-k                  keep the k largest
    4. top-p                  keep the largest until their probabilities sum to p, including the one that reaches p
    5. min-p                  keep those at least p times as probable as the most probable
Of equal logits the lower id ranks first, in every filter and in argmax: top_k = 1 is temperature 0.
All of it is computed in float64 on the CPU, so that a sample depends on the logits and not on the device. Only the few largest
logits are ever sorted: all of a vocabulary of 32,000 would take as long as the forward of a small model.

A sample is a pure function of (seed, sample index, position): a hash gives a number in [0, 1), which the inverse of the
cumulative distribution maps to a token. There is no generator, hence no state to save or restore.
Tested by: tests/generate/test_sampler.py."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from tapeless.config import Sampling
from tapeless.errors import NonFiniteError

FEW = 64  # logits that top-p sorts at first


def sample(
    logits: np.ndarray,  # (V,) float; read only
    history: Sequence[int],  # the tokens so far, for the repetition penalty
    sampling: Sampling,
    *,
    position: int,  # of the new token, counted from the start of the text
    index: int = 0,  # of the sample
) -> int:
    if sampling.temperature == 0:  # no sum is needed: argmax is the first of equals, or the first nan
        z = _penalized(logits, history, sampling.repetition_penalty)
        token = int(z.argmax())
        if not np.isfinite(z[token]):
            _raise_if_unusable(z)
        return token
    ids, weights = distribution(logits, history, sampling)
    cumulative = _cumulative(weights)
    # uniform() is at most 1 - 2^-53, so even after rounding x is below the last; right: skips tokens of probability 0
    x = uniform(sampling.seed, index, position) * cumulative[-1]
    return int(ids[cumulative.searchsorted(x, side="right")])


def distribution(
    logits: np.ndarray,  # (V,) float; read only
    history: Sequence[int],
    sampling: Sampling,
) -> tuple[np.ndarray, np.ndarray]:  # ids (n,), weights (n,) float64
    """The tokens that are left after all filters, in order, and numbers in proportion to their probabilities, 1 for the most
    probable. For a temperature above 0."""
    z = _penalized(logits.astype(np.float64), history, sampling.repetition_penalty)
    if not np.isfinite(z.sum()):
        _raise_if_unusable(z)
    ids = _largest(z, sampling.top_k or len(z))
    if len(ids) < len(z):
        z = z[ids]
    with np.errstate(over="ignore"):  # at a tiny temperature the quotient is -inf, and exp of it 0
        weights = np.exp((z - z.max()) / sampling.temperature)  # the largest is 0 before it is divided, so none overflows
    if sampling.top_p < 1:
        keep = _nucleus(z, weights, sampling.top_p)
        ids, weights = ids[keep], weights[keep]
    if sampling.min_p:
        keep = weights >= sampling.min_p  # a ratio, which renormalising does not change
        ids, weights = ids[keep], weights[keep]
    return ids, weights


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the precision of float64."""
    digest = hashlib.sha256(f"sample/{seed}/{index}/{position}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def _cumulative(weights: np.ndarray) -> np.ndarray:  # (n,) each
    """The bits of numpy's cumsum, one addition after the other, in a fifth of its time."""
    return torch.from_numpy(weights).cumsum(0).numpy()


def _largest(z: np.ndarray, k: int) -> np.ndarray:  # (n,) -> (k,) places, ascending
    n = len(z)
    if k >= n:
        return np.arange(n)
    kth = np.partition(z, n - k)[n - k]
    above = np.flatnonzero(z > kth)
    return np.sort(np.concatenate([above, np.flatnonzero(z == kth)[: k - len(above)]]))


def _nucleus(z: np.ndarray, weights: np.ndarray, p: float) -> np.ndarray:  # (n,) each -> (m,) places, ascending
    """The fewest of the largest whose weights reach p of the sum."""
    target, k = p * weights.sum(), FEW
    while k < len(z) and weights[_largest(z, k)].sum() < target:
        k *= 8
    few = _largest(z, k)
    ranked = few[np.argsort(-z[few], kind="stable")]  # stable: equal logits keep the order of their ids
    before = weights[ranked].cumsum()[:-1]
    return np.sort(ranked[: 1 + int((before < target).sum())])


def _penalized(z: np.ndarray, history: Sequence[int], r: float) -> np.ndarray:  # (V,)
    if r == 1:
        return z
    seen = np.array(history, dtype=np.int64)
    seen = seen[seen < len(z)]  # a prompt may have ids that are never drawn
    z = z.astype(np.float64)  # a copy
    z[seen] = np.where(z[seen] > 0, z[seen] / r, z[seen] * r)
    return z


def _raise_if_unusable(z: np.ndarray) -> None:  # (V,)
    """-inf excludes a token; any other value that is not finite is an error."""
    bad = np.flatnonzero(np.isnan(z) | np.isposinf(z))
    if len(bad):
        raise NonFiniteError(f"logit of token {bad[0]} is {z[bad[0]]}; cannot sample")
    if np.isneginf(z).all():
        raise NonFiniteError("every logit is -inf; cannot sample")
