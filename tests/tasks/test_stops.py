"""A text ends before its first stop string, however tokens and characters split it."""

import pytest

from tapeless.data.tokenizer import ByteTokenizer
from tapeless.tasks.stops import UntilText


def pushed(text: str, until: list[str]) -> tuple[int | None, str]:
    """The number of bytes until the stop was found, and the remaining text."""
    growing = UntilText(ByteTokenizer(), until)
    for count, byte in enumerate(text.encode(), 1):
        if growing.push(byte):
            return count, growing.finish()
    return None, growing.finish()


@pytest.mark.parametrize(
    ("text", "until", "seen", "left"),
    [
        ("one. two", ["."], 4, "one"),
        ("one\n\ntwo", ["\n\n", "two"], 5, "one"),
        ("Question: Q", ["Q:", "Question:"], 9, ""),
        ("größer", ["ß"], 6, "grö"),
        ("nothing", ["."], None, "nothing"),
        ("nothing", [], None, "nothing"),
        ("nothing", ["", "."], None, "nothing"),
        ("aab", ["ab"], 3, "a"),
    ],
)
def test_the_first_stop_ends_the_text(text: str, until: list[str], seen: int | None, left: str):
    assert pushed(text, until) == (seen, left)


def test_a_token_may_contain_more_than_the_stop():
    class Words(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.table = [b"one", b". two", b" three!\n"]

    growing = UntilText(Words(), ["two three", "!"])
    assert [growing.push(token) for token in (0, 1, 2)] == [False, False, True]
    assert growing.finish() == "one. "


def test_the_earliest_of_several_stops_counts():
    class Words(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.table = [b"a.b;c"]

    growing = UntilText(Words(), [";", "."])
    assert growing.push(0)
    assert growing.finish() == "a"


def test_half_a_character_is_a_replacement_character():
    growing = UntilText(ByteTokenizer(), ["."])
    assert not growing.push("ß".encode()[0])
    assert growing.finish() == "\ufffd"
