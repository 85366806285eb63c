"""What a chat model writes, taken apart: thinking, the answer, and calls of tools.

MiniMax-M1 thinks first, `<think>...</think>`, then answers, and calls tools by lines of JSON:

    <tool_calls>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_calls>

Its template shows calls of earlier turns nowhere, so `template_messages` writes them into the text again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from .api import ApiError, Message, ToolCall

THINK, THOUGHT = "<think>", "</think>"
CALLS, CALLED = "<tool_calls>", "</tool_calls>"


@dataclass
class Delta:
    """What a piece of text adds to a message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class MessageParser:
    """Takes the text as it comes; what could be the beginning of a mark waits for the next piece.

    Args:
        tools: look for calls; without it their mark is text as any other.
        thinking: the prompt has opened the thinking already.
    """

    def __init__(self, *, tools: bool, thinking: bool = False):
        self._rest, self._tools = "", tools
        self._part = "thinking" if thinking else "start"
        self._after_mark = thinking  # newlines beside a mark belong to it
        self.called = 0

    def feed(self, text: str, *, last: bool = False) -> Delta:
        self._rest += text
        delta = Delta()
        while self._advance(delta, last):
            pass
        return delta

    def _advance(self, delta: Delta, last: bool) -> bool:
        """Handle the text up to the next mark; whether there may be more to do."""
        if self._after_mark:
            self._rest = self._rest.lstrip("\n")
            self._after_mark = not self._rest
        if self._part == "start":
            begun = self._rest.lstrip()
            if begun.startswith(THINK):
                return self._enter("thinking", begun.removeprefix(THINK))
            if THINK.startswith(begun) and not last:
                return False
            return self._enter("content", self._rest, marked=False)
        if self._part == "thinking":
            thought, found, after = self._split(THOUGHT, last)
            delta.reasoning += thought
            return found and self._enter("content", after)
        if self._part == "content" and self._tools:
            text, found, after = self._split(CALLS, last)
            delta.content += text
            return found and self._enter("calls", after)
        if self._part == "content":
            delta.content += self._rest
            self._rest = ""
            return False
        return self._read_calls(delta, last)

    def _enter(self, part: str, rest: str, *, marked: bool = True) -> bool:
        self._part, self._rest, self._after_mark = part, rest, marked
        return True

    def _split(self, mark: str, last: bool) -> tuple[str, bool, str]:
        """The text before a mark, whether it is there, and the text behind it."""
        before, found, after = self._rest.partition(mark)
        if found:
            return before.rstrip("\n"), True, after
        kept = 0 if last else _begun(self._rest, mark)
        ready = self._rest[: len(self._rest) - kept]
        ready = ready if last else ready.rstrip("\n")
        self._rest = self._rest[len(ready) :]
        return ready, False, ""

    def _read_calls(self, delta: Delta, last: bool) -> bool:
        inside, closed, after = self._rest.partition(CALLED)
        if not closed and not last:
            return False
        calls = _parsed_calls(inside)
        if calls is None:  # nothing that a client could run: the text is shown as it is
            delta.content += CALLS + "\n" + self._rest
            self._part, self._rest = "content", ""
            return False
        for call in calls:
            delta.tool_calls.append(call | {"index": self.called})
            self.called += 1
        return self._enter("content", after)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as `chat_text` reads them: calls as text, results with their tool's name."""
    names: dict[str | None, str] = {}
    written = []
    for i, message in enumerate(messages):
        plain = message.model_dump(include={"role", "name"}, exclude_none=True)
        plain["role"] = "system" if message.role == "developer" else message.role
        content = message.content
        if not isinstance(content, str) and content is not None:
            plain["content"] = [part.model_dump(exclude_none=True) for part in content]
        elif content is not None:
            plain["content"] = content
        if message.tool_calls:
            plain["content"] = _with_calls(plain.get("content"), message.tool_calls)
            names |= {call.id: call.function.name for call in message.tool_calls}
        if message.role == "tool" and message.name is None and message.tool_call_id is not None:
            if message.tool_call_id not in names:
                raise ApiError(
                    400, f"messages[{i}] answers the tool call {message.tool_call_id!r}, which no message "
                    "before it makes", param=f"messages.{i}.tool_call_id",
                )  # fmt: skip
            plain["name"] = names[message.tool_call_id]
        written.append(plain)
    return written


def _with_calls(content: Any, calls: Sequence[ToolCall]) -> str:
    text = "".join(part.get("text", "") for part in content) if isinstance(content, list) else content or ""
    lines = [CALLS]
    for call in calls:
        try:
            arguments = json.loads(call.function.arguments)
        except (ValueError, RecursionError):
            arguments = call.function.arguments
        lines.append(json.dumps({"name": call.function.name, "arguments": arguments}, ensure_ascii=False))
    return "\n".join([*([text] if text else []), *lines, CALLED])


def _begun(text: str, mark: str) -> int:
    """How many of the last characters may be the beginning of a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def _parsed_calls(text: str) -> list[dict[str, Any]] | None:
    """The calls, one object after the other; None if any of it is something else."""
    decoder, calls, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        try:
            call, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(
            {"id": f"call_{uuid4().hex[:24]}", "type": "function",
             "function": {"name": call["name"], "arguments": arguments}}
        )  # fmt: skip
        rest = rest[end:].lstrip()
    return calls or None
