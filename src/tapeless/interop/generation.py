"""How a model wants to be sampled: what of Hugging Face's generation_config.json has a meaning here.

    eos_token_id        ids that end a text, one or a list          bos_token_id, pad_token_id   kept for whoever asks
    temperature, top_k, top_p, min_p, repetition_penalty            where do_sample is true: defaults that flags override
A run that was imported keeps such a file; a run that was trained here has none, and its texts end where they are cut off.
Tested by: tests/interop/test_generation.py."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from tapeless.config import Sampling
from tapeless.errors import ConfigError

FILE = "generation_config.json"
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Generation(NamedTuple):
    stop: tuple[int, ...] = ()
    begin: int | None = None
    pad: int | None = None
    sampling: Sampling = Sampling()  # its seed is of no meaning here

    def given(self) -> dict[str, Any]:
        """What differs from our own defaults."""
        usual = asdict(Sampling())
        return {name: value for name, value in asdict(self.sampling).items() if value != usual[name]}

    def settings(self) -> dict[str, Any]:
        """As generation_config.json; top_k is always said, since theirs is 50 where it is not."""
        ids: dict[str, Any] = {"bos_token_id": self.begin, "pad_token_id": self.pad}
        ids["eos_token_id"] = self.stop[0] if len(self.stop) == 1 else list(self.stop) or None
        known = {name: value for name, value in ids.items() if value is not None}
        return {**known, "do_sample": True, "top_k": self.sampling.top_k, **self.given()}


def read_generation(settings: Mapping[str, Any], vocab_size: int) -> tuple[Generation, list[str]]:
    """What such a file says, and notes on what cannot be meant: it never makes a model unusable."""
    notes: list[str] = []

    def ids(key: str) -> tuple[int, ...]:
        value = settings.get(key)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        good = tuple(i for i in listed if type(i) is int and 0 <= i < vocab_size)
        if len(good) < len(listed):
            notes.append(f"{key} {value!r:.80} is not within the vocabulary of {vocab_size} and is left out")
        return good

    stop, begin, pad = ids("eos_token_id"), ids("bos_token_id"), ids("pad_token_id")
    values = {name: settings[name] for name in SAMPLED if settings.get(name) is not None and settings.get("do_sample") is True}
    try:
        sampling = Sampling(**values)
    except ConfigError as error:
        notes.append(f"the sampling of {FILE} is left out: {error}")
        sampling = Sampling()
    return Generation(stop, next(iter(begin), None), next(iter(pad), None), sampling), notes
