"""Generated text that ends at a stop string, found as soon as the token that completes it is sampled.
Tested by: tests/tasks/test_stops.py."""

from collections.abc import Sequence

from tapeless.data.tokenizer import Tokenizer
from tapeless.generate.stop_strings import StopStrings


class UntilText:
    """One growing text. Empty stop strings are ignored."""

    def __init__(self, tokenizer: Tokenizer, until: Sequence[str]):
        self._stream, self._until = tokenizer.stream(), StopStrings(until)
        self._text = ""

    def push(self, token: int) -> bool:
        """Whether the text contains a stop string now."""
        self._text += self._until.push(self._stream.push(token))
        return self._until.found

    def finish(self) -> str:
        """The text up to the first stop string, or all of it."""
        return self._text + self._until.push(self._stream.finish()) + self._until.finish()
