"""How tokens are sampled.

Tested by: tests/test_config.py, tests/generate/test_sampler.py."""

from dataclasses import dataclass

from tapeless.config.fields import check_fields, option, require

MAX_TOKENS = 200  # to generate by default


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. The defaults sample from the model's own distribution."""

    temperature: float = option(1.0, "below 1 sharpens the distribution, above 1 flattens it; 0: greedy", ge=0)
    top_k: int = option(0, "sample from the k most likely tokens; 0: from all", ge=0)
    top_p: float = option(1.0, "sample from the most likely tokens that together have this probability; 1: from all")
    min_p: float = option(0.0, "exclude tokens with less than this fraction of the highest probability; 0: none")
    repetition_penalty: float = option(1.0, "above 1 makes tokens that occurred before less likely; 1: off", gt=0)
    seed: int = option(0, "equal seeds give equal samples", ge=0)

    def __post_init__(self) -> None:
        check_fields(self)
        require(0 < self.top_p <= 1, "top_p", "above 0, at most 1", self.top_p)
        require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
