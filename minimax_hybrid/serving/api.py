"""The requests and answers of the OpenAI API that the server speaks, and its way to say no.

A field is known and obeyed, or known and allowed only in the value that changes nothing, or refused: none is
dropped in silence. Beyond OpenAI's fields there are those of GenerationParams: `top_k`, `min_p`,
`repetition_penalty`, `stop_token_ids` (with the openai client, in `extra_body`).
"""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

MOST_CHOICES, MOST_STOPS, MOST_TOP_LOGPROBS = 128, 16, 20

TopCount = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]
Words = Annotated[str, Field(max_length=256)]
Zero = Annotated[float, Field(ge=0, le=0)] | None
# A text that the repetition stop cut off is as incomplete as one that grew too long.
FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length", "repetition": "length"}

# allowed in the one value that changes nothing
UNSUPPORTED = {
    "best_of", "echo", "frequency_penalty", "logit_bias", "parallel_tool_calls", "presence_penalty",
    "response_format", "store", "suffix",
}  # fmt: skip


class ApiError(Exception):
    """A refusal in the API's own form.

    Args:
        param: the field at fault.
        code: a short name that programs can compare.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, usual)
        # what a client sent may be half of a surrogate pair, which no answer can hold
        message = str(self).encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def not_valid(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints about a body, in words."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"][1:] if isinstance(first["loc"][1], str))
    if first["type"] == "extra_forbidden":
        message = f"this server knows no field {where!r}; leave it out"
    elif where.split(".")[0] in UNSUPPORTED:
        message = f"this server does not support {where.split('.')[0]}; leave it out ({first['msg']})"
    elif where:
        message = f"{where}: {first['msg']}, got {first['input']!r:.80}"
    elif first["type"] == "json_invalid":
        message = f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}"
    else:
        message = "the body is no JSON object; send one, with Content-Type: application/json"
    return ApiError(400, message, param=where or None, code=first["type"])


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Lenient(BaseModel):
    """Part of a message, which clients send back with fields of their own."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(_Strict):
    type: Literal["text"]


class Sampling(_Strict):
    """What chats and completions have in common."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MOST_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    # for the caller's own books
    user: Words | None = None
    metadata: dict[str, str] | None = None

    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stops):
            raise ApiError(400, "a stop string is empty; leave it out or give some text", param="stop")
        return stops

    def top_count(self) -> int | None:
        """How many likeliest tokens to show at each position; None for no log-probabilities at all."""
        raise NotImplementedError

    def choices(self) -> int:
        return self.n or 1

    def includes_usage(self) -> bool:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options need stream: true", param="stream_options")
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Sampling):
    """A prompt is a text, or its tokens, or several of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: TopCount | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    def top_count(self) -> int | None:
        return self.logprobs

    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]


class TextPart(_Lenient):
    type: str
    text: str | None = None


class Function(_Lenient):
    name: str
    arguments: str = "{}"


class ToolCall(_Lenient):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(_Lenient):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ToolFunction(_Lenient):
    name: str


class Tool(_Lenient):
    type: Literal["function"]
    function: ToolFunction


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    store: Literal[False] | None = None

    def top_count(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs need logprobs: true", param="top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None

    def given_tools(self) -> list[dict[str, Any]]:
        """The functions that the model may call, as its template shows them."""
        if self.tool_choice not in (None, "none", "auto"):
            raise ApiError(
                400, "the server cannot force a tool call; tool_choice is 'auto' or 'none'",
                param="tool_choice",
            )  # fmt: skip
        return [] if self.tool_choice == "none" else [tool.model_dump() for tool in self.tools or []]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> "Usage":
        return cls(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
            prompt_tokens_details={"cached_tokens": cached},
        )  # fmt: skip


class Reply(BaseModel):
    """An answer or, of a stream, a piece of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage | None = None

    @classmethod
    def opened(cls, kind: str, model: str, prefix: str) -> "Reply":
        """One without choices yet."""
        created = int(time.time())
        return cls(id=f"{prefix}-{uuid4().hex}", object=kind, created=created, model=model, choices=[])
