"""The transformer: forward, and backward as its mirror image.

    embed -> positions -> dropout -> block 0 … block L-1 -> final norm -> head and loss
What forward keeps is a plain record; backward takes the blocks' parts from it one by one, last first, and each is freed as
soon as it is used. Training, evaluation and decoding all go through `_trunk`.
Tested by: tests/model/test_transformer_grads.py, tests/model/test_against_hf.py, tests/model/test_errors.py."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import Lora, ModelConfig, nearest
from tapeless.errors import ConfigError, InputError, OrderError
from tapeless.kernels.choose import choose
from tapeless.model.block import BlockSaved, block_backward, block_forward
from tapeless.model.check import check_documents, check_num_targets, check_targets, check_tokens, check_upstream
from tapeless.model.decode import KVCache
from tapeless.model.init import initialize
from tapeless.model.params import ParamStore, count_params, transformer_specs
from tapeless.model.repeat import Repeats
from tapeless.model.sublayers import RECOMPUTE, Call, Dropout, drop_backward, drop_forward
from tapeless.model.trained import layouts
from tapeless.model.views import TransformerParams, product_names, structured
from tapeless.ops.cross_entropy import valid_targets
from tapeless.ops.op import OpSet, loss_with_gradient
from tapeless.ops.positions import POSITIONS
from tapeless.ops.softcap import SOFTCAP


class Kept(NamedTuple):
    """What a forward leaves for its backward."""

    call: Call
    version: int  # of the parameters
    inputs: tuple[tuple[Tensor, int], ...]  # the caller's tensors that backward reads again, and their versions
    embed: Any
    blocks: list[BlockSaved]  # backward pops from the end
    final_norm: Any
    head: Any  # of the loss, or of the head's product where logits were asked for
    softcap: Any
    loss_options: dict[str, Any] | None  # None: the forward ended at the logits
    logits_shape: torch.Size | None  # then their shape


def counted(*inputs: Tensor | None) -> tuple[tuple[Tensor, int], ...]:
    """Tensors with torch's count of the writes into them; those made under inference_mode have none."""
    return tuple((x, x._version) for x in inputs if x is not None and not x.is_inference())


def summed(x: Tensor) -> Tensor:  # ()
    return x.sum(dtype=torch.promote_types(x.dtype, torch.float32))


