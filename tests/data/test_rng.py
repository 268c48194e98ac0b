"""The counter-based draws are splitmix64 to the bit, and nothing but a function of their arguments."""

import numpy as np

from tapeless.data.rng import draws, key, permutation


def test_draws_are_splitmix64():
    """The published generator, seed 1234567: its first five outputs."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert draws(1234567, 0, 5).tolist() == known


def test_a_draw_needs_only_its_own_counter():
    np.testing.assert_array_equal(draws(7, 0, 100)[40:60], draws(7, 40, 20))


def test_keys_tell_seeds_and_purposes_apart():
    keys = {key(seed, purpose, epoch) for seed in range(5) for purpose in ("order", "offset") for epoch in range(5)}
    assert len(keys) == 50
    assert key(0, "order", 0) == 7983451878373509741  # printf 0/order/0 | sha256sum, its first 8 bytes, little-endian


def test_permutation_is_one():
    order = permutation(key(3, "order", 1), 1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert (order != np.arange(1000)).mean() > 0.99
    assert permutation(5, 1).tolist() == [0]
