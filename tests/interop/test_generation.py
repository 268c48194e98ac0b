"""generation_config.json in both directions."""

import pytest

from tapeless.config import Sampling
from tapeless.interop.generation import Generation, read_generation


@pytest.mark.parametrize(
    "generation",
    [
        Generation(),
        Generation(eos_ids=(3,), bos_id=1, pad_id=2),
        Generation(eos_ids=(3, 4), sampling=Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.1)),
        Generation(sampling=Sampling(temperature=0.0)),
    ],
)
def test_round_trip(generation: Generation):
    assert read_generation(generation.settings(), 10) == (generation, [])


def test_top_k_is_always_written():
    assert Generation().settings() == {"do_sample": True, "top_k": 0}


def test_sampling_settings_count_only_with_do_sample():
    assert read_generation({"temperature": 0.1, "do_sample": False}, 10) == (Generation(), [])
    assert read_generation({"temperature": 0.1, "do_sample": True}, 10)[0].non_default() == {"temperature": 0.1}


def test_invalid_values_are_ignored_with_a_note():
    found, notes = read_generation({"eos_token_id": [10, -1, True, "x"], "top_p": 7, "do_sample": True}, 10)
    assert found == Generation()
    assert len(notes) == 2
