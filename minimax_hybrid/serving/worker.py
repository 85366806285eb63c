"""The thread that owns the engine, and the way in and out of it for asyncio.

The engine is not made for two threads. So one thread alone calls it: it takes commands between two steps,
sends each step's updates to the event loop in one call, and sleeps while there is nothing to do.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar, cast

from .api import ApiError
from .engine import Engine
from .requests import QueueFullError, Request, Stats, Update

SPEED_SECONDS = 10.0  # the span over which tokens per second are counted
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Generation:
    """Requests submitted together. Iterating gives (which of them, update) until all have ended."""

    def __init__(self, count: int):
        self.ids: list[int] = []  # the engine's, written and read by its thread alone
        self.open = count
        self.arrived: asyncio.Queue[tuple[int, Update] | ApiError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        running = self.open
        while running:
            item = await self.arrived.get()
            if isinstance(item, ApiError):
                raise item
            running -= item[1].finish_reason is not None
            yield item


class Counters:
    """What has passed through: how requests ended, and how fast tokens come."""

    def __init__(self) -> None:
        self.finished: dict[str, int] = {}
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, update: Update) -> None:
        self._recent.append((time.monotonic(), len(update.tokens)))
        self._forget()
        if update.finish_reason is not None:
            self.finish(update.finish_reason)

    def finish(self, reason: str, count: int = 1) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + count

    def tokens_per_second(self) -> float:
        self._forget()
        return sum(count for _, count in self._recent) / SPEED_SECONDS

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - SPEED_SECONDS:
            self._recent.popleft()


class EngineWorker:
    """The engine on a thread of its own.

    Args:
        max_pending: requests that may be unfinished at once, running and waiting together.
    """

    def __init__(self, engine: Engine, *, max_pending: int):
        self.engine, self.max_pending = engine, max_pending
        self.pending = 0  # this and the counters belong to the event loop
        self.counters = Counters()
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running: dict[int, tuple[Generation, int]] = {}  # the thread's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin; to be called on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def submit(self, requests: Sequence[Request]) -> Generation:
        """Queue requests together.

        Raises:
            ApiError: 429 for a full queue, 400 for a request that the engine refuses.
        """
        if self.pending + len(requests) > self.max_pending:
            raise ApiError(
                429, f"{self.pending} requests are running or waiting, and the server takes "
                f"{self.max_pending}; try again later", code="queue_full",
            )  # fmt: skip
        generation = Generation(len(requests))
        self.pending += len(requests)
        try:
            await self._ask(lambda: self._submit(requests, generation))
        except BaseException:
            self.cancel(generation)
            raise
        return generation

    async def stats(self) -> Stats:
        """The engine's, taken between two steps."""
        return await self._ask(self.engine.stats)

    def cancel(self, generation: Generation) -> None:
        """Stop what still runs of a generation; one that has ended is left alone."""
        if generation.open:
            self.counters.finish("cancelled", generation.open)
            self._release(generation, generation.open)
            generation.arrived.put_nowait(ApiError(499, "the request was cancelled", code="cancelled"))
            self._commands.put(lambda: self._cancel(generation))

    # On the event loop.

    async def _ask(self, work: Callable[[], T]) -> T:
        """What `work` gives on the engine's thread."""
        if not self.alive:
            raise ApiError(503, "the engine has stopped; restart the server", code="engine_stopped")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(result: T | None, error: ApiError | None) -> None:
            if answer.done():  # whoever asked has gone
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(cast(T, result))

        def command() -> None:
            result, error = None, None
            try:
                result = work()
            except ValueError as refusal:
                error = ApiError(400, str(refusal))
            except QueueFullError as refusal:
                error = ApiError(429, str(refusal), code="queue_full")
            except Exception as failure:
                _log.exception("the engine failed to answer")
                error = _engine_failed(failure)
            self._on_loop(lambda: settle(result, error))

        self._commands.put(command)
        return await answer

    def _release(self, generation: Generation, count: int) -> None:
        generation.open -= count
        self.pending -= count

    def _deliver(self, updates: Sequence[tuple[Generation, int, Update]]) -> None:
        for generation, which, update in updates:
            if generation.open:
                self.counters.add(update)
                generation.arrived.put_nowait((which, update))
                self._release(generation, int(update.finish_reason is not None))

    def _fail(self, generations: Sequence[Generation], error: BaseException) -> None:
        for generation in generations:
            self.counters.finish("error", generation.open)
            self._release(generation, generation.open)
            generation.arrived.put_nowait(_engine_failed(error))

    # On the engine's thread.

    def _on_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def _run(self) -> None:
        while True:
            try:
                if not self._take_commands():
                    return
                if self._running:
                    self._step()
            except Exception as error:  # whatever fails, the thread stays: others wait for it
                self._give_up(error)

    def _take_commands(self) -> bool:
        """Obey all that wait, or wait for one where nothing runs; False at the end."""
        while not self._commands.empty() or not self._running:
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _step(self) -> None:
        updates = self.engine.step()
        known = [
            (*self._running[update.request_id], update)
            for update in updates
            if update.request_id in self._running
        ]
        for update in updates:
            if update.finish_reason is not None:
                self._running.pop(update.request_id, None)
        self._on_loop(lambda: self._deliver(known))

    def _give_up(self, error: Exception) -> None:
        """End every request that runs with an error; the engine is tidied as far as it lets us."""
        _log.error("the engine failed; its requests are given up", exc_info=error)
        generations = list({id(generation): generation for generation, _ in self._running.values()}.values())
        for request_id in [*self._running]:
            with suppress(Exception):
                self._cancel_id(request_id)
        self._on_loop(lambda: self._fail(generations, error))

    def _submit(self, requests: Sequence[Request], generation: Generation) -> None:
        for which, request in enumerate(requests):
            request_id = self.engine.submit(request)
            generation.ids.append(request_id)
            self._running[request_id] = generation, which

    def _cancel(self, generation: Generation) -> None:
        for request_id in generation.ids:
            if request_id in self._running:
                self._cancel_id(request_id)

    def _cancel_id(self, request_id: int) -> None:
        del self._running[request_id]
        self.engine.cancel(request_id)


def _engine_failed(error: BaseException) -> ApiError:
    return ApiError(500, f"the engine failed: {type(error).__name__}", code="engine_failed")
