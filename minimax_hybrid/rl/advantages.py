"""From rewards to advantages (report, equation 2), and the reward shaping that surrounds it.

    A[i] = (reward[i] - mean of its group) / (deviation of its group + 1e-4)

A group is the G responses to one prompt. Imports torch only.
"""

import torch
from torch import Tensor

# Rewards of a group that differ by less than this, relative to the largest, are equal up to rounding.
SPREAD_MIN = 1e-6


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, population: bool = False, epsilon: float = 1e-4
) -> Tensor:
    """How much better than its group each response did, in deviations of that group.

    The report gives neither the kind of deviation nor what is added to it. The sample deviation (G - 1) and
    1e-4 are TRL's. Groups without spread, groups of one among them, give exactly 0.

    Args:
        rewards: (B,) any number type; a non-finite one is refused.
        group_ids: (B,) integers, in any order.
        population: divide the squares by G instead of G - 1.
        epsilon: added to the deviation.

    Returns:
        (B,) in the type of rewards, at least float32.
    """
    index, groups, values = _grouped(rewards, group_ids)
    size = _sum(torch.ones_like(values), index, groups)
    centred = values - (_sum(values, index, groups) / size)[index]
    squares = _sum(centred**2, index, groups) / (size if population else (size - 1).clamp_min(1))
    scaled = centred / (squares.sqrt()[index] + epsilon)
    scaled = scaled.masked_fill(~_spread(values, index, groups)[index], 0.0)
    return scaled.to(torch.promote_types(rewards.dtype, torch.float32))


def has_reward_spread(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) bool: responses whose group has spread. DAPO's dynamic sampling trains on these alone."""
    index, groups, values = _grouped(rewards, group_ids)
    return _spread(values, index, groups)[index]


def overlong_penalty(lengths: Tensor, *, length_max: int, ramp: int) -> Tensor:
    """(B,) float32 to add to the rewards: 0 up to length_max - ramp, falling in a line to -1 at length_max.

    The rule is DAPO's (length_max 20,480 and ramp 4,096 in its paper); the M1 report names it and gives no
    numbers.
    """
    if not 0 < ramp <= length_max:
        raise ValueError(f"ramp must lie in [1, length_max], got ramp={ramp}, length_max={length_max}")
    return -((lengths - (length_max - ramp)).float() / ramp).clamp(0.0, 1.0)


def clip_rewards(rewards: Tensor, *, low: float, high: float) -> Tensor:
    """Rewards clipped to [low, high]: one outlier of a reward model must not set the scale of its group."""
    if not low < high:
        raise ValueError(f"clip_rewards needs low < high, got {low} and {high}")
    _check_finite(rewards)
    return rewards.clamp(low, high)


def length_bias(rewards: Tensor, lengths: Tensor, group_ids: Tensor) -> dict[str, float]:
    """Does length buy reward? What the report watches online for its reward model (section 4.2.2) and
    collapse (5).

    `length_reward_correlation` is Pearson's, after subtracting each group's means, so that hard prompts with
    long answers do not count as bias; 0 where either has no spread. `length_above` and `length_below` are the
    mean lengths of responses above and below their group's mean reward, 0 if there are none.
    """
    index, groups, values = _grouped(rewards, group_ids)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths must be {tuple(rewards.shape)} like rewards, got {tuple(lengths.shape)}")
    lengths = lengths.double()
    size = _sum(torch.ones_like(values), index, groups)
    reward = values - (_sum(values, index, groups) / size)[index]
    reward = reward.masked_fill(~_spread(values, index, groups)[index], 0.0)
    length = lengths - (_sum(lengths, index, groups) / size)[index]
    scale = (reward.square().sum() * length.square().sum()).sqrt()
    correlation = (reward * length).sum() / scale if scale > 0 else torch.zeros(())
    above, below = reward > 0, reward < 0
    return {
        "length_reward_correlation": float(correlation),
        "length_above": float(lengths[above].mean()) if above.any() else 0.0,
        "length_below": float(lengths[below].mean()) if below.any() else 0.0,
    }


def _grouped(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, int, Tensor]:
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards and group_ids must be (B,), got {tuple(rewards.shape)} and {tuple(group_ids.shape)}"
        )
    if group_ids.is_floating_point():
        raise ValueError(f"group_ids must be integers, got {group_ids.dtype}")
    _check_finite(rewards)
    ids, index = torch.unique(group_ids, return_inverse=True)
    return index, len(ids), rewards.double()


def _check_finite(rewards: Tensor) -> None:
    bad = (~torch.isfinite(rewards.double())).nonzero().flatten().tolist()
    if bad:
        shown = ", ".join(map(str, bad[:20])) + (", ..." if len(bad) > 20 else "")
        raise ValueError(
            f"rewards of responses {shown} are not finite (the first is {rewards[bad[0]].item()}); "
            "mask those responses or give them a reward"
        )


def _sum(values: Tensor, index: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=values.dtype, device=values.device).index_add_(0, index, values)


def _spread(values: Tensor, index: Tensor, groups: int) -> Tensor:
    """(groups,) bool: largest and smallest differ by more than rounding."""
    empty = torch.zeros(groups, dtype=values.dtype, device=values.device)
    largest = empty.scatter_reduce(0, index, values, "amax", include_self=False)
    smallest = empty.scatter_reduce(0, index, values, "amin", include_self=False)
    return largest - smallest > SPREAD_MIN * torch.maximum(largest.abs(), smallest.abs())
