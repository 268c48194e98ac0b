"""The transformer: forward, and backward as its mirror image.

    embed -> positions -> dropout -> block 0 … block L-1 -> final norm -> head and loss
Forward keeps a plain record of saved activations; backward pops the blocks' parts from it, last first, and each is freed as
soon as it is used. Training, evaluation and decoding all go through `_trunk`.
Tested by: tests/model/test_transformer_grads.py, tests/model/test_against_hf.py, tests/model/test_errors.py."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.config import Lora, ModelConfig, nearest
from tapeless.errors import ConfigError, InputError, OrderError
from tapeless.generate.text import Generates
from tapeless.kernels.choose import choose
from tapeless.model.block import (
    BlockSaved,
    BranchParams,
    Params,
    build_blocks,
    drop_backward,
    drop_forward,
    norm_specs,
    norm_views,
)
from tapeless.model.cache import KVCache
from tapeless.model.check import check_documents, check_num_targets, check_targets, check_tokens, check_upstream
from tapeless.model.init import initialize
from tapeless.model.params import FlatLayout, Parametrized, ParamSpec, ParamStore
from tapeless.model.replay import CapturedPasses
from tapeless.model.sublayer import RECOMPUTE, Context, Dropout, Sublayer
from tapeless.model.trained import layouts
from tapeless.ops.cross_entropy import valid_targets
from tapeless.ops.op import OpSet, loss_with_gradient
from tapeless.ops.positions import POSITIONS
from tapeless.ops.softcap import SOFTCAP


class TransformerParams(NamedTuple):
    """The parameters as views of the flat buffer, or their gradients; None: absent or frozen."""

    embed: Tensor | None  # (V, C)
    positions: Tensor | None  # (Tmax, C)
    blocks: list[list[BranchParams]]
    final_norm: Params
    head: Tensor | None  # (V, C); of a tied model the embedding, whose gradient then collects both contributions


class SavedActivations(NamedTuple):
    """What a forward keeps for its backward."""

    ctx: Context
    version: int  # of the parameters
    inputs: tuple[tuple[Tensor, int], ...]  # the caller's tensors that backward reads again, and their versions
    embed: Any
    blocks: list[BlockSaved]  # backward pops from the end
    final_norm: Any
    head: Any = None  # of the loss, or of the head's matmul if logits were asked for
    softcap: Any = None
    loss_options: dict[str, Any] | None = None  # None: the forward ended at the logits
    logits_shape: torch.Size | None = None  # their shape in that case


def transformer_specs(config: ModelConfig) -> list[ParamSpec]:
    """All parameters, in the order of the flat buffer."""
    V, C = config.vocab_size, config.hidden_dim
    specs = [ParamSpec("embed.w", (V, C), "embedding", True, 0, is_linear=config.tie_embeddings)]
    if config.position == "learned":
        specs.append(ParamSpec("pos.w", (config.max_seq_len, C), "embedding", True, None))
    for block in build_blocks(config):
        specs += block.specs()
    specs += norm_specs(config, "final_norm")
    return specs if config.tie_embeddings else [*specs, ParamSpec("head.w", (V, C), "linear", True, 0, is_linear=True)]


def with_versions(*inputs: Tensor | None) -> tuple[tuple[Tensor, int], ...]:
    """Tensors with torch's count of writes into them; those made under inference_mode have none."""
    return tuple((x, x._version) for x in inputs if x is not None and not x.is_inference())


def sum_of(x: Tensor) -> Tensor:  # ()
    return x.sum(dtype=torch.promote_types(x.dtype, torch.float32))


