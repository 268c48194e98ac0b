"""Names from elsewhere, printed."""

import pytest

from tapeless.text import printable, readable, rows_text


@pytest.mark.parametrize("text", ["plain", "ü漢🙂 with spaces", ""])
def test_what_can_be_printed_stays(text: str):
    assert printable(text) == readable(text) == text


def test_what_cannot_is_escaped():
    assert printable("a\nb\x1b]0;title\x07\u202e\x9b\udcff") == r"a\nb\x1b]0;title\x07\u202e\x9b\udcff"
    assert rows_text([("run", "a\x1b[2J"), ("", "cp 'a\nb'")]) == "run        a\\x1b[2J\n           cp 'a\\nb'"
