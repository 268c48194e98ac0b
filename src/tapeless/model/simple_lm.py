"""SimpleLM: embedding, LayerNorm, linear, GELU, linear. No attention: the next token from the last one alone.

It validates everything around a model (data, loss, optimizer, sampling) with the simplest possible model, and is an example
of a Chain."""

from typing import Any

import torch
from torch import Tensor

from tapeless.config import SimpleLMConfig
from tapeless.errors import ConfigError, OrderError
from tapeless.generate.text import Generates
from tapeless.model.chain import Chain, Layer, layer
from tapeless.model.check import check_num_targets, check_targets, check_tokens, check_upstream
from tapeless.model.params import Parametrized, ParamSpec
from tapeless.ops.cross_entropy import CROSS_ENTROPY
from tapeless.ops.embed import EMBED
from tapeless.ops.layer_norm import LAYER_NORM
from tapeless.ops.linear import LINEAR
from tapeless.ops.pointwise import GELU
from tapeless.ops.reference import REFERENCE


def layers(config: SimpleLMConfig) -> list[Layer]:
    V, C, F = config.vocab_size, config.hidden_dim, config.intermediate_dim
    return [
        layer("embed", EMBED, w=(V, C)),
        layer("norm", LAYER_NORM, w=(C,), b=(C,), eps=config.norm_eps),
        layer("hidden", LINEAR, w=(F, C), b=(F,)),
        layer("gelu", GELU),
        layer("head", LINEAR, w=(V, F), b=None),
    ]


def simple_lm_specs(config: SimpleLMConfig) -> list[ParamSpec]:
    return [spec for part in layers(config) for spec in part.specs()]


class SimpleLM(Parametrized, Generates):
    __doc__ = __doc__

    def __init__(
        self,
        config: SimpleLMConfig,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
        initialized: bool = True,
    ):
        """config: its shape. seed: of the initial weights. device, dtype: where and in what it computes; float32, float64 or
        bfloat16. initialized: False leaves the parameters zero, for a caller who writes them all."""
        if dtype == "fp8":
            raise ConfigError("fp8 is for transformer blocks, and SimpleLM has none; use --dtype bfloat16")
        self.config, self.seed, self.dtype, self.device = config, seed, dtype, torch.device(device)
        self.ops = REFERENCE  # whose ops the chain below names one by one
        self.chain = Chain(*layers(config), seed=seed, device=device, dtype=dtype, initialized=initialized)
        self.store = self.chain.store
        self._saved: tuple[torch.Size, Any, int | None] | None = None  # shape of the logits, and of a loss what it saved

    def forward(
        self,
        tokens: Tensor,  # (B, T) int64
        targets: Tensor,  # (B, T) int64; -100 is ignored
        *,
        num_targets: int | None = None,
        step: int | None = None,
        first_sample: int = 0,
        check: bool = True,
    ) -> Tensor:  # loss ()
        """The loss; saves what backward needs. step and first_sample are part of every model's interface; nothing here is
        random. check: False reads no values; the caller is then responsible for valid ids."""
        self._saved = None
        if check:
            check_num_targets(num_targets)
            check_tokens(tokens, self.config.vocab_size, self.device)
            check_targets(targets, tokens, self.config.vocab_size)
        logits = self.logits(tokens, keep=True, check=check)
        loss, saved = CROSS_ENTROPY.forward(logits, targets, num_targets=num_targets)
        self._saved = (logits.shape, saved, num_targets)
        return loss

    def forward_backward(
        self,
        tokens: Tensor,  # (B, T) int64
        targets: Tensor,  # (B, T) int64; -100 is ignored
        accumulate: bool = True,
        **options: Any,
    ) -> Tensor:  # loss ()
        """accumulate: False replaces whatever the gradients held."""
        if not accumulate:
            self.zero_grads()
        loss = self.forward(tokens, targets, **options)
        self.backward()
        return loss

    def backward(
        self,
        dlogits: Tensor | None = None,  # (B, T, V)
    ) -> None:
        """Accumulate the gradient of the last forward's loss, or of <dlogits, logits>, into `grads`."""
        if self._saved is None:
            raise OrderError("backward without a forward: call forward(tokens, targets) or logits(tokens, keep=True) first")
        shape, saved, num_targets = self._saved
        if (dlogits is None) == (saved is None):
            raise OrderError("backward() follows forward(tokens, targets); backward(dlogits) follows logits(tokens, keep=True)")
        if dlogits is None:
            dlogits = CROSS_ENTROPY.backward(1.0, saved, num_targets=num_targets)
        check_upstream(dlogits, shape, self.store.compute_flat.dtype)
        self.chain.backward(dlogits)
        self._saved = None

    def loss(self, tokens: Tensor, targets: Tensor, *, num_targets: int | None = None, check: bool = True) -> Tensor:  # ()
        """The loss for evaluation: saves nothing. check: see forward."""
        if check:
            check_num_targets(num_targets)
            check_tokens(tokens, self.config.vocab_size, self.device)
            check_targets(targets, tokens, self.config.vocab_size)
        return CROSS_ENTROPY.forward(self.logits(tokens, check=check), targets, num_targets=num_targets)[0]

    def logits(self, tokens: Tensor, *, keep: bool = False, check: bool = True) -> Tensor:  # (B, T, V)
        """Logits of every position. keep: save activations, so that backward(dlogits) may follow. check: see forward."""
        if keep:
            self._saved = None
        if check:
            check_tokens(tokens, self.config.vocab_size, self.device)
        logits = self.chain.forward(tokens, keep=keep)
        if check and not torch.isfinite(logits).all():
            self.store.raise_if_non_finite()
        if keep:
            self._saved = (logits.shape, None, None)
        return logits
