"""A server process with the demo model, spoken to by OpenAI's own client."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.slow  # starting a process takes as long as importing torch

KEY = "open sesame"


@contextmanager
def server(*options: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """The address of a server on a free port, and its process."""
    command = [sys.executable, "-m", "minimax_hybrid", "serve", "--port", "0", "--threads", "1",
               "--dtype", "float32", "--api-key", KEY, *options]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "serving at " in line)
        yield line.split("serving at ")[1].strip(), process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server() as (address, _):
        yield address


def client_of(address: str) -> Any:
    return openai.OpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=120)


def question(i: int) -> dict[str, Any]:
    """The i-th of many different requests, greedy and sampled."""
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"{10 + i}+{20 + 2 * i}="}],
        "temperature": i % 3 / 2, "seed": i, "max_tokens": 30,
    }  # fmt: skip


def streamed(client: Any, i: int, *, pieces: int | None = None) -> str:
    """The text of a stream, or of its first pieces, after which the client goes away."""
    text = ""
    with client.chat.completions.create(**question(i), stream=True) as stream:
        for count, chunk in enumerate(stream, start=1):
            text += chunk.choices[0].delta.content or ""
            if count == pieces:
                break
    return text


def finished(address: str, reason: str) -> int:
    headers = {"Authorization": f"Bearer {KEY}"}
    lines = httpx.get(address.removesuffix("/v1") + "/metrics", headers=headers).text.splitlines()
    return sum(int(line.split()[-1]) for line in lines if f'{{reason="{reason}"}}' in line)


def test_a_chat_is_the_same_whole_and_as_a_stream(address):
    client = client_of(address)
    whole = client.chat.completions.create(**question(1))
    chunks = list(
        client.chat.completions.create(**question(1), stream=True, stream_options={"include_usage": True})
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 3
    assert [model.id for model in client.models.list()] == ["demo"]


def test_of_32_streams_half_go_away_and_the_rest_say_what_they_say_alone(address):
    client, before = client_of(address), finished(address, "cancelled")
    alone = [streamed(client, i) for i in range(32)]
    assert len(set(alone)) > 10
    goes = [i % 4 < 2 for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda i: streamed(client, i, pieces=2 if goes[i] else None), range(32)))
    assert [text for text, gone in zip(together, goes, strict=True) if not gone] == [
        text for text, gone in zip(alone, goes, strict=True) if not gone
    ]
    assert all(whole.startswith(text) for whole, text in zip(alone, together, strict=True))
    # a client's leaving may be seen after its last token was made, but not every time
    assert before < finished(address, "cancelled") <= before + 16


def test_a_client_that_goes_away_without_a_stream_cancels_its_request(address):
    before = finished(address, "cancelled")
    request = question(0) | {"max_tokens": 4000, "temperature": 100.0}  # nearly no text ends soon
    with pytest.raises(openai.APITimeoutError):
        client_of(address).with_options(timeout=0.3).chat.completions.create(**request, n=32)
    until = time.monotonic() + 30
    while finished(address, "cancelled") == before and time.monotonic() < until:
        pass
    assert finished(address, "cancelled") > before


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"temperature": -1}, "BadRequestError"),
        ({"messages": []}, "BadRequestError"),
        ({"max_tokens": 10**6}, "BadRequestError"),
        ({"model": "gpt"}, "NotFoundError"),
    ],
)
def test_a_bad_request_is_an_error_of_the_client_and_the_server_stays(address, fields, error):
    client = client_of(address)
    with pytest.raises(getattr(openai, error)) as caught:
        client.chat.completions.create(**question(1) | fields)
    assert caught.value.body["message"]
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(**question(1))
    assert client.chat.completions.create(**question(1)).choices[0].message.content


def test_overload_is_answered_and_a_signal_lets_what_runs_finish():
    with server("--max-batch", "1", "--max-queue", "2") as (address, process):
        client = client_of(address)
        alone = streamed(client, 1)

        def outcome(i: int) -> str:
            try:
                return streamed(client, 1)
            except openai.RateLimitError:
                return "sent away"

        with ThreadPoolExecutor(16) as pool:
            outcomes = list(pool.map(outcome, range(16)))
        assert set(outcomes) == {alone, "sent away"}

        with client.chat.completions.create(**question(1), stream=True) as stream:
            chunks = iter(stream)
            text = next(chunks).choices[0].delta.content
            process.send_signal(signal.SIGTERM)
            text += "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == alone
        assert process.wait(timeout=30) == 0
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.parametrize("host", ["0.0.0.0", "example.com", "::"])
def test_a_door_to_others_needs_a_key(host):
    command = [sys.executable, "-m", "minimax_hybrid", "serve", "--host", host]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--api-key" in done.stderr
