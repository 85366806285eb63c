"""Text comes in whole characters, and what may be the start of a stop text waits."""

import pytest
import tiny

from minimax_hybrid.serving.text_stream import TextStream

TOKENIZER = tiny.character_tokenizer()


def pieces(text: str, *stop: str) -> tuple[list[str], bool]:
    stream = TextStream(TOKENIZER, stop)
    found = []
    for token in TOKENIZER(text)["input_ids"]:
        found.append(stream.put(token))
        if stream.stopped:
            break
    return [*found, stream.end()], stream.stopped


@pytest.mark.parametrize(
    ("text", "stop", "wanted", "stopped"),
    [
        ("abcdef", (), "abcdef", False),
        ("abcdef", ("cd",), "ab", True),
        ("abcdef", ("de", "bcx"), "abc", True),
        ("abab", ("abc",), "abab", False),  # the start of a stop text that never came is released
        ("aaab", ("aab",), "a", True),
    ],
)
def test_the_text_ends_before_a_stop_text(
    text: str, stop: tuple[str, ...], wanted: str, stopped: bool
) -> None:
    found, was_stopped = pieces(text, *stop)
    assert ("".join(found), was_stopped) == (wanted, stopped)


def test_the_start_of_a_stop_text_waits_until_it_is_decided() -> None:
    found, _ = pieces("abxab", "abc")
    assert found == ["", "", "abx", "", "", "ab"]
