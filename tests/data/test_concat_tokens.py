"""Several token files are indexed like one array, and never converted to one."""

from pathlib import Path

import numpy as np
import pytest

from tapeless.data.token_files import ConcatTokens, as_plain, concat_tokens

WHOLE = np.random.default_rng(1).integers(0, 60_000, 50).astype("<u2")


@pytest.fixture
def parts(tmp_path: Path) -> list[np.memmap]:
    maps = []
    for number, ids in enumerate(np.split(WHOLE, [1, 2, 20, 33])):
        (tmp_path / str(number)).write_bytes(ids.tobytes())
        maps.append(np.memmap(tmp_path / str(number), "<u2", "r"))
    return maps


def test_it_is_indexed_as_one_array(parts: list[np.memmap]):
    tokens = concat_tokens(parts)
    assert isinstance(tokens, ConcatTokens)
    assert (len(tokens), tokens.dtype, tokens.itemsize) == (50, WHOLE.dtype, 2)
    assert [int(tokens[place]) for place in range(50)] == WHOLE.tolist()
    for start in range(0, 51, 3):
        for stop in (*range(start, 51, 4), 50, 99):
            np.testing.assert_array_equal(tokens[start:stop], WHOLE[start:stop])
    np.testing.assert_array_equal(tokens[:], WHOLE)
    np.testing.assert_array_equal(tokens[-7:-2], WHOLE[-7:-2])
    places = np.random.default_rng(2).integers(0, 50, (6, 9))
    np.testing.assert_array_equal(tokens[places], WHOLE[places])
    assert tokens[places].dtype == WHOLE.dtype
    assert tokens[np.empty((0, 4), int)].shape == (0, 4)


@pytest.mark.parametrize("key", [50, -1, [3, 50], [-1, 4]])
def test_a_position_out_of_range_is_an_error(parts: list[np.memmap], key: object):
    with pytest.raises(IndexError, match="of 50 tokens"):
        concat_tokens(parts)[key]


def test_it_is_never_converted_to_one_array(parts: list[np.memmap]):
    tokens = concat_tokens(parts)
    with pytest.raises(TypeError, match="5 token files are not converted to one array"):
        np.asarray(tokens)
    with pytest.raises(IndexError, match="must have step 1"):
        tokens[::2]
    assert as_plain(tokens) is tokens


def test_one_file_is_returned_as_it_is(parts: list[np.memmap]):
    assert concat_tokens(parts[:1]) is parts[0]
    assert type(as_plain(parts[0])) is np.ndarray
