"""Chat messages to text and tokens: a message's content may be a string or a list of parts.

Templates differ in what they read. M1's indexes `content[0]["text"]`: it fails on a string and forgets every
part after the first. Most others print a string and show a list as Python writes it. So messages are brought
to one form, one text each, and given to the template in the form it was seen to read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool")


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The conversation as the tokenizer's template writes it.

    Args:
        messages: each with a `role` and a `content`, a string or parts `{"type": "text", "text": ...}`; a
            tool's message or its parts carry the tool's `name`.
        add_generation_prompt: end with the opening of the assistant's turn.
        tools: descriptions of functions the assistant may call.

    Raises:
        ValueError: no template, an unknown role, absent content, a part that is not text.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the tokenizer has no chat template; give the whole text as a plain prompt")
    read = [_Message.read(message, i) for i, message in enumerate(_list_of(messages))]
    as_parts = _reads_parts(tokenizer)
    written = [message.parts() if as_parts else message.string() for message in read]
    try:
        return _applied_template(tokenizer)(
            written, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The tokens of `chat_text`; the template has already written every special token."""
    text = chat_text(tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class _Message:
    """A message as its texts: one, or for a tool one for each result with the tool's name."""

    def __init__(self, role: str, texts: list[tuple[str, str | None]], rest: dict[str, Any]):
        self.role, self.texts, self.rest = role, texts, rest

    @classmethod
    def read(cls, message: Mapping[str, Any], i: int) -> "_Message":
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} is {message!r}; a message is a dictionary with 'role' and 'content'")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"{where} has the role {role!r}; a role is one of {', '.join(ROLES)}")
        if content is None or content == []:
            raise ValueError(f"{where} ({role}) has no content; give a string or a list of text parts")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            raise ValueError(f"{where} has the content {content!r}; give a string or a list of text parts")
        texts = [_text_of(part, f"{where}.content[{j}]") for j, part in enumerate(content)]
        if role == "tool":
            texts = [(text, name or message.get("name")) for text, name in texts]
            if not all(name for _, name in texts):
                raise ValueError(f"{where} is a tool's result without the tool's name; add 'name'")
        else:
            texts = [("".join(text for text, _ in texts), None)]
        rest = {key: value for key, value in message.items() if key != "content"}
        return cls(role, texts, rest)

    def string(self) -> dict[str, Any]:
        return self.rest | {"content": "".join(text for text, _ in self.texts)}

    def parts(self) -> dict[str, Any]:
        named = [{"name": name} if name else {} for _, name in self.texts]
        texts = [{"type": "text", "text": text} for text, _ in self.texts]
        return self.rest | {"content": [part | name for part, name in zip(texts, named, strict=True)]}


def _list_of(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"a conversation is a list of at least one message, got {messages!r:.80}")
    return messages


def _text_of(part: Any, where: str) -> tuple[str, str | None]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        shown = f"of type {kind!r}" if kind else f"{part!r:.80}"
        raise ValueError(f'{where} is {shown}; only {{"type": "text", "text": ...}} is supported')
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where} has the text {part.get('text')!r:.80}; a text part holds a string")
    return part["text"], part.get("name")


def _applied_template(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    # its annotations know neither contents in parts nor that text comes back without `tokenize`
    return tokenizer.apply_chat_template


def _reads_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template reads lists of parts rather than strings, found by trying one message."""
    probe = "probe"
    for as_parts, content in ((False, probe), (True, [{"type": "text", "text": probe}])):
        try:
            text = _applied_template(tokenizer)([{"role": "user", "content": content}], tokenize=False)
        except (TemplateError, TypeError):
            continue
        if probe in text and "'type'" not in text:
            return as_parts
    raise ValueError("the tokenizer's chat template shows no user's text, neither from a string nor parts")
