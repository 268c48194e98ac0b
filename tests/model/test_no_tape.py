"""No tape: nothing on the training path requires a gradient of torch's or carries a graph, and nothing outlives backward."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tapeless.model.transformer import RECOMPUTE
from tapeless.verify.fixtures import MODEL_CASES, TRANSFORMER_CASES, ModelCase, build, data_of, loss_with_gradients

CASES = [pytest.param(case, id=case.name) for case in MODEL_CASES]


class Watch(TorchFunctionMode):
    """Looks at the result of every call to torch."""

    def __init__(self) -> None:
        self.calls = 0
        self.taped: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if any(isinstance(x, torch.Tensor) and (x.requires_grad or x.grad_fn is not None) for x in tree_leaves(result)):
            self.taped.append(str(func))
        return result


def left_behind(run: Callable[[], object]) -> list[torch.Size]:
    """The shapes of tensors that a call made and that live on after it, whatever it returned being dropped."""
    gc.freeze()  # what was there before is not listed
    run()
    gc.collect()
    left = [x.shape for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    gc.unfreeze()
    return left


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_no_call_leaves_a_trace_on_a_tape(case: ModelCase, dtype: str):
    model, data = build(case, dtype), data_of(case)
    with torch.enable_grad(), Watch() as watch:
        loss_with_gradients(model, *data)
    assert watch.calls > 20
    assert watch.taped == []
    assert not any(w.requires_grad for w in (*model.params.values(), *model.grads.values()))


def test_the_watch_sees_a_tape():
    with Watch() as watch:
        torch.ones(2, requires_grad=True) * 2
    assert watch.taped


@pytest.mark.parametrize("policy", RECOMPUTE)
@pytest.mark.parametrize("case", TRANSFORMER_CASES, ids=lambda case: case.name)
def test_nothing_is_kept_after_backward(case: ModelCase, policy: str):
    model, data = build(case, "float32", policy), data_of(case)
    loss_with_gradients(model, *data)  # the gradients themselves are made with the first backward, and stay
    assert left_behind(lambda: loss_with_gradients(model, *data, backward=False))
    assert left_behind(lambda: loss_with_gradients(model, *data)) == []


def test_evaluation_keeps_nothing():
    model, data = build(TRANSFORMER_CASES[0], "float32"), data_of(TRANSFORMER_CASES[0])
    assert left_behind(lambda: model.loss(data.tokens, data.targets)) == []
    assert left_behind(lambda: model.logits(data.tokens)) == []
