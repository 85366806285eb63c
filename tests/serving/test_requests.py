"""Requests that cannot be served are refused in words, before anything runs."""

import dataclasses

import pytest

from minimax_hybrid.serving import GenerationParams, Result, Update


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(temperature=-0.5), "temperature is -0.5; it must be finite and at least 0"),
        (dict(temperature=float("inf")), "temperature is inf"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(top_k=-1), "top_k is -1"),
        (dict(top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1"),
        (dict(min_p=1.0), "min_p is 1.0"),
        (dict(repetition_penalty=0.0), "repetition_penalty is 0.0"),
        (dict(max_new_tokens=0), "max_new_tokens is 0; it must be at least 1"),
        (dict(stop=("",)), "stop is"),
        (dict(stop="end"), "stop is 'end'"),
        (dict(repetition_run=0), "repetition_run is 0"),
        (dict(top_log_probs=-1), "top_log_probs is -1"),
        (dict(seed=-1), "seed is -1"),
    ],
)
def test_values_out_of_range_are_refused_in_words(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationParams(**wrong)


def test_no_temperature_means_greedy() -> None:
    for temperature in (0, 0.0, None):
        params = GenerationParams(temperature=temperature)
        assert params.is_greedy and params.divisor == 1.0
    params = GenerationParams(temperature=0.5, greedy=True)
    assert params.is_greedy and params.divisor == 0.5


def test_a_result_is_the_sum_of_its_updates() -> None:
    result = Result(7)
    result.add(Update(7, tokens=[1], text="a", log_probs=[-1.0], sampled_log_probs=[-0.5], prompt_tokens=3))
    result.add(
        Update(7, tokens=[2], text="b", log_probs=[-2.0], sampled_log_probs=[-0.1], finish_reason="end")
    )
    assert (result.tokens, result.text, result.finish_reason) == ([1, 2], "ab", "end")
    assert (result.log_probs, result.sampled_log_probs) == ([-1.0, -2.0], [-0.5, -0.1])
    assert {f.name for f in dataclasses.fields(Update)} < {f.name for f in dataclasses.fields(Result)}
