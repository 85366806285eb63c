"""A request's answer is its own: alone, in any batch, joined late, with any neighbours, prefix hit or not."""

import dataclasses

import pytest
import tiny
import torch

from minimax_hybrid import MiniMaxM1ForCausalLM
from minimax_hybrid.serving import Engine, GenerationParams, Request, Result

GREEDY = GenerationParams(temperature=0, max_new_tokens=12, end_tokens=())
SAMPLED = GenerationParams(seed=5, max_new_tokens=12, end_tokens=())


@pytest.fixture(scope="module")
def model() -> MiniMaxM1ForCausalLM:
    return tiny.model()


def prompt(length: int, seed: int = 0) -> list[int]:
    return tiny.tokens(1, length, seed=seed)[0].tolist()


def requests(params: GenerationParams = GREEDY) -> list[Request]:
    """Prompts on both sides of a block border, and answers of many lengths."""
    return [
        Request(prompt(length, i), dataclasses.replace(params, max_new_tokens=new, seed=i))
        for i, (length, new) in enumerate([(3, 12), (64, 5), (130, 70), (1, 30), (63, 2), (200, 9)])
    ]


def alone(model: MiniMaxM1ForCausalLM, request: Request) -> Result:
    return Engine(model, prefix_cache_bytes=0).generate([request])[0]


def assert_same(found: Result, wanted: Result) -> None:
    assert found.tokens == wanted.tokens
    assert found.finish_reason == wanted.finish_reason
    for name in ("log_probs", "sampled_log_probs"):
        tiny.assert_close(torch.tensor(getattr(found, name)), torch.tensor(getattr(wanted, name)))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, top_p=0.9, top_k=20)])
@pytest.mark.parametrize("engine", [dict(), dict(max_batch=2), dict(prefill_chunk=7), dict(max_tokens=420)])
def test_the_batch_changes_no_answer(
    model: MiniMaxM1ForCausalLM, params: GenerationParams, engine: dict
) -> None:
    wanted = [alone(model, request) for request in requests(params)]
    for found, expected in zip(Engine(model, **engine).generate(requests(params)), wanted, strict=True):
        assert_same(found, expected)


def test_greedy_answers_are_those_of_generate(model: MiniMaxM1ForCausalLM) -> None:
    for request in requests():
        ids = torch.tensor([request.prompt])
        wanted = model.generate(
            ids, do_sample=False, max_new_tokens=request.sampling.max_new_tokens, eos_token_id=None
        )
        assert alone(model, request).tokens == wanted[0, ids.shape[1] :].tolist()


def test_log_probs_are_those_that_training_sees(model: MiniMaxM1ForCausalLM) -> None:
    for temperature in (1.0, 0.7):
        params = GenerationParams(temperature=temperature, top_k=5, seed=1, max_new_tokens=20, end_tokens=())
        for length in (1, 70):
            result = alone(model, Request(prompt(length), params))
            ids = torch.tensor([prompt(length) + result.tokens])
            wanted = model.log_probs(ids, temperature=temperature)[0, length:]
            tiny.assert_close(torch.tensor(result.log_probs), wanted.detach())
            assert all(a > b for a, b in zip(result.sampled_log_probs, result.log_probs, strict=True))
