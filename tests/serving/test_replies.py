"""The pieces of a stream add up to the whole answer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pydantic")

from minimax_hybrid.serving.api import ApiError
from minimax_hybrid.serving.replies import ChatChoice, TextChoice
from minimax_hybrid.serving.requests import Update
from minimax_hybrid.serving.tool_calls import MessageParser
from minimax_hybrid.text import DEMO, load_tokenizer

TOKENIZER = load_tokenizer(DEMO)
ANSWER = '<think>\nhm\n</think>\nI look.\n<tool_calls>\n{"name": "f", "arguments": {"x": 1}}\n</tool_calls>'


def updates(text: str, cuts: list[int]) -> list[Update]:
    """One character a token; several tokens may come together."""
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    made = []
    for piece in pieces:
        tokens = TOKENIZER(piece, add_special_tokens=False)["input_ids"]
        tops = [[(token, -0.5), (5, -1.0)] for token in tokens]
        log_probs = [-0.5] * len(tokens)
        made.append(Update(0, tokens=tokens, text=piece, log_probs=log_probs, top_log_probs=tops))
    made[-1].finish_reason = "end"
    return made


@given(st.lists(st.integers(0, 200), max_size=9), st.sampled_from([None, 0, 2]))
def test_chat_deltas_add_up(cuts, top_count):
    choice = ChatChoice(0, TOKENIZER, top_count, MessageParser(tools=True))
    content, reasoning = "", ""
    calls: list[Any] = []
    entries: list[Any] = []
    pieces = [piece for update in updates(ANSWER, cuts) if (piece := choice.feed(update))]
    for piece in pieces:
        content += piece["delta"].get("content", "")
        reasoning += piece["delta"].get("reasoning_content", "")
        calls += piece["delta"].get("tool_calls", [])
        entries += (piece["logprobs"] or {"content": []})["content"]
    whole = choice.whole()
    assert (content, reasoning) == (whole["message"]["content"], whole["message"]["reasoning_content"])
    assert (content, reasoning) == ("I look.", "hm")
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"x": 1}'}]
    assert [call["index"] for call in calls] == [0] and len(whole["message"]["tool_calls"]) == 1
    assert pieces[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert entries == ([] if top_count is None else whole["logprobs"]["content"])
    assert "".join(entry["token"] for entry in entries) == ("" if top_count is None else ANSWER)


@given(st.lists(st.integers(0, 200), max_size=9))
def test_text_pieces_add_up_with_their_offsets(cuts):
    choice = TextChoice(0, TOKENIZER, 2)
    pieces = [piece for update in updates("The cat.", cuts) if (piece := choice.feed(update))]
    whole = choice.whole()
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == "The cat."
    assert whole["logprobs"]["text_offset"] == list(range(8))
    assert sum((piece["logprobs"]["text_offset"] for piece in pieces), []) == list(range(8))


def test_numbers_that_are_not_finite_are_an_error_not_an_answer():
    with pytest.raises(ApiError, match="not finite"):
        TextChoice(0, TOKENIZER, None).feed(Update(0, finish_reason="error"))
