"""An OpenAI-compatible server in front of one engine: `minimax-hybrid serve --model DIR`.

POST /v1/chat/completions, /v1/completions; GET /v1/models, /health, /metrics

A handler checks its request, turns it into tokens on a thread beside the event loop, submits it to the
engine's thread (worker.py) and writes what comes back as the API's replies (replies.py).
"""

import asyncio
import functools
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from ..chat import chat_text
from ..text import encode
from . import requests as engine_requests
from .api import ApiError, ChatRequest, CompletionRequest, Reply, Sampling, not_valid
from .engine import Engine
from .gate import Gate
from .metrics import metrics_text
from .replies import ChatChoice, Choice, Tally, TextChoice, reply_events, whole_reply
from .tool_calls import THINK, MessageParser, template_messages
from .worker import EngineWorker, Generation

COMPLETION_TOKENS = 16  # what /v1/completions gives where a request does not say, as OpenAI's does
MOST_PROMPTS = 128
T = TypeVar("T")


@dataclass(frozen=True)
class ServerSettings:
    """How the server meets the world.

    Args:
        name: of the model, as requests must spell it.
        api_key: what requests must carry, except to /health; None lets everybody in.
        max_length: tokens of a prompt and its answer together.
        max_pending: requests that may be unfinished at once, running and waiting together.
        chat_tokens: the longest answer of a chat that gives no limit.
        drain_seconds: after SIGTERM, what still runs after this time is cut off.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_length: int = 4096
    max_pending: int = 288
    chat_tokens: int = 1024
    max_body_bytes: int = 16 * 2**20
    drain_seconds: int = 300


def serve(engine: Engine, tokenizer: PreTrainedTokenizerBase, settings: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM, then finish what runs."""
    config = uvicorn.Config(
        create_app(engine, tokenizer, settings), host=settings.host, port=settings.port,
        log_level="warning", access_log=False, timeout_keep_alive=30,
        timeout_graceful_shutdown=settings.drain_seconds,
    )  # fmt: skip
    # uvicorn drains at a signal and then raises it again; for us the drained end is the good end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _Server(config).run(sockets=[config.bind_socket()])


class _Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            host, port = server.sockets[0].getsockname()[:2]
            print(f"serving at http://{f'[{host}]' if ':' in host else host}:{port}/v1", file=sys.stderr)
        sys.stderr.flush()


