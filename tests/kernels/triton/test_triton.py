"""The set `triton`: every case of every op by the contract. Without a GPU the kernels run in Triton's interpreter, at fewer
sizes and in float32 alone: the interpreter cuts bfloat16 off where hardware rounds."""

from operator import attrgetter

import pytest
import torch

from contract import check_behaviour, check_kernel, check_precision, check_within

pytest.importorskip("triton")

from tapeless.kernels.triton.ops import triton_ops
from tapeless.verify.cases import OpCase, cases_of
from tapeless.verify.finding import distance
from tapeless.verify.kernel_ops import SHAPES
from tapeless.verify.kernel_update import update_findings
from tapeless.verify.op_levels import against_float64
from tapeless.verify.tolerances import OP_FLOAT32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = triton_ops()
CASES = [case for case in cases_of(OPS, DEVICE) if case.family != "dropout"]  # whose op is the reference's
OF_ANY_SIZE = [case for case in CASES if case.name != "attention[long]"]  # which has a length of its own
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, in the interpreter, of exp(100) and of inf - inf
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter, of a loop's bounds
]


@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
def test_contract(case: OpCase):
    if DEVICE == "cuda":
        check_kernel(case)
    else:
        if case in OF_ANY_SIZE:  # the long case differs in its length alone, and the interpreter is slow
            check_behaviour(case, "float32")
        check_precision(case, ["float32"])


@pytest.mark.skipif(DEVICE == "cuda", reason="check_kernel has all of them")
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("case", OF_ANY_SIZE, ids=attrgetter("name"))
def test_other_sizes(case: OpCase, shape):
    case = case.at(**shape._asdict())
    for name, (claimed, truth) in against_float64(case, torch.float32).items():
        assert case.is_zero(name) or distance(claimed, truth).largest <= OP_FLOAT32, name


def test_the_optimizers_passes():
    check_within(finding for finding in update_findings(OPS, DEVICE) if DEVICE == "cuda" or finding.tensor != "copy")


@pytest.mark.parametrize("capped", [0.0, 4.0])
def test_both_equals_forward_then_backward(capped: float):
    op = OPS.linear_cross_entropy
    x, w = torch.randn(7, 12, device=DEVICE), torch.randn(33, 12, device=DEVICE)
    targets = torch.randint(33, (7,)).to(DEVICE)
    targets[2] = -100
    options = {"num_targets": 5, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": capped}
    dw, dw_both = torch.zeros(2, 33, 12, device=DEVICE)
    loss, saved = op.forward(x, targets, w, **options)
    dx = op.backward(1.0, saved, w, dw, **options)
    assert op.both is not None
    loss_both, dx_both = op.both(x, targets, w, dw_both, **options)
    assert torch.equal(loss, loss_both)
    assert torch.equal(dx, dx_both)
    assert torch.equal(dw, dw_both)


def test_blocks_of_the_head(monkeypatch: pytest.MonkeyPatch):
    x, w, targets = torch.randn(9, 8, device=DEVICE), torch.randn(21, 8, device=DEVICE), torch.arange(9, device=DEVICE)
    results = []
    for block in (2**28, 4 * 21):
        monkeypatch.setattr("tapeless.kernels.triton.linear_cross_entropy.BLOCK", block)
        dw = torch.zeros(21, 8, device=DEVICE)
        assert OPS.linear_cross_entropy.both is not None
        results.append((*OPS.linear_cross_entropy.both(x, targets, w, dw), dw))
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(cut, whole)


def test_unknown_ids_touch_nothing():
    """A captured step cannot check them first: the kernels themselves stay within the table."""
    w, dw = torch.randn(5, 8, device=DEVICE), torch.zeros(5, 8, device=DEVICE)
    y, saved = OPS.embed.forward(torch.tensor([4, 5, -1, 0], device=DEVICE), w)
    assert torch.equal(y, torch.stack([w[4], torch.zeros_like(w[0]), torch.zeros_like(w[0]), w[0]]))
    OPS.embed.backward(torch.ones(4, 8, device=DEVICE), saved, w, dw)
    assert dw.sum(1).tolist() == [8, 0, 0, 0, 8]
