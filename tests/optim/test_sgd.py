"""SGD, step by step against torch.optim."""

import pytest
import torch
from optim_fixtures import draw_gradients, movement_errors, small_model

from tapeless.errors import ConfigError
from tapeless.optim import SGD
from tapeless.verify.tolerances import OPTIMIZER


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True), (0.3, True)])
def test_every_step_is_that_of_torch(momentum: float, nesterov: bool, weight_decay: float):
    model = small_model()
    ours = SGD(model.params, model.grads, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
    errors = movement_errors(model, ours, torch.optim.SGD, weight_decay, momentum=momentum, nesterov=nesterov)
    assert {name: error for name, error in errors.items() if error > OPTIMIZER} == {}


def test_a_plain_step_is_lr_times_the_gradient():
    model = small_model()
    draw_gradients(model, 0)
    expected = model.store.flat - 0.5 * model.store.flat_grads
    SGD(model.params, model.grads, lr=0.5).step()
    assert model.store.flat.equal(expected)


def test_nesterov_needs_momentum():
    model = small_model()
    with pytest.raises(ConfigError, match="nesterov needs a momentum"):
        SGD(model.params, model.grads, nesterov=True)
