"""generation_config.json, there and back."""

import pytest

from tapeless.config import Sampling
from tapeless.interop.generation import Generation, read_generation


@pytest.mark.parametrize(
    "wanted",
    [
        Generation(),
        Generation(stop=(3,), begin=1, pad=2),
        Generation(stop=(3, 4), sampling=Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.1)),
        Generation(sampling=Sampling(temperature=0.0)),
    ],
)
def test_there_and_back(wanted: Generation):
    assert read_generation(wanted.settings(), 10) == (wanted, [])


def test_their_default_of_top_k_is_not_ours():
    assert Generation().settings() == {"do_sample": True, "top_k": 0}


def test_sampling_is_taken_only_where_they_sample():
    assert read_generation({"temperature": 0.1, "do_sample": False}, 10) == (Generation(), [])
    assert read_generation({"temperature": 0.1, "do_sample": True}, 10)[0].given() == {"temperature": 0.1}


def test_nonsense_is_told_and_left_out():
    found, notes = read_generation({"eos_token_id": [10, -1, True, "x"], "top_p": 7, "do_sample": True}, 10)
    assert found == Generation()
    assert len(notes) == 2
