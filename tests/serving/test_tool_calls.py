"""A chat model's text taken apart, in whatever pieces it comes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pydantic")

from minimax_hybrid.serving.api import ApiError, Message
from minimax_hybrid.serving.tool_calls import Delta, MessageParser, template_messages

CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
TEXTS = [
    "plain",
    "",
    "  blanks first",
    "<think>\nhm\n\nyes\n</think>\n\nThe answer.\n",
    "<think>never ends\n\n",
    f"<think>\nhm\n</think>\n\nI look.\n<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>",
    f"<tool_calls>\n{CALL}",
    "<tool_calls>\nno JSON\n</tool_calls> and on",
    "<tool_calls>\n[1]\n</tool_calls>",
    "a < b, a <tool, <thin",
    "says <think> in the middle",
]


def parse(pieces: list[str], *, tools: bool = True, thinking: bool = False) -> Delta:
    parser, whole = MessageParser(tools=tools, thinking=thinking), Delta()
    for i, piece in enumerate(pieces):
        delta = parser.feed(piece, last=i == len(pieces) - 1)
        whole.reasoning += delta.reasoning
        whole.content += delta.content
        whole.tool_calls += delta.tool_calls
    for call in whole.tool_calls:
        call["id"] = "any"
    return whole


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 80), max_size=8), st.booleans(), st.booleans())
def test_where_the_text_is_cut_changes_nothing(text, cuts, tools, thinking):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert parse(pieces, tools=tools, thinking=thinking) == parse([text], tools=tools, thinking=thinking)


def test_thinking_goes_apart_from_the_answer():
    found = parse(["<think>\nhm\n\nyes\n</think>\n\nThe answer.\n"])
    assert (found.reasoning, found.content) == ("hm\n\nyes", "The answer.\n")
    assert parse(["hm</think>yes"], thinking=True) == Delta("hm", "yes")
    assert parse(["says <think> in the middle"]).content == "says <think> in the middle"


def test_each_line_of_json_is_a_call():
    found = parse([f"I look.\n<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>"])
    assert found.content == "I look."
    assert [call["index"] for call in found.tool_calls] == [0, 1]
    assert {call["function"]["name"] for call in found.tool_calls} == {"weather"}
    assert json.loads(found.tool_calls[0]["function"]["arguments"]) == {"city": "Paris"}


@pytest.mark.parametrize("text", [TEXTS[7], TEXTS[8], TEXTS[9]])
def test_what_is_no_call_stays_text(text):
    assert parse([text]) == Delta(content=text)


def test_without_tools_their_mark_is_text():
    assert parse([TEXTS[5]], tools=False).content == f"I look.\n<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>"


def test_calls_of_earlier_turns_are_written_as_the_model_wrote_them():
    call = {"id": "7", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "7", "content": "sunny"},
    ]
    system, assistant, tool = template_messages([Message.model_validate(message) for message in given])
    assert system["role"] == "system"
    assert parse([assistant["content"]]).tool_calls[0]["function"] == call["function"]
    assert tool["name"] == "weather"


def test_a_result_of_no_call_is_refused():
    with pytest.raises(ApiError, match="tool call '8', which no message before it makes"):
        template_messages([Message(role="tool", tool_call_id="8", content="sunny")])
