"""Texts that end at a string: seen as soon as the token that completes it is drawn, wherever in that token it ends.
Tested by: tests/tasks/test_stops.py."""

from collections.abc import Sequence

from tapeless.data.tokenizer import Tokenizer


class UntilText:
    """One growing text. An empty stop string, which would end it before it begins, stops nothing."""

    def __init__(self, tokenizer: Tokenizer, until: Sequence[str]):
        self._stream = tokenizer.stream()
        self._until = [stop for stop in until if stop]
        self._text = ""

    def push(self, token: int) -> bool:
        """Whether the text has reached a stop string."""
        new = self._stream.push(token)
        self._text += new
        reach = len(new) + max(map(len, self._until), default=0)  # a stop that is complete now began no earlier
        return any(stop in self._text[-reach:] for stop in self._until)

    def finish(self) -> str:
        """The text in front of the first stop string, or all of it."""
        text = self._text + self._stream.finish()
        return text[: min((text.index(stop) for stop in self._until if stop in text), default=len(text))]
