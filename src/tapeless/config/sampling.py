"""How tokens are drawn.

Tested by: tests/test_config.py, tests/generate/test_sampler.py."""

from dataclasses import dataclass

from tapeless.config.fields import INFINITY, check_types, option, require


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The defaults draw from the model's own distribution."""

    temperature: float = option(1.0, "below 1 sharpens the distribution, above 1 flattens it; 0: always the likeliest token")
    top_k: int = option(0, "draw from this many likeliest tokens; 0: from all")
    top_p: float = option(1.0, "draw from the likeliest tokens that together have this probability; 1: from all")
    min_p: float = option(0.0, "leave out tokens less than this times as probable as the likeliest; 0: none")
    repetition_penalty: float = option(1.0, "above 1 makes tokens that were seen before less likely; 1: as they are")
    seed: int = option(0, "equal seeds give equal samples")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("temperature", "top_k"):
            require(0 <= getattr(self, name) < INFINITY, name, "0 or more", getattr(self, name))
        require(0 < self.top_p <= 1, "top_p", "above 0, at most 1", self.top_p)
        require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        require(0 < self.repetition_penalty < INFINITY, "repetition_penalty", "above 0", self.repetition_penalty)
        require(0 <= self.seed < 2**63, "seed", "0 or more", self.seed)