def create_app(engine: Engine, tokenizer: PreTrainedTokenizerBase, settings: ServerSettings) -> FastAPI:
    service = Service(engine, tokenizer, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.stop()

    app = FastAPI(title="minimax-hybrid", lifespan=lifespan)
    app.add_middleware(Gate, api_key=settings.api_key, max_body_bytes=settings.max_body_bytes)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _our_fault)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.card

    @app.get("/health")
    async def health() -> Response:
        alive = service.worker.alive
        return JSONResponse({"status": "ok" if alive else "engine stopped"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = metrics_text(await service.worker.stats(), service.worker.counters)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    return app


class Service:
    """Requests to engine and back."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, settings: ServerSettings):
        self.tokenizer, self.settings = tokenizer, settings
        self.worker = EngineWorker(engine, max_pending=settings.max_pending)
        self.card = {
            "id": settings.name, "object": "model", "created": 0, "owned_by": "minimax-hybrid",
            "max_model_len": settings.max_length,
        }  # fmt: skip
        # one thread: a tokenizer may not be entered by two
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def stop(self) -> None:
        self.worker.stop()
        self._tokenizing.shutdown()

    def check_model(self, name: str) -> None:
        if name != self.settings.name:
            raise ApiError(
                404, f"there is no model {name!r:.80}; this server has {self.settings.name!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        self.check_model(body.model)
        text = await self._beside(lambda: self._chat_text(body))
        prompt = await self._beside(lambda: self._tokens(text, "messages", special_tokens=False))
        tools, thinking = bool(body.given_tools()), text.rstrip().endswith(THINK)
        wanted = body.max_completion_tokens or body.max_tokens
        longest = wanted or max(1, min(self.settings.chat_tokens, self.settings.max_length - len(prompt)))
        choices = [
            ChatChoice(i, self.tokenizer, body.top_count(), MessageParser(tools=tools, thinking=thinking))
            for i in range(body.choices())
        ]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        return await self._answer(body, request, [prompt], longest, choices, kind)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        self.check_model(body.model)
        given = body.prompts()
        if not 0 < len(given) * body.choices() <= MOST_PROMPTS:
            raise ApiError(
                400, f"{len(given)} prompts with {body.choices()} answers each; a request takes from 1 to "
                f"{MOST_PROMPTS} answers in all", param="prompt",
            )  # fmt: skip
        prompts = await self._beside(lambda: [self._tokens(prompt, "prompt") for prompt in given])
        count = len(prompts) * body.choices()
        choices = [TextChoice(i, self.tokenizer, body.top_count()) for i in range(count)]
        longest = body.max_tokens or COMPLETION_TOKENS
        return await self._answer(body, request, prompts, longest, choices, "text_completion")

    async def _answer(
        self,
        body: Sampling,
        request: Request,
        prompts: Sequence[list[int]],
        longest: int,
        choices: Sequence[Choice],
        kind: str,
    ) -> Response:
        include_usage = body.includes_usage()
        for prompt in prompts:
            self._check_length(len(prompt), longest)
        generation = await self.worker.submit(_requests(body, prompts, longest))
        reply = Reply.opened(kind, self.settings.name, "cmpl" if kind == "text_completion" else "chatcmpl")
        tally = Tally([len(prompt) for prompt in prompts], body.choices())
        if body.stream:
            events = reply_events(reply, generation, choices, tally, include_usage=include_usage)
            return StreamingResponse(
                self._to_the_end(events, generation), media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )  # fmt: skip
        watch = asyncio.create_task(self._cancel_at_disconnect(request, generation))
        try:
            return JSONResponse(await whole_reply(reply, generation, choices, tally))
        finally:
            watch.cancel()
            self.worker.cancel(generation)

    async def _to_the_end(self, events: AsyncIterator[str], generation: Generation) -> AsyncIterator[str]:
        """The events; a stream that is closed before its end (the client has gone) cancels its requests."""
        try:
            async for event in events:
                yield event
        finally:
            self.worker.cancel(generation)

    async def _cancel_at_disconnect(self, request: Request, generation: Generation) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.worker.cancel(generation)

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    def _chat_text(self, body: ChatRequest) -> str:
        tools = body.given_tools()
        write = functools.partial(
            chat_text, self.tokenizer, template_messages(body.messages), add_generation_prompt=True
        )
        try:
            text = write(tools=tools or None)
            if tools and text == write():
                raise ApiError(400, "the model's chat template shows no tools; leave them out", param="tools")
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        return text

    def _tokens(self, given: str | list[int], param: str, *, special_tokens: bool = True) -> list[int]:
        if isinstance(given, str):
            try:
                return encode(self.tokenizer, given, special_tokens=special_tokens)
            except ValueError as error:
                raise ApiError(400, str(error), param=param) from error
        V = len(self.tokenizer)
        if not given or not all(0 <= token < V for token in given):
            raise ApiError(400, f"a prompt of tokens has at least one, each from 0 to {V - 1}", param=param)
        return given

    def _check_length(self, prompt: int, answer: int) -> None:
        if prompt + answer > self.settings.max_length:
            raise ApiError(
                400, f"the prompt has {prompt} tokens and the answer may have {answer}; together they may be "
                f"at most {self.settings.max_length}; shorten the prompt or lower max_tokens",
                param="max_tokens", code="context_length_exceeded",
            )  # fmt: skip


def _requests(body: Sampling, prompts: Sequence[list[int]], longest: int) -> list[engine_requests.Request]:
    """One request for each choice: those of a prompt beside each other, each with a seed of its own."""
    given = body.model_dump(
        include={"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}, exclude_none=True
    )
    requests = []
    for prompt in prompts:
        for i in range(body.choices()):
            sampling = engine_requests.GenerationParams(
                seed=None if body.seed is None else (body.seed + i) % 2**64,
                max_new_tokens=longest, stop=tuple(body.stops()),
                stop_token_ids=tuple(body.stop_token_ids or ()), top_log_probs=body.top_count() or 0, **given,
            )  # fmt: skip
            requests.append(engine_requests.Request(prompt, sampling))
    return requests


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {429: {"Retry-After": "1"}}.get(error.status)
    return JSONResponse(error.body(), error.status, headers=headers)


async def _not_valid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _refused(request, not_valid(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code in (404, 405):
        message = f"this server has no {request.method} {request.url.path}"
    return await _refused(request, ApiError(error.status_code, message))


async def _our_fault(request: Request, error: Exception) -> Response:
    return await _refused(request, ApiError(500, f"the server failed: {type(error).__name__}"))
