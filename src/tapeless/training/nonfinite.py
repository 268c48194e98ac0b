"""Diagnosis of a non-finite step: the first tensor that is not finite, by layer and op, and a dump.

A step checks only its loss and its gradient norm. If one of them is not finite, nothing is updated, and the batch is computed
again with every op observed. A bad weight is named, with the op in which it first shows. If the second pass is clean, the cause
was not the arithmetic (a flipped bit, for example), and the bad gradient of the first pass is named.
Tested by: tests/train/test_nonfinite.py, acceptance/guards.py."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapeless.data.files import write_json
from tapeless.errors import NonFiniteError, WriteError
from tapeless.model.build import AnyModel
from tapeless.model.observe import OpCall, observe_ops
from tapeless.model.params import ParamStore
from tapeless.model.transformer import Transformer
from tapeless.optim.clip import grad_norm
from tapeless.training.checkpoint import checkpoints
from tapeless.training.run_dir import RunDir, resume_command
from tapeless.training.step import accumulate_gradients


class BadTensor(NamedTuple):
    tensor: str  # parameter blocks.0.attn.wq | gradient of head.w | dq
    layer: str  # blocks.0.attn
    op: str  # such as `attention backward`; empty if no op showed it
    element: tuple[int, ...]  # its index
    value: float
    note: str = ""

    def __str__(self) -> str:
        index = f"{list(self.element)}" if self.element else ""
        where = f" in {self.layer}" + (f", {self.op}" if self.op else "")
        return f"{self.tensor}{index} = {self.value}{where}{f' ({self.note})' if self.note else ''}"


def explained(
    error: NonFiniteError,
    model: AnyModel,
    batch: Mapping[str, Tensor | None],  # (k*B, T) int64: tokens, targets, documents
    counts: Mapping[str, int],  # grad_accum, step, first_sample: arguments of accumulate_gradients()
    lr: float,
    run: RunDir | None,
    *,
    peak: float | None,
    functions: Sequence[str] = (),
) -> NonFiniteError:
    """The error with the first bad tensor in its message, and a dump in the run directory. lr: of the step; peak: of the
    schedule, None if that is a function; functions: those that a resume needs."""
    present = {name: x for name, x in batch.items() if x is not None}
    number, first = counts["step"] + 1, counts["first_sample"]
    last = first + len(present["tokens"]) - 1
    bad = first_bad_tensor(model, list(present.values()), counts)
    text = f"step {number}: {str(error).removeprefix(f'step {number}: ')}; first bad tensor: {bad}"
    text += f"; batch: samples {first} to {last}"
    if run is not None:
        dump = run.path / "dumps" / f"step-{number:08d}.json"
        facts = {"step": number, "samples": [first, last], "lr": lr, "error": text}
        facts["first_bad_tensor"] = bad._asdict() | {"value": str(bad.value)}  # JSON has no NaN
        facts["batch"] = {name: x.tolist() for name, x in present.items()}  # the weights are in the checkpoint
        try:
            write_json(dump, facts)
            text += f"; dump: {dump}"
        except WriteError as failure:
            text += f"; no dump: {failure}"
        text += f"; {_next(run, peak, functions)}"
    return NonFiniteError(text)


def _next(run: RunDir, peak: float | None, functions: Sequence[str]) -> str:
    """What to do. Without a checkpoint, the same steps would diverge again."""
    smaller = {} if peak is None else {"lr": f"{peak / 2:.2g}"}
    resume, again = resume_command(run.path, functions), resume_command(run.path, functions, **smaller)
    if checkpoints(run.checkpoints):
        return f"resume from the last checkpoint: {resume}; if it diverges again, with a smaller learning rate: {again}"
    return f"there is no checkpoint yet: start again at step 0, with a smaller learning rate: {again}"


def first_bad_tensor(model: AnyModel, batch: Sequence[Tensor], counts: Mapping[str, int]) -> BadTensor:
    """Of the step that accumulate_gradients() has just taken with these arguments. Overwrites its gradients."""
    weight = _bad_view(model.params)
    norm = float((model.ops.grad_norm or grad_norm)(model.store.flat_grads))
    left = _bad_view({name: model.grads[name] for name in reversed(list(model.grads))})  # in backward order
    shown, again = None, ""
    if isinstance(model, Transformer):
        try:
            shown = _first_shown(model, batch, counts)
            again = "computed again, every op was finite"
        except torch.OutOfMemoryError:  # a captured step holds its own activations
            again = "not enough memory to compute it again"
    if weight is not None:
        name, index, value = weight
        op = f"first shown by {shown.layer} {shown.op}, {shown.tensor}{list(shown.element)}" if shown else ""
        return BadTensor(f"parameter {name}", _owner(name), "", index, value, op)
    if shown is not None:
        return shown
    if left is not None:
        name, index, value = left
        return BadTensor(f"gradient of {name}", _owner(name), "", index, value, again)
    if not math.isfinite(norm):
        note = f"{again}; each is finite, their squares are too large"
        return BadTensor("norm of all gradients", "the step", "", (), norm, note)
    return BadTensor("loss", "head", "", (), float("nan"), again)


def _first_shown(model: Transformer, batch: Sequence[Tensor], counts: Mapping[str, Any]) -> BadTensor | None:
    found: list[BadTensor] = []

    def observe(seen: OpCall) -> None:
        if not found:
            found.extend(_bad_of(seen, model.store))

    with observe_ops(model, observe):
        accumulate_gradients(model, *batch, **counts, check=False)  # continue after a bad weight
    return found[0] if found else None


def _bad_of(seen: OpCall, store: ParamStore) -> list[BadTensor]:
    """The first bad result of one call, or the first bad gradient that it left."""
    for name, x in seen.outputs.items():
        bad = _bad_element(x) if isinstance(x, Tensor) else None
        if bad is not None:
            return [BadTensor(name, seen.layer, f"{seen.op} {seen.direction}", *bad)]
    for dw in seen.grads:
        bad = _bad_element(dw)
        if bad is not None:  # adjacent parameters are passed as one matrix: find the one
            offset = int(dw.storage_offset()) + sum(i * stride for i, stride in zip(bad[0], dw.stride(), strict=True))
            name, (start, _) = next((n, span) for n, span in store.layout.spans.items() if span[0] <= offset < sum(span))
            shape = store.layout.specs[name].shape
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(offset - start), shape))
            return [BadTensor(f"gradient of {name}", seen.layer, f"{seen.op} {seen.direction}", index, bad[1])]
    return []


def _bad_view(views: Mapping[str, Tensor]) -> tuple[str, tuple[int, ...], float] | None:
    for name, view in views.items():
        bad = _bad_element(view)
        if bad is not None:
            return name, *bad
    return None


def _bad_element(x: Tensor) -> tuple[tuple[int, ...], float] | None:
    finite = torch.isfinite(x)
    if finite.all():
        return None
    index = tuple((~finite).nonzero()[0].tolist())
    return index, float(x[index])


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
