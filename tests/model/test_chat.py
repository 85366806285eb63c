"""A conversation gives the same text and tokens however its contents are spelled."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import STRING_TEMPLATE, character_tokenizer
from tokenizers.processors import TemplateProcessing

from minimax_hybrid.chat import chat_text, chat_tokens

# Reads as the release's template does: the first part of system and user, every part of the others.
PARTS_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% for part in message['content'] %}{{ part['name'] + ': ' + part['text'] + '\n' }}{% endfor %}"
    "{% elif message['role'] == 'assistant' %}assistant: "
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{{ '\n' }}"
    "{% else %}{{ message['role'] + ': ' + message['content'][0]['text'] + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# Takes either form itself.
BOTH_TEMPLATE = (
    "{% for m in messages %}{% set text = m['content'] if m['content'] is string else "
    "m['content'] | map(attribute='text') | join %}{{ m['role'] + ': ' + text + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TEMPLATES = {"strings": STRING_TEMPLATE, "parts": PARTS_TEMPLATE, "both": BOTH_TEMPLATE}
USER = {"role": "user"}
CONVERSATION = [("system", "be brief"), ("user", "hi there"), ("assistant", "hello"), ("user", "1+1=")]
TEXT = "system: be brief\nuser: hi there\nassistant: hello\nuser: 1+1=\n"


@pytest.fixture(params=TEMPLATES)
def tokenizer(request):
    return with_template(TEMPLATES[request.param])


def with_template(template: str | None):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def spelled(how: str) -> list[dict]:
    forms = {
        "string": lambda text: text,
        "one part": lambda text: [part(text)],
        "two parts": lambda text: [part(text[:3]), part(text[3:])],
    }
    return [{"role": role, "content": forms[how](text)} for role, text in CONVERSATION]


@pytest.mark.parametrize("how", ["string", "one part", "two parts"])
def test_every_spelling_gives_the_same_text_and_tokens(tokenizer, how):
    assert chat_text(tokenizer, spelled(how)) == TEXT
    ids = chat_tokens(tokenizer, spelled(how))
    assert ids == tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == TEXT


@given(texts=st.lists(st.text(max_size=8), min_size=1, max_size=5))
def test_only_the_joined_text_counts(texts):
    tokenizer = with_template(PARTS_TEMPLATE)
    for role in ("system", "user", "assistant"):
        whole = [{"role": role, "content": "".join(texts)}]
        assert chat_text(tokenizer, [{"role": role, "content": list(map(part, texts))}]) == chat_text(
            tokenizer, whole
        )


def test_the_generation_prompt_comes_once_and_only_when_asked_for(tokenizer):
    messages = spelled("string")
    assert chat_text(tokenizer, messages, add_generation_prompt=True) == TEXT + "assistant: "
    assert chat_text(tokenizer, messages, add_generation_prompt=False) == TEXT
    ids = chat_tokens(tokenizer, messages, add_generation_prompt=True)
    assert tokenizer.decode(ids) == TEXT + "assistant: "


def test_no_special_token_is_added_to_those_of_the_template():
    tokenizer = with_template("{{ '<end>' }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    end, letter = tokenizer.convert_tokens_to_ids(["<end>", "a"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", end)]
    )
    assert tokenizer("a")["input_ids"] == [end, letter]
    assert chat_tokens(tokenizer, [USER | {"content": "a"}]) == [end, letter]


def test_messages_are_left_as_they_were(tokenizer):
    messages = spelled("two parts")
    before = copy.deepcopy(messages)
    chat_text(tokenizer, messages, add_generation_prompt=True)
    assert messages == before


def test_results_of_tools_keep_their_names():
    tokenizer = with_template(PARTS_TEMPLATE)
    spellings = (
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "tool", "name": "add", "content": [part("2")]},
        {"role": "tool", "content": [{"type": "text", "name": "add", "text": "2"}]},
    )
    assert {chat_text(tokenizer, [message]) for message in spellings} == {"add: 2\n"}
    two = [{"type": "text", "name": name, "text": text} for name, text in (("add", "2"), ("neg", "-2"))]
    assert chat_text(tokenizer, [{"role": "tool", "content": two}]) == "add: 2\nneg: -2\n"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER | {"content": [{"type": "image_url"}]}], r"content\[0\] is of type 'image_url'"),
        ([USER | {"content": [part("a"), {"type": "audio"}]}], r"content\[1\] is of type 'audio'"),
        ([USER | {"content": ["a"]}], r"content\[0\] is 'a'"),
        ([USER | {"content": [{"text": "a"}]}], r"content\[0\] is {'text': 'a'}"),
        ([USER | {"content": [{"type": "text"}]}], "has the text None"),
        ([USER | {"content": None}], r"messages\[0\] \(user\) has no content"),
        ([USER | {"content": []}], "has no content"),
        ([USER], "has no content"),
        ([USER | {"content": 7}], "has the content 7"),
        ([USER | {"content": "a"}, {"role": "assistant"}], r"messages\[1\] \(assistant\) has no content"),
        ([{"role": "developer", "content": "a"}], "the role 'developer'; a role is one of system, user"),
        ([{"content": "a"}], "the role None"),
        ([{"role": "tool", "content": "2"}], "without the tool's name"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([], "at least one message"),
        ("hi", "at least one message"),
        ({"role": "user", "content": "hi"}, "at least one message"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused_in_words(tokenizer, messages, words):
    with pytest.raises(ValueError, match=words):
        chat_text(tokenizer, messages)


def test_a_missing_or_refusing_template_is_named():
    messages = spelled("string")
    with pytest.raises(ValueError, match="no chat template"):
        chat_text(with_template(None), messages)
    with pytest.raises(ValueError, match="shows no user's text"):
        chat_text(with_template("{{ 'nothing' }}"), messages)
    strict = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    with pytest.raises(ValueError, match="refuses this conversation: one at a time"):
        chat_text(with_template(strict + STRING_TEMPLATE), messages)
