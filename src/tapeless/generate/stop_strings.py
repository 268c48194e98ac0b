"""A text that ends before the first of some strings, while it grows.
Tested by: tests/generate/test_stop_strings.py."""

from collections.abc import Sequence


class StopStrings:
    """Empty ones are ignored."""

    def __init__(self, stops: Sequence[str]):
        self.found = False
        self._stops = [stop for stop in stops if stop]
        self._held = ""  # the end of the text, which may be the beginning of a stop string

    def push(self, text: str) -> str:
        """What is now certain to be in the text."""
        if self.found:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.found = bool(places)
        cut = min(places) if places else len(self._held) - self._overlap()
        certain, self._held = self._held[:cut], "" if self.found else self._held[cut:]
        return certain

    def finish(self) -> str:
        """The rest: no stop string will be completed."""
        rest, self._held = self._held, ""
        return rest

    def _overlap(self) -> int:
        """How many of the last characters begin a stop string."""
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
        return max(lengths, default=0)
