"""How tokens are sampled.

Tested by: tests/test_config.py, tests/generate/test_sampler.py."""

from dataclasses import dataclass

from tapeless.config.fields import INFINITY, check_types, option, require


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. The defaults sample from the model's own distribution."""

    temperature: float = option(1.0, "below 1 sharpens the distribution, above 1 flattens it; 0: greedy")
    top_k: int = option(0, "sample from the k most likely tokens; 0: from all")
    top_p: float = option(1.0, "sample from the most likely tokens that together have this probability; 1: from all")
    min_p: float = option(0.0, "exclude tokens with less than this fraction of the highest probability; 0: none")
    repetition_penalty: float = option(1.0, "above 1 makes tokens that occurred before less likely; 1: off")
    seed: int = option(0, "equal seeds give equal samples")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("temperature", "top_k"):
            require(0 <= getattr(self, name) < INFINITY, name, "0 or more", getattr(self, name))
        require(0 < self.top_p <= 1, "top_p", "above 0, at most 1", self.top_p)
        require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        require(0 < self.repetition_penalty < INFINITY, "repetition_penalty", "above 0", self.repetition_penalty)
        require(0 <= self.seed < 2**63, "seed", "0 or more", self.seed)
