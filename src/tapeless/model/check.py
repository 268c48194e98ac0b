"""Checks of a model's inputs before anything is computed: an invalid id is an error with its position, never clamped."""

import torch
from torch import Tensor

from tapeless.errors import InputError
from tapeless.ops.cross_entropy import IGNORED


def _check_ids(what: str, ids: Tensor, device: torch.device) -> None:
    if ids.dtype != torch.int64:
        raise InputError(f"{what} must be int64, got {str(ids.dtype).removeprefix('torch.')}; convert with .long()")
    if ids.dim() != 2:
        raise InputError(f"{what} must have the shape (batch, time), got {tuple(ids.shape)}")
    if ids.numel() == 0:
        raise InputError(f"{what} are an empty batch of shape {tuple(ids.shape)}")
    if ids.device.type != device.type:
        raise InputError(f"{what} are on {ids.device}, the model is on {device}")


def _check_range(what: str, ids: Tensor, vocab_size: int, ignored: int = 0) -> None:
    """ignored: an id that is allowed besides those of the vocabulary."""
    low, high = torch.stack(ids.aminmax()).tolist()  # one pass, and most batches need no other
    if low >= 0 and high < vocab_size:
        return
    bad = ((ids < 0) | (ids >= vocab_size)) & (ids != ignored)
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise InputError(
            f"{what} [{row}, {column}] is {ids[row, column].item()}, "
            f"outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
        )


def _check_same_shape(what: str, x: Tensor, tokens: Tensor) -> None:
    if x.shape != tokens.shape:
        raise InputError(f"{what} have the shape {tuple(x.shape)}, tokens {tuple(tokens.shape)}; they must be equal")


def check_shapes(tokens: Tensor, targets: Tensor) -> None:
    """Checks that do not read values."""
    _check_ids("tokens", tokens, tokens.device)
    _check_ids("targets", targets, targets.device)
    _check_same_shape("targets", targets, tokens)


def check_tokens(tokens: Tensor, vocab_size: int, device: torch.device) -> None:
    _check_ids("tokens", tokens, device)
    _check_range("token", tokens, vocab_size)


def check_targets(targets: Tensor, tokens: Tensor, vocab_size: int) -> None:
    _check_ids("targets", targets, tokens.device)
    _check_same_shape("targets", targets, tokens)
    _check_range("target", targets, vocab_size, IGNORED)


def check_documents(documents: Tensor, tokens: Tensor) -> None:
    _check_ids("documents", documents, tokens.device)
    _check_same_shape("documents", documents, tokens)


def check_num_targets(num_targets: int | Tensor | None) -> None:
    if num_targets is not None and (type(num_targets) is not int or num_targets < 1):
        raise InputError(f"num_targets must be a whole number of at least 1, got {num_targets}")


def check_upstream(dlogits: Tensor, shape: torch.Size | None, dtype: torch.dtype) -> None:
    if dlogits.shape != shape or dlogits.dtype != dtype:
        raise InputError(
            f"dlogits must be like the logits, {tuple(shape or ())} {dtype}, got {tuple(dlogits.shape)} {dlogits.dtype}"
        )
