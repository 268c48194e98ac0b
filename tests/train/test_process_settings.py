"""Settings of the process apply for the time they are asked for, and are restored."""

import pytest
import torch

import tapeless
from tapeless.config import TrainConfig
from tapeless.errors import ConfigError
from tapeless.training.process import limit_threads, num_threads, process_settings, usable_device

SHAPE = tapeless.ModelConfig(vocab_size=16, hidden_dim=8, num_layers=1, num_heads=2, intermediate_dim=8, max_seq_len=4)


@pytest.fixture(autouse=True)
def two_threads():
    """So that one thread is a change, on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_are_restored_also_after_an_error():
    with num_threads(1):
        assert torch.get_num_threads() == 1
        with num_threads(None):
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(KeyError), num_threads(1):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_more_threads_than_cores_are_an_error():
    with pytest.raises(ConfigError, match="this machine has"), num_threads(100_000):
        pass


def test_determinism_is_restored():
    with process_settings(TrainConfig(threads=1, deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.get_num_threads() == 2


def test_sums_in_order_need_determinism_where_it_is_not_given():
    assert TrainConfig(device="cuda", rank_invariant=True).repeatable
    assert not TrainConfig(device="cuda").repeatable
    assert not TrainConfig().repeatable


def test_determinism_ends_with_the_last_of_several():
    first, second = (process_settings(TrainConfig(deterministic=True)) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.are_deterministic_algorithms_enabled()
    second.__exit__(None, None, None)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_a_model_with_threads_uses_them_in_its_calls_alone(monkeypatch: pytest.MonkeyPatch):
    seen = []
    for name in ("logits", "loss"):
        method = getattr(tapeless.Transformer, name)

        def spy(self, *args, method=method, **options):
            seen.append(torch.get_num_threads())
            return method(self, *args, **options)

        monkeypatch.setattr(tapeless.Transformer, name, spy)
    model, other = tapeless.Transformer(SHAPE), tapeless.Transformer(SHAPE)
    limit_threads(model, 1)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model.logits(tokens), other.logits(tokens))
    model.loss(tokens, tokens)
    assert seen[0] == 1
    assert seen[1] == 2
    assert seen[2:] in ([1], [1, 1])  # loss may call logits
    assert torch.get_num_threads() == 2
    model.zero_grads()
    model.forward(tokens, tokens)
    model.backward()
    assert isinstance(model, tapeless.Transformer)


def test_a_device_that_is_not_there_is_an_error():
    assert usable_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="device 'cpuu' cannot be used here"):
        usable_device("cpuu")
    with pytest.raises(ConfigError, match="device 'meta' cannot be used here: its tensors have no values"):
        usable_device("meta")
