"""The objective for TRL's GRPOTrainer: what must be set so that TRL computes it, and what TRL sets otherwise.

TRL's CISPO clamps the ratio at `epsilon_high` itself (not at one plus it), and takes 0.2 where nothing is
given: a bound below every ratio. Its two-sided losses clip at 1 - epsilon and 1 + epsilon_high. It adds the
router's balance loss with the model's own coefficient unless switched off, and its AdamW is not the report's.
"""

import math
from typing import Any

from ..objective import Objective


def grpo_settings(objective: Objective) -> dict[str, Any]:
    """Arguments of `trl.GRPOConfig` for this objective and the report's optimiser.

        GRPOConfig(**grpo_settings(CISPO(ratio_max=5.0)), learning_rate=..., ...)

    TRL samples a generation batch once and takes `steps_per_generation / gradient_accumulation_steps`
    optimiser steps on it: the report's 16 updates are `steps_per_generation=16` without accumulation.

    Raises:
        ValueError: a setting that TRL has no place for.
    """
    return {
        **_loss(objective),
        "beta": objective.kl_coefficient,
        "importance_sampling_level": "token",
        "router_aux_loss_coef": 0.0,
        # Ratios are over the full vocabulary, so nothing may be cut off in sampling.
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-15,
    }


def _loss(objective: Objective) -> dict[str, Any]:
    bounded_weight = objective.ratio_max < math.inf
    trust_region = objective.trust_max < math.inf or objective.trust_min > 0
    if bounded_weight and trust_region:
        raise ValueError("TRL has a bound on the weight (cispo) or a trust region (dapo, grpo), not both")
    if objective.ratio_min > 0:
        raise ValueError(f"TRL's cispo has no lower bound on the weight, got ratio_min {objective.ratio_min}")
    if bounded_weight:
        if objective.sample_share != 0:
            raise ValueError(
                f"TRL's cispo takes the mean over tokens, got sample_share {objective.sample_share}"
            )
        return {"loss_type": "cispo", "epsilon_high": objective.ratio_max}
    if not trust_region or objective.trust_max == math.inf:
        raise ValueError("TRL needs a bound: ratio_max of CISPO, or trust_min and trust_max")
    if objective.sample_share not in (0, 1):
        raise ValueError(f"TRL takes one mean or the other, got sample_share {objective.sample_share}")
    return {
        "loss_type": "grpo" if objective.sample_share else "dapo",
        "epsilon": 1 - objective.trust_min,
        "epsilon_high": objective.trust_max - 1,
    }
