"""The settings of Hugging Face's generation_config.json that have a meaning here.

    eos_token_id        ids that end a text, one or a list          bos_token_id, pad_token_id   passed on
    temperature, top_k, top_p, min_p, repetition_penalty            if do_sample is true: defaults that flags override
An imported run has such a file. A run trained here has none, and its texts end at the token limit.
Tested by: tests/interop/test_generation.py."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from tapeless.config import Sampling
from tapeless.errors import ConfigError

FILE = "generation_config.json"
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Generation(NamedTuple):
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    sampling: Sampling = Sampling()  # its seed is not used

    def non_default(self) -> dict[str, Any]:
        """The sampling settings that differ from our defaults."""
        defaults = asdict(Sampling())
        return {name: value for name, value in asdict(self.sampling).items() if value != defaults[name]}

    def token_ids(self) -> dict[str, Any]:
        """As config.json and generation_config.json have them."""
        eos = self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids) or None
        return {"bos_token_id": self.bos_id, "pad_token_id": self.pad_id, "eos_token_id": eos}

    def settings(self) -> dict[str, Any]:
        """As generation_config.json; top_k is always included, since it defaults to 50 there."""
        known = {name: value for name, value in self.token_ids().items() if value is not None}
        return {**known, "do_sample": True, "top_k": self.sampling.top_k, **self.non_default()}


def read_generation(settings: Mapping[str, Any], vocab_size: int) -> tuple[Generation, list[str]]:
    """The contents of such a file, and notes on invalid values, which are ignored: they never make a model unusable."""
    notes: list[str] = []

    def ids(key: str) -> tuple[int, ...]:
        value = settings.get(key)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        valid = tuple(i for i in listed if type(i) is int and 0 <= i < vocab_size)
        if len(valid) < len(listed):
            notes.append(f"{key} {value!r:.80} is outside the vocabulary of {vocab_size} and is ignored")
        return valid

    eos, bos, pad = ids("eos_token_id"), ids("bos_token_id"), ids("pad_token_id")
    sampled = settings.get("do_sample") is True
    try:
        sampling = Sampling(**{key: settings[key] for key in SAMPLING_KEYS if sampled and settings.get(key) is not None})
    except ConfigError as error:
        notes.append(f"the sampling settings of {FILE} are ignored: {error}")
        sampling = Sampling()
    return Generation(eos, next(iter(bos), None), next(iter(pad), None), sampling), notes
