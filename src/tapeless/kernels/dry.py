"""What the built-in kernels take from memory, and nothing else of them: ops that only allocate, on torch's meta device, where a
tensor has a shape and no bytes.

A model with these ops runs its real forward and backward, and whoever watches sees which tensors come and go, before anything
is there (estimate/dry_run.py). Each op allocates what its namesakes in cpu/ and triton/ do, in their order; what depends on
the set is in `Taking`. The reference ops need no double: plain torch runs on the meta device as it is.
Tested by: tests/kernels/test_dry.py, block for block against a real step of the CPU kernels."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.kernels.dispatch import DispatchObserver, computes, writes
from tapeless.kernels.workspace import LARGEST_RECORDING, SMALL, Workspace
from tapeless.ops.add_norm import AddNormSaved
from tapeless.ops.attention import AttentionSaved
from tapeless.ops.dropout import DROPOUT
from tapeless.ops.embed import EmbedSaved
from tapeless.ops.ffn_down import FFN_DOWN, FFNDownSaved
from tapeless.ops.layer_norm import LayerNormSaved
from tapeless.ops.linear import LinearSaved
from tapeless.ops.linear_cross_entropy import LinearCrossEntropySaved
from tapeless.ops.op import Op, OpSet, Recording
from tapeless.ops.qkv_rope import QKVRopeSaved
from tapeless.ops.rms_norm import RMSNormSaved

META = torch.device("meta")


class Bytes(NamedTuple):
    """A block of a workspace that nobody has to map."""

    nbytes: int


class DryWorkspace(Workspace):
    """Lends and takes back as its parent does, without having anything."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = 0  # bytes
        self.copied = 0  # bytes that a library takes by itself for the largest of its products: the C library keeps them
        self.recorded = 0  # bytes that recordings have for themselves
        self._taken: dict[int, Bytes] | None = None  # blocks that were lent while a pass was recorded

    @property
    def idle(self) -> int:
        """Bytes that are held for the next one who asks, for the duration of a kernel, by a library, and by recordings."""
        return self.allocated - self.lent + self.copied + self.recorded

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if torch.Size(shape).numel() * dtype.itemsize < SMALL:
            return torch.empty(shape, dtype=dtype, device=META)
        return super().empty(shape, dtype)

    def _new_block(self, numel: int, dtype: torch.dtype) -> Bytes:
        return Bytes(numel * dtype.itemsize)

    def _lend(self, block: Bytes, free: list[Bytes], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.lent += block.nbytes
        if self._taken is not None:
            self._taken[id(block)] = block
        tensor = torch.empty(shape, dtype=dtype, device=META)
        ticket = weakref.ref(tensor.untyped_storage(), self._take_back)
        self._lent[id(ticket)] = ticket, free, block
        return tensor

    def record(self, run: Callable[[], Any]) -> tuple[Any, Recording | str]:
        """The recording of a dry pass: it has what the pass took, and nothing to repeat."""
        self._taken = {}
        with _Made() as made:
            result = run()
        nbytes = made.nbytes + sum(block.nbytes for block in self._taken.values())
        self._taken = None
        if nbytes > LARGEST_RECORDING:
            return result, f"it would have {nbytes / 2**20:,.0f} MiB for itself"
        self.give_away()
        self.recorded += nbytes
        return result, Recording([], nbytes)

    def _take_back(self, ticket: Any) -> None:
        self.lent -= self._lent[id(ticket)][2].nbytes
        super()._take_back(ticket)


class _Made(DispatchObserver):
    """Counts the bytes of all results that torch makes."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        result = function(*args, **(options or {}))
        if isinstance(result, Tensor) and computes(function) and not writes(function):
            self.nbytes += result.nbytes
        return result


def plain_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class Taking(NamedTuple):
    """Where a set takes its tensors from, and what it needs beside those that go in and out."""

    empty: Callable[[Sequence[int], torch.dtype], Tensor]
    copied: Callable[[int, int, int, torch.dtype], None]  # (M, K, N): a product whose result may be copied to its place
    logits_rows: Callable[[int, int], int]  # (N, V): rows of logits that are there at a time
    rounded_rows: Callable[[Tensor], int] | None  # of dw: rows that are rounded at a time; None: dw is added to in place
    one_buffer_of_heads: bool
    for_attention: Callable[[int, int], None]  # (S, D): buffers of its kernels
    wide_dq: bool  # whether the library's attention sums dq in float32 beside it
    sorts_tokens: bool


class DryOps(NamedTuple):
    ops: OpSet
    workspace: DryWorkspace | None
    logits_rows: Callable[[int, int], int]


def dry_ops(name: str) -> DryOps | None:
    """The double of a built-in set; None for any other, whose own ops have to run on the meta device."""
    if name == "cpu":
        workspace = DryWorkspace()
        taking = _cpu(workspace)
        return DryOps(replace(_ops(name, taking), capture=workspace.record), workspace, taking.logits_rows)
    if name in ("triton", "triton-fp8"):  # the latter keeps half of what goes into its products: this is its upper bound
        taking = _triton()
        return DryOps(_ops(name, taking), None, taking.logits_rows)
    return None


def _cpu(ws: DryWorkspace) -> Taking:
    from tapeless.kernels.cpu.attention import BLOCK as QUERIES
    from tapeless.kernels.cpu.linear import ROUNDED
    from tapeless.kernels.cpu.linear_cross_entropy import rows_of_logits
    from tapeless.kernels.cpu.products import by_onednn
    from tapeless.kernels.cpu.tile import WIDTH

    def for_attention(S: int, D: int) -> None:
        S_, D_, threads = -(-S // WIDTH) * WIDTH, -(-D // WIDTH) * WIDTH, torch.get_num_threads()
        ws.scratch("operands", threads, 3, S_ * D_)
        ws.scratch("blocks", threads, 4, QUERIES * D_)
        ws.scratch("weights", threads, QUERIES * S_)
        ws.scratch("scores", threads, 2, QUERIES * S_)
        ws.scratch("outputs", threads, QUERIES * (D_ + 1))
        ws.scratch("dkeys", threads, S_ * D_)
        ws.scratch("dvalues", threads, S_ * D_)

    def copied(M: int, K: int, N: int, dtype: torch.dtype) -> None:
        if by_onednn(M, K, N, dtype):
            ws.copied = max(ws.copied, (M * N + K * N) * dtype.itemsize)  # the result, and the weights as oneDNN packs them

    return Taking(
        empty=ws.empty,
        copied=copied,
        logits_rows=rows_of_logits,
        rounded_rows=lambda dw: min(max(1, ROUNDED // dw.shape[1]), len(dw)),
        one_buffer_of_heads=False,
        for_attention=for_attention,
        wide_dq=False,
        sorts_tokens=False,
    )


def _triton() -> Taking:
    from tapeless.kernels.triton.linear_cross_entropy import rows_of_logits

    return Taking(
        empty=plain_empty,
        copied=lambda M, K, N, dtype: None,
        logits_rows=rows_of_logits,
        rounded_rows=None,
        one_buffer_of_heads=True,
        for_attention=lambda S, D: None,
        wide_dq=True,
        sorts_tokens=True,
    )


def _ops(name: str, t: Taking) -> OpSet:
    norms = {kind: _norms(t, centre) for kind, centre in (("rms", False), ("layer", True))}
    alone: Mapping[str, Op] = MappingProxyType({kind: pair[0] for kind, pair in norms.items()})
    added: Mapping[str, Op] = MappingProxyType({kind: pair[1] for kind, pair in norms.items()})
    kinds: Mapping[str, Op] = MappingProxyType(dict.fromkeys(FFN_DOWN, _ffn_down(t)))
    ops = OpSet(
        name=name,
        embed=_embed(t),
        norm=alone,
        add_norm=added,
        qkv_rope=_qkv_rope(t),
        attention=_attention(t),
        linear=_linear(t),
        ffn_down=kinds,
        linear_cross_entropy=_linear_cross_entropy(t),
        dropout=DROPOUT,
        adam_update=lambda *args: None,
        grad_norm=lambda grads: torch.empty((), dtype=torch.float64, device=META),
    )
    return replace(ops, non_accumulating=ops)  # whether dw is written or added to, nothing more is taken


def _embed(t: Taking) -> Op:
    def forward(tokens: Tensor, w: Tensor) -> tuple[Tensor, EmbedSaved]:
        return t.empty((*tokens.shape, w.shape[1]), w.dtype), EmbedSaved(tokens)

    def backward(dy: Tensor, saved: EmbedSaved, w: Tensor, dw: Tensor | None) -> None:
        if t.sorts_tokens:
            saved.tokens.reshape(-1).sort(stable=True)

    return Op(forward, backward)


def _norms(t: Taking, centre: bool) -> tuple[Op, Op]:
    """By itself, and with the sum before it."""

    def add_forward(x: Tensor, delta: Tensor | None, *params: Any, eps: float) -> tuple[Tensor, Tensor, AddNormSaved]:
        s = x if delta is None else t.empty(x.shape, x.dtype)
        n = t.empty(x.shape, x.dtype)
        r = plain_empty((*x.shape[:-1], 1), torch.float32)
        return s, n, AddNormSaved(LayerNormSaved(s, torch.empty_like(r), r) if centre else RMSNormSaved(s, r))

    def add_backward(ds: Tensor | None, dn: Tensor, saved: AddNormSaved, *params: Any) -> Tensor:
        return t.empty(dn.shape, dn.dtype)

    def forward(x: Tensor, *params: Any, eps: float) -> tuple[Tensor, Any]:
        _, n, saved = add_forward(x, None, *params, eps=eps)
        return n, saved.norm

    def backward(dy: Tensor, saved: Any, *params: Any) -> Tensor:
        return add_backward(None, dy, AddNormSaved(saved), *params)

    return Op(forward, backward), Op(add_forward, add_backward)


def _qkv_rope(t: Taking) -> Op:
    def forward(
        qkv: Tensor, wq_norm: Tensor | None, wk_norm: Tensor | None, *, num_heads: int, num_kv_heads: int, **settings: Any
    ) -> tuple[Tensor, Tensor, Tensor, QKVRopeSaved | None]:
        (B, T, width), H, G = qkv.shape, num_heads, num_kv_heads
        D = width // (H + 2 * G)
        if t.one_buffer_of_heads:
            q, k, v = t.empty((B, T, H + 2 * G, D), qkv.dtype).transpose(1, 2).split([H, G, G], 1)
        else:
            q, k, v = (t.empty((B, heads, T, D), qkv.dtype) for heads in (H, G, G))
        if wq_norm is None:
            return q, k, v, None
        r = plain_empty((B, T, H + G), torch.float32)
        rq, rk = (part.transpose(1, 2).unsqueeze(-1) for part in r.split([H, G], 2))
        return q, k, v, QKVRopeSaved(qkv, rq, rk)

    def backward(dq: Tensor, dk: Tensor, dv: Tensor, saved: QKVRopeSaved | None, *params: Any, **settings: Any) -> Tensor:
        (B, H, T, D), G = dq.shape, dk.shape[1]
        dqkv = t.empty((B, T, (H + 2 * G) * D), dq.dtype)
        if saved is not None:
            torch.cat([saved.rq, saved.rk], 1).squeeze(-1).transpose(1, 2).contiguous()
        return dqkv

    return Op(forward, backward)


def _attention(t: Taking) -> Op:
    def forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> tuple[Tensor, AttentionSaved]:
        (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
        o = t.empty((B, T, H * D), q.dtype)
        lse = plain_empty((B, G, H // G, T, 1), torch.float32)
        t.for_attention(S, D)
        return o, AttentionSaved(q, k, v, o, lse, documents)

    def backward(do: Tensor, saved: AttentionSaved) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = saved
        wide = plain_empty(q.shape, torch.float32) if t.wide_dq and q.dtype != torch.float32 else None
        dq, dk, dv = t.empty(q.shape, q.dtype), t.empty(k.shape, k.dtype), t.empty(v.shape, v.dtype)
        del wide
        return dq, dk, dv

    return Op(forward, backward)


def _add_product(t: Taking, dw: Tensor | None, dtype: torch.dtype) -> None:
    if dw is not None and dw.dtype != dtype and t.rounded_rows is not None:
        t.empty((t.rounded_rows(dw), dw.shape[1]), dtype)


def _product(t: Taking, x: Tensor, K: int, N: int) -> Tensor:  # (..., K) -> (..., N)
    t.copied(x.numel() // K, K, N, x.dtype)
    return t.empty((*x.shape[:-1], N), x.dtype)


def _linear(t: Taking) -> Op:
    def forward(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, LinearSaved]:
        return _product(t, x, w.shape[1], w.shape[0]), LinearSaved(x)

    def backward(dy: Tensor, saved: LinearSaved, w: Tensor, b: Tensor | None, dw: Tensor | None, db: Tensor | None) -> Tensor:
        _add_product(t, dw, dy.dtype)
        return _product(t, dy, *w.shape)

    return Op(forward, backward)


def _ffn_down(t: Taking) -> Op:
    def forward(gate_up: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, FFNDownSaved]:
        h = t.empty((*gate_up.shape[:-1], w.shape[1]), gate_up.dtype)
        return _product(t, h, w.shape[1], w.shape[0]), FFNDownSaved(gate_up)

    def backward(dy: Tensor, saved: FFNDownSaved, w: Tensor, b: Tensor | None, dw: Tensor | None, db: Tensor | None) -> Tensor:
        dh = _product(t, dy.reshape(-1, dy.shape[-1]), *w.shape)
        dgate_up = t.empty(saved.gate_up.shape, dh.dtype)
        _add_product(t, dw, dy.dtype)
        return dgate_up

    return Op(forward, backward)


def _linear_cross_entropy(t: Taking) -> Op:
    def logits_of(x: Tensor, w: Tensor) -> Tensor:
        (V, C), dtype = w.shape, x.dtype
        rows = t.logits_rows(x.numel() // C, V)
        t.copied(rows, C, V, dtype)
        t.copied(rows, V, C, dtype)  # of dlogits, to dx
        return t.empty((rows, V), dtype)

    def forward(x: Tensor, targets: Tensor, w: Tensor, **options: Any) -> tuple[Tensor, LinearCrossEntropySaved]:
        lse = plain_empty((targets.numel(), 1), torch.float32)
        logits_of(x, w)
        return plain_empty((), torch.float32), LinearCrossEntropySaved(x, targets, lse)

    def backward(dloss: Any, saved: LinearCrossEntropySaved, w: Tensor, dw: Tensor | None, **options: Any) -> Tensor:
        dx = t.empty(saved.x.shape, saved.x.dtype)
        logits = logits_of(saved.x, w)
        _add_product(t, dw, logits.dtype)
        return dx

    def both(x: Tensor, targets: Tensor, w: Tensor, dw: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        dx = t.empty(x.shape, x.dtype)
        logits = logits_of(x, w)
        _add_product(t, dw, logits.dtype)
        return plain_empty((), torch.float32), dx

    return Op(forward, backward, both)
