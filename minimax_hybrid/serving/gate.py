"""What a request must pass before anything reads it: the key, and the size of its body."""

import hmac

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api import ApiError


class Gate:
    """ASGI middleware.

    Args:
        api_key: compared in constant time with the bearer token of every request, but those to /health.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int):
        self.app, self.max_body_bytes = app, max_body_bytes
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            answer = JSONResponse(refusal.body(), refusal.status)
            if refusal.status == 401:
                answer.headers["WWW-Authenticate"] = "Bearer"
            return await answer(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        await self.app(scope, counted, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self.expected is not None and path != "/health":
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self.expected):
                return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.max_body_bytes:
            return ApiError(413, self._too_large())
        return None

    def _too_large(self) -> str:
        return f"the body is larger than {self.max_body_bytes:,} bytes"
