"""The objective as a policy loss of verl, under a name of your choice.

verl's own "cispo" clips the ratio to [1 - clip_ratio_low, 1 + clip_ratio_high], 0.8 to 1.2 unless set; here
the bounds are the objective's. verl's workers are processes of their own, so registration has to happen when
they load the model: put the call into a module of yours and name that module in
`actor_rollout_ref.model.external_lib`.

    # my_losses.py
    register("m1_cispo", CISPO(ratio_max=5.0))

    # command line
    actor_rollout_ref.model.external_lib=my_losses actor_rollout_ref.actor.policy_loss.loss_mode=m1_cispo
"""

from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.workers.config import ActorConfig

from ..objective import Objective, policy_loss, policy_metrics

# verl's name for each of our two means, and the count over the whole batch that verl hands over for it.
MEANS = {0.0: ("token-mean", "batch_num_tokens"), 1.0: ("seq-mean-token-mean", "global_batch_size")}


def register(name: str, objective: Objective) -> None:
    """Make `objective` verl's policy loss `name`.

    Raises:
        ValueError: an objective with a KL term (verl adds its own: `actor.use_kl_loss`) or a mix of means
            (verl hands over one count).
    """
    if objective.kl_coefficient > 0:
        raise ValueError(
            "verl adds the KL term itself: set actor.use_kl_loss and kl_loss_coef, and none here"
        )
    if objective.sample_share not in MEANS:
        raise ValueError(f"sample_share must be 0 or 1 under verl, got {objective.sample_share}")
    mean, count = MEANS[objective.sample_share]

    @register_policy_loss(name)
    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: ActorConfig | None = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        if loss_agg_mode != mean:
            raise ValueError(
                f"policy loss {name!r} is a {mean}, and actor.loss_agg_mode is {loss_agg_mode!r}; "
                "make them agree"
            )
        whole_batch = {} if config is None else config.global_batch_info
        # verl averages gradients over its data-parallel ranks, hence the factor.
        ranks = whole_batch.get("dp_size", 1)
        N = whole_batch.get(count)
        if ranks > 1 and N is None:
            raise ValueError(f"{count} of the whole batch is needed with {ranks} data-parallel ranks")
        if rollout_is_weights is not None:
            advantages = advantages * rollout_is_weights
        tokens = (log_prob, old_log_prob, advantages, response_mask, objective)
        value = policy_loss(*tokens, normaliser=None if N is None else float(N))
        return value * ranks, {f"actor/{name}": number for name, number in policy_metrics(*tokens).items()}
