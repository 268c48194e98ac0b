"""Chain: a model of one's own, its gradients exact without a tape."""

import pytest
import torch
import torch.nn.functional as F

from tapeless.config import SimpleLMConfig
from tapeless.errors import ConfigError, OrderError
from tapeless.model.chain import Chain, layer, residual
from tapeless.model.simple_lm import SimpleLM
from tapeless.ops.embed import EMBED
from tapeless.ops.layer_norm import LAYER_NORM
from tapeless.ops.linear import LINEAR
from tapeless.ops.pointwise import GELU, TANH
from tapeless.ops.rms_norm import RMS_NORM
from tapeless.verify.finding import distance
from tapeless.verify.fixtures import batch, move_off_init, shrunk
from tapeless.verify.oracles import Point, autograd_gradient
from tapeless.verify.tolerances import MODEL_AUTOGRAD

V, C, M = 23, 10, 7


def test_one_linear_layer_by_hand():
    """y = w x + b with numbers that a reader can check: x = (1, 2), w = ((3, 4), (5, 6)), b = (7, 8), dy = (1, -1)."""
    chain = Chain(layer("map", LINEAR, w=(2, 2), b=(2,)))
    chain.params["map.w"].copy_(torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
    chain.params["map.b"].copy_(torch.tensor([7.0, 8.0]))
    y = chain.forward(torch.tensor([[1.0, 2.0]]))
    assert y.tolist() == [[18.0, 25.0]]  # 3*1 + 4*2 + 7, 5*1 + 6*2 + 8
    dx = chain.backward(torch.tensor([[1.0, -1.0]]))
    assert dx.tolist() == [[-2.0, -2.0]]  # 3 - 5, 4 - 6
    assert chain.grads["map.w"].tolist() == [[1.0, 2.0], [-1.0, -2.0]]  # dy' x
    assert chain.grads["map.b"].tolist() == [1.0, -1.0]


def nested() -> Chain:
    return Chain(
        layer("embed", EMBED, w=(V, C)),
        residual(
            layer("norm", RMS_NORM, w=(C,), eps=1e-5),
            layer("up", LINEAR, w=(M, C), b=(M,)),
            layer("gelu", GELU),
            residual(layer("inner", LINEAR, w=(M, M), b=None), layer("tanh", TANH)),
            layer("down", LINEAR, w=(C, M), b=None),
        ),
        layer("last", LAYER_NORM, w=(C,), b=(C,), eps=1e-5),
        layer("head", LINEAR, w=(V, C), b=(V,)),
        dtype="float64",
    )


def test_residual_branches_within_residual_branches():
    chain, (tokens, _) = nested(), batch()
    move_off_init(chain, 1)
    dy = torch.randn(3, 7, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def formula(p: Point) -> torch.Tensor:
        x = F.embedding(tokens, p["embed.w"])
        h = F.gelu(F.linear(F.rms_norm(x, (C,), p["norm.w"], 1e-5), p["up.w"], p["up.b"]), approximate="tanh")
        x = x + F.linear(h + torch.tanh(F.linear(h, p["inner.w"])), p["down.w"])
        y = F.linear(F.layer_norm(x, (C,), p["last.w"], p["last.b"], 1e-5), p["head.w"], p["head.b"])
        return (y * dy).sum()

    truth = autograd_gradient(formula, chain.params)
    chain.forward(tokens)
    assert chain.backward(dy) is None  # tokens have no gradient
    assert truth.keys() == chain.grads.keys()
    for name, g in truth.items():
        assert distance(chain.grads[name], g).l2 <= MODEL_AUTOGRAD, name
    chain.forward(tokens)
    chain.backward(dy)
    for name, g in truth.items():
        assert distance(chain.grads[name], 2 * g).l2 <= MODEL_AUTOGRAD, f"{name} does not accumulate"
    chain.zero_grads()
    assert not chain.store.flat_grads.any()


def test_the_gradient_of_a_float_input_is_returned():
    chain = Chain(residual(layer("map", LINEAR, w=(C, C), b=None)), dtype="float64")
    x, dy = torch.randn(2, 4, C, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chain.forward(x)
    expected = dy + dy @ chain.params["map.w"]
    assert distance(chain.backward(dy), expected).largest <= MODEL_AUTOGRAD


def test_bfloat16_computes_with_rounded_copies():
    chain = Chain(layer("map", LINEAR, w=(C, C), b=None), dtype="bfloat16")
    x = torch.ones(2, C, dtype=torch.bfloat16)
    before = chain.forward(x)
    chain.params["map.w"].mul_(2)
    assert torch.equal(chain.forward(x), 2 * before)
    assert chain.grads["map.w"].dtype == torch.float32


def test_order_and_names():
    chain = nested()
    with pytest.raises(OrderError, match="backward without a forward"):
        chain.backward(torch.zeros(1))
    chain.forward(batch()[0], keep=False)
    with pytest.raises(OrderError, match="backward without a forward"):
        chain.backward(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"two layers of the chain own a parameter 'a\.w'"):
        Chain(layer("a", LINEAR, w=(2, 2), b=None), layer("a", RMS_NORM, w=(2,), eps=1e-5))


def test_simple_lm_has_one_loss():
    model, (tokens, targets) = SimpleLM(shrunk(SimpleLMConfig()), dtype="float64"), batch()
    move_off_init(model, 1)
    loss = model.forward(tokens, targets)
    model.backward()
    direct = {name: g.clone() for name, g in model.grads.items()}
    assert torch.equal(loss, model.loss(tokens, targets))
    model.zero_grads()
    logits = model.logits(tokens, keep=True)
    dlogits = autograd_gradient(lambda p: F.cross_entropy(p["z"].flatten(0, 1), targets.flatten()), {"z": logits})["z"]
    model.backward(dlogits)
    for name, g in direct.items():
        assert distance(model.grads[name], g).l2 <= MODEL_AUTOGRAD, name
