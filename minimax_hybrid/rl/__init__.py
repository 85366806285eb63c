"""Reinforcement learning: the objective, advantages and tasks here; `rollout`, `trainer` and the plugs by
module."""

from .advantages import clip_rewards, group_advantages, informative, length_bias, overlong_penalty
from .objective import CISPO, DAPO, GRPO, REINFORCE, Objective, policy_loss

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "REINFORCE",
    "Objective",
    "clip_rewards",
    "group_advantages",
    "informative",
    "length_bias",
    "overlong_penalty",
    "policy_loss",
]
