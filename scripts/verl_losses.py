"""Our objectives as policy losses of verl. Name this module where verl's workers load the model:

    PYTHONPATH=scripts python -m verl.trainer.main_ppo \\
        actor_rollout_ref.model.external_lib=verl_losses \\
        actor_rollout_ref.actor.policy_loss.loss_mode=m1_cispo \\
        actor_rollout_ref.actor.loss_agg_mode=token-mean \\
        actor_rollout_ref.actor.use_kl_loss=False \\
        ...

The report gives no value for CISPO's bound; 5 is one plus an epsilon of 4.
"""

from minimax_hybrid.rl.objective import CISPO, DAPO
from minimax_hybrid.rl.plugins.verl_plugin import register

register("m1_cispo", CISPO(ratio_max=5.0))
register("m1_dapo", DAPO())
