"""Claims about advantages relative to the group, and about the shaping of rewards."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimax_hybrid.rl.advantages import (
    clip_rewards,
    group_advantages,
    has_reward_spread,
    length_bias,
    overlong_penalty,
)


def test_two_groups_in_any_order_have_the_sample_deviation() -> None:
    grouped = group_advantages(torch.tensor([1.0, 0.0, 11.0, 10.0]), torch.tensor([0, 0, 1, 1]))
    assert grouped.tolist() == pytest.approx([0.70701, -0.70701, 0.70701, -0.70701], abs=1e-5)
    shuffled = group_advantages(torch.tensor([11.0, 0.0, 10.0, 1.0]), torch.tensor([40, -3, 40, -3]))
    assert shuffled.tolist() == pytest.approx([0.70701, -0.70701, -0.70701, 0.70701], abs=1e-5)


def test_the_population_deviation_is_a_setting() -> None:
    values = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), population=True)
    assert values.tolist() == pytest.approx([0.9998, -0.9998], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_group_without_spread_gives_exactly_zero(dtype: torch.dtype) -> None:
    for rewards in ([1, 1, 1, 1], [0.3, 0.1 + 0.2, 0.3, 0.3], [5.0], [0, 0], [-0.1, -0.1, -0.3 + 0.2]):
        values = torch.tensor(rewards, dtype=dtype)
        ids = torch.zeros(len(rewards), dtype=torch.long)
        assert (group_advantages(values, ids) == 0).all()
        assert not has_reward_spread(values, ids).any()
    rounded = torch.tensor([0.3, 0.1], dtype=torch.float32)
    noisy = torch.stack([rounded[0], rounded[1] + torch.tensor(0.2), rounded[0] * 3 / 3])
    assert (group_advantages(noisy, torch.zeros(3, dtype=torch.long)) == 0).all()


def test_integer_and_bool_rewards_count() -> None:
    ids = torch.tensor([0, 0, 1])
    for rewards in (torch.tensor([1, 0, 1]), torch.tensor([True, False, True])):
        values = group_advantages(rewards, ids)
        assert values.dtype == torch.float32
        assert values.tolist() == pytest.approx([0.70701, -0.70701, 0.0], abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_named_by_response(bad: float) -> None:
    rewards = torch.tensor([0.0, bad, 1.0, bad])
    for run in (
        lambda: group_advantages(rewards, torch.zeros(4, dtype=torch.long)),
        lambda: clip_rewards(rewards, low=0, high=1),
    ):
        with pytest.raises(ValueError, match="responses 1, 3 are not finite"):
            run()


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="must be \\(B,\\)"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="must be integers"):
        group_advantages(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="lengths must be"):
        length_bias(torch.zeros(3), torch.zeros(2), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="low < high"):
        clip_rewards(torch.zeros(3), low=1, high=0)
    with pytest.raises(ValueError, match="ramp"):
        overlong_penalty(torch.zeros(3), length_max=10, ramp=0)


def test_an_empty_batch_is_an_empty_result() -> None:
    empty = torch.zeros(0)
    assert group_advantages(empty, empty.long()).shape == (0,)
    assert length_bias(empty, empty, empty.long())["length_reward_correlation"] == 0


@given(st.integers(0, 10_000), st.floats(0.1, 100), st.floats(-100, 100))
def test_scale_and_shift_of_a_groups_rewards_do_not_matter(seed: int, scale: float, shift: float) -> None:
    make = torch.Generator().manual_seed(seed)
    rewards = torch.rand(12, generator=make, dtype=torch.float64)
    ids = torch.randint(0, 3, (12,), generator=make)
    plain = group_advantages(rewards, ids, epsilon=0)
    moved = group_advantages(rewards * scale + shift, ids, epsilon=0)
    assert torch.allclose(plain, moved, atol=1e-6)
    for group in ids.unique():
        assert plain[ids == group].sum().abs() < 1e-9
        if (ids == group).sum() > 1:
            assert plain[ids == group].std() == pytest.approx(1.0)


def test_dynamic_sampling_keeps_groups_with_spread() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    ids = torch.tensor([0, 1, 0, 2, 1, 2])
    assert has_reward_spread(rewards, ids).tolist() == [False, False, False, True, False, True]


def test_the_overlong_penalty_ramps_to_minus_one() -> None:
    lengths = torch.tensor([0, 16384, 18432, 20480, 30000])
    assert overlong_penalty(lengths, length_max=20480, ramp=4096).tolist() == [0, 0, -0.5, -1, -1]


def test_clipping_holds_rewards_in_bounds() -> None:
    assert clip_rewards(torch.tensor([-9.0, 0.5, 9.0]), low=-1, high=1).tolist() == [-1, 0.5, 1]


def test_length_bias_is_measured_within_groups() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    lengths = torch.tensor([10, 20, 110, 120])
    grows = length_bias(torch.tensor([0.0, 1.0, 0.0, 1.0]), lengths, ids)
    assert grows["length_reward_correlation"] == pytest.approx(1.0)
    assert (grows["length_above"], grows["length_below"]) == (70.0, 60.0)
    # Across the groups long goes with high reward; within each, with low.
    falls = length_bias(torch.tensor([1.0, 0.0, 5.0, 4.0]), lengths, ids)
    assert falls["length_reward_correlation"] == pytest.approx(-1.0)
    none = length_bias(torch.ones(4), lengths, ids)
    assert none == {"length_reward_correlation": 0.0, "length_above": 0.0, "length_below": 0.0}