class Transformer(Parametrized, Generates):
    """A decoder-only transformer with explicit gradients.

    loss = model.forward(tokens, targets); model.backward(); then read or use model.grads, a mapping by name.
    A model holds saved activations and reuses its buffers, so only one Python thread may use it at a time."""

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
        """config: its shape. seed: of the initial weights. device, dtype: where and in what it computes; float32, float64,
        bfloat16 or fp8, the last two with float32 master weights. ops: the op set: auto, reference, cpu, triton, or a
        registered one. recompute: none, cheap or full, what backward computes again to save memory. initialized: False leaves
        the parameters zero, for a caller who writes them all. freeze, lora: which parameters are frozen and have no gradient
        (trained.py)."""
        if not isinstance(config, ModelConfig):
            raise ConfigError(f"a Transformer takes a ModelConfig, got {type(config).__name__}; build_model takes any kind")
        if recompute not in RECOMPUTE:
            raise ConfigError(f"unknown recompute policy {recompute!r}; {nearest(recompute, RECOMPUTE)}")
        self.config, self.seed, self.dtype, self.recompute = config, seed, dtype, recompute
        if lora and dtype == "fp8":
            raise ConfigError("LoRA adapters are too narrow for 8-bit matmuls; use lora with --dtype bfloat16")
        self.device, self.freeze, self.lora = torch.device(device), freeze, lora
        self.ops, self.ops_reason = choose(ops, self.device, dtype)
        self.blocks = build_blocks(config)
        layout, trained = layouts(transformer_specs(config), freeze, lora)
        self.store = ParamStore(layout, self.device, dtype, trained=trained)
        if initialized:
            initialize(self.store, config.init, config.num_layers, seed)
        self._p = self._views(self.store.layout, self.store.compute_flat)
        make_decoder = None if lora else self.ops.decoder  # it does not know adapters; a merged model has none
        self._decode = make_decoder and make_decoder(config, self.store.layout.spans, self.store.compute_flat)
        self._saved: SavedActivations | None = None
        self._captured, self._captured_losses = CapturedPasses(), CapturedPasses(1)

    @cached_property
    def _g(self) -> TransformerParams:
        return self._views(self.store.trained, self.store.flat_grads)

    def _views(self, layout: FlatLayout, flat: Tensor) -> TransformerParams:
        return TransformerParams(
            embed=layout.view(flat, "embed.w"),
            positions=layout.view(flat, "pos.w"),
            blocks=[block.views(layout, flat) for block in self.blocks],
            final_norm=norm_views(self.config, layout, flat, "final_norm"),
            head=layout.view(flat, "embed.w" if self.config.tie_embeddings else "head.w"),
        )

    @property
    def _captures(self) -> bool:
        """Whether single passes are captured. Not on a GPU: their graphs would hold activations besides those of the captured
        step."""
        return self.ops.capture is not None and self.device.type != "cuda"

    @cached_property
    def _grad_parts(self) -> dict[str, Tensor]:
        """What `on_grads_ready` receives, one after the other."""
        return self.store.trained.parts(self.store.flat_grads)

    @cached_property
    def first_trainable_block(self) -> int:
        """Backward stops there: nothing below it trains. 0 if an embedding trains."""
        parts = self.store.trained.parts(self.store.flat)
        blocks = [i for i in range(self.config.num_layers) if f"blocks.{i}" in parts]
        return 0 if "embed" in parts else min(blocks, default=self.config.num_layers)

    @cached_property
    def _accumulated_grads(self) -> list[Tensor]:
        """The spans of the gradients that no matmul writes whole, and that must be zeroed."""
        linear = {name for name, spec in self.store.trained.specs.items() if spec.is_linear}
        return self.store.trained.all_but(self.store.flat_grads, linear)

    def sublayer(self, name: str) -> Sublayer:
        """By its name, such as blocks.0.attn."""
        return next(s for block in self.blocks for s in block.sublayers if s.name == name)

    def _start_grads(self) -> OpSet:
        """Zero the gradients that are accumulated into, and return the ops that write the others without reading them."""
        if self.ops.non_accumulating is None:
            self.zero_grads()
            return self.ops
        for span in self._accumulated_grads:
            span.zero_()
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
        check: bool = True,
    ) -> Tensor:  # loss ()
        """The loss; saves the activations that backward needs.

        num_targets: the divisor of the summed loss; the valid targets of all micro-batches and ranks together, by default of
        this batch. step and first_sample (the global index of the first row) determine dropout. documents: attention stays
        within positions of equal value. check: see forward_backward."""
        self._saved = None  # after an error, backward must not use an older forward
        if check:
            self._check(tokens, targets, documents)
            check_num_targets(num_targets)
        n, saved = self._trunk(tokens, self._context(documents, self._dropout(step, first_sample)), keep=True)
        options = self._loss_options(num_targets)
        loss, head = self.ops.linear_cross_entropy.forward(n, targets, self._p.head, **options)
        if check:
            self._finite(n)  # if every target is ignored, the loss alone does not show it
            self._finite(loss)
        self._saved = saved._replace(head=head, loss_options=options, inputs=with_versions(tokens, targets, documents))
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
        accumulate: bool = True,
        check: bool = True,
    ) -> Tensor:  # loss ()
        """forward and backward in one call, so that a kernel can compute the head's gradient while it has the logits. After an
        error, such as a parameter that is not finite, the gradients may be incomplete. On the CPU, passes that differ only in
        their tokens are captured and replayed (replay.py).

        accumulate: False replaces whatever the gradients held, which is faster than zeroing and adding.
        check: False reads no values, so that nothing waits for the device and the call can be captured in a CUDA graph;
        num_targets may then be a tensor on the device. The caller is then responsible for valid ids and finite numbers."""
        self._saved = None
        if check:
            self._check(tokens, targets, documents)
            check_num_targets(num_targets)
        elif self.ops.begin is not None:
            self.ops.begin()
        ctx = self._context(documents, self._dropout(step, first_sample))
        # Only tokens and targets may differ between captured passes. A num_targets on the device is part of a captured step.
        varies = on_grads_ready is not None or documents is not None or ctx.dropout is not None
        capturable = self._captures and not varies and not isinstance(num_targets, Tensor)
        if capturable:
            num_targets = num_targets or valid_targets(targets)

        def run(tokens: Tensor, targets: Tensor) -> tuple[Tensor, ...]:  # loss (), and a sum () to check
            return self._forward_backward(tokens, targets, ctx, num_targets, on_grads_ready, accumulate, check)

        if capturable:
            key = num_targets, accumulate, check, self.recompute
            loss, *sums = self._captured.run(self.ops, self.store.refresh, run, (tokens, targets), *key)
        else:
            loss, *sums = run(tokens, targets)
        for number in (*sums, loss) if check else ():
            self._finite(number)
        return loss

    def _forward_backward(
        self,
        tokens: Tensor,  # (B, T) int64
        targets: Tensor,  # (B, T) int64
        ctx: Context,
        num_targets: int | Tensor | None,
        on_grads_ready: Callable[[Tensor], None] | None,
        accumulate: bool,
        check: bool,
    ) -> tuple[Tensor, ...]:  # loss (), and if it is to be checked, the sum () of the head's input
        n, saved = self._trunk(tokens, ctx, keep=True)
        if not accumulate:
            saved = saved._replace(ctx=ctx._replace(ops=self._start_grads()))
        total = (sum_of(n),) if check else ()  # if every target is ignored, the loss alone does not show a bad number
        assert self._p.head is not None
        options = self._loss_options(num_targets)
        loss, dn = loss_with_gradient(saved.ctx.ops.linear_cross_entropy, n, targets, self._p.head, self._g.head, **options)
        del n
        self._trunk_backward(dn, saved, on_grads_ready)
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
        """The loss for evaluation: saves nothing, applies no dropout. check: see forward_backward. Captured and replayed on a
        CPU if num_targets is given."""
        if check:
            self._check(tokens, targets, documents)
            check_num_targets(num_targets)
        elif self.ops.begin is not None:
            self.ops.begin()

        def run(tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> tuple[Tensor]:
            n, _ = self._trunk(tokens, self._context(documents), keep=False)
            return (self.ops.linear_cross_entropy.forward(n, targets, self._p.head, **self._loss_options(num_targets))[0],)

        batch = (tokens, targets) if documents is None else (tokens, targets, documents)
        if self._captures and num_targets is not None:
            (loss,) = self._captured_losses.run(self.ops, self.store.refresh, run, batch, num_targets)
        else:
            (loss,) = run(*batch)
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
        last: bool = False,
    ) -> Tensor:  # (B, T, V), or (B, 1, V) with last
        """Logits of every position. keep: save activations, so that backward(dlogits) may follow. kv_cache: tokens continue
        those it holds. last: of the last position only."""
        if keep:
            self._saved = None
        self._check(tokens, None, documents)
        if kv_cache is not None:
            if keep or documents is not None:
                raise InputError("logits with a kv_cache cannot be differentiated, and takes no documents")
            kv_cache.expect(*tokens.shape)
        elif keep and last:
            raise InputError("logits of the last position cannot be differentiated")
        n, saved = self._trunk(tokens, self._context(documents, kv_cache=kv_cache), keep)
        logits, head = self.ops.linear.forward(n[:, -1:] if last else n, self._p.head, None)
        softcap = None
        if self.config.logit_softcap:
            logits, softcap = SOFTCAP.forward(logits, cap=self.config.logit_softcap)
        self._finite(logits)
        if keep:
            inputs = with_versions(tokens, documents)
            self._saved = saved._replace(head=head, softcap=softcap, logits_shape=logits.shape, inputs=inputs)
        if kv_cache is not None:
            kv_cache.length += tokens.shape[1]
        return logits

    def decode(
        self,
        tokens: Tensor,  # (R,) int64
        slots: Tensor,  # (R,) int64
        positions: Tensor,  # (R,) int64
        kv_cache: KVCache,
        *,
        check: bool = True,
    ) -> Tensor:  # (R, V)
        """Logits after one more token in each of R sequences, sequence i in row slots[i] of kv_cache, which holds positions[i]
        tokens of it: rows may differ in length. A row of the result depends on its own sequence alone, bit for bit. check: see
        forward_backward."""
        if check:
            self._check(tokens[:, None], None, None)
            kv_cache.expect_rows(slots, positions)
        elif self.ops.begin is not None:
            self.ops.begin()
        if self._decode is None:
            return torch.cat([self._decode_one(*one, kv_cache) for one in zip(tokens, slots, positions, strict=True)])
        self.store.refresh(only_if_counted=True)
        logits = self._decode(tokens, slots, positions, kv_cache)
        if self.config.logit_softcap:
            logits, _ = SOFTCAP.forward(logits, cap=self.config.logit_softcap)
        if check:
            self._finite(logits)
        return logits

    @property
    def draws_on_device(self) -> bool:
        """Whether tokens can be drawn without the host, from `decode` and the sampler of its ops."""
        return self._decode is not None and self.ops.sampler is not None

    def _decode_one(self, token: Tensor, slot: Tensor, position: Tensor, kv_cache: KVCache) -> Tensor:  # (1, V)
        row = kv_cache.row(int(slot))
        row.length = int(position)
        return self.logits(token.view(1, 1), kv_cache=row)[:, -1]

    def kv_cache(self, batch_size: int, capacity: int) -> KVCache:
        """For decoding: holds what the sublayers remember of up to `capacity` tokens. Its logits are those of the weights as
        they are now, or as counted writes change them (ParamStore.refresh)."""
        self.store.refresh()
        c = self.config
        if c.position == "learned" and capacity > c.max_seq_len:
            raise InputError(f"kv_cache for {capacity} tokens, but max_seq_len is {c.max_seq_len}; learned positions end there")
        sublayers = [s for block in self.blocks for s in block.sublayers]
        shapes = lambda capacity: {s.name: s.cache_shapes(batch_size, capacity) for s in sublayers}  # noqa: E731
        return KVCache(shapes, batch_size, capacity, self.device, self.store.compute_flat.dtype)

    def backward(
        self,
        dlogits: Tensor | None = None,  # (B, T, V)
        *,
        on_grads_ready: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Accumulate the gradient of the last forward's loss, or of <dlogits, logits>, into `grads`.

        on_grads_ready receives each span of the flat gradients as soon as it is complete, the head's first, then block by
        block, the embedding's last: a reduction over ranks can start on it."""
        saved = self._saved
        if saved is None:
            raise OrderError(
                "backward without a forward: call forward(tokens, targets), or logits(tokens, keep=True), before each"
            )
        if (dlogits is None) == (saved.loss_options is None):
            raise OrderError("backward() follows forward(tokens, targets); backward(dlogits) follows logits(tokens, keep=True)")
        if dlogits is not None:
            check_upstream(dlogits, saved.logits_shape, self.store.compute_flat.dtype)
        self.store.expect_version(saved.version)
        if any(x._version != version for x, version in saved.inputs):
            raise OrderError("tokens, targets or documents were written between forward and backward; run forward again")
        self._saved = None
        self._trunk_backward(self._head_backward(dlogits, saved), saved, on_grads_ready)

    def _trunk_backward(self, dn: Tensor, saved: SavedActivations, on_grads_ready: Callable[[Tensor], None] | None) -> None:
        """The mirror image of `_trunk`, starting from the gradient of its output, dn (B, T, C)."""
        p, g, ctx, c = self._p, self._g, saved.ctx, self.config

        def ready(part: str) -> None:
            if on_grads_ready is not None and part in self._grad_parts:
                on_grads_ready(self._grad_parts[part])

        dx = ctx.ops.add_norm[c.norm].backward(None, dn, saved.final_norm, *p.final_norm, *g.final_norm)
        ready("head")
        for i in reversed(range(self.first_trainable_block, c.num_layers)):
            dx = self.blocks[i].backward(dx, saved.blocks.pop(), p.blocks[i], g.blocks[i], ctx)  # mutant: block-backward
            ready(f"blocks.{i}")
        if "embed" not in self._grad_parts:
            return
        dx = drop_backward(dx, ctx, "embed")  # mutant: embed-dropout
        if p.positions is not None:
            dx = POSITIONS.backward(dx, None, p.positions, g.positions)
        ctx.ops.embed.backward(dx, saved.embed, p.embed, g.embed)  # mutant: embed-backward
        ready("embed")

    def _trunk(self, tokens: Tensor, ctx: Context, keep: bool) -> tuple[Tensor, SavedActivations]:  # n (B, T, C)
        """Everything before the head."""
        self.store.refresh(only_if_counted=ctx.kv_cache is not None)
        p, c = self._p, self.config
        x, embed = self.ops.embed.forward(tokens, p.embed)
        if p.positions is not None:
            x, _ = POSITIONS.forward(x, p.positions, offset=ctx.offset)
        x, delta = drop_forward(x, ctx, "embed"), None
        blocks = []
        for i, block in enumerate(self.blocks):
            x, delta, saved = block.forward(x, delta, p.blocks[i], ctx)
            if keep and i >= self.first_trainable_block:
                blocks.append(saved)
        _, n, final_norm = self.ops.add_norm[c.norm].forward(x, delta, *p.final_norm, eps=c.norm_eps)
        return n, SavedActivations(ctx, self.store.version, (), embed, blocks, final_norm)

    def _head_backward(self, dlogits: Tensor | None, saved: SavedActivations) -> Tensor:  # dn (B, T, C)
        p, g = self._p, self._g  # mutant: head-backward
        if saved.loss_options is not None:
            return self.ops.linear_cross_entropy.backward(1.0, saved.head, p.head, g.head, **saved.loss_options)
        if saved.softcap is not None:  # mutant: softcap-backward
            dlogits = SOFTCAP.backward(dlogits, saved.softcap, cap=self.config.logit_softcap)
        return self.ops.linear.backward(dlogits, saved.head, p.head, None, g.head, None)

    def _loss_options(self, num_targets: int | Tensor | None) -> dict[str, Any]:
        c = self.config
        return {
            "num_targets": num_targets,
            "label_smoothing": c.label_smoothing,
            "z_loss": c.z_loss,
            "softcap": c.logit_softcap,
        }

    def _context(self, documents: Tensor | None, dropout: Dropout | None = None, kv_cache: KVCache | None = None) -> Context:
        scale = self.lora.scale if self.lora else 1.0
        return Context(self.ops, self.recompute, documents, dropout, kv_cache, scale)

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
        """Raise if a non-finite result comes from non-finite weights; otherwise it is the caller's to judge."""
        if not torch.isfinite(sum_of(result)):  # one pass, one number
            self.store.raise_if_non_finite()
