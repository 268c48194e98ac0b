"""The order of the data: everything once in an epoch, nothing but a function of the seed and the sample's number."""

import numpy as np
import pytest
import torch

from tapeless.data.loader import Loader, ValidationSet, validation_windows
from tapeless.errors import DataError

T = 7
TOKENS = np.random.default_rng(0).integers(0, 50_000, 1000).astype("<u2")


def samples(loader: Loader, first: int, count: int) -> torch.Tensor:  # (count, T + 1)
    rows = []
    for sample in range(first, first + count, loader.batch_size):
        tokens, targets = loader.batch(sample)
        rows.append(torch.cat([tokens, targets[:, -1:]], dim=1))
    return torch.cat(rows)[:count]


def test_a_batch_is_tokens_and_the_next_tokens():
    tokens, targets = Loader(TOKENS, T, 4, seed=0).batch(8)
    assert tokens.shape == targets.shape == (4, T)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    torch.testing.assert_close(tokens[:, 1:], targets[:, :-1])
    loader = Loader(TOKENS, T, 4, seed=0)
    for b in range(4):
        (start,) = loader.begins(8 + b, 1)
        np.testing.assert_array_equal(targets[b], TOKENS[start + 1 : start + T + 1])


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_visits_every_window_once(epoch: int):
    loader = Loader(TOKENS, T, 4, seed=3)
    w = loader.num_windows
    assert w == (1000 - T) // T
    starts = loader.begins(epoch * w, w).tolist()
    assert sorted(starts) == [loader.offset(epoch) + T * i for i in range(w)]
    assert starts != sorted(starts)
    assert max(starts) + T + 1 <= 1000
    assert {loader.epoch_of(sample) for sample in range(epoch * w, (epoch + 1) * w)} == {epoch}


def test_offsets_and_orders_change_with_epoch_and_seed():
    offsets = {Loader(TOKENS, T, 1, seed=seed).offset(epoch) for seed in range(10) for epoch in range(10)}
    assert offsets == set(range(T))
    orders = {tuple(Loader(TOKENS, T, 1, seed=seed).order(epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_the_order_is_fixed_for_ever():
    """A resumed run may have another numpy: the first samples of seed 0, written down."""
    loader = Loader(TOKENS, T, 1, seed=0)
    assert [int(loader.begins(sample, 1)[0]) for sample in (0, 1, 2, 3, 141, 142)] == [759, 878, 38, 178, 805, 616]


@pytest.mark.parametrize("batch_size", [2, 3, 16, 200])
def test_samples_do_not_depend_on_the_batch_size(batch_size: int):
    """Also across the borders of epochs, of which a batch of 200 holds two."""
    expected = samples(Loader(TOKENS, T, 1, seed=1), 0, 600)
    torch.testing.assert_close(samples(Loader(TOKENS, T, batch_size, seed=1), 0, 600), expected)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_out_the_same_batch(ranks: int):
    whole = Loader(TOKENS, T, 8, seed=1)
    parts = [Loader(TOKENS, T, 8 // ranks, seed=1) for _ in range(ranks)]
    for step in range(40):
        tokens = torch.cat([part.batch(8 * step + rank * 8 // ranks)[0] for rank, part in enumerate(parts)])
        torch.testing.assert_close(tokens, whole.batch(8 * step)[0])


def test_a_resumed_loader_goes_on_where_the_first_one_stopped():
    unbroken = samples(Loader(TOKENS, T, 4, seed=9), 0, 400)
    for first in (4, 140, 284):
        torch.testing.assert_close(samples(Loader(TOKENS, T, 4, seed=9), first, 100), unbroken[first : first + 100])


def test_going_back_gives_the_same():
    loader = Loader(TOKENS, T, 4, seed=0)
    early = loader.batch(0)
    loader.batch(1000)
    torch.testing.assert_close(loader.batch(0), early)


@pytest.mark.parametrize("count", range(T + 1, 3 * T + 2))
def test_few_tokens(count: int):
    """One window is enough, its offset then moves in what room there is."""
    loader = Loader(TOKENS[:count], T, 3, seed=0)
    assert loader.num_windows == max(1, (count - T) // T)
    starts = set(loader.begins(0, 100).tolist())
    assert min(starts) >= 0
    assert max(starts) + T + 1 <= count
    assert loader.batch(50)[0].shape == (3, T)


def test_too_few_tokens():
    with pytest.raises(
        DataError, match=r"training part has 7 tokens, but one window of seq_len 7 needs 8.*--seq-len to 6 or less"
    ):
        Loader(TOKENS[:T], T, 1, seed=0)
    with pytest.raises(DataError, match="validation part has 7 tokens"):
        validation_windows(TOKENS[:T], T)


def whole(windows: ValidationSet) -> tuple[torch.Tensor, ...]:
    return next(windows.batches(len(windows)))


@pytest.mark.parametrize("count", [8, 9, 14, 15, 16, 100])
def test_validation_covers_every_token_once(count: int):
    tokens, targets = whole(validation_windows(TOKENS[:count], T))
    assert tokens.shape == targets.shape == (-(-(count - 1) // T), T)
    assert targets[targets >= 0].tolist() == TOKENS[1:count].tolist()
    assert tokens[targets >= 0].tolist() == TOKENS[: count - 1].tolist()
    assert set(targets[targets < 0].tolist()) <= {-100}
    assert (targets[:-1] >= 0).all()
    assert tokens.min() >= 0  # what fills the last window up is a token too


def test_limited_validation_is_spread_evenly():
    tokens, targets = whole(validation_windows(TOKENS, T))
    for limit in (1, 2, 10, 71):
        few, few_targets = whole(validation_windows(TOKENS, T, limit))
        chosen = [i * len(tokens) // limit for i in range(limit)]
        torch.testing.assert_close(few, tokens[chosen])
        torch.testing.assert_close(few_targets, targets[chosen])
    for limit in (len(tokens), len(tokens) + 1, 10**6):
        torch.testing.assert_close(whole(validation_windows(TOKENS, T, limit))[1], targets)


@pytest.mark.parametrize("size", [1, 3, 142, 1000])
def test_validation_batches_are_the_whole_in_order(size: int):
    starts = np.array([0, 4, 500])
    windows = validation_windows(TOKENS, T, starts=starts)
    for parts, expected in zip(zip(*windows.batches(size), strict=True), whole(windows), strict=True):
        assert torch.cat(parts).equal(expected)


def test_only_the_needed_part_of_a_memory_map_is_copied(tmp_path):
    path = tmp_path / "tokens.bin"
    TOKENS.tofile(path)
    mapped = np.memmap(path, "<u2", "r")
    loader = Loader(mapped, T, 4, seed=0)
    assert np.shares_memory(loader.tokens, mapped)
    torch.testing.assert_close(loader.batch(5), Loader(TOKENS, T, 4, seed=0).batch(5))
