"""Generated text that ends at a stop string, found as soon as the token that completes it is sampled.
Tested by: tests/tasks/test_stops.py."""

from collections.abc import Sequence

from tapeless.data.tokenizer import Tokenizer


class UntilText:
    """One growing text. Empty stop strings are ignored."""

    def __init__(self, tokenizer: Tokenizer, until: Sequence[str]):
        self._stream = tokenizer.stream()
        self._until = [stop for stop in until if stop]
        self._text = ""

    def push(self, token: int) -> bool:
        """Whether the text contains a stop string now."""
        new = self._stream.push(token)
        self._text += new
        reach = len(new) + max(map(len, self._until), default=0)  # a stop string that is complete now starts in here
        return any(stop in self._text[-reach:] for stop in self._until)

    def finish(self) -> str:
        """The text up to the first stop string, or all of it."""
        text = self._text + self._stream.finish()
        return text[: min((text.index(stop) for stop in self._until if stop in text), default=len(text))]