class Transformer:
    """A decoder-only transformer with explicit gradients.

    loss = model.forward(tokens, targets); model.backward(); then read or use model.grads, a mapping by name.
    A model keeps what a forward saved and reuses its buffers, so it is for one thread of Python at a time."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
        ops: str = "auto",
        recompute: str = "none",
        initialized: bool = True,
        freeze: str = "",
        lora: Lora | None = None,
    ):
        """initialized: False leaves the parameters zero, for a caller who writes them all. freeze, lora: what does not train,
        and has no gradient (trained.py)."""
        if not isinstance(config, ModelConfig):
            raise ConfigError(f"a Transformer takes a ModelConfig, got {type(config).__name__}; build_model takes any kind")
        if recompute not in RECOMPUTE:
            raise ConfigError(f"unknown recompute policy {recompute!r}; {nearest(recompute, RECOMPUTE)}")
        self.config, self.seed, self.dtype, self.recompute = config, seed, dtype, recompute
        if lora and dtype == "fp8":
            raise ConfigError("adapters of a low rank are too narrow for products of eight bits; lora with --dtype bfloat16")
        self.device, self.freeze, self.lora = torch.device(device), freeze, lora
        self.ops, self.ops_reason = choose(ops, self.device, dtype)
        layout, trained = layouts(transformer_specs(config), freeze, lora)
        self.store = ParamStore(layout, self.device, dtype, trained=trained)
        if initialized:
            initialize(self.store, config.init, config.num_layers, seed)
        self._p = structured(config, self.store.layout, self.store.compute_flat)
        make_decoder = None if lora else self.ops.decoder  # which knows of no adapters; merged, it is a model without them
        self._decode = make_decoder and make_decoder(config, self.store.layout.spans, self.store.compute_flat)
        self._kept: Kept | None = None
        self._repeats = Repeats()

    @cached_property
    def _g(self) -> TransformerParams:
        return structured(self.config, self.store.trained, self.store.flat_grads)

    @cached_property
    def _grad_parts(self) -> dict[str, Tensor]:
        """What `on_grads_ready` is handed, one after the other."""
        return self.store.trained.parts(self.store.flat_grads)

    @cached_property
    def lowest(self) -> int:
        """The first block that backward has to reach: nothing below it trains. 0 where an embedding does."""
        parts = self.store.trained.parts(self.store.flat)
        blocks = [i for i in range(self.config.num_layers) if f"blocks.{i}" in parts]
        return 0 if "embed" in parts else min(blocks, default=self.config.num_layers)

    @cached_property
    def _summed_grads(self) -> list[Tensor]:
        """The stretches of the gradients that do not begin as a product."""
        return self.store.trained.all_but(self.store.flat_grads, product_names(self.store.trained, self.config))

    @property
    def params(self) -> Mapping[str, Tensor]:
        return self.store.params

    @property
    def grads(self) -> Mapping[str, Tensor]:
        return self.store.grads

    @property
    def num_params(self) -> int:
        return count_params(self.store.layout.specs.values())

    def zero_grads(self) -> None:
        self.store.flat_grads.zero_()

    def _fresh_grads(self) -> OpSet:
        """Zero the gradients that are sums, and return the ops that write the others, the products', without reading them."""
        if self.ops.non_accumulating is None:
            self.zero_grads()
            return self.ops
        for stretch in self._summed_grads:
            stretch.zero_()
        return self.ops.non_accumulating

    def forward(
        self,
        tokens: Tensor,  # (B, T) int64
        targets: Tensor,  # (B, T) int64; -100 is ignored
        *,
        num_targets: int | None = None,
        step: int | None = None,
        first_sample: int = 0,
        documents: Tensor | None = None,  # (B, T) int64
    ) -> Tensor:  # loss ()
        """The loss, and everything backward needs.

        num_targets: what the sum is divided by; the valid targets of all micro-batches and ranks together, by default of
        this batch. step and first_sample (the global index of the first row) drive dropout. documents: attention stays
        within positions of equal value."""
        self._kept = None  # whatever goes wrong from here on, backward must not take an older forward for this one
        self._check(tokens, targets, documents)
        check_num_targets(num_targets)
        n, kept = self._trunk(tokens, self._call(documents, self._dropout(step, first_sample)), keep=True)
        options = self._loss_options(num_targets)
        loss, head = self.ops.linear_cross_entropy.forward(n, targets, self._p.head, **options)
        self._finite(n)  # with every target ignored, the loss alone would not show it
        self._finite(loss)
        self._kept = kept._replace(head=head, loss_options=options, inputs=counted(tokens, targets, documents))
        return loss

    def forward_backward(
        self,
        tokens: Tensor,  # (B, T) int64
        targets: Tensor,  # (B, T) int64; -100 is ignored
        *,
        num_targets: int | Tensor | None = None,
        step: int | None = None,
        first_sample: int = 0,
        documents: Tensor | None = None,  # (B, T) int64
        on_grads_ready: Callable[[Tensor], None] | None = None,
        fresh: bool = False,
        check: bool = True,
    ) -> Tensor:  # loss ()
        """forward and then backward, as one call: a kernel can then make the head's gradient while its logits are there.
        After an error, such as a parameter that is not finite, the gradients may hold this batch's or a part of them. Passes
        that differ in their tokens alone may be repeated from a recording (repeat.py).

        fresh: the gradients are this batch's alone, whatever they held: most need not be zeroed then, but are written.
        check: False leaves out every look at values, so that nothing waits for the device and the call can be captured in a
        graph; num_targets may then be a number on the device. Who calls it so answers for the ids and for finite numbers."""
        self._kept = None
        if check:
            self._check(tokens, targets, documents)
            check_num_targets(num_targets)
        elif self.ops.begin is not None:
            self.ops.begin()
        call = self._call(documents, self._dropout(step, first_sample))
        # Nothing but tokens and targets may differ between two passes; and in inference mode torch's dispatcher shows less.
        alike = on_grads_ready is None and documents is None and call.dropout is None and not torch.is_inference_mode_enabled()
        repeatable = alike and self.ops.record is not None
        if repeatable:
            num_targets = int(num_targets or valid_targets(targets))

        def run(tokens: Tensor, targets: Tensor) -> tuple[Tensor, ...]:  # loss (), and to be checked, a sum ()
            return self._forward_backward(tokens, targets, call, num_targets, on_grads_ready, fresh, check)

        if repeatable:
            same = num_targets, fresh, check, self.recompute
            loss, *looked_at = self._repeats.run(self.ops, self.store.refresh, run, tokens, targets, *same)
        else:
            loss, *looked_at = run(tokens, targets)
        for number in (*looked_at, loss) if check else ():
            self._finite(number)
        return loss

    def _forward_backward(
        self,
        tokens: Tensor,  # (B, T) int64
        targets: Tensor,  # (B, T) int64
        call: Call,
        num_targets: int | Tensor | None,
        on_grads_ready: Callable[[Tensor], None] | None,
        fresh: bool,
        check: bool,
    ) -> tuple[Tensor, ...]:  # loss (), and to be checked, the sum () of what the head reads
        n, kept = self._trunk(tokens, call, keep=True)
        if fresh:
            kept = kept._replace(call=call._replace(ops=self._fresh_grads()))
        total = (summed(n),) if check else ()  # with every target ignored, the loss alone would not show a bad number
        assert self._p.head is not None
        options = self._loss_options(num_targets)
        loss, dn = loss_with_gradient(kept.call.ops.linear_cross_entropy, n, targets, self._p.head, self._g.head, **options)
        del n
        self._trunk_backward(dn, kept, on_grads_ready)
        return loss, *total

    def loss(
        self,
        tokens: Tensor,  # (B, T) int64
        targets: Tensor,  # (B, T) int64; -100 is ignored
        *,
        num_targets: int | None = None,
        documents: Tensor | None = None,  # (B, T) int64
        check: bool = True,
    ) -> Tensor:  # ()
        """The loss for evaluation: nothing is kept, nothing is dropped out. check: as of forward_backward."""
        if check:
            self._check(tokens, targets, documents)
            check_num_targets(num_targets)
        n, _ = self._trunk(tokens, self._call(documents), keep=False)
        loss, _ = self.ops.linear_cross_entropy.forward(n, targets, self._p.head, **self._loss_options(num_targets))
        if check:
            self._finite(loss)
        return loss

    def logits(
        self,
        tokens: Tensor,  # (B, T) int64
        *,
        keep: bool = False,
        kv_cache: KVCache | None = None,
        documents: Tensor | None = None,  # (B, T) int64
    ) -> Tensor:  # (B, T, V)
        """Logits of every position. keep: backward(dlogits) may follow. kv_cache: tokens continue those it holds."""
        if keep:
            self._kept = None
        self._check(tokens, None, documents)
        if kv_cache is not None:
            if keep or documents is not None:
                raise InputError("logits with a kv_cache cannot be kept for backward, nor be given documents")
            kv_cache.expect(*tokens.shape)
        head = softcap = kept = None
        if kv_cache is not None and tokens.shape[1] == 1 and self._decode is not None:
            self.store.refresh(only_if_counted=True)
            logits = self._decode(tokens, kv_cache)
        else:
            n, kept = self._trunk(tokens, self._call(documents, kv_cache=kv_cache), keep)
            logits, head = self.ops.linear.forward(n, self._p.head, None)
        if self.config.logit_softcap:
            logits, softcap = SOFTCAP.forward(logits, cap=self.config.logit_softcap)
        self._finite(logits)
        if kept is not None and keep:
            self._kept = kept._replace(head=head, softcap=softcap, logits_shape=logits.shape, inputs=counted(tokens, documents))
        if kv_cache is not None:
            kv_cache.length += tokens.shape[1]
        return logits

    def kv_cache(self, batch_size: int, capacity: int) -> KVCache:
        return KVCache(self.config, batch_size, capacity, self.device, self.store.compute_flat.dtype)

    def backward(
        self,
        dlogits: Tensor | None = None,  # (B, T, V)
        *,
        on_grads_ready: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Accumulate the gradient of the last forward's loss, or of <dlogits, logits>, into `grads`.

        on_grads_ready is handed each stretch of the flat gradients as soon as it is complete, the head's first, then block
        by block, the embedding's last: what a reduction over ranks may start on."""
        kept = self._kept
        if kept is None:
            raise OrderError(
                "backward without a forward: call forward(tokens, targets), or logits(tokens, keep=True), before each"
            )
        if (dlogits is None) == (kept.loss_options is None):
            raise OrderError("backward() follows forward(tokens, targets); backward(dlogits) follows logits(tokens, keep=True)")
        if dlogits is not None:
            check_upstream(dlogits, kept.logits_shape, self.store.compute_flat.dtype)
        self.store.expect_version(kept.version)
        if any(x._version != version for x, version in kept.inputs):
            raise OrderError("tokens, targets or documents were written between forward and backward; run forward again")
        self._kept = None
        self._trunk_backward(self._head_backward(dlogits, kept), kept, on_grads_ready)

    def _trunk_backward(self, dn: Tensor, kept: Kept, on_grads_ready: Callable[[Tensor], None] | None) -> None:
        """The mirror image of `_trunk`, from the gradient of its output on: dn (B, T, C)."""
        p, g, call, c = self._p, self._g, kept.call, self.config

        def ready(part: str) -> None:
            if on_grads_ready is not None and part in self._grad_parts:
                on_grads_ready(self._grad_parts[part])

        dx = call.ops.add_norm[c.norm].backward(None, dn, kept.final_norm, *p.final_norm, *g.final_norm)
        ready("head")
        for i in reversed(range(self.lowest, c.num_layers)):
            dx = block_backward(dx, kept.blocks.pop(), p.blocks[i], g.blocks[i], call, i)  # mutant: block-backward
            ready(f"blocks.{i}")
        if "embed" not in self._grad_parts:
            return
        dx = drop_backward(dx, call, "embed")  # mutant: embed-dropout
        if p.positions is not None:
            dx = POSITIONS.backward(dx, None, p.positions, g.positions)
        call.ops.embed.backward(dx, kept.embed, p.embed, g.embed)  # mutant: embed-backward
        ready("embed")

    def _trunk(self, tokens: Tensor, call: Call, keep: bool) -> tuple[Tensor, Kept]:  # n (B, T, C)
        """Everything before the head."""
        self.store.refresh(only_if_counted=call.offset > 0)
        p, c = self._p, self.config
        x, embed = self.ops.embed.forward(tokens, p.embed)
        if p.positions is not None:
            x, _ = POSITIONS.forward(x, p.positions, offset=call.offset)
        x, delta = drop_forward(x, call, "embed"), None
        blocks = []
        for i in range(c.num_layers):
            x, delta, saved = block_forward(x, delta, p.blocks[i], call, i)
            if keep and i >= self.lowest:
                blocks.append(saved)
        _, n, final_norm = self.ops.add_norm[c.norm].forward(x, delta, *p.final_norm, eps=c.norm_eps)
        return n, Kept(call, self.store.version, (), embed, blocks, final_norm, None, None, None, None)

    def _head_backward(self, dlogits: Tensor | None, kept: Kept) -> Tensor:  # dn (B, T, C)
        p, g = self._p, self._g  # mutant: head-backward
        if kept.loss_options is not None:
            return self.ops.linear_cross_entropy.backward(1.0, kept.head, p.head, g.head, **kept.loss_options)
        if kept.softcap is not None:  # mutant: softcap-backward
            dlogits = SOFTCAP.backward(dlogits, kept.softcap, cap=self.config.logit_softcap)
        return self.ops.linear.backward(dlogits, kept.head, p.head, None, g.head, None)

    def _loss_options(self, num_targets: int | Tensor | None) -> dict[str, Any]:
        c = self.config
        return {
            "num_targets": num_targets,
            "label_smoothing": c.label_smoothing,
            "z_loss": c.z_loss,
            "softcap": c.logit_softcap,
        }

    def _call(self, documents: Tensor | None, dropout: Dropout | None = None, kv_cache: KVCache | None = None) -> Call:
        scale = self.lora.scale if self.lora else 1.0
        return Call(self.config, self.ops, self.recompute, documents, dropout, kv_cache, scale)

    def _dropout(self, step: int | None, first_sample: int) -> Dropout | None:
        if self.config.dropout == 0:
            return None
        if step is None:
            raise InputError("this model has dropout, whose masks depend on the step: pass step=; to evaluate, use loss()")
        return Dropout(self.config.dropout, self.seed, step, first_sample)

    def _check(self, tokens: Tensor, targets: Tensor | None, documents: Tensor | None) -> None:
        if self.ops.begin is not None:
            self.ops.begin()
        check_tokens(tokens, self.config.vocab_size, self.device)
        if targets is not None:
            check_targets(targets, tokens, self.config.vocab_size)
        if documents is not None:
            check_documents(documents, tokens)

    def _finite(self, result: Tensor) -> None:
        """Bad weights are named where they show; a bad result of good weights is the caller's to judge."""
        if not torch.isfinite(summed(result)):  # one pass, one number
            self.store.raise_if_non_finite()
