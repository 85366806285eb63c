"""Reinforcement learning: the objective and advantages, which need torch only.

`rollout`, `trainer`, the tasks and the plugins are imported from their own modules.
"""

from .advantages import clip_rewards, group_advantages, has_reward_spread, length_bias, overlong_penalty
from .objective import CISPO, DAPO, GRPO, REINFORCE, Objective, policy_loss, policy_metrics

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "REINFORCE",
    "Objective",
    "clip_rewards",
    "group_advantages",
    "has_reward_spread",
    "length_bias",
    "overlong_penalty",
    "policy_loss",
    "policy_metrics",
]
