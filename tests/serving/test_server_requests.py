"""Good and bad requests, to an application in this process with the demo model."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from fastapi.testclient import TestClient

from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.serving.engine import Engine
from minimax_hybrid.serving.server import ServerSettings, create_app
from minimax_hybrid.text import DEMO, load_model, load_tokenizer

SUM = [{"role": "user", "content": "12+34="}]
KEY = {"Authorization": "Bearer open sesame"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.fixture(scope="module")
def model() -> MiniMaxM1ForCausalLM:
    return load_model(DEMO, dtype="float32")


@contextmanager
def served(model: MiniMaxM1ForCausalLM, *, template: str | None = None) -> Iterator[TestClient]:
    tokenizer = load_tokenizer(DEMO)
    tokenizer.chat_template = template or tokenizer.chat_template
    engine = Engine(model, tokenizer, max_batch=4)
    settings = ServerSettings(name="demo", api_key="open sesame", max_body_bytes=100_000, max_pending=4)
    app = create_app(engine, tokenizer, settings)
    with TestClient(app, headers=KEY, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def client(model: MiniMaxM1ForCausalLM) -> Iterator[TestClient]:
    with served(model) as client:
        yield client


def chat(client: TestClient, **fields: Any) -> Any:
    body = {"model": "demo", "messages": SUM, "temperature": 0, "max_tokens": 12} | fields
    return client.post("/v1/chat/completions", json=body)


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "'king'; a role is one of"),
        ({"messages": [{"role": "user"}]}, "has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "é"}]}, "'é'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "refuses the prompt|surrogate|unicode"),
        ({"temperature": -1}, "greater than or equal to 0, got -1"),
        ({"temperature": "hot"}, "valid number"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n: "),
        ({"n": 100_000}, "n: "),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "at most 4096; shorten the prompt"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ""}, "a stop string is empty"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"top_logprobs": 2}, "need logprobs: true"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "need stream: true"),
        ({"frequency_penalty": 1}, "does not support frequency_penalty"),
        ({"logit_bias": {"7": 1}}, "does not support logit_bias"),
        ({"response_format": {"type": "json_object"}}, "does not support response_format"),
        ({"tools": [TOOL]}, "template shows no tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "cannot force"),
        ({"max_token": 3}, "knows no field 'max_token'"),
    ],
)
def test_a_bad_request_is_refused_in_words(client, fields, words):
    body = {"model": "demo", "messages": SUM} | fields
    headers = {"Content-Type": "application/json"}
    response = client.post("/v1/chat/completions", content=json.dumps(body), headers=headers)
    assert re.search(words, error_of(response, 400)["message"])


@pytest.mark.parametrize(
    "method, path, content, status",
    [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400),
        ("POST", "/v1/chat/completions", b"[" * 50_000, 400),
        ("POST", "/v1/chat/completions", b'{"model": "demo", "messages": [], "temperature": NaN}', 400),
        ("POST", "/v1/chat/completions", b" " * 100_001, 413),
        ("POST", "/v1/completions", b'{"model": "demo", "prompt": [999]}', 400),
        ("POST", "/v1/completions", b'{"model": "demo", "prompt": []}', 400),
        ("POST", "/v1/completions", b'{"model": "demo", "prompt": ""}', 400),
        ("POST", "/v1/completions", b'{"model": "gpt", "prompt": "a"}', 404),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/v1/models/gpt", None, 404),
        ("GET", "/nowhere", None, 404),
    ],
)
def test_whatever_is_sent_is_answered_in_the_same_form(client, method, path, content, status):
    headers = {"Content-Type": "application/json"}
    error_of(client.request(method, path, content=content, headers=headers), status)


def test_a_body_of_unknown_length_is_cut_off(client):
    error_of(client.post("/v1/completions", content=(b" " * 10_000 for _ in range(20))), 413)


def test_a_request_that_breaks_the_model_is_a_500_and_the_next_is_answered(client, model):
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    hook = model.register_forward_hook(fail)
    try:
        whole = chat(client)
        stream = client.post(
            "/v1/chat/completions", json={"model": "demo", "messages": SUM, "stream": True, "seed": 1}
        )
    finally:
        hook.remove()
    assert error_of(whole, 500)["code"] == "engine_failed"
    assert stream.status_code == 200 and '"engine_failed"' in stream.text and "[DONE]" not in stream.text
    assert client.get("/health").status_code == 200
    assert chat(client).status_code == 200


def test_tools_are_shown_to_a_model_whose_template_has_them(model):
    template = (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}"
        "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    )
    call = {"id": "7", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    turns = [
        *SUM,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "7", "content": "sunny"},
    ]
    with served(model, template=template) as client:
        plain, with_tools = (chat(client, messages=turns, tools=tools) for tools in (None, [TOOL]))
        assert plain.status_code == with_tools.status_code == 200, with_tools.text
        tokens = [answer.json()["usage"]["prompt_tokens"] for answer in (plain, with_tools)]
        assert tokens[0] > len("12+34=") + len('{"name": "weather", "arguments": {"city": "Paris"}}')
        assert tokens[1] > tokens[0] + len(json.dumps(TOOL)) // 2
        assert (
            chat(client, messages=turns, tools=[TOOL], tool_choice="none").json()["usage"]["prompt_tokens"]
            == tokens[0]
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["messages", "temperature", "top_p", "n", "stop", "seed", "logprobs", "tools", "stream_options", "x"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3))
def test_no_body_brings_the_server_down(client, fields):
    response = chat(client, max_tokens=1, **fields)
    assert response.status_code in (200, 400)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer open sesame!", "Bearer é".encode("latin-1")])
def test_a_wrong_key_opens_nothing_but_health(client, key):
    given = {"Authorization": key}
    for path in ("/v1/models", "/metrics", "/nowhere"):
        error = error_of(client.get(path, headers=given), 401)
        assert error["type"] == "authentication_error"
    assert client.get("/health", headers=given).json() == {"status": "ok"}


def test_more_requests_than_may_wait_are_sent_away(client):
    response = chat(client, n=5)
    assert error_of(response, 429)["code"] == "queue_full"
    assert response.headers["Retry-After"] == "1"
    assert chat(client, n=4).status_code == 200


def test_n_choices_cost_their_prompt_once_and_differ_by_seed(client):
    first, again = (chat(client, n=4, seed=5, temperature=1.5).json() for _ in range(2))
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    assert len(set(texts)) > 1
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    one = chat(client).json()["usage"]
    assert first["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert first["usage"]["total_tokens"] == one["prompt_tokens"] + first["usage"]["completion_tokens"]


def test_a_prompt_that_was_seen_before_is_reported_as_cached(client):
    chat(client)
    usage = chat(client).json()["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def test_logprobs_are_those_of_the_tokens_sent(client):
    choice = chat(client, logprobs=True, top_logprobs=2).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    text = "".join(entry["token"] for entry in entries)
    assert text.startswith(choice["message"]["content"])
    for entry in entries:  # greedy: the token sent is the likeliest
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_a_stop_string_ends_the_answer_before_it(client):
    whole = chat(client).json()["choices"][0]["message"]["content"]
    cut = chat(client, stop=whole[3]).json()["choices"][0]
    assert cut["message"]["content"] == whole[: whole.index(whole[3])]
    assert cut["finish_reason"] == "stop"
    assert chat(client, max_tokens=2).json()["choices"][0]["finish_reason"] == "length"


def test_completions_take_several_prompts_as_text_or_tokens(client):
    tokens = load_tokenizer(DEMO)("The cat")["input_ids"]
    body = {"model": "demo", "max_tokens": 5, "temperature": 0, "logprobs": 0}
    texts = client.post("/v1/completions", json=body | {"prompt": ["The cat", "12+3"]}).json()
    same = client.post("/v1/completions", json=body | {"prompt": tokens}).json()
    assert [choice["index"] for choice in texts["choices"]] == [0, 1]
    assert same["choices"][0]["text"] == texts["choices"][0]["text"]
    assert "".join(texts["choices"][0]["logprobs"]["tokens"]) == texts["choices"][0]["text"]


def test_metrics_count_what_passed(client):
    def counted() -> dict[str, float]:
        lines = client.get("/metrics").text.splitlines()
        return {name: float(n) for name, n in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = counted()
    chat(client, max_tokens=2)
    after = counted()
    assert after["minimax_hybrid_new_tokens_total"] == before["minimax_hybrid_new_tokens_total"] + 2
    assert after["minimax_hybrid_requests_running"] == after["minimax_hybrid_requests_waiting"] == 0
    assert 0 < after["minimax_hybrid_prefix_hit_ratio"] <= 1
