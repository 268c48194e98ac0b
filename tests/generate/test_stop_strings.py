"""A text ends before its first stop string, and no more of it is held back than could belong to one."""

import pytest

from tapeless.generate.stop_strings import StopStrings


@pytest.mark.parametrize(
    ("pieces", "stops", "seen"),
    [
        (["one. two"], ["."], ["one"]),
        (["one", "\n", "\n", "two"], ["\n\n"], ["one", "", ""]),
        (["one", "\n", "two"], ["\n\n"], ["one", "", "\ntwo"]),
        (["Question", ":", " Q"], ["Q:", "Question:"], ["", ""]),
        (["a", "a", "b"], ["ab"], ["", "a", ""]),
        (["a.b;c"], [";", "."], ["a"]),
        (["one", ". two", " three!"], ["two three"], ["one", ". ", ""]),
        (["nothing"], ["", "x"], ["nothing"]),
        (["nothing"], [], ["nothing"]),
    ],
)
def test_what_is_certain(pieces: list[str], stops: list[str], seen: list[str]):
    text, found = StopStrings(stops), []
    for piece in pieces:
        found.append(text.push(piece))
        if text.found:
            break
    assert found == seen
    assert text.found == any(stop in "".join(pieces) for stop in stops if stop)
    if text.found:
        assert text.push("more") == text.finish() == ""


def test_the_rest():
    text = StopStrings(["END"])
    assert [text.push("an E"), text.push("N"), text.finish()] == ["an ", "", "EN"]
    assert not text.found
