"""From the engine's updates to the API's choices: pieces for a stream, and their sum for a whole answer."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from .api import FINISH_REASONS, ApiError, Reply, Usage
from .requests import Update
from .tool_calls import MessageParser
from .worker import Generation


class Choice(Protocol):
    """One answer of several: `feed` gives what an update adds to it, `whole` all of it."""

    def feed(self, update: Update) -> dict[str, Any] | None: ...

    def whole(self) -> dict[str, Any]: ...


@dataclass
class TextChoice:
    """A choice of /v1/completions.

    Args:
        top_count: likeliest tokens shown at each position; None for no log-probabilities.
    """

    index: int
    tokenizer: PreTrainedTokenizerBase
    top_count: int | None
    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    likeliest: list[dict[str, float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def feed(self, update: Update) -> dict[str, Any] | None:
        begin = len(self.tokens)
        if self.top_count is not None:
            self._note(update)
        self.text += update.text
        self.finish_reason = _finish_reason(update)
        if not (update.text or self.finish_reason or len(self.tokens) > begin):
            return None
        return self._shown(update.text, begin)

    def whole(self) -> dict[str, Any]:
        return self._shown(self.text, 0)

    def _note(self, update: Update) -> None:
        for token in update.tokens:
            self.offsets.append(self.offsets[-1] + len(self.tokens[-1]) if self.tokens else 0)
            self.tokens.append(_token_text(self.tokenizer, token))
        self.log_probs += update.log_probs
        self.likeliest += [
            {_token_text(self.tokenizer, token): log_prob for token, log_prob in top}
            for top in update.top_log_probs
        ]

    def _shown(self, text: str, begin: int) -> dict[str, Any]:
        logprobs = None
        if self.top_count is not None:
            logprobs = {
                "tokens": self.tokens[begin:], "token_logprobs": self.log_probs[begin:],
                "top_logprobs": self.likeliest[begin:] or None, "text_offset": self.offsets[begin:],
            }  # fmt: skip
        return {
            "index": self.index, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason
        }  # fmt: skip


@dataclass
class ChatChoice:
    """A choice of /v1/chat/completions."""

    index: int
    tokenizer: PreTrainedTokenizerBase
    top_count: int | None
    parser: MessageParser
    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)

    def opening(self) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def feed(self, update: Update) -> dict[str, Any] | None:
        reason = _finish_reason(update)
        added = self.parser.feed(update.text, last=reason is not None)
        self.reasoning += added.reasoning
        self.content += added.content
        self.tool_calls += added.tool_calls
        self.finish_reason = "tool_calls" if reason == "stop" and self.tool_calls else reason
        entries = [] if self.top_count is None else self._entries(update)
        self.entries += entries
        if not (added or reason or entries):
            return None
        delta: dict[str, Any] = {}
        if added.reasoning:
            delta["reasoning_content"] = added.reasoning
        if added.content:
            delta["content"] = added.content
        if added.tool_calls:
            delta["tool_calls"] = added.tool_calls
        logprobs = {"content": entries} if entries else None
        return {
            "index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": self.finish_reason
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in self.tool_calls
            ]
            message["content"] = self.content or None
        return {
            "index": self.index, "message": message, "finish_reason": self.finish_reason,
            "logprobs": None if self.top_count is None else {"content": self.entries},
        }  # fmt: skip

    def _entries(self, update: Update) -> list[dict[str, Any]]:
        tops = update.top_log_probs or [[] for _ in update.tokens]
        return [
            self._entry(token, log_prob) | {"top_logprobs": [self._entry(*other) for other in top]}
            for token, log_prob, top in zip(update.tokens, update.log_probs, tops, strict=True)
        ]

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        text = _token_text(self.tokenizer, token)
        # a token that is a part of a character has no text of its own
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": log_prob, "bytes": data}


@dataclass
class Tally:
    """Counts the tokens of one call; a prompt counts once, however many choices it has."""

    prompts: Sequence[int]
    n: int
    completion: int = 0
    cached: int = 0

    def add(self, which: int, update: Update) -> None:
        self.completion += len(update.tokens)
        if update.finish_reason is not None and which % self.n == 0:
            self.cached += update.cached_prompt_tokens

    def usage(self) -> Usage:
        return Usage.of(sum(self.prompts), self.completion, self.cached)


async def whole_reply(
    reply: Reply, generation: Generation, choices: Sequence[Choice], tally: Tally
) -> dict[str, Any]:
    async for which, update in generation:
        tally.add(which, update)
        choices[which].feed(update)
    reply.choices = [choice.whole() for choice in choices]
    reply.usage = tally.usage()
    return reply.model_dump()


async def reply_events(
    reply: Reply, generation: Generation, choices: Sequence[Choice], tally: Tally, *, include_usage: bool
) -> AsyncIterator[str]:
    """The reply as server-sent events. What goes wrong on the way is an event too."""
    head = json.dumps(reply.model_dump(exclude={"choices", "usage"}), ensure_ascii=False)[:-1]

    def event(choices: list[dict[str, Any]]) -> str:
        return f'data: {head}, "choices": {json.dumps(choices, ensure_ascii=False)}}}\n\n'

    try:
        for choice in choices:
            if isinstance(choice, ChatChoice):
                yield event([choice.opening()])
        async for which, update in generation:
            tally.add(which, update)
            piece = choices[which].feed(update)
            if piece is not None:
                yield event([piece])
    except ApiError as error:
        yield f"data: {json.dumps(error.body())}\n\n"
        return
    if include_usage:
        reply.usage = tally.usage()
        yield f"data: {reply.model_dump_json()}\n\n"
    yield "data: [DONE]\n\n"


def _finish_reason(update: Update) -> str | None:
    reason = update.finish_reason
    if reason in ("error", "cancelled"):
        raise ApiError(500, "the model gave numbers that are not finite", code="not_finite")
    return None if reason is None else FINISH_REASONS[reason]


def _token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.decode([token]))
